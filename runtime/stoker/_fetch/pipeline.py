"""The batch pipeline of one rank: batches in order, from a bucket, through the ring.

The front that training talks to is synchronous; fetching runs on a background event-loop thread. Between the two there
is little: the consumer looks up ready items, gathers rows from their slots and says which items it is done with. A
:class:`BatchPipeline` holds what lasts (store, manifest, memory, statistics), a stream what belongs to one
uninterrupted stretch of the order.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._base.threads import LoopThread
from stoker._cache.keeper import CacheStatistics, KeepingTier, Nearer
from stoker._cache.tiers import follow
from stoker._fetch.batch_stream import Batch, BatchStream, Origin, Reading, StepQueue, StreamCounters
from stoker._fetch.config import FetchCounters, PipelineConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import GatherRows, gather_rows
from stoker._fetch.groups import GroupReading, HeadMemory
from stoker._fetch.prefetcher import Prefetcher
from stoker._fetch.range_plan import Forecast, ReadLimits
from stoker._fetch.super_samples import SuperSampleReading
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, most_sample_bytes, plan_group_slots, plan_slots
from stoker._memory.ring import FirstTouch, Ring, anonymous_memory
from stoker._order.sharding import Dealing
from stoker._order.steps import Stretch
from stoker.abc import Readable
from stoker.errors import BudgetError, StokerError

_TOUCHED_BYTES = 128 << 20
"""Of the ring, taken at the start: what the first batches wait for. Taking more would slow the fetching down that it is
to help, where there are few cores."""


class _Process:
    """What the data sets that one process opens one after the other have in common: memory and counts."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fetched = FetchCounters()
        self._memory: memoryview | None = None

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory for a ring; it is the same for each ring, so the one before must not be used any more."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = anonymous_memory(size_bytes)
        return self._memory[:size_bytes]


class OpenDataSet:
    """A data set as one process reads it in one order; nothing is allocated or connected before the first fetch.

    Args:
        origin: the data set.
        config: what to deliver and how.
        copy_rows: how rows are copied out of the ring.
        nearer: where super-samples are looked for first; not where samples are read in groups.
        process: lends memory and counts, to one after the other.

    Raises:
        BudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        columns: that are delivered.
        slots: how the memory is spent.
        tiers: that keep by the order.
        ring: what is fetched lies here.
        fetcher: gets bytes.
        reading: how samples come into the ring.
    """

    def __init__(
        self, origin: Origin, config: PipelineConfig, copy_rows: GatherRows, nearer: Nearer, process: _Process
    ) -> None:
        manifest = origin.manifest
        self.origin, self.config, self.process = origin, config, process
        self.partition = config.dealing(manifest.samples)
        self.columns = manifest.schema.chosen(config.columns)
        self.slots: SlotPlan = self._planned_slots()
        nearer = Nearer() if self.slots.holds_groups else nearer
        self.tiers = nearer.tiers
        self.ring = Ring(self.slots.slots, self.slots.slot_bytes, allocate=process.allocate)
        self.fetcher = Fetcher(
            origin.store,
            config=config.fetch,
            small_hedge_bytes=self.slots.hedge_buffer_bytes,
            ring=self.ring,
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            tiers=(*self.tiers, *(() if nearer.warm is None else (nearer.warm,))),
            is_start=True,
            counters=process.fetched,
        )
        parts = manifest, self.columns, self.fetcher, self.ring
        self.reading: Reading = (
            GroupReading(*parts, ReadLimits.of(self.slots), copy_rows)
            if self.slots.holds_groups
            else SuperSampleReading(*parts, copy_rows)
        )

    def _planned_slots(self) -> SlotPlan:
        """Return how the memory is spent; ``full`` is read in groups where not everything fits."""
        manifest, config = self.origin.manifest, self.config
        manifest_bytes, sharers = manifest.file_bytes + config.held_bytes, config.workers or 1
        try:
            return plan_slots(manifest, manifest_bytes, config.order, self.partition, config.memory_bytes, sharers)
        except BudgetError:
            if config.order.shuffle != "full":
                raise
        return plan_group_slots(
            manifest_bytes=manifest_bytes,
            head_bytes=HeadMemory.size_bytes(manifest, self.columns),
            sample_bytes=most_sample_bytes(manifest, self.columns),
            hedge_buffers=config.fetch.hedge_burst,
            memory_bytes=config.memory_bytes,
            sharers=sharers,
        )

    @cached_property
    def first_touch(self) -> FirstTouch:
        """What takes the pages that the ring fills first."""
        return FirstTouch(self.ring.memory[:_TOUCHED_BYTES])

    def forecast(self) -> Forecast:
        """Return what an epoch of this rank will take."""
        return self.reading.forecast(self.config.order, self.partition)

    async def follow(self, stretch: Stretch) -> Callable[[int, int, int], None]:
        """Have tiers keep what a stretch needs; return what is to be told of every item that is taken."""
        manifest = self.origin.manifest
        return await follow(self.tiers, manifest, stretch, self.config.other_dealings(manifest.samples))


class BatchPipeline:
    """Batches of one rank, as numpy arrays.

    One thread at a time consumes; any may call :meth:`stop`. After a fork the child has its own memory, connections and
    thread, and goes on where the parent was.

    Args:
        store: where the data set is.
        manifest: the pinned version of its index.
        config: what to deliver and how.
        thread: runs the fetching; the store must only be used on it.
        copy_rows: how rows are copied out of the ring.
        recorder: follows fetches, and is told of waits.
        nearer: where super-samples are looked for first; not where samples are read in groups.

    Raises:
        BudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        opened: what the epoch under way is read from.
        counters: of what the consumer was given and waited for.
    """

    def __init__(
        self,
        store: Readable,
        manifest: Manifest,
        config: PipelineConfig,
        thread: LoopThread,
        *,
        copy_rows: GatherRows = gather_rows,
        recorder: Recorder | None = None,
        nearer: Nearer | None = None,
    ) -> None:
        self.store, self.manifest, self.config = store, manifest, config
        self._thread, self._copy_rows, self._recorder = thread, copy_rows, recorder
        self._nearer = Nearer() if nearer is None else nearer
        self.counters, self._process = StreamCounters(), _Process()
        self._tiers: Sequence[KeepingTier] = ()
        self._stream: BatchStream | None = None
        self._place, self._end_epoch = (0, 0), config.end_epoch
        self._is_stopped = False
        self.opened = self._open_first()
        self.partition = self._dealing = self.opened.partition

    # What is read, and how.

    def _open_first(self) -> OpenDataSet:
        """Return what epochs will be like, until the first one is begun."""
        return self._open(Origin(self.store, self.manifest), self.config, self._nearer)

    def _open_here(self) -> OpenDataSet:
        """Return what the epoch of the place is read from: the same for all epochs, until a fork."""
        return self.opened if self._is_of_this_process else self._open_first()

    def _open(self, origin: Origin, config: PipelineConfig, nearer: Nearer) -> OpenDataSet:
        if self._process.pid != os.getpid():
            self._process = _Process()
        opened = OpenDataSet(origin, config, self._copy_rows, nearer, self._process)
        self._tiers = opened.tiers or self._tiers
        return opened

    @property
    def _is_of_this_process(self) -> bool:
        return self.opened.process.pid == os.getpid()

    @property
    def is_materialized(self) -> bool:
        """Whether the epoch under way is read from objects of its own."""
        return self.opened.origin.layout is not None

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch and position that the stream under way would deliver next, None if there is none."""
        stream = self._stream
        return self._place if stream is not None and not stream.is_closed and self._is_of_this_process else None

    # From stream to stream.

    def start(
        self, epoch: int, position: int = 0, *, partition: Dealing | None = None, end_epoch: int | None = None
    ) -> None:
        """Go to a position of an epoch; fetching begins. A stream that is under way is ended.

        Args:
            epoch: the first.
            position: in it, as the partition counts.
            partition: how the first epoch is dealt, if not as all are.
            end_epoch: do not look ahead into this epoch or beyond; default the config's.

        Raises:
            BudgetError: the epoch cannot be read within the budget, of memory or of dollars.
            StokerError: what must be read before anything else could not be had.
        """
        self._end_stream()
        self._place, self._is_stopped = (epoch, position), False
        self._dealing = self.partition if partition is None else partition
        self._end_epoch = self.config.end_epoch if end_epoch is None else end_epoch
        self._begin()

    def _begin(self) -> None:
        """Fetch from the place on, unless the run is over there."""
        self._end_stream()
        if not self._is_over:
            self._read(self._open_here())

    @property
    def _is_over(self) -> bool:
        return self._end_epoch is not None and self._place[0] >= self._end_epoch

    def _read(self, opened: OpenDataSet) -> None:
        """Fetch from the place on, from what was opened for its epoch."""
        self._check_started()
        self.opened = opened
        started = time.perf_counter()
        self._thread.run(opened.reading.prepare())
        ended = time.perf_counter()
        self.counters.wait_seconds += ended - started
        if self._recorder is not None:
            self._recorder.waited(Phase.START, started, ended)
        stream = self._stream = self._create_stream(opened)
        if self._is_stopped:  # looked at behind the assignment: a stop has seen the stream, or is seen here
            self._stream = None
        self._check_started()
        stream.start()

    def _create_stream(self, opened: OpenDataSet) -> BatchStream:
        epoch, position = self._place
        stretch = Stretch(
            order=opened.config.order,
            partition=self._dealing,
            epoch=epoch,
            position=position,
            end_epoch=self._end_of_stream,
        )
        taken = self._thread.run(opened.follow(stretch)) if opened.tiers else None
        queue: StepQueue[Any] = StepQueue(opened.reading.steps(stretch), taken)
        prefetcher = Prefetcher(
            opened.reading,
            opened.ring,
            self.config.schedule,
            queue.next_item,
            hedge_slots=opened.slots.hedge_slots,
            recorder=self._recorder,
        )
        return BatchStream(queue, prefetcher, opened.reading, opened.first_touch, self._thread, self.counters)

    @property
    def _end_of_stream(self) -> int | None:
        """The epoch that the stream under way ends before."""
        return self._end_epoch

    def _check_started(self) -> None:
        """Check that nobody has stopped the pipeline.

        Raises:
            StokerError: somebody has.
        """
        if self._is_stopped:
            raise StokerError("the batch pipeline was stopped: its loader was closed, or iterates anew")

    def next(self) -> Batch | None:
        """Return the next batch, or None where the run ends.

        Epochs follow one another: the batch behind one that ``is_last`` is the first of the next epoch. Behind an error
        it goes on at the batch that could not be had.

        Raises:
            StokerError: a super-sample that the batch needs could not be had; names it. Or the pipeline was stopped.
        """
        self._check_started()
        if self.place is None:
            self._begin()
        stream = self._stream
        if stream is None:
            self._check_started()
            return None
        try:
            batch = stream.next(self.opened.origin)
        except BaseException:
            self._end_stream()
            self._check_started()
            raise
        if batch is None:
            self._end_stream()
            return None
        self.opened.fetcher.end_start()
        self._place = (batch.epoch + 1, 0) if batch.is_last else (batch.epoch, batch.end)
        if batch.is_last:
            self._dealing = self._dealing.from_start()
        self.counters.repeated += batch.repeated
        return batch

    def is_ready(self) -> bool:
        """Return whether :meth:`next` would neither wait for the bucket nor fail."""
        stream = self._stream
        return self.place is not None and stream is not None and stream.is_ready()

    def stop(self) -> None:
        """End the stream that is under way, if any: nothing is fetched any more until :meth:`start`. Idempotent.

        From any thread: one that is in :meth:`next` gets a StokerError, as does one that calls it afterwards.
        """
        self._is_stopped = True
        self._end_stream()

    def _end_stream(self) -> None:
        stream = self._stream
        if stream is not None and self._is_of_this_process:
            stream.close()
        self._stream = None  # only now: a close that was interrupted is repeated by the next start or stop

    def caches(self) -> dict[str, CacheStatistics]:
        """Return what tiers that keep have done, by name."""
        return {tier.name: tier.statistics() for tier in self._tiers}
