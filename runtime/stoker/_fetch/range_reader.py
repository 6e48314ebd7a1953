"""Reads one range of an object with as many requests as it takes: permit, attempts, back-off, hedges.

:meth:`RangeReader.read` holds a permit and retries until the range is read. Each try is a race between an attempt and,
if that is late, its hedges; an attempt is one call of the store. The caller verifies the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

from stoker._base.fetch_record import Activity, Phase, Request, start_activity
from stoker._base.retry import LONG_WAIT_SECONDS, SuspensionAwareDeadline, backoff_seconds
from stoker._base.task_group import Limiter, task_group
from stoker._fetch.concurrency import AimdLimit, RateLimit
from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._fetch.hedge import POLL_SECONDS, HedgePolicy
from stoker.abc import ObjectInfo, ObjectRef, Readable
from stoker.errors import (
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

MAX_HEDGES = 3
"""Maximum number of hedges of one attempt: if 5% of requests are late, one in 400 is late twice, and delays all items
behind it in the order."""


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes ``[start, end)`` of an object, and their place in the caller's memory.

    Attributes:
        start: offset of the first byte in the object.
        end: offset behind the last byte in the object.
        offset: offset of the first byte in the memory.
    """

    start: int
    end: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class ObjectFetch:
    """State of one object's fetch, shared by all its requests.

    Attributes:
        ref: the object.
        name: URL of the object, for messages.
        into: the caller's memory for the bytes.
        urgent: whether its requests go before others.
        tag: precondition of its requests; None for none.
        size_bytes: number of bytes to read in total.
        deadline: deadline of the fetch, which starts when the first request may be sent.
        requests: number of requests sent so far.
        failed_reads: number of failed reads of all ranges so far.
        change_error: first error that reported a changed object; None if there was none.
        last_error: error of the last failed request; None if there was none.
    """

    ref: ObjectRef
    name: str
    into: memoryview
    urgent: bool
    tag: str | None
    size_bytes: int
    deadline: SuspensionAwareDeadline = field(default_factory=SuspensionAwareDeadline)
    requests: int = 0
    failed_reads: int = 0
    change_error: ObjectChangedError | None = None
    last_error: StoreError | None = None

    def check_size(self, info: ObjectInfo) -> None:
        """Raise ObjectTruncatedError if the object is shorter than the pinned one, ObjectChangedError if longer."""
        if info.size_bytes != self.ref.size_bytes:
            kind = ObjectTruncatedError if info.size_bytes < self.ref.size_bytes else ObjectChangedError
            raise kind(
                f"{self.name} has {info.size_bytes} bytes where the manifest says {self.ref.size_bytes}: it was "
                "overwritten after packing"
            )


@dataclass(slots=True)
class _Attempt:
    """One call of the store: the first request of a race, or a hedge.

    Attributes:
        into: memory that only this attempt writes to.
        sent_seconds: time of sending, in seconds of the event loop.
        begun_seconds: time at which its response began; None before.
        ended_seconds: time at which it ended; 0 before.
    """

    into: memoryview
    sent_seconds: float
    begun_seconds: float | None = None
    ended_seconds: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether its response has begun."""
        return self.begun_seconds is not None

    def request(self, key: str, *, is_whole: bool) -> Request:
        """Return the record of the attempt for traces."""
        ended_seconds = max(self.sent_seconds, self.ended_seconds)  # an attempt cancelled before its start has no end
        return Request(self.sent_seconds, self.begun_seconds, ended_seconds, self.into.nbytes, is_whole, key)


_Race = dict[asyncio.Task[StoreError | None], _Attempt]
"""The attempts of one try, in the order of sending."""


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
    """

    def __init__(
        self, store: Readable, *, rng: random.Random, config: FetchConfig, counters: FetchCounters, hedges: HedgePolicy
    ) -> None:
        self._store, self._rng, self._config, self._counters, self._hedges = store, rng, config, counters, hedges
        self._aimd = AimdLimit(
            start=config.start_concurrency, min_limit=config.min_concurrency, max_limit=config.max_concurrency
        )
        self._limiter = Limiter(self._aimd.limit)
        self._rate = RateLimit(config.max_bytes_per_second)

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
                self._hedges.budget.earn()
                fetch.deadline.start(self._config.deadline_seconds, self._config.transfer_seconds(fetch.size_bytes))
                for attempt in count(1):
                    error = await self._race(fetch, part, span)
                    if error is None:
                        return
                    await self.back_off(fetch, attempt, self._check_transient(fetch, attempt, error))
                    self._rate.charge(part.size_bytes)
            finally:
                self._limiter.release()

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

        When the first response begins, the requests that still wait are cancelled, before they transfer bytes. Each
        request has its own memory, and has ended before the memory is used for anything else.
        """
        loop, key = asyncio.get_running_loop(), fetch.ref.key
        into = fetch.into[part.offset : part.offset + part.size_bytes]
        race: _Race = {}
        if not self._config.hedge:
            attempt = _Attempt(into, loop.time())
            error = await self._attempt(fetch, part, attempt, race)
            span.add_attempt([attempt.request(key, is_whole=error is None)])
            return error
        with ExitStack() as borrowed:
            async with task_group() as group:
                data: memoryview | None = into
                while True:
                    if data is not None:
                        attempt = _Attempt(data, loop.time())
                        race[group.create_task(self._attempt(fetch, part, attempt, race))] = attempt
                    running = [task for task in race if not task.done()]
                    if not running or _winner(race) is not None:
                        break
                    data, look_seconds = self._hedge(part, race, borrowed)
                    if data is None:
                        await asyncio.wait(running, timeout=look_seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    task.cancel()
            span.add_attempt([attempt.request(key, is_whole=_has_succeeded(task)) for task, attempt in race.items()])
            return self._finish_race(race, into)

    def _hedge(self, part: RangePart, race: _Race, borrowed: ExitStack) -> tuple[memoryview | None, float | None]:
        """Decide whether to hedge: return memory for the hedge, or None and the seconds until the next check."""
        if len(race) > MAX_HEDGES:
            return None, None
        look_seconds = self._hedges.poll_delay_seconds(
            part.size_bytes,
            sent_seconds=max(attempt.sent_seconds for attempt in race.values()),
            has_begun=any(attempt.has_begun for attempt in race.values()),
            now_seconds=asyncio.get_running_loop().time(),
        )
        if look_seconds > 0.0:
            return None, look_seconds
        data = self._hedges.borrow_buffer(part.size_bytes, borrowed, len(race) - 1)
        if data is not None:
            self._limiter.held += 1  # beyond the limit if necessary: hedges have their own budget
            borrowed.callback(self._limiter.release)
            self._rate.charge(part.size_bytes)
        return data, POLL_SECONDS

    def _finish_race(self, race: _Race, into: memoryview) -> StoreError | None:
        """Copy the winner's bytes to ``into`` and count the losers; return the error if no attempt succeeded."""
        winner = _winner(race)
        if winner is None:
            return next(task.result() for task in race if not task.cancelled())
        data, store_tells = race[winner].into, race[winner].has_begun
        losers = [task for task in race if task is not winner and (race[task].has_begun or not store_tells)]
        self._counters.hedged_bytes += len(losers) * data.nbytes
        if data is not into:
            into[:] = data
            self._counters.hedge_wins += 1
        return None

    async def _attempt(self, fetch: ObjectFetch, part: RangePart, attempt: _Attempt, race: _Race) -> StoreError | None:
        """Call the store once; return its error, since a failure must not stop the other attempts of the race.

        When its response begins, attempts that still wait for theirs are cancelled.
        """
        loop = asyncio.get_running_loop()
        attempt.sent_seconds = loop.time()
        self._counters.requests += 1
        fetch.requests += 1

        def begun() -> None:
            attempt.begun_seconds = loop.time()
            self._hedges.times.observe_first_byte(attempt.begun_seconds - attempt.sent_seconds)
            for task, other in race.items():
                if not other.has_begun:
                    task.cancel()

        limit_seconds = self._config.attempt_limit_seconds(part.size_bytes)
        error: StoreError | None = None
        try:
            async with asyncio.timeout(limit_seconds):
                info = await self._store.get_range(
                    fetch.ref.key, part.start, part.end, into=attempt.into, tag=fetch.tag, begun=begun
                )
            fetch.check_size(info)
        except StoreError as raised:
            error = raised
        except TimeoutError as raised:
            error = DeadlineError(
                f"{fetch.name}: bytes {part.start} to {part.end} did not arrive within {limit_seconds:g} s; on a very "
                "slow link, lower min_bytes_per_second"
            )
            error.__cause__ = raised
        finally:
            attempt.ended_seconds = loop.time()
        self._record_attempt(fetch, part, attempt, error)
        return error

    def _record_attempt(self, fetch: ObjectFetch, part: RangePart, attempt: _Attempt, error: StoreError | None) -> None:
        """Record an attempt that was not cancelled: counters, timings and the concurrency limit."""
        if error is not None:
            if isinstance(error, ThrottledError):
                self._aimd.record_throttle(attempt.sent_seconds, attempt.ended_seconds)
                self._limiter.limit = self._aimd.limit
            self.count_failure(fetch, error)
            return
        seconds = attempt.ended_seconds - attempt.sent_seconds
        begun_seconds = attempt.begun_seconds
        self._counters.bytes += part.size_bytes
        self._hedges.times.observe(part.size_bytes, seconds)
        self._aimd.record_completion(
            part.size_bytes,
            seconds,
            saturated=self._limiter.has_waiters,
            first_byte_seconds=None if begun_seconds is None else begun_seconds - attempt.sent_seconds,
        )
        self._limiter.limit = self._aimd.limit


def _winner(race: _Race) -> asyncio.Task[StoreError | None] | None:
    """Return the successful attempt that was sent first; None if there is none."""
    return next((task for task in race if _has_succeeded(task)), None)


def _has_succeeded(task: asyncio.Task[StoreError | None]) -> bool:
    return task.done() and not task.cancelled() and task.result() is None
