"""A walk: one uninterrupted stretch of a rank's order, fetched ahead on one thread and gathered on another.

The event-loop thread pulls items, and with them plans steps; the consuming thread takes the steps, waits for what they
need, gathers, and gives back what is done with. A lock guards the plan between the two; ready items are looked up
without one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._base.recorder import Recorder
from stoker._base.threads import LoopThread
from stoker._fetch.batch_source import Reading
from stoker._fetch.gather import Columns, GatherRows, concatenate, gather
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._fetch.schedule import Schedule
from stoker._fetch.step_queue import StepQueue
from stoker._format.schema import Column
from stoker._memory.ring import FirstTouch, Ring, RingStateError
from stoker._order.steps import PlannedStep, Segment, StepSource
from stoker.errors import StokerError

__all__ = ["Gathered", "Walk", "WalkParts", "WalkStatistics"]

Ref = TypeVar("Ref")


@dataclass(slots=True, kw_only=True)
class WalkStatistics:
    """Counts of what a consumer asked for and waited for, over any number of walks.

    Attributes:
        look_ups: items that a batch asked for when it first needed them: super-samples, or groups of samples.
        misses: of these, those that were not in the ring yet.
        wait_seconds: time that the consumer waited for items, and for what must be read before the first one.
    """

    look_ups: int = 0
    misses: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The samples of one step.

    Attributes:
        step: what was asked for.
        columns: the values; they own their memory.
        super_samples: ``int64 [samples]``, the manifest row each comes from.
        rows: ``int64 [samples]``, the row in it.
    """

    step: PlannedStep[Any]
    columns: Columns
    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkParts(Generic[Ref]):
    """What a walk works with.

    Attributes:
        columns: which to gather.
        rows: how rows are copied out of the ring.
        steps: the order; only this walk advances it.
        ring: all of its slots are this walk's.
        reading: fills them, and knows where in them rows lie.
        schedule: how far ahead.
        hedge_slots: of the ring, kept for hedges.
        first_touch: takes the pages that the ring fills first.
        thread: the event loop's.
        statistics: counted into.
        recorder: follows fetches, and is told of waits.
        taken: is told of every item that is being fetched, with its step's epoch and end.
    """

    columns: dict[str, Column]
    rows: GatherRows
    steps: StepSource[Ref]
    ring: Ring
    reading: Reading[Ref]
    schedule: Schedule
    hedge_slots: int
    first_touch: FirstTouch
    thread: LoopThread
    statistics: WalkStatistics
    recorder: Recorder | None = None
    taken: Callable[[Ref, int, int], object] | None = None


@dataclass(slots=True)
class _Batch:
    """A batch in the making: segments whose slots are known, and what was gathered before them."""

    columns: list[Columns] = field(default_factory=list)
    super_samples: list[NDArray[np.int64]] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    segments: list[tuple[Segment, list[int]]] = field(default_factory=list)


class Walk(Generic[Ref]):
    """Fetches from :meth:`start` until :meth:`close`.

    Made, started and closed apart, so that an interrupt (Ctrl-C) between any two instructions leaves nothing that its
    owner does not know of.
    """

    def __init__(self, parts: WalkParts[Ref]) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._queue = StepQueue(parts.steps, parts.taken)
        self._used = 0
        self._broken: RingStateError | None = None
        self._prefetcher = Prefetcher(
            parts.reading,
            parts.ring,
            parts.schedule,
            self._next_item,
            hedge_slots=parts.hedge_slots,
            recorder=parts.recorder,
        )
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._life: object | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing is fetched: it was not started, or it was closed, or the thread was."""
        return self._is_closed or self._life is None or self._life is not self._parts.thread.life

    def start(self) -> None:
        """Begin to fetch; does not wait."""
        self._life = self._parts.thread.start()
        self._parts.thread.call(self._run(), self._life)

    def next(self) -> Gathered | None:
        """Return the samples of the next step, or None where the run ends.

        Raises:
            StokerError: a super-sample could not be had.
            RingStateError: an item was given back twice; a bug.
        """
        if self._broken is not None:
            raise self._broken
        with self._lock:
            step = self._queue.next_step()
        if step is None:
            return None
        self._used += len(step.first_uses)
        self._parts.statistics.look_ups += len(step.first_uses)
        if step.first_uses or self._parts.schedule.follows_steps:  # waking the other thread costs more than a gather
            self._parts.thread.call_soon(self._prefetcher.reached, step.number, self._used)
        batch = _Batch()
        for segment in step.segments:
            self._give_back(segment.passed)
            batch.segments.append((segment, [self._slot(item, batch) for item in segment.items]))
        self._flush(batch)
        return Gathered(
            step, concatenate(batch.columns), np.concatenate(batch.super_samples), np.concatenate(batch.rows)
        )

    def is_ready(self) -> bool:
        """Return whether :meth:`next` would neither wait nor fail."""
        with self._lock:
            step = self._queue.peek()
        if step is None:
            return True
        try:
            return all(self._prefetcher.ready(item) is not None for part in step.segments for item in part.items)
        except StokerError:
            return False  # whoever comes to it may have it fetched again, and waits for that

    def close(self) -> None:
        """End the fetching, wait until nothing writes to the ring, and free its slots. If interrupted, call again.

        From any thread: one that is in :meth:`next` gets a StokerError.
        """
        self._is_closed = True
        if self._life is not None:
            with suppress(StokerError):  # a thread that is closed ends what runs on it
                self._parts.thread.run(self._end(), self._life)

    async def _run(self) -> None:
        """Fetch until this is cancelled, by :meth:`close` or the end of the thread; then free all slots."""
        if self._is_closed:
            self._prefetcher.release_all()
            return
        self._running = asyncio.current_task()
        if self._parts.recorder is not None:
            self._parts.recorder.align(time.perf_counter() - asyncio.get_running_loop().time())
        tasks = [
            asyncio.create_task(self._prefetcher.run(), name="stoker prefetcher"),
            asyncio.create_task(self._parts.first_touch.run(), name="stoker first touch"),
        ]
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for task in tasks:
                task.cancel()
            while not all(task.done() for task in tasks):
                with suppress(asyncio.CancelledError):  # the thread may end meanwhile, which cancels this again
                    await asyncio.gather(*tasks, return_exceptions=True)  # their errors have reached the consumer
            self._prefetcher.release_all()

    async def _end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _next_item(self) -> Item[Ref] | None:
        with self._lock:
            return self._queue.next_item()

    def _slot(self, item: int, batch: _Batch) -> int:
        """Return the slot of an item, waiting for it if need be.

        Before a wait, what could be gathered is, and what it no longer needs is given back: a ring that has no room for
        all that one batch needs must not be full of what the batch has seen already.
        """
        slot = self._prefetcher.ready(item)
        if slot is not None:
            return slot
        self._flush(batch)
        started = time.perf_counter()
        try:
            return self._parts.thread.run(self._prefetcher.wait(item), self._life)
        finally:
            ended = time.perf_counter()
            self._parts.statistics.misses += 1
            self._parts.statistics.wait_seconds += ended - started
            if self._parts.recorder is not None:
                self._parts.recorder.waited_for(item, started, ended)

    def _flush(self, batch: _Batch) -> None:
        """Gather the segments that wait in a batch, in one go, and release the items that are done with."""
        if not batch.segments:
            return
        slots: list[int] = []
        which: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for segment, found in batch.segments:
            segment_which, segment_rows = segment.picks()
            which.append(segment_which + len(slots))
            rows.append(segment_rows)
            slots.extend(found)
        picked = self._parts.reading.picked(slots, np.concatenate(which), np.concatenate(rows))
        batch.super_samples.append(picked.super_samples)
        batch.rows.append(picked.rows)
        batch.columns.append(gather(picked, self._parts.columns, self._parts.rows))
        done = [item for segment, _ in batch.segments for item in segment.done]
        batch.segments.clear()
        self._give_back(done)

    def _give_back(self, items: Sequence[int]) -> None:
        if items:
            self._parts.thread.call_soon(self._release, items)

    def _release(self, items: Sequence[int]) -> None:
        try:
            for item in items:
                self._prefetcher.release(item)
        except RingStateError as error:  # a bug; nobody would hear of it on this thread
            self._broken = error
