"""The batch pipeline of one rank: batches in order, from a bucket, through the ring.

The interface for the training loop is synchronous; fetching runs on a background event-loop thread. The consumer looks
up ready items, gathers rows from their slots and releases the items. A :class:`BatchPipeline` holds the lasting state
(store, manifest, memory, statistics), a stream the state of one uninterrupted range of the order.
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
"""Part of the ring whose pages are touched at the start, since the first batches wait for it. Touching more would slow
down fetching on machines with few cores."""


class _Process:
    """Memory and counters that the data sets share which one process opens in turn."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fetched = FetchCounters()
        self._memory: memoryview | None = None

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory for a ring; each call returns the same memory, so the previous ring must be out of use."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = anonymous_memory(size_bytes)
        return self._memory[:size_bytes]


class OpenDataSet:
    """A data set that one process reads in one order; nothing is allocated or connected before the first fetch.

    Args:
        origin: data set to read.
        config: settings of the pipeline.
        copy_rows: copies rows out of the ring.
        nearer: tiers to read super-samples from first; not used if samples are read in groups.
        process: memory and counters, which data sets use in turn.

    Raises:
        BudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        columns: name → column, of the delivered columns.
        slots: division of the memory.
        tiers: caches that evict by the known order.
        ring: buffer of fetched items.
        fetcher: reads bytes.
        reading: reads items into the ring.
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
        """Return the division of the memory; ``full`` is read in groups if the data set does not fit."""
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
        """Touches the pages that the ring fills first."""
        return FirstTouch(self.ring.memory[:_TOUCHED_BYTES])

    def forecast(self) -> Forecast:
        """Return the expected requests and bytes of an epoch of this rank."""
        return self.reading.forecast(self.config.order, self.partition)

    async def follow(self, stretch: Stretch) -> Callable[[int, int, int], None]:
        """Let caches evict by the order of a range; return the function to call for every item that is requested."""
        manifest = self.origin.manifest
        return await follow(self.tiers, manifest, stretch, self.config.other_dealings(manifest.samples))


class BatchPipeline:
    """Batches of one rank, as numpy arrays.

    One thread at a time may consume; any thread may call :meth:`stop`. After a fork, the child has its own memory,
    connections and thread, and continues at the parent's position.

    Args:
        store: store of the data set.
        manifest: pinned version of its index.
        config: settings of the pipeline.
        thread: thread that fetches; the store must be used on it only.
        copy_rows: copies rows out of the ring.
        recorder: records fetches and waits; None for no record.
        nearer: tiers to read super-samples from first; not used if samples are read in groups.

    Raises:
        BudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        opened: data set that the current epoch is read from.
        counters: counters of delivered batches and waits.
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

    # Opening data sets.

    def _open_first(self) -> OpenDataSet:
        """Return the data set to plan with until the first epoch starts."""
        return self._open(Origin(self.store, self.manifest), self.config, self._nearer)

    def _open_here(self) -> OpenDataSet:
        """Return the data set for the epoch of the current position: the same for all epochs, until a fork."""
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
        """Whether the current epoch is materialized, and read from its own objects."""
        return self.opened.origin.layout is not None

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch and position of the next batch of the current stream; None without a stream."""
        stream = self._stream
        return self._place if stream is not None and not stream.is_closed and self._is_of_this_process else None

    # Starting and ending streams.

    def start(
        self, epoch: int, position: int = 0, *, partition: Dealing | None = None, end_epoch: int | None = None
    ) -> None:
        """End the current stream, if any, and start to fetch from a position of an epoch.

        Args:
            epoch: first epoch.
            position: position in that epoch, in the partition's numbering.
            partition: sharding of the first epoch; None for that of all epochs.
            end_epoch: epoch before which to stop reading ahead; None for the config's.

        Raises:
            BudgetError: the epoch cannot be read within the budget, of memory or of dollars.
            StokerError: a preparatory read failed.
        """
        self._end_stream()
        self._place, self._is_stopped = (epoch, position), False
        self._dealing = self.partition if partition is None else partition
        self._end_epoch = self.config.end_epoch if end_epoch is None else end_epoch
        self._begin()

    def _begin(self) -> None:
        """Fetch from the current position on, unless the run ends there."""
        self._end_stream()
        if not self._is_over:
            self._read(self._open_here())

    @property
    def _is_over(self) -> bool:
        return self._end_epoch is not None and self._place[0] >= self._end_epoch

    def _read(self, opened: OpenDataSet) -> None:
        """Fetch from the current position on, from the data set opened for its epoch."""
        self._check_started()
        self.opened = opened
        started = time.perf_counter()
        self._thread.run(opened.reading.prepare())
        ended = time.perf_counter()
        self.counters.wait_seconds += ended - started
        if self._recorder is not None:
            self._recorder.waited(Phase.START, started, ended)
        stream = self._stream = self._create_stream(opened)
        if self._is_stopped:  # checked after the assignment: either stop() saw the stream, or its flag is seen here
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
        """The epoch before which the stream ends; None for no end."""
        return self._end_epoch

    def _check_started(self) -> None:
        """Check that the pipeline was not stopped.

        Raises:
            StokerError: it was.
        """
        if self._is_stopped:
            raise StokerError("the batch pipeline was stopped: its loader was closed, or started a new iteration")

    def next(self) -> Batch | None:
        """Return the next batch, or None at the end of the run.

        Epochs follow one another: after a batch with ``is_last`` comes the first batch of the next epoch. After an
        error, the next call tries the same batch again.

        Raises:
            StokerError: a super-sample of the batch could not be read; names it. Or the pipeline was stopped.
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
        """End the current stream, if any, and stop fetching until :meth:`start`. Idempotent.

        May be called from any thread; a thread that is in :meth:`next`, or calls it later, gets a StokerError.
        """
        self._is_stopped = True
        self._end_stream()

    def _end_stream(self) -> None:
        stream = self._stream
        if stream is not None and self._is_of_this_process:
            stream.close()
        self._stream = None  # only now, so that the next start or stop repeats an interrupted close

    def caches(self) -> dict[str, CacheStatistics]:
        """Return the statistics of each cache, by name."""
        return {tier.name: tier.statistics() for tier in self._tiers}
