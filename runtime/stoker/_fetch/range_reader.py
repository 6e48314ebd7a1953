"""Reads one range of an object with as many requests as it takes: permit, attempts, back-off, hedges.

:meth:`RangeReader.read` holds a permit and retries until the range is read. Each try is a race between an attempt and,
if that is late, its hedges; an attempt is one call of the store. The caller verifies the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import ClassVar, Protocol

from stoker._base.batch_read import RangePart
from stoker._base.fetch_record import Activity, Phase, start_activity
from stoker._base.retry import LONG_WAIT_SECONDS, SuspensionAwareDeadline, backoff_seconds
from stoker._base.task_group import Limiter
from stoker._base.threads import compute_in_thread, count_cores
from stoker._fetch.concurrency import AimdLimit, CompletedRequest, LinkUse, RateLimit
from stoker._fetch.config import LARGE_REQUEST_BYTES, FetchConfig, FetchCounters
from stoker._fetch.hedge import POLL_SECONDS, TIMER_SECONDS, HedgePolicy
from stoker._fetch.race import Attempt, Race, RaceWatch
from stoker.abc import ObjectInfo, ObjectRef, Readable
from stoker.errors import (
    ConnectionLostError,
    DeadlineError,
    FetchError,
    ObjectChangedError,
    ObjectTruncatedError,
    RangeBeyondEndError,
    StoreError,
    ThrottledError,
    TransientError,
)

_log = logging.getLogger("stoker.fetch.range_reader")

_THREAD_BYTES, _THREAD_CORES = 1 << 20, 4
"""Size of ranges whose checksum another thread computes, and number of cores from which on it does. The checksum is a
third of the receiving thread's time; where there are fewer cores, the training needs the other one."""
MAX_HEDGES = 3
"""Maximum number of hedges of one attempt: if 5% of requests are late, one in 400 is late twice, and delays all items
behind it in the order."""


class RangeChecks(Protocol):
    """The checksums of an object's ranges."""

    def compute(self, data: memoryview) -> int:
        """Return the checksum of bytes; callable from any thread."""
        ...

    def record(self, part: RangePart, checksum: int) -> None:
        """Record the checksum of a range."""
        ...


@dataclass(slots=True, kw_only=True)
class ObjectFetch:
    """State of one object's fetch, shared by all its requests.

    Attributes:
        shares_memory: whether a hedge may share the memory of late requests while no response has begun. Otherwise,
            only hedges for which there is other memory are sent.
        ref: the object.
        name: URL of the object, for messages.
        into: the caller's memory for the bytes.
        urgent: whether its requests go before others.
        tag: precondition of its requests; None for none.
        size_bytes: number of bytes to read in total.
        checks: gets the checksum of each range that was read; None for none.
        deadline: deadline of the fetch, which starts when the first request for a range may be sent, and again with the
            next range.
        begun: start of each range for which requests may be sent or were sent.
        requests: number of requests sent so far.
        failed_reads: number of failed reads of all ranges so far.
        change_error: first error that reported a changed object; None if there was none.
        last_error: error of the last failed request; None if there was none.
    """

    shares_memory: ClassVar[bool] = False

    ref: ObjectRef
    name: str
    into: memoryview
    urgent: bool
    tag: str | None
    size_bytes: int
    checks: RangeChecks | None = None
    deadline: SuspensionAwareDeadline = field(default_factory=SuspensionAwareDeadline)
    begun: set[int] = field(default_factory=set)
    requests: int = 0
    failed_reads: int = 0
    change_error: ObjectChangedError | None = None
    last_error: StoreError | None = None

    def request(
        self, store: Readable, part: RangePart, into: memoryview, begun: Callable[[], None]
    ) -> Awaitable[ObjectInfo]:
        """Send a request for a part; ``begun`` is called when its response begins."""
        return store.get_range(self.ref.key, part.start, part.end, into=into, tag=self.tag, begun=begun)

    def check_size(self, info: ObjectInfo) -> None:
        """Raise ObjectTruncatedError if the object is shorter than the pinned one, ObjectChangedError if longer."""
        if info.size_bytes != self.ref.size_bytes:
            kind = ObjectTruncatedError if info.size_bytes < self.ref.size_bytes else ObjectChangedError
            raise kind(
                f"{self.name} has {info.size_bytes} bytes where the manifest says {self.ref.size_bytes}: it was "
                "overwritten after packing"
            )


@dataclass(slots=True, eq=False, kw_only=True)
class _RangeRace(Race):
    """The requests of one try of a part of a fetch."""

    fetch: ObjectFetch
    part: RangePart


class RangeReader:
    """Reads ranges of one store, on one event loop.

    A read that backs off keeps its permit, so in an outage concurrency and back-off bound the request rate for any
    number of waiting reads.

    Args:
        store: store to read from.
        rng: random numbers for jitter.
        config: retries, hedged requests and concurrency.
        counters: counters to update.
        hedges: decides which requests are late, and provides memory for hedges.
        request_bytes: expected size of most requests.

    Attributes:
        ranges: limit for callers that read many ranges, as many as requests in flight.
        link: estimate of how many requests fill the link.
    """

    def __init__(
        self,
        store: Readable,
        *,
        rng: random.Random,
        config: FetchConfig,
        counters: FetchCounters,
        hedges: HedgePolicy,
        request_bytes: float = LARGE_REQUEST_BYTES,
    ) -> None:
        self._store, self._rng, self._config, self._counters, self._hedges = store, rng, config, counters, hedges
        self._aimd = AimdLimit(
            start=config.start_limit(request_bytes),
            min_limit=config.min_concurrency,
            max_limit=config.max_concurrency,
        )
        self._limiter, self.ranges = Limiter(self._aimd.limit), Limiter(self._aimd.limit)
        self._watch = RaceWatch(self._look)
        self._refused: dict[Race, None] = {}
        """Late races for which the budget or memory allowed no hedge, in order."""
        hedges.on_chance = self._look_at_refused
        self._rate = RateLimit(config.max_bytes_per_second)
        self._thread_bytes = _THREAD_BYTES if count_cores() >= _THREAD_CORES else math.inf
        self.link = LinkUse()

    async def read(self, fetch: ObjectFetch, part: RangePart) -> None:
        """Fill a part of the fetch's memory; when the call ends in any way, nothing writes there any more.

        Raises:
            FetchError: every attempt failed, or the next one would miss the deadline.
            ObjectTruncatedError: the object ends before the part does.
            StoreError: the store raised an error that a retry cannot fix.
        """
        with start_activity(fetch.ref.key, Phase.QUEUE) as span:
            await self._rate.wait(part.size_bytes)
            await self._limiter.acquire(urgent=fetch.urgent)
            try:
                self._hedges.earn()
                self._start_deadline(fetch, part)
                for attempt in count(1):
                    error = await self._race(fetch, part, span)
                    if error is None:
                        break
                    await self.back_off(fetch, attempt, self._check_transient(fetch, attempt, error))
                    self._rate.charge(part.size_bytes)
            finally:
                self._limiter.release()
        if fetch.checks is not None:
            compute = partial(fetch.checks.compute, fetch.into[part.offset : part.offset + part.size_bytes])
            with start_activity(fetch.ref.key, Phase.VERIFY):
                is_large = part.size_bytes >= self._thread_bytes
                # Recorded here, not in the thread: that of a cancelled read may still run beside the next read.
                fetch.checks.record(part, await compute_in_thread(compute) if is_large else compute())

    def _start_deadline(self, fetch: ObjectFetch, part: RangePart) -> None:
        """Start the deadline of a fetch, and again with each range: large objects have more of them than permits."""
        if part.start not in fetch.begun:
            fetch.begun.add(part.start)
            fetch.deadline.restart()
        fetch.deadline.start(self._config.deadline_seconds, self._config.transfer_seconds(fetch.size_bytes))

    def _check_transient(self, fetch: ObjectFetch, attempts: int, error: StoreError) -> TransientError:
        """Return the error if it is transient and attempts are left; raise otherwise."""
        if isinstance(error, RangeBeyondEndError):
            raise ObjectTruncatedError(f"{error}, where the manifest says {fetch.ref.size_bytes} bytes") from None
        if not isinstance(error, TransientError):
            raise error
        if attempts >= self._config.attempts:
            raise self.fetch_error(fetch, f"a range failed {attempts} times") from error
        return error

    async def back_off(self, fetch: ObjectFetch, failures: int, error: TransientError) -> None:
        """Wait before the next try.

        Raises:
            FetchError: the deadline would pass during the wait; raised at once.
        """
        wait_seconds = backoff_seconds(
            failures,
            base_seconds=self._config.backoff_base_seconds,
            cap_seconds=self._config.backoff_cap_seconds,
            rng=self._rng,
            retry_after_seconds=error.retry_after_seconds,
            left_seconds=fetch.deadline.left_seconds,
        )
        if fetch.deadline.expires_within(wait_seconds):
            raise self.fetch_error(fetch, "its deadline would pass before the next try") from error
        if wait_seconds > LONG_WAIT_SECONDS:
            _log.warning("%s: retrying in %.0f s: %s", fetch.name, wait_seconds, error)
        self._counters.retries[type(error).__name__] += 1
        await asyncio.sleep(wait_seconds)

    def count_failure(self, fetch: ObjectFetch, error: StoreError) -> None:
        """Count a failed read."""
        fetch.last_error = error
        self._counters.failures[type(error).__name__] += 1

    def fetch_error(self, fetch: ObjectFetch, reason: str) -> FetchError:
        """Return the error that ends a fetch for a reason, with the settings that limit it."""
        config = self._config
        return FetchError(
            f"{fetch.name} was not fetched with {fetch.requests} requests: {reason} "
            f"(deadline_seconds={config.deadline_seconds:g}, attempts={config.attempts}, "
            f"checksum_attempts={config.checksum_attempts}); last error: {fetch.last_error}"
        )

    async def _race(self, fetch: ObjectFetch, part: RangePart, span: Activity) -> StoreError | None:
        """Send a request and, while the requests are late, hedges; return the error if none succeeds.

        When the first response begins, the requests that still wait are ended, before they transfer bytes. So those
        that share memory never write to it at the same time, and all have ended before it is used for anything else.
        """
        into = fetch.into[part.offset : part.offset + part.size_bytes]
        now_seconds = asyncio.get_running_loop().time()
        first = Attempt(into, now_seconds)
        race = _RangeRace(fetch=fetch, part=part, attempts=[first])
        self._watch.add(race, now_seconds + self._first_look_seconds(part.size_bytes, now_seconds))
        with race.borrowed:
            try:
                await self._attempt(race, first)
                if len(race.attempts) > 1:
                    await race.wait_for_hedges()
            finally:
                self._watch.remove(race)
                self._refused.pop(race, None)
                if len(race.attempts) > 1:
                    await race.close()
            span.add_attempt([attempt.request(fetch.ref.key) for attempt in race.attempts])
            return self._finish_race(race, into)

    def _first_look_seconds(self, size_bytes: int, now_seconds: float) -> float:
        """Return in how many seconds a request that is sent now may be late or overdue."""
        limit_seconds = self._config.attempt_limit_seconds(size_bytes)
        if not self._config.hedge:
            return limit_seconds
        late_seconds = self._hedges.seconds_until_late(
            size_bytes, sent_seconds=now_seconds, has_begun=False, now_seconds=now_seconds
        )
        return min(limit_seconds, late_seconds)

    def _look_at_refused(self) -> None:
        if self._refused:
            self._watch.look_soon(self._refused)
            self._refused.clear()

    def _look(self, race: Race, now_seconds: float) -> float:
        """End the requests of a race that have reached their limit, hedge it if it is late; return when to look again.

        A race without a running request is not looked after: it is about to end.
        """
        assert isinstance(race, _RangeRace)  # noqa: S101 - only these are watched
        limit_seconds = self._config.attempt_limit_seconds(race.part.size_bytes)
        next_seconds = now_seconds + limit_seconds
        for attempt in race.attempts:
            if attempt.is_running:
                due_seconds = attempt.sent_seconds + limit_seconds
                if due_seconds - now_seconds < TIMER_SECONDS:
                    attempt.expire()
                else:
                    next_seconds = min(next_seconds, due_seconds)
        if self._config.hedge and any(attempt.is_running and not attempt.is_stopped for attempt in race.attempts):
            next_seconds = min(next_seconds, now_seconds + self._hedge(race, now_seconds))
        return next_seconds

    def _hedge(self, race: _RangeRace, now_seconds: float) -> float:
        """Hedge a race if it is late; return the seconds until it may be hedged next, as far as only time decides."""
        part, has_begun = race.part, any(attempt.has_begun for attempt in race.attempts)
        if len(race.attempts) > MAX_HEDGES:
            return math.inf
        late_after = partial(
            self._hedges.seconds_until_late, part.size_bytes, has_begun=has_begun, now_seconds=now_seconds
        )
        left_seconds = late_after(sent_seconds=max(attempt.sent_seconds for attempt in race.attempts))
        if left_seconds > 0.0:
            return left_seconds
        hedges = len(race.attempts) - 1
        if race.fetch.shares_memory and not has_begun:
            data = race.attempts[0].into if self._hedges.spend(hedges) else None
        else:
            data = self._hedges.borrow_buffer(part.size_bytes, race.borrowed, hedges)
        if data is None:
            self._refused[race] = None
            return math.inf
        self._limiter.held += 1  # beyond the limit if necessary: hedges have their own budget
        race.borrowed.callback(self._limiter.release)
        self._rate.charge(part.size_bytes)
        hedge = Attempt(data, now_seconds)
        race.hedge(hedge, self._attempt(race, hedge))
        return max(POLL_SECONDS, late_after(sent_seconds=now_seconds))

    def _finish_race(self, race: Race, into: memoryview) -> StoreError | None:
        """Copy the winner's bytes to ``into`` and count the losers; return the error if no attempt succeeded."""
        winner = race.winner
        if winner is None:
            return next(attempt.error for attempt in race.attempts if attempt.error is not None)
        if len(race.attempts) > 1:
            store_tells = winner.has_begun
            losers = [attempt for attempt in race.attempts if attempt is not winner]
            wasted = [attempt for attempt in losers if attempt.has_begun or not store_tells]
            self._counters.hedged_bytes += len(wasted) * into.nbytes
        if winner.into is not into:
            into[:] = winner.into
            self._counters.hedge_wins += 1
        return None

    async def _attempt(self, race: _RangeRace, attempt: Attempt) -> None:
        """Call the store once, and record the outcome: a failure must not stop the other attempts of the race.

        Raises:
            CancelledError: the task was cancelled, and not because the race has ended this attempt.
        """
        loop, task, fetch, part = asyncio.get_running_loop(), asyncio.current_task(), race.fetch, race.part
        assert task is not None  # noqa: S101 - coroutines always run in a task
        attempt.task, attempt.sent_seconds, cancels = task, loop.time(), task.cancelling()
        self._counters.requests += 1
        fetch.requests += 1

        def begun() -> None:
            if attempt.is_stopped:  # it may share its memory with the faster request
                raise ConnectionLostError(f"{fetch.name}: the request was ended before its response began")
            race.begin(attempt, loop.time())
            if self._hedges.times.observe_first_byte(loop.time() - attempt.sent_seconds):
                self._watch.look_soon()

        try:
            fetch.check_size(await fetch.request(self._store, part, attempt.into, begun))
            race.succeed(attempt)
        except StoreError as error:
            attempt.error = error
        except asyncio.CancelledError as error:
            if not attempt.is_stopped or task.cancelling() - 1 > cancels:
                raise
            attempt.error = self._limit_error(fetch, part, error) if attempt.is_overdue else None
        finally:
            attempt.ended_seconds = loop.time()
            if attempt.is_stopped:
                task.uncancel()
        if not attempt.is_lost:
            self._record_attempt(fetch, part, attempt)

    def _limit_error(self, fetch: ObjectFetch, part: RangePart, cause: BaseException) -> DeadlineError:
        limit_seconds = self._config.attempt_limit_seconds(part.size_bytes)
        error = DeadlineError(
            f"{fetch.name}: bytes {part.start} to {part.end} did not arrive within {limit_seconds:g} s; on a very "
            "slow link, lower min_bytes_per_second"
        )
        error.__cause__ = cause
        return error

    def _record_attempt(self, fetch: ObjectFetch, part: RangePart, attempt: Attempt) -> None:
        """Record an attempt that has ended itself: counters, timings and the concurrency limit."""
        error, ended_seconds = attempt.error, asyncio.get_running_loop().time()
        if error is not None:
            if isinstance(error, ThrottledError):
                self._aimd.record_throttle(attempt.sent_seconds, ended_seconds)
                self._limiter.limit = self.ranges.limit = self._aimd.limit
            self.count_failure(fetch, error)
            return
        seconds = ended_seconds - attempt.sent_seconds
        first_byte_seconds = 0.0 if attempt.begun_seconds is None else attempt.begun_seconds - attempt.sent_seconds
        self._counters.bytes += part.size_bytes
        if self._hedges.times.observe(part.size_bytes, seconds):
            self._watch.look_soon()
        self._aimd.record_completion(
            part.size_bytes,
            seconds,
            saturated=self._limiter.has_waiters or self.ranges.has_waiters,
            first_byte_seconds=first_byte_seconds,
        )
        self._limiter.limit = self.ranges.limit = self._aimd.limit
        self.link.record(CompletedRequest(part.size_bytes, seconds, first_byte_seconds))
