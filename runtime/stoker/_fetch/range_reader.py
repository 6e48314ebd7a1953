"""One range of an object, however many requests it takes: permit, attempts, back-off, hedge.

:meth:`RangeReader.read` makes attempts and holds a permit meanwhile; an attempt is one request and perhaps its hedge;
a request is one call of the store. Whether the bytes are right is for the caller to say.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

from stoker._base.fetch_record import Phase, Request, Strand, strand
from stoker._base.retry import LONG_SECONDS, Deadline, backoff_seconds
from stoker._base.task_group import task_group
from stoker._fetch.concurrency import Aimd, Gate, RateLimit
from stoker._fetch.config import FetchConfig
from stoker._fetch.hedge import START_HEDGES, HedgeBudget, TransferTimes
from stoker._fetch.statistics import FetchStatistics, FetchTally
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef, Readable
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

__all__ = ["Pursuit", "RangePart", "RangeReader"]

_log = logging.getLogger("stoker.fetch.range_reader")

LOOK_SECONDS = 0.02
"""How often a request that is late looks whether it may be hedged: about a first byte's time."""
TIMER_SECONDS = 0.001
"""Timers are no finer: what is due sooner than this is due."""
START_LATE_SECONDS, START_FACTOR = 0.08, 2.5
"""In a start, when a request without a byte is late: in seconds while no answer has begun, and then in times of the
shortest wait for one: a median of few is as late as they are."""
GUESSED_BYTES_PER_SECOND = 100e6
"""Of one transfer, while none was seen."""
HEDGES = 3
"""For one request at most: where 5% are late, one in 400 is so twice, and holds up what is in order behind it."""


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
class Pursuit:
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
    last_error: StoreError | None = None


@dataclass(slots=True)
class _Leg:
    """A request of an attempt, the first or a hedge.

    Attributes:
        into: where its bytes go, memory of its own.
        sent_seconds: when, in loop time.
        begun_seconds: when its answer began, None until then.
        ended_seconds: when it ended.
    """

    into: memoryview
    sent_seconds: float
    begun_seconds: float | None = None
    ended_seconds: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether its answer has begun."""
        return self.begun_seconds is not None

    def request(self, key: str, *, is_whole: bool) -> Request:
        """Return what is kept on record of it."""
        ended_seconds = max(self.sent_seconds, self.ended_seconds)  # one that was cancelled before it began has no end
        return Request(self.sent_seconds, self.begun_seconds, ended_seconds, self.into.nbytes, is_whole, key)


_Legs = dict[asyncio.Task[StoreError | None], _Leg]


class RangeReader:
    """Reads ranges of one store, on one event loop; the ring's free slots are for the hedges.

    A read that backs off keeps its permit, so in an outage the request rate is bounded by the concurrency and the
    back-off, however many reads wait.
    """

    def __init__(
        self,
        store: Readable,
        *,
        ring: Ring,
        rng: random.Random,
        config: FetchConfig,
        tally: FetchTally,
        small_hedge_bytes: int,
        is_start: bool,
    ) -> None:
        self._store = store
        self._ring = ring
        self._rng = rng
        self._config = config
        self._tally = tally
        self._aimd = Aimd(start=config.concurrency_start, least=config.concurrency_least, most=config.concurrency_most)
        self._gate = Gate(self._aimd)
        self._budget = HedgeBudget(config.hedge_fraction, config.hedge_burst, is_start=is_start)
        self._times = TransferTimes()
        self._rate = RateLimit(config.max_bytes_per_second)
        self._small_hedge_bytes = small_hedge_bytes
        self._small_used_bytes = 0

    def statistics(self, tier_states: Mapping[str, str]) -> FetchStatistics:
        """Return what was counted, with what is expected and allowed now.

        Args:
            tier_states: of each tier's circuit breaker, by name of the tier.
        """
        return self._tally.snapshot(
            fit=self._times.fit(),
            transfer_seconds=self._times.median_seconds(),
            concurrency=self._aimd.limit,
            in_flight=self._gate.in_flight,
            tier_states=tier_states,
            start_hedges=self._budget.start_hedges,
        )

    def end_start(self) -> None:
        """Hedge by the budget alone from here on. Idempotent; from any thread."""
        self._budget.end_start()

    def expected_seconds(self, size_bytes: int) -> tuple[float, float]:
        """Return what a transfer of so many bytes takes lately, and what of it its bytes take.

        While too few were seen: no end, and what the bytes take at 100 MB/s.
        """
        whole_seconds = self._times.expected_seconds(size_bytes)
        if whole_seconds is None:
            return math.inf, size_bytes / GUESSED_BYTES_PER_SECOND
        return whole_seconds, whole_seconds - (self._times.expected_first_byte_seconds() or whole_seconds)

    async def read(self, pursuit: Pursuit, part: RangePart) -> None:
        """Fill a part of the pursuit's memory. When the call ends, however it ends, nothing writes there any more.

        Raises:
            FetchError: every attempt failed, or the next one would miss the deadline.
            ObjectTruncatedError: the store says that the object ends before the part does.
            StoreError: what the store raised, if trying again cannot help.
        """
        with strand(pursuit.ref.key, Phase.QUEUE) as told:
            await self._read(pursuit, part, told)

    async def _read(self, pursuit: Pursuit, part: RangePart, told: Strand) -> None:
        into = pursuit.into[part.offset : part.offset + part.size_bytes]
        await self._rate.wait(part.size_bytes)
        async with self._gate.permit(urgent=pursuit.urgent):
            self._budget.earn()
            pursuit.deadline.start(self._config.deadline_seconds, self._config.transfer_seconds(pursuit.size_bytes))
            for attempt in count(1):
                if attempt > 1:
                    self._rate.charge(part.size_bytes)
                error = await self._attempt(pursuit, part, into, told)
                if error is None:
                    return
                if isinstance(error, RangeBeyondEndError):
                    raise ObjectTruncatedError(
                        f"{error}, where the manifest says {pursuit.ref.size_bytes} bytes"
                    ) from None
                if not isinstance(error, TransientError):
                    raise error
                if attempt >= self._config.attempts:
                    raise self.gave_up(pursuit, f"a range failed {attempt} times") from error
                await self.back_off(pursuit, attempt, error)

    async def back_off(self, pursuit: Pursuit, failures: int, error: TransientError) -> None:
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
            left_seconds=pursuit.deadline.left_seconds,
        )
        if pursuit.deadline.forbids(wait_seconds):
            raise self.gave_up(pursuit, "its deadline would pass before the next try") from error
        if wait_seconds > LONG_SECONDS:
            _log.warning("%s is tried again in %.0f s: %s", pursuit.name, wait_seconds, error)
        self._tally.retries[type(error).__name__] += 1
        await asyncio.sleep(wait_seconds)

    def failed(self, pursuit: Pursuit, error: StoreError) -> None:
        """Count a reading that failed."""
        pursuit.last_error = error
        self._tally.failures[type(error).__name__] += 1

    def gave_up(self, pursuit: Pursuit, reason: str) -> FetchError:
        """Return the error that ends a pursuit."""
        config = self._config
        return FetchError(
            f"{pursuit.name} was not fetched with {pursuit.requests} requests: {reason} "
            f"(deadline_seconds={config.deadline_seconds:g}, attempts={config.attempts}, "
            f"checksum_attempts={config.checksum_attempts}); last error: {pursuit.last_error}"
        )

    async def _attempt(self, pursuit: Pursuit, part: RangePart, into: memoryview, told: Strand) -> StoreError | None:
        """Send a request and, when it is late, a hedge, which may be late, too; return the error if none succeeds.

        The first whose answer begins is left to itself: those that wait are cancelled, and have moved no bytes.
        Each has memory of its own, and has ended before its memory is used for anything else.
        """
        loop = asyncio.get_running_loop()
        if not self._config.hedge:
            leg = _Leg(into, loop.time())
            error = await self._request(pursuit, part, leg, {})
            told.attempted([leg.request(pursuit.ref.key, is_whole=error is None)])
            return error
        legs: _Legs = {}
        with ExitStack() as lent:
            async with task_group() as group:

                def send(data: memoryview) -> None:
                    leg = _Leg(data, loop.time())
                    legs[group.create_task(self._request(pursuit, part, leg, legs))] = leg

                send(into)
                while (running := [leg for leg in legs if not leg.done()]) and _winner(legs) is None:
                    left_seconds = self._left_seconds(part.size_bytes, legs) if len(legs) <= HEDGES else None
                    if left_seconds == 0.0:
                        left_seconds = LOOK_SECONDS
                        if (data := self.lend(part.size_bytes, lent, len(legs) - 1)) is not None:
                            lent.enter_context(self._gate.extra())
                            self._rate.charge(part.size_bytes)
                            send(data)
                            continue
                    await asyncio.wait(running, timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED)
                for each in running:
                    each.cancel()
            key = pursuit.ref.key
            told.attempted([leg.request(key, is_whole=_has_succeeded(task)) for task, leg in legs.items()])
            return self._outcome(legs, into)

    def _outcome(self, legs: _Legs, into: memoryview) -> StoreError | None:
        """Put what has arrived where it belongs; return the error if none has."""
        winner = _winner(legs)
        if winner is None:
            return next(leg.result() for leg in legs if not leg.cancelled())
        data = legs[winner].into
        store_tells = legs[winner].begun
        losers = [leg for leg in legs if leg is not winner and (legs[leg].begun or not store_tells)]
        self._tally.hedged_bytes += len(losers) * data.nbytes
        if data is not into:
            into[:] = data
            self.won()
        return None

    def _left_seconds(self, size_bytes: int, legs: _Legs) -> float:
        """Return when to look next at the request that was sent last; 0 if it is late."""
        config, expected_seconds = self._config, self._times.expected_seconds(size_bytes)
        if expected_seconds is None:
            late_seconds = config.hedge_first_seconds
        else:
            late_seconds = config.hedge_after_factor * expected_seconds
        if not any(leg.begun for leg in legs.values()):
            late_seconds = min(late_seconds, self._first_byte_late_seconds())
        sent_seconds = max(leg.sent_seconds for leg in legs.values())
        late_seconds = max(late_seconds, config.hedge_least_seconds)
        left_seconds = sent_seconds + late_seconds - asyncio.get_running_loop().time()
        if left_seconds < TIMER_SECONDS:
            return 0.0
        # While nothing is expected, others that were sent at the same time may yet teach it.
        return left_seconds if expected_seconds is not None else min(LOOK_SECONDS, left_seconds)

    def _first_byte_late_seconds(self) -> float:
        """Return when a request without a byte is late; in a start, the first answer of another is judge enough."""
        if self._budget.is_start:
            least_seconds = self._times.least_first_byte_seconds()
            return START_LATE_SECONDS if least_seconds is None else START_FACTOR * least_seconds
        first_byte_seconds = self._times.expected_first_byte_seconds()
        return math.inf if first_byte_seconds is None else self._config.hedge_first_byte_factor * first_byte_seconds

    def earn(self) -> None:
        """A place that is read beside the store was asked: that allows as much of a hedge as a request does."""
        self._budget.earn()

    def won(self) -> None:
        """What memory was lent for came first."""
        self._tally.hedge_wins += 1

    def lend(self, size_bytes: int, lent: ExitStack, hedges: int = START_HEDGES) -> memoryview | None:
        """Return memory for a hedge, until ``lent`` is closed; None if the budget allows none or there is no memory.

        It comes out of what ``hedge_burst`` small buffers hold, else it is a slot.

        Args:
            size_bytes: of the memory.
            lent: gives it back.
            hedges: of the same request, so far.
        """
        room_bytes = self._config.hedge_burst * self._small_hedge_bytes - self._small_used_bytes
        is_small = size_bytes <= min(self._small_hedge_bytes, room_bytes)
        if not (is_small or (self._ring.spare and size_bytes <= self._ring.slot_bytes)) or not self._budget.spend(
            hedges
        ):
            return None
        self._tally.hedges += 1
        if is_small:
            self._small_used_bytes += size_bytes
            lent.callback(self._return_small, size_bytes)
            return memoryview(bytearray(size_bytes))
        slot = self._ring.acquire()
        assert slot is not None  # noqa: S101 - it has a spare slot, and nothing ran in between
        lent.callback(self._ring.abort, slot)
        return self._ring.view(slot, size_bytes)

    def _return_small(self, size_bytes: int) -> None:
        self._small_used_bytes -= size_bytes

    async def _request(self, pursuit: Pursuit, part: RangePart, leg: _Leg, legs: _Legs) -> StoreError | None:
        """Call the store once; return its error: in a race, a leg that fails must not stop the others.

        When its answer begins, those of ``legs`` that wait for theirs are cancelled.
        """
        loop = asyncio.get_running_loop()
        sent_seconds = loop.time()
        self._tally.requests += 1
        pursuit.requests += 1

        def begun() -> None:
            leg.begun_seconds = loop.time()
            self._times.observe_first_byte(leg.begun_seconds - sent_seconds)
            for other, state in legs.items():
                if not state.begun:
                    other.cancel()

        try:
            await self._get(pursuit, part, leg.into, begun)
        except StoreError as error:
            if isinstance(error, ThrottledError):
                self._aimd.throttled(sent_seconds, loop.time())
            self.failed(pursuit, error)
            return error
        finally:
            leg.ended_seconds = loop.time()
        seconds = leg.ended_seconds - sent_seconds
        first_byte_seconds = None if leg.begun_seconds is None else leg.begun_seconds - sent_seconds
        self._tally.bytes += part.size_bytes
        self._times.observe(part.size_bytes, seconds)
        self._aimd.completed(
            part.size_bytes, seconds, saturated=self._gate.saturated, first_byte_seconds=first_byte_seconds
        )
        return None

    async def _get(self, pursuit: Pursuit, part: RangePart, into: memoryview, begun: Callable[[], None]) -> None:
        ref = pursuit.ref
        limit_seconds = self._config.attempt_limit_seconds(part.size_bytes)
        try:
            async with asyncio.timeout(limit_seconds):
                info = await self._store.get_range(
                    ref.key, part.start, part.end, into=into, tag=pursuit.tag, begun=begun
                )
        except StoreError:
            raise
        except TimeoutError as error:
            raise DeadlineError(
                f"{pursuit.name}: bytes {part.start} to {part.end} are not there after {limit_seconds:g} s; on a very "
                "slow link lower least_bytes_per_second"
            ) from error
        if info.size_bytes != ref.size_bytes:
            kind = ObjectTruncatedError if info.size_bytes < ref.size_bytes else ObjectChangedError
            raise kind(
                f"{pursuit.name} has {info.size_bytes} bytes where the manifest says {ref.size_bytes}: it was "
                "overwritten since it was packed"
            )


def _winner(legs: _Legs) -> asyncio.Task[StoreError | None] | None:
    """Return a request that has succeeded, the one sent first if there are several."""
    return next((leg for leg in legs if _has_succeeded(leg)), None)


def _has_succeeded(leg: asyncio.Task[StoreError | None]) -> bool:
    return leg.done() and not leg.cancelled() and leg.result() is None
