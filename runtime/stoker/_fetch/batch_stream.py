"""A stream of batches over one uninterrupted range of a rank's order, fetched on one thread and gathered on another.

The event-loop thread takes items to fetch, and plans steps as it needs them. The consuming thread takes the steps,
waits for their items, gathers the rows and releases the items. Looking up a ready item takes no lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._base.computed import cached_property
from stoker._base.task_group import end_tasks
from stoker._base.threads import LoopThread
from stoker._fetch.gather import Columns, concatenate, gather
from stoker._fetch.groups import SampleGroupReader
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._fetch.super_samples import SuperSampleReader
from stoker._fetch.units import UnitReader
from stoker._format.manifest import Manifest, sample_starts
from stoker._memory.ring import PagePrefaulter, RingStateError
from stoker._order.epoch_layout import EpochLayout
from stoker._order.steps import PlannedStep, Segment, StepSource, resident_item
from stoker.abc import Readable
from stoker.errors import StokerError

Ref = TypeVar("Ref")

RowReader = SuperSampleReader | SampleGroupReader | UnitReader
"""Reads items into ring slots: super-samples or columns of them; groups of samples from any super-samples; or units.

For the same order, all deliver the same batches.
"""


class StoredDataset:
    """A data set in a store, or a materialized epoch of one; maps rows to sample numbers.

    Args:
        store: store of the super-samples.
        manifest: index of the super-samples.
        layout: layout of the materialized epoch; None for a data set.
    """

    def __init__(self, store: Readable, manifest: Manifest, layout: EpochLayout | None = None) -> None:
        self.store, self.manifest, self.layout = store, manifest, layout

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Number of samples before each super-sample in packed order, ``int64 [super-samples + 1]``."""
        return sample_starts(self.manifest.rows.samples)

    def sample_ids(self, super_samples: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each sample in the packed order, ``int64 [samples]``."""
        places: NDArray[np.int64] = self._starts[super_samples] + rows
        return places if self.layout is None else self.layout.samples_of(places)

    def address(self, super_sample: int) -> str:
        """Return the URL of a super-sample."""
        return f"{self.store.url}/{self.manifest.key(super_sample)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch of this rank; it owns its memory.

    Attributes:
        columns: column name → values.
        epoch: epoch of the batch.
        end: position behind the batch, in the epoch over all ranks, or in a worker's share of it.
        is_last: whether the batch is the last of this rank's epoch.
        super_samples: ``int64 [samples]``, manifest row of each sample's super-sample.
        rows: ``int64 [samples]``, row of each sample in its super-sample.
        repeated: number of samples that all ranks together deliver a second time in this step.
        dataset: data set of the samples.
        resident: ``bool [samples]``, which samples the consumer has itself, and ``columns`` lacks; None if none.
    """

    columns: Columns
    epoch: int
    end: int
    is_last: bool
    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]
    repeated: int
    dataset: StoredDataset
    resident: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def count_resident(self) -> int:
        """Return the number of samples that the consumer has itself."""
        return 0 if self.resident is None else int(np.count_nonzero(self.resident))

    def read_part(self) -> Batch:
        """Return the samples that ``columns`` has."""
        if self.resident is None:
            return self
        read = ~self.resident
        return replace(self, super_samples=self.super_samples[read], rows=self.rows[read], resident=None)

    def sample_ids(self) -> NDArray[np.int64]:
        """Return the number of each sample in the packed order, ``int64 [samples]``."""
        return self.dataset.sample_ids(self.super_samples, self.rows)

    def sample_name(self, place: int) -> str:
        """Return a description of the sample at index ``place`` of the batch, for error messages."""
        sample, row = int(self.sample_ids()[place]), int(self.rows[place])
        return f"sample {sample} (row {row} of {self.dataset.address(int(self.super_samples[place]))})"


@dataclass(slots=True, kw_only=True)
class StreamCounters:
    """Counters of the consumer, over any number of streams.

    Attributes:
        repeated: samples that all ranks together delivered a second time, so that all have a sample in the last batch.
        resident: samples that the consumer had itself.
        lookups: items (super-samples, or groups of samples) that batches looked up on first use.
        misses: look-ups of items that were not in the ring yet.
        wait_seconds: time that the consumer waited for items and for preparatory reads, in seconds.
    """

    repeated: int = 0
    resident: int = 0
    lookups: int = 0
    misses: int = 0
    wait_seconds: float = 0.0


class Residents(Protocol):
    """The samples that the consumer of batches keeps itself, such as on a device."""

    @property
    def is_empty(self) -> bool:
        """Whether it has none yet."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether it has all samples of the data set."""
        ...

    def has(self, super_sample: int) -> bool:
        """Return whether it has, and will keep, all samples of a super-sample. Called by any thread."""
        ...


class StepQueue(Generic[Ref]):
    """Plans steps on demand: the prefetcher takes items, and the consumer takes steps. Thread-safe.

    Args:
        steps: source of the steps; only this queue advances it.
        on_issue: called with every item and its step's epoch and end when the next item is requested: then its fetch
            has begun, and tiers have been asked for it.

    Attributes:
        is_cut: whether the queue ends before its source, since many steps in a row read nothing.
    """

    def __init__(self, steps: StepSource[Ref], on_issue: Callable[[Ref, int, int], object] | None = None) -> None:
        self._steps, self._on_issue = steps, on_issue
        self.is_cut, self._resident_steps = False, 0
        self._planned: deque[PlannedStep[Ref]] = deque()
        self._items: deque[tuple[Item[Ref], PlannedStep[Ref]]] = deque()
        self._current: tuple[Item[Ref], PlannedStep[Ref]] | None = None
        self._lock = threading.Lock()

    def next_item(self) -> Item[Ref] | None:
        """Return the next item in order of first use, None behind the last."""
        with self._lock:
            given, self._current = self._current, None
            if self._on_issue is not None and given is not None:
                item, step = given
                self._on_issue(item.ref, step.epoch, step.end)
            while not self._items:
                if not self._plan():
                    return None
            self._current = self._items.popleft()
            return self._current[0]

    def next_step(self) -> PlannedStep[Ref] | None:
        """Return the next step, None behind the last."""
        with self._lock:
            return self._planned.popleft() if self._planned or self._plan() else None

    def peek(self) -> PlannedStep[Ref] | None:
        """Return the step that :meth:`next_step` would return, without taking it."""
        with self._lock:
            return self._planned[0] if self._planned or self._plan() else None

    def _plan(self) -> bool:
        step = None if self.is_cut else self._steps.next()
        if step is None:
            return False
        reads_nothing = all(item < 0 for segment in step.segments for item in segment.items)
        self._resident_steps = self._resident_steps + 1 if reads_nothing else 0
        self.is_cut = self._resident_steps >= _MAX_RESIDENT_STEPS
        self._planned.append(step)
        self._items.extend((Item(index, ref, step.number), step) for index, ref in step.first_uses)
        return True


_MAX_RESIDENT_STEPS = 1024
"""Steps in a row that read nothing: more are planned by another stream, or planning ahead would not end."""
_RESIDENT = -1
"""In place of the slot of an item that the consumer has."""


class _GatheredPart(NamedTuple):
    """Samples of a batch.

    Attributes:
        columns: column name → values of the samples that are not resident.
        super_samples: ``int64 [samples]``, manifest rows.
        rows: ``int64 [samples]``, rows in the super-samples.
        is_resident: ``bool [samples]``, which ones the consumer has.
    """

    columns: Columns
    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]
    is_resident: NDArray[np.bool_]


class BatchStream:
    """Delivers batches; fetches from :meth:`start` until :meth:`close`.

    Construction, start and close are separate, so that after an interrupt (Ctrl-C) at any instruction the owner can
    still close the stream.

    Args:
        queue: queue of steps and items; only this stream advances it.
        prefetcher: fetches the queue's items; this stream owns all slots of its ring.
        reader: reads items into slots and locates rows in them.
        first_touch: touches the pages that the ring fills first.
        thread: thread of the event loop.
        counters: counters to update.
    """

    def __init__(
        self,
        queue: StepQueue[Any],
        prefetcher: Prefetcher[Any],
        reader: RowReader,
        first_touch: PagePrefaulter,
        thread: LoopThread,
        counters: StreamCounters,
    ) -> None:
        self._queue, self._prefetcher, self._reader = queue, prefetcher, reader
        self._first_touch, self._thread, self._counters = first_touch, thread, counters
        self._consumed_items = 0
        self._ring_error: RingStateError | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._thread_life: object | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the stream does not fetch: it was not started, or it or its thread was closed."""
        return self._is_closed or self._thread_life is None or self._thread_life is not self._thread.generation

    def start(self) -> None:
        """Start fetching, without waiting."""
        self._thread_life = self._thread.start()
        self._thread.call(self._run(), self._thread_life)

    def next(self, dataset: StoredDataset) -> Batch | None:
        """Return the samples of the next step, or None at the end of the run.

        Args:
            dataset: data set of the samples.

        Raises:
            StokerError: a super-sample could not be read.
            RingStateError: an item was released twice; a bug.
        """
        if self._ring_error is not None:
            raise self._ring_error
        step = self._queue.next_step()
        if step is None:
            return None
        self._consumed_items += len(step.first_uses)
        self._counters.lookups += len(step.first_uses)
        if (
            step.first_uses or self._prefetcher.schedule.follows_steps
        ):  # waking the other thread costs more than a gather
            self._thread.call_soon(self._prefetcher.advance, step.number, self._consumed_items)
        parts = list(self._gather_segments(step.segments))
        read = [part.columns for part in parts if part.columns]
        resident = np.concatenate([part.is_resident for part in parts])
        return Batch(
            columns=concatenate(read) if read else {},
            epoch=step.epoch,
            end=step.end,
            is_last=step.is_last,
            super_samples=np.concatenate([part.super_samples for part in parts]),
            rows=np.concatenate([part.rows for part in parts]),
            repeated=step.repeated,
            dataset=dataset,
            resident=resident if resident.any() else None,
        )

    def _gather_segments(self, segments: Iterable[Segment]) -> Iterator[_GatheredPart]:
        """Yield the samples of segments in as few parts as possible, and release the items that are no longer needed.

        Before a wait, all ready segments are gathered and their items released: a ring that is too small for all items
        of a batch must not stay full of items that the batch has used already.
        """
        pending: list[tuple[Segment, list[int]]] = []
        for segment in segments:
            self._schedule_release(segment.released_before)
            slots: list[int] = []
            for item in segment.items:
                slot = _RESIDENT if item < 0 else self._prefetcher.ready(item)
                if slot is None:
                    if pending:
                        yield self._gather(pending)
                        pending = []
                    slot = self._wait_for_slot(item)
                slots.append(slot)
            pending.append((segment, slots))
        yield self._gather(pending)

    def is_ready(self) -> bool:
        """Return whether :meth:`next` would neither wait nor fail."""
        step = self._queue.peek()
        if step is None:
            return True
        try:
            items = (item for part in step.segments for item in part.items)
            return all(item < 0 or self._prefetcher.ready(item) is not None for item in items)
        except StokerError:
            return False  # the next call may fetch the item again, and wait for it

    def close(self) -> None:
        """Stop fetching, wait until nothing writes to the ring, and free its slots. If interrupted, call again.

        May be called from any thread; a thread that is in :meth:`next` gets a StokerError.
        """
        self._is_closed = True
        if self._thread_life is not None:
            with suppress(StokerError):  # a closed thread has ended its tasks
                self._thread.run(self._end(), self._thread_life)

    async def _run(self) -> None:
        """Fetch until cancelled by :meth:`close` or the end of the thread; then free all slots."""
        if self._is_closed:
            self._prefetcher.release_all()
            return
        self._running = asyncio.current_task()
        if self._prefetcher.recorder is not None:
            self._prefetcher.recorder.restart_items(time.perf_counter() - asyncio.get_running_loop().time())
        tasks = [
            asyncio.create_task(self._prefetcher.run(), name="stoker prefetcher"),
            asyncio.create_task(self._first_touch.run(), name="stoker first touch"),
        ]
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with suppress(asyncio.CancelledError):  # the thread may end meanwhile and cancel this again
                await end_tasks(tasks)  # the consumer gets their errors from the prefetcher
            self._prefetcher.release_all()

    async def _end(self) -> None:
        if self._running is not None:
            await end_tasks([self._running])

    def _wait_for_slot(self, item: int) -> int:
        """Wait for an item and return its slot."""
        started = time.perf_counter()
        try:
            return self._thread.run(self._prefetcher.wait(item), self._thread_life)
        finally:
            ended = time.perf_counter()
            self._counters.misses += 1
            self._counters.wait_seconds += ended - started
            if self._prefetcher.recorder is not None:
                self._prefetcher.recorder.add_item_wait(item, started, ended)

    def _gather(self, located: Sequence[tuple[Segment, list[int]]]) -> _GatheredPart:
        """Return the samples of segments, each given with its slots, and release the items that they use last."""
        slots: list[int] = []
        sources: list[NDArray[np.int64]] = []
        rows: list[NDArray[np.int64]] = []
        for segment, segment_slots in located:
            segment_sources, segment_rows = segment.row_indices()
            sources.append(segment_sources + len(slots))
            rows.append(segment_rows)
            slots += segment_slots
        if _RESIDENT in slots:
            items = [item for segment, _ in located for item in segment.items]
            part = self._gather_read(items, slots, np.concatenate(sources), np.concatenate(rows))
        else:
            part = self._gather_all(slots, np.concatenate(sources), np.concatenate(rows))
        self._schedule_release([item for segment, _ in located for item in segment.released_after])
        return part

    def _gather_all(self, slots: Sequence[int], sources: NDArray[np.int64], rows: NDArray[np.int64]) -> _GatheredPart:
        picked = self._reader.locate(slots, sources, rows)
        columns = gather(picked, self._reader.columns, self._reader.arrays)
        return _GatheredPart(columns, picked.super_samples, picked.rows, np.zeros(len(picked.rows), np.bool_))

    def _gather_read(
        self, items: Sequence[int], slots: Sequence[int], sources: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> _GatheredPart:
        """Return samples of which some are resident; ``items``, ``slots``: of the super-samples, by source."""
        is_read = np.array(slots) != _RESIDENT
        super_samples = np.array([resident_item(item) for item in items], np.int64)[sources]
        read_samples = is_read[sources]
        columns: Columns = {}
        if read_samples.any():
            read_slots = [slot for slot in slots if slot != _RESIDENT]
            part = self._gather_all(read_slots, (np.cumsum(is_read) - 1)[sources[read_samples]], rows[read_samples])
            columns, super_samples[read_samples] = part.columns, part.super_samples
        return _GatheredPart(columns, super_samples, rows, ~read_samples)

    def _schedule_release(self, items: Sequence[int]) -> None:
        read_items = [item for item in items if item >= 0]
        if read_items:
            self._thread.call_soon(self._release, read_items)

    def _release(self, items: Sequence[int]) -> None:
        try:
            for item in items:
                self._prefetcher.release(item)
        except RingStateError as error:  # a bug: raise it on the consuming thread
            self._ring_error = error
