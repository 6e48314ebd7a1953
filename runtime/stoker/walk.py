"""A walk: one uninterrupted stretch of a rank's order, fetched ahead on one thread and gathered on another.

The event-loop thread pulls items, and with them plans steps; the consuming thread takes the steps, waits for what they
need, gathers, and gives back what is done with. A lock guards the plan between the two; ready items are looked up
without one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stoker.errors import FormatError, StokerError
from stoker.fetch import Fetcher
from stoker.gather import Columns, GatherRows, Picked, concatenate, gather
from stoker.loop_thread import LoopThread
from stoker.manifest import Manifest
from stoker.prefetch import Item, Prefetcher
from stoker.ring import Ring
from stoker.schedule import Schedule
from stoker.schema import Column
from stoker.steps import PlannedStep, Segment, Steps
from stoker.supersample import Head
from stoker.tier import ObjectRef

__all__ = ["Gathered", "Walk", "WalkParts", "WalkStatistics"]


@dataclass(slots=True, kw_only=True)
class WalkStatistics:
    """Counts of what a consumer asked for and waited for, over any number of walks.

    Attributes:
        look_ups: super-samples that a batch asked for when it first needed them.
        misses: of these, those that were not in the ring yet.
        wait_seconds: time that the consumer waited for super-samples.
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

    step: PlannedStep
    columns: Columns
    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkParts:
    """What a walk works with.

    Attributes:
        manifest: what the steps' super-samples are.
        columns: which to gather.
        rows: how rows are copied out of the ring.
        steps: the order; only this walk advances it.
        ring: all of its slots are this walk's.
        fetcher: fills them.
        schedule: how far ahead.
        hedge_slots: of the ring, kept for hedges.
        thread: the event loop's.
        statistics: counted into.
    """

    manifest: Manifest
    columns: dict[str, Column]
    rows: GatherRows
    steps: Steps
    ring: Ring
    fetcher: Fetcher
    schedule: Schedule
    hedge_slots: int
    thread: LoopThread
    statistics: WalkStatistics


@dataclass(slots=True)
class _Batch:
    """A batch in the making: segments whose slots are known, and what was gathered before them."""

    columns: list[Columns] = field(default_factory=list)
    super_samples: list[NDArray[np.int64]] = field(default_factory=list)
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    segments: list[tuple[Segment, list[int]]] = field(default_factory=list)


class Walk:
    """Fetches from the moment it is made, until :meth:`close`."""

    def __init__(self, parts: WalkParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._planned: deque[PlannedStep] = deque()
        self._items: deque[Item[ObjectRef]] = deque()
        self._heads: dict[int, Head] = {}
        self._used = 0
        self._prefetcher = Prefetcher(
            parts.fetcher, parts.ring, parts.schedule, self._next_item, hedge_slots=parts.hedge_slots
        )
        self._running = parts.thread.run(self._started())

    def next(self) -> Gathered | None:
        """Return the samples of the next step, or None where the run ends.

        Raises:
            StokerError: a super-sample could not be had.
        """
        with self._lock:
            step = self._planned.popleft() if self._planned else self._plan()
        if step is None:
            return None
        self._used += len(step.first_uses)
        self._parts.statistics.look_ups += len(step.first_uses)
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
        """Return whether :meth:`next` would not wait."""
        with self._lock:
            step = self._planned[0] if self._planned else self._plan()
            if step is None:
                return True
            if not self._planned:
                self._planned.append(step)
        try:
            return all(self._prefetcher.ready(item) is not None for part in step.segments for item in part.items)
        except StokerError:
            return True

    def close(self) -> None:
        """End the fetching, wait until nothing writes to the ring, and free all its slots."""
        self._parts.thread.run(self._ended())

    async def _started(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._prefetcher.run(), name="stoker prefetcher")

    async def _ended(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)  # an error of its own reached the consumer
        self._prefetcher.release_all()

    def _next_item(self) -> Item[ObjectRef] | None:
        """Return the next item in order of first use, planning steps until there is one."""
        with self._lock:
            while not self._items:
                step = self._plan()
                if step is None:
                    return None
                self._planned.append(step)
            return self._items.popleft()

    def _plan(self) -> PlannedStep | None:
        step = self._parts.steps.next()
        if step is not None:
            for index, row in step.first_uses:
                self._items.append(Item(index=index, ref=self._parts.manifest.ref(row), step=step.number))
        return step

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
            return self._parts.thread.run(self._prefetcher.wait(item))
        finally:
            self._parts.statistics.misses += 1
            self._parts.statistics.wait_seconds += time.perf_counter() - started

    def _flush(self, batch: _Batch) -> None:
        """Gather the segments that wait in a batch, in one go, and release the items that are done with."""
        if not batch.segments:
            return
        heads: list[Head] = []
        bases: list[int] = []
        which: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for segment, slots in batch.segments:
            picked, picked_rows = segment.picks()
            which.append(picked + len(heads))
            rows.append(picked_rows)
            batch.super_samples.append(segment.super_samples[picked])
            for item, row, slot in zip(segment.items, segment.super_samples.tolist(), slots, strict=True):
                heads.append(self._head(item, row, slot))
                bases.append(self._parts.ring.offset(slot))
        batch.rows.extend(rows)
        everything = Picked(heads, np.array(bases), np.concatenate(which), np.concatenate(rows))
        batch.columns.append(gather(self._parts.ring.memory, everything, self._parts.columns, self._parts.rows))
        done = [item for segment, _ in batch.segments for item in segment.done]
        batch.segments.clear()
        self._give_back(done)

    def _give_back(self, items: Sequence[int]) -> None:
        for item in items:
            self._heads.pop(item, None)
            self._parts.thread.call_soon(self._prefetcher.release, item)

    def _head(self, item: int, row: int, slot: int) -> Head:
        """Return the head of an item's super-sample, checked against the manifest."""
        head = self._heads.get(item)
        if head is None:
            manifest = self._parts.manifest
            size_bytes = int(manifest.rows.size_bytes[row])
            try:
                head = Head.parse(self._parts.ring.view(slot, size_bytes), size_bytes)
            except FormatError as error:
                raise FormatError(f"{manifest.key(row)}: {error}; pack the data set again") from error
            if head.schema != manifest.schema or head.samples != manifest.rows.samples[row]:
                raise FormatError(f"{manifest.key(row)} does not have the schema or the samples the manifest says")
            self._heads[item] = head
        return head
