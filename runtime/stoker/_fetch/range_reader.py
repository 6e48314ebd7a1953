"""One range of an object, however many requests it takes: permit, attempts, back-off, hedges.

:meth:`RangeReader.read` tries until the range is there, and holds a permit meanwhile; one try is a race of an attempt
and, if that is late, of its hedges; an attempt is one call of the store. Whether the bytes are right is for the caller
to say.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

from stoker._base.fetch_record import Phase, Request, Strand, strand
from stoker._base.retry import LONG_SECONDS, Deadline, backoff_seconds
from stoker._base.task_group import Limiter, task_group
from stoker._fetch.concurrency import Aimd, RateLimit
from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._fetch.hedge import LOOK_SECONDS, Hedges
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

HEDGES = 3
"""For one attempt at most: where 5% are late, one in 400 is so twice, and holds up what is in order behind it."""


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes ``[start, end)`` of an object, and where in the caller's memory they go.

    Attributes:
        start: first byte.
        end: byte after the last.
        offset: of the first byte in the memory, in bytes.
    """

    start: int
    end: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """How many bytes."""
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class ObjectFetch:
    """An object being fetched: what all its requests share.

    Attributes:
        ref: the object.
        name: its URL, for messages.
        into: where its bytes go; the caller's.
        urgent: whether its requests go before others.
        tag: precondition of its requests; None sends none.
        size_bytes: of all that is to be read.
        deadline: ends the fetch; counts from the moment the first request may be sent.
        requests: sent so far.
        failed_readings: of all its ranges, so far.
        changed: the error that said, once so far, that the object is another than the one pinned.
        last_error: of the last request that failed.
    """

    ref: ObjectRef
    name: str
    into: memoryview
    urgent: bool
    tag: str | None
    size_bytes: int
    deadline: Deadline = field(default_factory=Deadline)
    requests: int = 0
    failed_readings: int = 0
    changed: ObjectChangedError | None = None
    last_error: StoreError | None = None

    def check_size(self, info: ObjectInfo) -> None:
        """Raise ObjectChangedError if the object has another size than the pinned one, ObjectTruncatedError if less."""
        if info.size_bytes != self.ref.size_bytes:
            kind = ObjectTruncatedError if info.size_bytes < self.ref.size_bytes else ObjectChangedError
            raise kind(
                f"{self.name} has {info.size_bytes} bytes where the manifest says {self.ref.size_bytes}: it was "
                "overwritten since it was packed"
            )


@dataclass(slots=True)
class _Attempt:
    """One call of the store, the first of a race or a hedge.

    Attributes:
        into: memory of its own.
        sent_seconds: when, in loop time.
        begun_seconds: when its answer began, None until then.
        ended_seconds: when it ended.
    """

    into: memoryview
    sent_seconds: float
    begun_seconds: float | None = None
    ended_seconds: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether its answer has begun."""
        return self.begun_seconds is not None

    def request(self, key: str, *, is_whole: bool) -> Request:
        """Return what is kept on record of it."""
        ended_seconds = max(self.sent_seconds, self.ended_seconds)  # one that was cancelled before it began has no end
        return Request(self.sent_seconds, self.begun_seconds, ended_seconds, self.into.nbytes, is_whole, key)


_Race = dict[asyncio.Task[StoreError | None], _Attempt]
"""The attempts of one try, in the order they were sent."""


class RangeReader:
    """Reads ranges of one store, on one event loop.

    A read that backs off keeps its permit, so in an outage the request rate is bounded by the concurrency and the
    back-off, however many reads wait.

    Args:
        store: what is read from.
        rng: for jitter.
        config: deadlines, retries, hedges and concurrency.
        counters: of what was done.
        hedges: says what is late, and lends memory.
    """

    def __init__(
        self, store: Readable, *, rng: random.Random, config: FetchConfig, counters: FetchCounters, hedges: Hedges
    ) -> None:
        self._store, self._rng, self._config, self._counters, self._hedges = store, rng, config, counters, hedges
        self._aimd = Aimd(start=config.concurrency_start, least=config.concurrency_least, most=config.concurrency_most)
        self._limiter = Limiter(self._aimd.limit)
        self._rate = RateLimit(config.max_bytes_per_second)

    async def read(self, fetch: ObjectFetch, part: RangePart) -> None:
        """Fill a part of the fetch's memory. When the call ends, however it ends, nothing writes there any more.

        Raises:
            FetchError: every attempt failed, or the next one would miss the deadline.
            ObjectTruncatedError: the store says that the object ends before the part does.
            StoreError: what the store raised, if trying again cannot help.
        """
        with strand(fetch.ref.key, Phase.QUEUE) as span:
            await self._rate.wait(part.size_bytes)
            await self._limiter.acquire(urgent=fetch.urgent)
            try:
                self._hedges.budget.earn()
                fetch.deadline.start(self._config.deadline_seconds, self._config.transfer_seconds(fetch.size_bytes))
                for attempt in count(1):
                    error = await self._race(fetch, part, span)
                    if error is None:
                        return
                    await self.back_off(fetch, attempt, self._passing(fetch, attempt, error))
                    self._rate.charge(part.size_bytes)
            finally:
                self._limiter.release()

    def _passing(self, fetch: ObjectFetch, attempts: int, error: StoreError) -> TransientError:
        """Return an error after which the range may be had all the same; raise if there is no use in trying again."""
        if isinstance(error, RangeBeyondEndError):
            raise ObjectTruncatedError(f"{error}, where the manifest says {fetch.ref.size_bytes} bytes") from None
        if not isinstance(error, TransientError):
            raise error
        if attempts >= self._config.attempts:
            raise self.gave_up(fetch, f"a range failed {attempts} times") from error
        return error

    async def back_off(self, fetch: ObjectFetch, failures: int, error: TransientError) -> None:
        """Wait before another try.

        Raises:
            FetchError: at once, if the deadline would pass meanwhile.
        """
        wait_seconds = backoff_seconds(
            failures,
            base_seconds=self._config.backoff_base_seconds,
            cap_seconds=self._config.backoff_cap_seconds,
            rng=self._rng,
            retry_after_seconds=error.retry_after_seconds,
            left_seconds=fetch.deadline.left_seconds,
        )
        if fetch.deadline.forbids(wait_seconds):
            raise self.gave_up(fetch, "its deadline would pass before the next try") from error
        if wait_seconds > LONG_SECONDS:
            _log.warning("%s is tried again in %.0f s: %s", fetch.name, wait_seconds, error)
        self._counters.retries[type(error).__name__] += 1
        await asyncio.sleep(wait_seconds)

    def failed(self, fetch: ObjectFetch, error: StoreError) -> None:
        """Count a reading that failed."""
        fetch.last_error = error
        self._counters.failures[type(error).__name__] += 1

    def gave_up(self, fetch: ObjectFetch, reason: str) -> FetchError:
        """Return the error that ends a fetch."""
        config = self._config
        return FetchError(
            f"{fetch.name} was not fetched with {fetch.requests} requests: {reason} "
            f"(deadline_seconds={config.deadline_seconds:g}, attempts={config.attempts}, "
            f"checksum_attempts={config.checksum_attempts}); last error: {fetch.last_error}"
        )

    async def _race(self, fetch: ObjectFetch, part: RangePart, span: Strand) -> StoreError | None:
        """Send a request and, when it is late, a hedge, which may be late, too; return the error if none succeeds.

        The first whose answer begins is left to itself: those that wait are cancelled, and have moved no bytes.
        Each has memory of its own, and has ended before its memory is used for anything else.
        """
        loop, key = asyncio.get_running_loop(), fetch.ref.key
        into = fetch.into[part.offset : part.offset + part.size_bytes]
        race: _Race = {}
        if not self._config.hedge:
            attempt = _Attempt(into, loop.time())
            error = await self._attempt(fetch, part, attempt, race)
            span.attempted([attempt.request(key, is_whole=error is None)])
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
            span.attempted([attempt.request(key, is_whole=_has_succeeded(task)) for task, attempt in race.items()])
            return self._outcome(race, into)

    def _hedge(self, part: RangePart, race: _Race, borrowed: ExitStack) -> tuple[memoryview | None, float | None]:
        """Decide whether to hedge now: return memory for it, or None and how long to wait for those that run."""
        if len(race) > HEDGES:
            return None, None
        look_seconds = self._hedges.look_seconds(
            part.size_bytes,
            sent_seconds=max(attempt.sent_seconds for attempt in race.values()),
            has_begun=any(attempt.has_begun for attempt in race.values()),
            now_seconds=asyncio.get_running_loop().time(),
        )
        if look_seconds > 0.0:
            return None, look_seconds
        data = self._hedges.borrow_buffer(part.size_bytes, borrowed, len(race) - 1)
        if data is not None:
            self._limiter.held += 1  # over the limit if need be: it has a budget of its own
            borrowed.callback(self._limiter.release)
            self._rate.charge(part.size_bytes)
        return data, LOOK_SECONDS

    def _outcome(self, race: _Race, into: memoryview) -> StoreError | None:
        """Put what has arrived where it belongs; return the error if none has."""
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
        """Call the store once; return its error: one that fails must not stop the others of the race.

        When its answer begins, those of the race that wait for theirs are cancelled.
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
                f"{fetch.name}: bytes {part.start} to {part.end} are not there after {limit_seconds:g} s; on a very "
                "slow link lower least_bytes_per_second"
            )
            error.__cause__ = raised
        finally:
            attempt.ended_seconds = loop.time()
        self._ended(fetch, part, attempt, error)
        return error

    def _ended(self, fetch: ObjectFetch, part: RangePart, attempt: _Attempt, error: StoreError | None) -> None:
        """Learn from an attempt that was not cancelled."""
        if error is not None:
            if isinstance(error, ThrottledError):
                self._aimd.throttled(attempt.sent_seconds, attempt.ended_seconds)
                self._limiter.limit = self._aimd.limit
            self.failed(fetch, error)
            return
        seconds = attempt.ended_seconds - attempt.sent_seconds
        begun_seconds = attempt.begun_seconds
        self._counters.bytes += part.size_bytes
        self._hedges.times.observe(part.size_bytes, seconds)
        self._aimd.completed(
            part.size_bytes,
            seconds,
            saturated=self._limiter.saturated,
            first_byte_seconds=None if begun_seconds is None else begun_seconds - attempt.sent_seconds,
        )
        self._limiter.limit = self._aimd.limit


def _winner(race: _Race) -> asyncio.Task[StoreError | None] | None:
    """Return an attempt that has succeeded, the one sent first if there are several."""
    return next((task for task in race if _has_succeeded(task)), None)


def _has_succeeded(task: asyncio.Task[StoreError | None]) -> bool:
    return task.done() and not task.cancelled() and task.result() is None
