"""Performs a schedule: fetches a stream of items into the ring ahead of the consumer, in order of first use.

Admission is strictly in order: item k has its slot before item k + 1 may have one. So the items that hold slots are
always the next ones to be used, and as long as the ring holds what the consumer uses at once, nothing can wait in a
circle.

A run starts slowly: what the first step needs is fetched alone, then three items at a time, and one more with each that
arrives, until eight may be under way. Items that are fetched at once share the bandwidth and arrive together, late; in
this way the next one is there first. The first sixteen items are read in parallel ranges: behind them there is enough
ahead of the consumer to wait for whole ones.

A fetch that fails while nobody waits for it may have met an outage that is over when the consumer comes. Its item keeps
its claim to a slot, and is fetched anew when the consumer goes on; the error of a fetch reaches a consumer that has
waited for most of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stoker._base.recorder import Recorder
from stoker._base.task_group import task_group
from stoker._fetch.config import Progress, Schedule
from stoker._memory.ring import Ring, RingStateError
from stoker.errors import (
    ChecksumError,
    ConfigError,
    CredentialsError,
    FetchError,
    ObjectDamagedError,
    StokerError,
    TransientError,
)

_START_ITEMS, _FULL_ITEMS = 3, 8
_SPLIT_ITEMS = 16
_WAITED_SHARE = 0.5
"""Of a fetch's time that a consumer has waited for it, from which on its error is the consumer's."""


Ref = TypeVar("Ref")
Wanted = TypeVar("Wanted", contravariant=True)


@dataclass(frozen=True, slots=True)
class Item(Generic[Ref]):
    """Something to fetch.

    Attributes:
        index: 0, 1, 2 … in order of first use over the run.
        ref: what it is, for the reader.
        step: the step that first uses it; never falls from one item to the next.
    """

    index: int
    ref: Ref
    step: int


class SlotReader(Protocol[Wanted]):
    """Fills slots of a ring; a :class:`~stoker._fetch.fetcher.Fetcher` is one."""

    async def fetch(self, ref: Wanted, *, urgent: bool = False) -> int:
        """Return a READY slot with what ``ref`` names, verified.

        The slot is acquired before the first await, and freed on every error and when the call is cancelled.

        Raises:
            StokerError: it could not be had.
            RingStateError: no slot was free; admission is the caller's part.
        """
        ...


@dataclass(slots=True, kw_only=True)
class PrefetchStatistics:
    """What a prefetcher has done.

    Attributes:
        issued: items whose fetch has begun.
        fetched: items that became ready.
        failed: items that ended in an error.
        released: items that the consumer is done with.
        waits: times the consumer had to wait for an item.
        misses: items issued only because the consumer was waiting already, before the schedule would have.
    """

    issued: int = 0
    fetched: int = 0
    failed: int = 0
    released: int = 0
    waits: int = 0
    misses: int = 0


class Prefetcher(Generic[Ref]):
    """Keeps the ring filled. Lives on one event loop; only :meth:`ready` may be called from other threads.

    Nothing is fetched before :meth:`run`.

    Args:
        reader: reads into ``ring``.
        ring: shared with the reader, used by nobody else.
        schedule: how far ahead.
        items: returns the next item, None after the last.
        hedge_slots: slots that admission leaves free for hedges.
        recorder: follows the fetches.

    Attributes:
        stats: counts so far.
    """

    def __init__(
        self,
        reader: SlotReader[Ref],
        ring: Ring,
        schedule: Schedule,
        items: Callable[[], Item[Ref] | None],
        *,
        hedge_slots: int,
        recorder: Recorder | None = None,
    ) -> None:
        if hedge_slots < 0 or ring.slots - hedge_slots < schedule.needed_slots:
            raise ConfigError(
                f"{schedule} needs {schedule.needed_slots} slots beside {hedge_slots} for hedges; the ring has "
                f"{ring.slots}: raise the memory budget or fetch less ahead"
            )
        self._reader, self._ring, self._items, self._hedge_slots = reader, ring, items, hedge_slots
        self.schedule, self.recorder, self.stats = schedule, recorder, PrefetchStatistics()
        self._outcomes: dict[int, int | Exception] = {}
        self._arrivals: dict[int, asyncio.Event] = {}
        self._wait_begun_seconds: dict[int, float] = {}
        self._failed_ahead: dict[int, Item[Ref]] = {}
        self._due: deque[Item[Ref]] = deque()
        self._changed = asyncio.Event()
        self._ended: Exception | None = None
        self._unplanned: Exception | None = None
        self._wanted = -1
        self._granted = self._step = self._consumed = 0
        self._first_step: int | None = None
        self._first_missing = 0
        self._start_items = _START_ITEMS

    async def run(self) -> None:
        """Fetch until the items are exhausted and every fetch has ended.

        An item that fails does not end the run. If it failed while nobody waited for it, for a reason that may pass, it
        is fetched anew when the consumer goes on; else its error is raised to the consumer when it comes to the item.
        Cancelling cancels every fetch, waits for the transports to end and frees all slots but the READY ones,
        which the consumer releases (or :meth:`release_all`). Whoever waits is told.

        Raises:
            Exception: what ``items`` raised; the consumer gets it too, at the first item that is missing.
        """
        try:
            async with task_group() as fetches:
                await self._issue_all(fetches)
        except BaseException:
            self._end(StokerError("the prefetcher was stopped"))
            raise
        if self._unplanned is not None:
            self._end(self._unplanned)
            raise self._unplanned
        self._end(StokerError(f"the order has only {self.stats.issued} items"))

    async def wait(self, index: int) -> int:
        """Return the slot of an item, READY, once it is there; it and all before it are issued at once.

        Raises:
            StoreError: the item could not be fetched.
            StokerError: it never will be: the run has ended.
        """
        if (slot := self.ready(index)) is not None:
            return slot
        self.stats.waits += 1
        self._wanted = max(self._wanted, index)
        self._wait_begun_seconds[index] = asyncio.get_running_loop().time()
        self._fetch_failed_anew()
        try:
            while slot is None:
                if self._ended is not None:
                    raise self._ended
                await self._arrivals.setdefault(index, asyncio.Event()).wait()
                slot = self.ready(index)
        finally:
            self._wait_begun_seconds.pop(index, None)
        return slot

    def ready(self, index: int) -> int | None:
        """Return the slot of an item if it is READY, else None; from any thread, without waiting.

        Raises:
            StoreError: the item could not be fetched, and is not fetched anew.
        """
        outcome = self._outcomes.get(index)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def release(self, index: int) -> None:
        """Free an item's slot; for one that failed, forget the error.

        Raises:
            RingStateError: the item was released already, or never was ready.
        """
        outcome = self._outcomes.pop(index, None)
        if outcome is None:
            raise RingStateError(f"item {index} holds no slot: it was released already, or was never ready")
        if isinstance(outcome, int):
            self._ring.release(outcome)
        if self.recorder is not None:
            self.recorder.released(index)
        self.stats.released += 1
        self._changed.set()

    def release_all(self) -> None:
        """Release every item that is ready, used or not: for a consumer that leaves early, after the run.

        Whoever waits is told.
        """
        for index in list(self._outcomes):
            self.release(index)
        if self._ended is None:  # it was never run
            self._end(StokerError("the prefetcher was stopped"))

    def reached(self, step: int, consumed: int) -> None:
        """The consumer is at ``step`` and has begun to use ``consumed`` items."""
        self._step = step
        self._consumed = consumed
        self._fetch_failed_anew()

    def _fetch_failed_anew(self) -> None:
        """The consumer goes on: what failed ahead of it is due, in order."""
        self._due.extend(self._failed_ahead[index] for index in sorted(self._failed_ahead))
        self._failed_ahead.clear()
        self._changed.set()

    @property
    def _claimed(self) -> int:
        """How many free slots belong to items that are to be fetched anew."""
        return len(self._failed_ahead) + len(self._due)

    @property
    def _under_way(self) -> int:
        stats = self.stats
        return stats.issued - stats.fetched - stats.failed - self._claimed

    def _next_item(self) -> Item[Ref] | None:
        try:
            return self._items()
        except Exception as error:  # noqa: BLE001 - raised again once the items before it have been fetched
            self._unplanned = error
            return None

    async def _issue_all(self, fetches: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        item, idle_seconds = self._next_item(), 0.0
        while item is not None or self._under_way or self._claimed:
            if self._due and self._ring.free:
                await self._issue(fetches, self._due.popleft(), 0.0)
            elif item is not None and self._may_issue(item):
                self.stats.issued += 1
                self._first_missing += item.step == self._first_step
                await self._issue(fetches, item, idle_seconds)
                item, idle_seconds = self._next_item(), 0.0
            else:
                is_idle = not self._under_way
                self._changed.clear()
                begun_seconds = loop.time()
                await self._changed.wait()
                idle_seconds += is_idle * (loop.time() - begun_seconds)

    async def _issue(self, fetches: asyncio.TaskGroup, item: Item[Ref], idle_seconds: float) -> None:
        fetches.create_task(self._fill(item, idle_seconds))
        # The loop starts tasks in the order they were made: after one turn the item holds its slot, in its own task, so
        # that one cancelled before it started has nothing to give back. A hedge may have its turn first.
        self._ring.promised += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._ring.promised -= 1

    def _may_issue(self, item: Item[Ref]) -> bool:
        """Decide on the next item. One that is waited for needs a slot and nothing else, not even the hedges' share."""
        if self._first_step is None:
            self._first_step = item.step
        waited_for = item.index <= self._wanted
        if item.step != self._first_step and not waited_for and self._would_delay():
            return False
        if self._ring.free - self._claimed <= (0 if waited_for else self._hedge_slots):
            return False
        if self._granted == 0:
            progress = Progress(self.stats.issued, self._consumed, item.step, self._step)
            self._granted = self.schedule.admit(progress)
        if self._granted > 0:
            self._granted -= 1
            return True
        self.stats.misses += waited_for
        return waited_for

    def _would_delay(self) -> bool:
        """Return whether one more fetch would keep what is needed soon from arriving: in the start of a run."""
        is_starting = self._start_items < _FULL_ITEMS
        return bool(self._first_missing) or (is_starting and self._under_way >= self._start_items)

    async def _fill(self, item: Item[Ref], idle_seconds: float) -> None:
        urgent = item.index <= self._wanted or item.step == self._first_step or item.index < _SPLIT_ITEMS
        begun_seconds = asyncio.get_running_loop().time()
        outcome: int | Exception
        try:
            with (
                nullcontext()
                if self.recorder is None
                else self.recorder.following(item.index, item.step, idle_seconds) as fetch
            ):
                outcome = await self._reader.fetch(item.ref, urgent=urgent)
                if fetch is not None:
                    fetch.slot = outcome
            self.stats.fetched += 1
        except Exception as error:  # noqa: BLE001 - a task boundary: raised again to the consumer, at this item
            if _may_pass(error) and not self._was_waited_for(item, begun_seconds):
                self._failed_ahead[item.index] = item
                if item.index in self._wait_begun_seconds:
                    self._fetch_failed_anew()
                self._changed.set()
                return
            outcome = error
            self.stats.failed += 1
        self._outcomes[item.index] = outcome
        if item.step == self._first_step:
            self._first_missing -= 1
        else:
            self._start_items += 1
        if (arrival := self._arrivals.pop(item.index, None)) is not None:
            arrival.set()
        self._changed.set()

    def _was_waited_for(self, item: Item[Ref], begun_seconds: float) -> bool:
        """Return whether a consumer has waited for an item through most of a fetch of it that ends now."""
        wait_begun_seconds = self._wait_begun_seconds.get(item.index)
        if wait_begun_seconds is None:
            return False
        now_seconds = asyncio.get_running_loop().time()
        return now_seconds - wait_begun_seconds >= _WAITED_SHARE * (now_seconds - begun_seconds)

    def _end(self, reason: Exception) -> None:
        self._ended = reason
        for arrival in self._arrivals.values():
            arrival.set()
        self._arrivals.clear()


def _may_pass(error: Exception) -> bool:
    """Return whether what made a fetch fail may be over by and by: an outage, not an object that is gone or spoilt."""
    may_pass = isinstance(error, FetchError | TransientError | CredentialsError)
    return may_pass and not isinstance(error, ObjectDamagedError | ChecksumError)
