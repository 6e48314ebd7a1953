"""Performs a schedule: fetches a stream of items into the ring ahead of the consumer, in order of first use.

Admission is strictly in order: item k gets its slots before item k + 1. So the items in slots are always the next ones
to be used, and as long as the ring holds all items that the consumer uses at once, there is no deadlock. If the free
slots are too scattered for an item that the consumer waits for, the ring is compacted: the consumer reads nothing while
it waits, and fetches in flight, which cannot be moved, end.

A run starts slowly: the items of the first step are fetched alone, until the first of their requests is complete; then
one more, whose first bytes arrive when theirs end; behind them (small ones: once few of them are missing) three items
at a time (small ones: more), and one more with each arrival, up to eight. Concurrent fetches share the bandwidth and
arrive together, late; limiting them makes the next item arrive first. From then on a
:class:`~stoker._fetch.look_ahead.LookAhead` limits the items ahead, so that a run uses no more new memory than the link
needs, and fills the ring with time.

The first 16 items are read in parallel ranges, and up to 48 more of the first epoch until enough items are ready: if
the consumer is close behind, it would wait for an item that takes the time of a whole read.

A fetch that fails while the consumer does not wait for it may have met an outage that is over when the consumer needs
the item. The item keeps its claim to a slot, and is fetched again when the consumer goes on. The error of a fetch is
raised to the consumer only if it has waited for most of the fetch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stoker._base.recorder import Recorder
from stoker._base.task_group import task_group
from stoker._fetch.config import Progress, Schedule
from stoker._fetch.look_ahead import MAX_START_ITEMS, MIN_ITEMS, START_ITEMS, LookAhead
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

_SPLIT_ITEMS = 16
_MIN_WAITED_FRACTION = 0.5
"""Fraction of a fetch's time that the consumer must have waited for its error to be raised to the consumer."""


Ref = TypeVar("Ref")
Wanted = TypeVar("Wanted", contravariant=True)


@dataclass(frozen=True, slots=True)
class Item(Generic[Ref]):
    """An item to fetch.

    Attributes:
        index: number of the item, 0, 1, 2 … in order of first use over the run.
        ref: reference to the item, for the reader.
        step: number of the step that first uses it; never decreases from one item to the next.
    """

    index: int
    ref: Ref
    step: int


class SlotReader(Protocol[Wanted]):
    """Fills slots of a ring; a :class:`~stoker._fetch.fetcher.Fetcher` is one."""

    def count_slots(self, ref: Wanted) -> int:
        """Return the number of adjacent slots that an item takes."""
        ...

    async def fetch(self, ref: Wanted, *, urgent: bool = False) -> int:
        """Return the READY slots with the verified item ``ref``, by their number in the ring.

        They are acquired before the first await, and freed on every error and on cancellation.

        Raises:
            StokerError: the item could not be read.
            RingStateError: too few adjacent slots were free; admission is up to the caller.
        """
        ...


@dataclass(slots=True, kw_only=True)
class PrefetchStatistics:
    """Counters of a prefetcher.

    Attributes:
        issued: items whose fetch has begun.
        fetched: items that became ready.
        failed: items whose fetch ended in an error.
        released: items that the consumer has released.
        waits: waits of the consumer for an item.
        misses: items issued before the schedule allowed it, because the consumer was waiting for them.
    """

    issued: int = 0
    fetched: int = 0
    failed: int = 0
    released: int = 0
    waits: int = 0
    misses: int = 0


class Prefetcher(Generic[Ref]):
    """Keeps the ring filled. Belongs to one event loop; only :meth:`ready` may be called from other threads.

    Nothing is fetched before :meth:`run`.

    Args:
        reader: reads items into ``ring``.
        ring: ring that only this prefetcher and the reader use.
        schedule: decides how far ahead to fetch.
        items: returns the next item, or None after the last.
        hedge_slots: number of slots that admission leaves free for hedges.
        look_ahead: limit of the items that are issued and not used yet; None for no limit but the ring's.
        recorder: records the fetches; None for no record.

    Attributes:
        stats: current counters.
    """

    def __init__(
        self,
        reader: SlotReader[Ref],
        ring: Ring,
        schedule: Schedule,
        items: Callable[[], Item[Ref] | None],
        *,
        hedge_slots: int,
        look_ahead: LookAhead | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if hedge_slots < 0 or ring.slots - hedge_slots < schedule.needed_slots:
            raise ConfigError(
                f"{schedule} needs {schedule.needed_slots} slots in addition to {hedge_slots} for hedges, but the ring "
                f"has {ring.slots}: raise the memory budget or fetch less far ahead"
            )
        self._reader, self._ring, self._items, self._hedge_slots = reader, ring, items, hedge_slots
        self.schedule, self.recorder, self.stats = schedule, recorder, PrefetchStatistics()
        self._outcomes: dict[int, int | Exception] = {}
        self._arrivals: dict[int, asyncio.Event] = {}
        self._wait_begun_seconds: dict[int, float] = {}
        self._failed_ahead: dict[int, Item[Ref]] = {}
        self._retry_items: deque[Item[Ref]] = deque()
        self._changed = asyncio.Event()
        self._end_error: Exception | None = None
        self._items_error: Exception | None = None
        self._last_wanted = -1
        self._admitted = self._step = self._consumed = 0
        self._first_step: int | None = None
        self._first_missing = 0
        self._has_bytes = False
        self._are_split = True
        self._start_items = START_ITEMS if look_ahead is None else look_ahead.start_items
        self._max_start_items = MAX_START_ITEMS if look_ahead is None else look_ahead.max_start_items
        self._tail_items = 0 if look_ahead is None else look_ahead.tail_items
        self._look_ahead, self._last_step, self._step_items, self._most_step_items = look_ahead, -1, 0, 0

    async def run(self) -> None:
        """Fetch until the items are exhausted and every fetch has ended.

        A failed item does not end the run. If it failed with a transient error while the consumer did not wait for it,
        it is fetched again when the consumer goes on; otherwise its error is raised to the consumer at that item.
        Cancellation cancels every fetch, waits for the transports to end and frees all slots but the READY ones, which
        the consumer (or :meth:`release_all`) releases. A waiting consumer gets an error.

        Raises:
            Exception: the error that ``items`` raised; the consumer gets it too, at the first missing item.
        """
        if self._look_ahead is not None:
            self._look_ahead.link.on_request = self._record_bytes
        try:
            async with task_group() as fetches:
                await self._issue_all(fetches)
        except BaseException:
            self._end(StokerError("the prefetcher was stopped"))
            raise
        if self._items_error is not None:
            self._end(self._items_error)
            raise self._items_error
        self._end(StokerError(f"the order has only {self.stats.issued} items"))

    async def wait(self, index: int) -> int:
        """Wait for an item and return its READY slot; the item and all before it are issued at once.

        Raises:
            StoreError: the item could not be fetched.
            StokerError: the item will not be fetched, because the run has ended.
        """
        if (slot := self.ready(index)) is not None:
            return slot
        self.stats.waits += 1
        self._last_wanted = max(self._last_wanted, index)
        self._ring.demand(index)
        self._wait_begun_seconds[index] = asyncio.get_running_loop().time()
        self._retry_failed()
        try:
            while slot is None:
                if self._end_error is not None:
                    raise self._end_error
                await self._arrivals.setdefault(index, asyncio.Event()).wait()
                slot = self.ready(index)
        finally:
            self._wait_begun_seconds.pop(index, None)
        return slot

    def ready(self, index: int) -> int | None:
        """Return the slot of an item if it is READY, else None; from any thread, without waiting.

        Raises:
            StoreError: the item could not be fetched, and will not be fetched again.
        """
        outcome = self._outcomes.get(index)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def release(self, index: int) -> None:
        """Free an item's slot, or discard the error of a failed item.

        Raises:
            RingStateError: the item was released already, or was never ready.
        """
        outcome = self._outcomes.pop(index, None)
        if outcome is None:
            raise RingStateError(f"item {index} holds no slot: it was released already, or was never ready")
        if isinstance(outcome, int):
            self._ring.release(outcome)
        if self.recorder is not None:
            self.recorder.remove_fetch(index)
        self.stats.released += 1
        self._changed.set()

    def release_all(self) -> None:
        """Release every ready item, used or not, after the run, for a consumer that ends early.

        A waiting consumer gets an error.
        """
        for index in list(self._outcomes):
            self.release(index)
        if self._end_error is None:  # run() was never called
            self._end(StokerError("the prefetcher was stopped"))

    def advance(self, step: int, consumed: int) -> None:
        """Record that the consumer is at ``step`` and has begun to use ``consumed`` items."""
        self._step = step
        self._consumed = consumed
        self._retry_failed()

    def _retry_failed(self) -> None:
        """Queue the items that failed ahead of the consumer to be fetched again, in order."""
        self._retry_items.extend(self._failed_ahead[index] for index in sorted(self._failed_ahead))
        self._failed_ahead.clear()
        self._changed.set()

    @property
    def _claims(self) -> int:
        """Number of items to be fetched again."""
        return len(self._failed_ahead) + len(self._retry_items)

    @property
    def _claimed_slots(self) -> int:
        """Number of free slots that are reserved for items to be fetched again."""
        if not self._claims:
            return 0
        items = [*self._failed_ahead.values(), *self._retry_items]
        return sum(self._reader.count_slots(item.ref) for item in items)

    @property
    def _in_flight(self) -> int:
        stats = self.stats
        return stats.issued - stats.fetched - stats.failed - self._claims

    def _next_item(self) -> Item[Ref] | None:
        try:
            return self._items()
        except Exception as error:  # noqa: BLE001 - raised again once the items before it have been fetched
            self._items_error = error
            return None

    async def _issue_all(self, fetches: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        item, idle_seconds = self._next_item(), 0.0
        while item is not None or self._in_flight or self._claims:
            if self._retry_items and self._fits(self._retry_items[0]):
                await self._issue(fetches, self._retry_items.popleft(), 0.0)
            elif item is not None and self._may_issue(item):
                self.stats.issued += 1
                self._count_step_items(item)
                await self._issue(fetches, item, idle_seconds)
                item, idle_seconds = self._next_item(), 0.0
            else:
                is_idle = not self._in_flight
                self._changed.clear()
                begun_seconds = loop.time()
                with self._growing():
                    await self._changed.wait()
                idle_seconds += is_idle * (loop.time() - begun_seconds)

    async def _issue(self, fetches: asyncio.TaskGroup, item: Item[Ref], idle_seconds: float) -> None:
        fetches.create_task(self._fetch_item(item, idle_seconds))
        # The loop starts tasks in the order of creation: after one turn, the item's own task holds its slot, so a task
        # that is cancelled before it starts has nothing to free. A hedge may run first.
        self._ring.reserved = self._reader.count_slots(item.ref)
        try:
            await asyncio.sleep(0)
        finally:
            self._ring.reserved = 0
            self._ring.on_free()

    def _may_issue(self, item: Item[Ref]) -> bool:
        """Return whether to issue the next item. If the consumer waits for it, it may even take a slot for hedges."""
        if self._first_step is None:
            self._first_step = item.step
        waited_for = item.index <= self._last_wanted
        if item.step != self._first_step and not waited_for and (self._is_start_limited() or self._is_far_ahead()):
            return False
        free = self._ring.free - self._claimed_slots - (0 if waited_for else self._hedge_slots)
        if free < self._reader.count_slots(item.ref) or not self._fits(item):
            return False
        if self._admitted == 0:
            progress = Progress(self.stats.issued, self._consumed, item.step, self._step)
            self._admitted = self.schedule.admit(progress)
        if self._admitted > 0:
            self._admitted -= 1
            return True
        self.stats.misses += waited_for
        return waited_for

    def _fits(self, item: Item[Ref]) -> bool:
        """Return whether an item fits in adjacent free slots; if the consumer waits for it, make them adjacent."""
        count = self._reader.count_slots(item.ref)
        if self._ring.has_run(count) or not any(index >= item.index for index in self._wait_begun_seconds):
            return self._ring.has_run(count)
        self._ring.compact()
        return self._ring.has_run(count)

    def _is_start_limited(self) -> bool:
        """Return whether one more fetch would delay the items that are needed first, at the start of a run."""
        is_starting = self._start_items < self._max_start_items
        if self._first_missing > self._tail_items:
            return not self._has_bytes or self._in_flight > self._first_missing
        return is_starting and self._in_flight >= self._start_items

    def _record_bytes(self) -> None:
        """Record that a request has brought bytes: one item behind those of the first step may be requested."""
        if not self._has_bytes:
            self._has_bytes = True
            self._changed.set()

    def _count_step_items(self, item: Item[Ref]) -> None:
        """Count an item that is being issued among those that its step is the first to use."""
        if item.step == self._first_step:
            self._first_missing += 1
            return
        self._step_items = self._step_items + 1 if item.step == self._last_step else 1
        self._last_step, self._most_step_items = item.step, max(self._most_step_items, self._step_items)

    @contextmanager
    def _growing(self) -> Iterator[None]:
        """During the block, report a change when the look-ahead allows one more item, if that is what is waited for."""
        if self._look_ahead is None or not self._ring.free or not self._is_far_ahead():
            yield
            return
        timer = asyncio.get_running_loop().call_later(self._look_ahead.seconds_to_growth(), self._changed.set)
        try:
            yield
        finally:
            timer.cancel()

    def _is_far_ahead(self) -> bool:
        """Return whether the look-ahead has all the items that it allows, in addition to those of one whole step."""
        if self._look_ahead is None:
            return False
        return self.stats.issued - self._consumed >= self._look_ahead.limit() + self._most_step_items

    def _is_urgent(self, item: Item[Ref]) -> bool:
        """Return whether an item that is being issued goes before others, and is read in parallel ranges."""
        if item.index <= self._last_wanted or item.step == self._first_step or item.index < _SPLIT_ITEMS:
            return True
        is_close = self.stats.fetched - self._consumed < MIN_ITEMS + self._most_step_items
        if not is_close or self._look_ahead is None or not self._look_ahead.gains_from_ranges(item.index):
            self._are_split = False  # from now on: later items must not overtake this one
        return self._are_split

    async def _fetch_item(self, item: Item[Ref], idle_seconds: float) -> None:
        urgent = self._is_urgent(item)
        begun_seconds = asyncio.get_running_loop().time()
        outcome: int | Exception
        try:
            with (
                nullcontext()
                if self.recorder is None
                else self.recorder.track(item.index, item.step, idle_seconds) as fetch
            ):
                outcome = await self._reader.fetch(item.ref, urgent=urgent)
                if fetch is not None:
                    fetch.slot = outcome
            if self._look_ahead is not None:
                self._look_ahead.record_arrival(self._in_flight)
            self.stats.fetched += 1
        except Exception as error:  # noqa: BLE001 - a task boundary: raised again to the consumer, at this item
            if _is_transient(error) and not self._was_waited_for(item, begun_seconds):
                self._failed_ahead[item.index] = item
                if item.index in self._wait_begun_seconds:
                    self._retry_failed()
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
        """Return whether the consumer has waited during most of a fetch of an item that ends now."""
        wait_begun_seconds = self._wait_begun_seconds.get(item.index)
        if wait_begun_seconds is None:
            return False
        now_seconds = asyncio.get_running_loop().time()
        return now_seconds - wait_begun_seconds >= _MIN_WAITED_FRACTION * (now_seconds - begun_seconds)

    def _end(self, reason: Exception) -> None:
        self._end_error = reason
        for arrival in self._arrivals.values():
            arrival.set()
        self._arrivals.clear()


def _is_transient(error: Exception) -> bool:
    """Return whether the cause of a failed fetch may pass, such as an outage, unlike a missing or corrupt object."""
    may_pass = isinstance(error, FetchError | TransientError | CredentialsError)
    return may_pass and not isinstance(error, ObjectDamagedError | ChecksumError)
