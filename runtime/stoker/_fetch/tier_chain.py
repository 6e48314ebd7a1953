"""A chain of tiers in front of the store: the nearest tier that has an object in time delivers it, or else the store.

No tier can delay a fetch by much. A late tier is raced with the store if memory and budget allow a hedge (see
:mod:`stoker._fetch.hedge`); otherwise its read is cancelled, and the store fills the same memory. After three late or
failed reads in a row, a tier's circuit breaker opens; later, a single read tries the tier again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from stoker._base.breaker import FAILURE_THRESHOLD, PROBE_INTERVAL_SECONDS, BreakerState, CircuitBreaker, ReadOutcome
from stoker._base.fetch_record import Phase, record_tier_outcome, start_activity
from stoker._base.task_group import task_group
from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._fetch.hedge import POLL_SECONDS, TIMER_SECONDS, HedgePolicy, TransferTimes
from stoker.abc import CorrectedTier, ObjectRef, PlacedTier, Tier
from stoker.errors import ChecksumError, StokerError, StoreError

LATE_SECONDS = 0.08
"""Minimum time after which a tier is late; longer if the store's bytes, or the usual reads of both, take longer."""

SINGLE_FLIGHT_SECONDS = 1.0
"""Minimum time after which a tier is late whose read may wait for another client's fetch from the store."""

ReadStore = Callable[[memoryview], Awaitable[None]]
Verify = Callable[[ObjectRef, memoryview], None]


@runtime_checkable
class SingleFlightTier(Tier, Protocol):
    """A tier whose ``read`` waits while another of its clients fetches the object from the store, to give it."""

    async def peek(self, ref: ObjectRef, into: memoryview) -> bool:
        """Read as :meth:`Tier.read` does, but wait for nobody, and with no intention to give the object."""
        ...

    def decline(self, ref: ObjectRef) -> None:
        """Let another client fetch an object that this one lacked and could not fetch. Must not block."""
        ...

    def is_responsive(self, ref: ObjectRef) -> bool:
        """Return whether an object's place has answered its requests, also those that wait for another client."""
        ...


class _TierOutcome(enum.StrEnum):
    """Outcome of a read from a tier, as in traces; a late read was cancelled (LATE), or lost to the store (BEATEN)."""

    DELIVERED = "delivered"
    MISSING = "lacking"
    FAILED = "failed"
    LATE = "late"
    BEATEN = "beaten"
    NOT_ASKED = "not asked"


@dataclass
class Patience:
    """How long one caller waits for tiers, all its reads together; beside the time that the store usually takes.

    Attributes:
        seconds: time left.
    """

    seconds: float = math.inf

    def spend(self, waited_seconds: float, usual_seconds: float) -> None:
        """Count a wait, of which ``usual_seconds`` are free."""
        self.seconds -= max(0.0, waited_seconds - usual_seconds)


@dataclass(frozen=True)
class _Read:
    """One read of an object.

    Attributes:
        ref: the object.
        into: memory of its size.
        store: fills memory from the store; None if only tiers are read.
        patience: how long to wait for tiers.
    """

    ref: ObjectRef
    into: memoryview
    store: ReadStore | None
    patience: Patience = field(default_factory=Patience)


class _TierState:
    """A tier, or one of the places that a tier reads from, with its circuit breaker and timings.

    Args:
        tier: the tier.
        location: name of the place; empty if the tier has only one.

    Attributes:
        label: name in messages.
        single_flight: the tier, if its reads wait for other clients; else None.
        times: durations of its reads, each divided by the number of concurrent reads, which share a device or link.
        in_flight: number of reads in flight.
        failure: text of the last failure.
        is_faulty: whether it has raised an error that tiers may not raise.
    """

    def __init__(self, tier: Tier, location: str) -> None:
        self.tier = tier
        self.single_flight = tier if isinstance(tier, SingleFlightTier) else None
        self.label = f"{tier.name} {location}".rstrip()
        self.breaker = CircuitBreaker()
        self.times = TransferTimes()
        self.in_flight = 0
        self.failure = ""
        self.is_faulty = False


class TierChain:
    """Reads objects from the nearest tier that has them. Belongs to one event loop.

    Args:
        tiers: the tiers, nearest first.
        hedges: hedges of the store, which provide memory for a race as far as budget and ring allow.
        config: time limits of reads.
        counters: counters of hits, errors and late reads.
        verify: raises ChecksumError if bytes are not those of the object.
        log: logger for breakers that open and close.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        hedges: HedgePolicy,
        config: FetchConfig,
        counters: FetchCounters,
        verify: Verify,
        log: logging.Logger,
    ) -> None:
        self._log = log
        self._tiers = tuple(tiers)
        self._places = [tier.place if isinstance(tier, PlacedTier) else _single_place for tier in tiers]
        self._single_flights = [tier for tier in tiers if isinstance(tier, SingleFlightTier)]
        self._states: dict[tuple[int, str], _TierState] = {}
        self._hedges, self._config, self._counters, self._verify = hedges, config, counters, verify

    def __bool__(self) -> bool:
        """Whether there is any tier."""
        return bool(self._tiers)

    def states(self) -> dict[str, str]:
        """Return the state of each breaker, by name of the tier and, if it has several, of the place."""
        unread = {tier.name: str(BreakerState.CLOSED) for tier in self._tiers if not isinstance(tier, PlacedTier)}
        return unread | {member.label: str(member.breaker.state) for member in self._states.values()}

    def _state(self, number: int, ref: ObjectRef) -> _TierState:
        """Return the state of the place from which a tier would read an object."""
        index = self._places[number](ref)
        member = self._states.get((number, index))
        if member is None:
            member = self._states[number, index] = _TierState(self._tiers[number], index)
        return member

    async def fetch(self, ref: ObjectRef, into: memoryview, store: ReadStore, patience: Patience | None = None) -> None:
        """Fill ``into`` with an object, verified, from the nearest tier that delivers it in time, or from the store.

        When the call ends in any way, nothing writes to ``into`` any more. All tiers nearer than the one that delivers
        are offered the object.

        Args:
            ref: the object.
            into: memory of the object's size.
            store: fills memory of that size from the store: ``into``, or other memory in a race.
            patience: how long to wait for tiers, if the caller has a limit for several reads.

        Raises:
            StokerError: the store failed, and no tier has the object.
        """
        try:
            answer = await self._read_in_turn(_Read(ref, into, store, patience or Patience()))
            if answer is _TierOutcome.DELIVERED:
                return
            if answer is not _TierOutcome.BEATEN:
                await self._read_store(ref, into, store)
        except BaseException:
            self._decline(ref)
            raise
        self._offer(ref, into, len(self._tiers))

    async def _read_store(self, ref: ObjectRef, into: memoryview, store: ReadStore) -> None:
        """Fill ``into`` from the store, or from any tier if the store fails."""
        try:
            await store(into)
        except StokerError:
            self._decline(ref)
            if not await self._read_from_any(ref, into):
                raise

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, verified, from the nearest tier that has it; return whether one had it.

        A tier that fails or returns wrong bytes only costs time.
        """
        return bool(self._tiers) and await self._read_in_turn(_Read(ref, into, None)) is _TierOutcome.DELIVERED

    async def _read_in_turn(self, read: _Read) -> _TierOutcome:
        """Read from tiers in turn until one or the store delivers, or one is late; return the last outcome.

        Raises:
            StokerError: a tier was late and did not deliver, and the store failed.
        """
        self._hedges.earn()
        answer = _TierOutcome.MISSING
        for number in range(len(self._tiers)):
            member = self._state(number, read.ref)
            answer = await self._read_if_permitted(member, read)
            record_tier_outcome(member.tier.name, answer)
            if answer is _TierOutcome.DELIVERED:
                self._count_hit(member, read.ref)
                self._offer(read.ref, read.into, number)
            if answer in (_TierOutcome.DELIVERED, _TierOutcome.BEATEN, _TierOutcome.LATE):
                break
        return answer

    async def _read_from_any(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` from any tier, even one with an open breaker, after the store has failed.

        A tier may take ``attempt_seconds`` plus the time of the bytes at ``min_bytes_per_second``.
        """
        for number in range(len(self._tiers)):
            member = self._state(number, ref)
            if await self._read_tier(member, ref, into, will_fetch=False) is _TierOutcome.DELIVERED:
                self._count_hit(member, ref)
                return True
        return False

    def _count_hit(self, member: _TierState, ref: ObjectRef) -> None:
        self._counters.tier_hits[member.tier.name] += 1
        self._counters.count_delivery(ref.size_bytes)

    def _offer(self, ref: ObjectRef, data: memoryview, end: int) -> None:
        for number, tier in enumerate(self._tiers[:end]):
            try:
                tier.offer(ref, data)
            except Exception as error:  # noqa: BLE001 - a tier may be a plug-in, and none may end a training run
                self._log_fault(self._state(number, ref), "offering", ref, error)

    @staticmethod
    def _waits_for_others(member: _TierState, ref: ObjectRef, answer: _TierOutcome) -> bool:
        """Return whether a late read was late because another client's fetch is."""
        is_late = answer in (_TierOutcome.LATE, _TierOutcome.BEATEN)
        return is_late and member.single_flight is not None and member.single_flight.is_responsive(ref)

    def _decline(self, ref: ObjectRef) -> None:
        for tier in self._single_flights:
            tier.decline(ref)

    async def _read_if_permitted(self, member: _TierState, read: _Read) -> _TierOutcome:
        """Read from a tier if its breaker permits."""
        loop = asyncio.get_running_loop()
        permit = member.breaker.permit(loop.time())
        if permit is None:
            return _TierOutcome.NOT_ASKED
        outcome = ReadOutcome.UNDECIDED
        member.in_flight += 1
        try:
            answer = await self._read_with_hedge(member, read)
            if answer is _TierOutcome.DELIVERED:
                outcome = ReadOutcome.DELIVERED
            elif answer is not _TierOutcome.MISSING and not self._waits_for_others(member, read.ref, answer):
                outcome = ReadOutcome.FAILED
        except StokerError:
            outcome = ReadOutcome.FAILED
            raise
        finally:
            member.in_flight -= 1
            before = member.breaker.state
            member.breaker.report(permit, outcome, loop.time())
            self._log_change(member, before)
        return answer

    async def _read_with_hedge(self, member: _TierState, read: _Read) -> _TierOutcome:
        """Read from a tier and, if it is late and memory is available, from the store at the same time."""
        ref, into, store = read.ref, read.into, read.store
        with ExitStack() as borrowed:
            async with task_group() as group:
                near = group.create_task(self._read_tier(member, ref, into, will_fetch=store is not None))
                if await self._wait_until_late(member, near, ref.size_bytes, read.patience):
                    return near.result()
                self._counters.tier_late[member.tier.name] += 1
                data = (
                    self._hedges.borrow_buffer(ref.size_bytes, borrowed)
                    if store is not None and self._config.hedge
                    else None
                )
                if store is None or data is None:
                    near.cancel()
                else:
                    far = group.create_task(_error_of(store(data)))
                    await _wait_first_success(near, far)
            if not near.cancelled() and near.result() is _TierOutcome.DELIVERED:
                return _TierOutcome.DELIVERED
            if data is None:
                return _TierOutcome.LATE
            if (error := far.result()) is not None:
                raise error
            self._counters.hedge_wins += 1
            into[:] = data
            return _TierOutcome.BEATEN

    async def _wait_until_late(
        self, member: _TierState, near: asyncio.Task[_TierOutcome], size_bytes: int, patience: Patience
    ) -> bool:
        """Wait until a read has ended or is late; return whether it has ended.

        Short waits are counted instead of the clock, so that a pause of this process does not make a tier late.
        """
        waited_seconds = 0.0
        usual_seconds = self._hedges.usual_seconds(size_bytes)
        limit_seconds = usual_seconds + patience.seconds
        try:
            while (
                left_seconds := min(limit_seconds, self._late_seconds(member, size_bytes)) - waited_seconds
            ) >= TIMER_SECONDS:
                look_seconds = min(POLL_SECONDS, left_seconds)
                await asyncio.wait([near], timeout=look_seconds)
                if near.done():
                    return True
                waited_seconds += look_seconds
        finally:
            patience.spend(waited_seconds, usual_seconds)
        member.failure = f"it had not delivered after {waited_seconds:.2g} s"
        return False

    def _late_seconds(self, member: _TierState, size_bytes: int) -> float:
        """Return how long to wait for a tier: a multiple of its recent times, but not longer than the store takes.

        At least the store's time after the first byte: a disk that is slow because of many readers is not faulty.
        """
        if member.single_flight is not None:
            return max(SINGLE_FLIGHT_SECONDS, self._hedges.late_seconds(size_bytes))
        store_seconds, store_bytes_seconds = self._hedges.expected_seconds(size_bytes)
        least_seconds = max(LATE_SECONDS, store_bytes_seconds)
        expected_seconds = member.times.expected_seconds(size_bytes)
        if expected_seconds is None:
            return least_seconds
        patience_seconds = self._config.hedge_after_factor * expected_seconds * member.in_flight
        return max(least_seconds, min(patience_seconds, store_seconds))

    async def _read_tier(
        self, member: _TierState, ref: ObjectRef, into: memoryview, *, will_fetch: bool = True
    ) -> _TierOutcome:
        """Read from a tier; ``will_fetch`` says whether the whole object is fetched from the store if it lacks it."""
        loop, tier = asyncio.get_running_loop(), member.tier
        begun_seconds, beside = loop.time(), member.in_flight
        try:
            async with asyncio.timeout(self._config.attempt_limit_seconds(ref.size_bytes)):
                with start_activity(ref.key, Phase.TIER):
                    read = tier.read if will_fetch or member.single_flight is None else member.single_flight.peek
                    is_hit = await read(ref, into)
            if not is_hit:
                return _TierOutcome.MISSING
            with start_activity(ref.key, Phase.VERIFY):
                self._verify(ref, into)
        except Exception as error:  # noqa: BLE001 - a tier may be a plug-in, and none may end a training run
            if not isinstance(error, StoreError | TimeoutError):
                self._log_fault(member, "reading", ref, error)
            self._counters.tier_errors[member.tier.name] += 1
            if isinstance(error, ChecksumError):
                self._counters.checksum_failures += 1
                if isinstance(tier, CorrectedTier):
                    tier.reject(ref)
            member.failure = str(error) or type(error).__name__
            return _TierOutcome.FAILED
        sharing = max(1, beside, member.in_flight)
        member.times.observe(ref.size_bytes, (loop.time() - begun_seconds) / sharing)
        return _TierOutcome.DELIVERED

    def _log_fault(self, member: _TierState, doing: str, ref: ObjectRef, error: Exception) -> None:
        """Log, once per tier, that it raised an error that tiers may not raise."""
        if not member.is_faulty:
            member.is_faulty = True
            self._log.warning(
                "the tier %s has a fault: %s %s raised %r; objects are read from the bucket instead (logged once)",
                member.label,
                doing,
                ref.key,
                error,
                exc_info=error,
            )

    def _log_change(self, member: _TierState, before: BreakerState) -> None:
        """Log that a breaker has opened, or has closed again, but not every probe."""
        name, state = member.label, member.breaker.state
        if before is BreakerState.CLOSED and state is BreakerState.OPEN:
            self._log.warning(
                "the tier %s was late or failed %d times in a row, so objects are read from the bucket; one read tries "
                "the tier every %g s; last failure: %s",
                name,
                FAILURE_THRESHOLD,
                PROBE_INTERVAL_SECONDS,
                member.failure,
            )
        elif before is BreakerState.PROBING and state is BreakerState.CLOSED:
            self._log.info("the tier %s delivers again", name)


def _single_place(_: ObjectRef) -> str:
    return ""


async def _wait_first_success(near: asyncio.Task[_TierOutcome], far: asyncio.Task[StokerError | None]) -> None:
    """Wait until a tier or the store has delivered, or both have failed, and cancel the other read."""
    await asyncio.wait([near, far], return_when=asyncio.FIRST_COMPLETED)
    if near.done() and near.result() is not _TierOutcome.DELIVERED:
        await asyncio.wait([far])
    elif far.done() and far.result() is not None:
        await asyncio.wait([near])
    near.cancel()
    far.cancel()


async def _error_of(reading: Awaitable[None]) -> StokerError | None:
    try:
        await reading
    except StokerError as error:
        return error
    return None
