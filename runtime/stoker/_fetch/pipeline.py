"""The batch pipeline of one rank: batches in order, from a bucket, through the ring.

The interface for the training loop is synchronous; fetching runs on a background event-loop thread. The consumer looks
up ready items, gathers rows from their slots and releases the items. A :class:`BatchPipeline` holds the lasting state
(store, manifest, memory, statistics), a stream the state of one uninterrupted range of the order.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stoker._base.computed import cached_property
from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._base.sizes import format_bytes
from stoker._base.threads import LoopThread
from stoker._cache.index import CacheTierStatistics, ManagedTier, MappedTier, TierSet
from stoker._cache.tiers import track_positions
from stoker._fetch.batch_stream import (
    Batch,
    BatchStream,
    Residents,
    RowReader,
    StepQueue,
    StoredDataset,
    StreamCounters,
)
from stoker._fetch.config import Continuous, FetchCounters, PipelineConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import NEW_ARRAYS, BatchArrays
from stoker._fetch.groups import HeadMemory, SampleGroupReader
from stoker._fetch.look_ahead import LookAhead
from stoker._fetch.mapped_objects import MappedObjects
from stoker._fetch.prefetcher import Prefetcher
from stoker._fetch.range_plan import ReadForecast, ReadLimits, mean_row_bytes
from stoker._fetch.resident_stream import ResidentStream
from stoker._fetch.super_samples import SuperSampleReader, read_shares
from stoker._fetch.units import UnitReader
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, UnitSizes, max_sample_bytes, plan_group_slots, plan_slots, plan_unit_slots
from stoker._memory.ring import PagePrefaulter, Ring, anonymous_memory
from stoker._memory.unit_ring import UnitRing
from stoker._order.sharding import Sharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker._order.units import Units
from stoker.abc import Readable
from stoker.errors import MemoryBudgetError, StokerError

_log = logging.getLogger("stoker")
_FIRST_TOUCH_BYTES = 128 << 20
"""Part of the ring whose pages are touched at the start, since the first batches wait for it. Touching more would slow
down fetching on machines with few cores."""


class _ProcessResources:
    """Memory and counters that the data sets share which one process opens in turn."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.counters = FetchCounters()
        self._memory: memoryview | None = None

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory for a ring; each call returns the same memory, so the previous ring must be out of use."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = anonymous_memory(size_bytes)
        return self._memory[:size_bytes]


class OpenDataset:
    """A data set that one process reads in one order; nothing is allocated or connected before the first fetch.

    Args:
        dataset: data set to read.
        config: settings of the pipeline.
        arrays: makes the arrays of batches.
        tier_set: tiers to read super-samples from first; groups and units are read from the cluster tier only.
        process: memory and counters, which data sets use in turn.

    Raises:
        MemoryBudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        columns: name → column, of the delivered columns.
        slots: division of the memory.
        tiers: caches that evict by the known order.
        ring: buffer of fetched items.
        fetcher: reads bytes.
        reader: reads items into the ring.
    """

    def __init__(
        self,
        dataset: StoredDataset,
        config: PipelineConfig,
        arrays: BatchArrays,
        tier_set: TierSet,
        process: _ProcessResources,
    ) -> None:
        manifest = dataset.manifest
        self.dataset, self.config, self.process = dataset, config, process
        self.partition = config.sharding(manifest.samples)
        self.columns = manifest.schema.select(config.columns)
        cluster = tier_set.cluster_tier
        self._mapped_tier = cluster if isinstance(cluster, MappedTier) else None
        # If most of a super-sample is not wanted, only what others have given is used.
        self._loads_mapped = self._mapped_tier is not None and not read_shares(manifest, self.columns)
        self.slots: SlotPlan = self._plan_slots_for_mapped()
        if self.slots.holds_groups:  # which need whole objects for the cluster tier only
            tier_set = TierSet() if self._mapped_tier is None else replace(tier_set, tiers=())
        self.tiers = tier_set.tiers
        self.ring = self._create_ring()
        self.fetcher = Fetcher(
            dataset.store,
            config=config.fetch,
            request_bytes=self._request_bytes,
            small_hedge_bytes=self.slots.hedge_buffer_bytes,
            ring=self.ring,
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            tiers=tier_set.chain,
            is_start=True,
            counters=process.counters,
        )
        self.reader = self._create_reader(arrays)

    def _create_ring(self) -> Ring:
        slots = self.slots
        if not slots.holds_units:
            return Ring(slots.slots, slots.slot_bytes, allocate=self.process.allocate)
        size_bytes = slots.slots * slots.slot_bytes
        # Some units are smaller than planned, and some wait for room.
        return UnitRing(2 * slots.slots, size_bytes, slots.granule_bytes, allocate=self.process.allocate)

    def _create_reader(self, arrays: BatchArrays) -> RowReader:
        manifest, columns, fetcher = parts = self.dataset.manifest, self.columns, self.fetcher
        if not self.slots.holds_groups:
            return SuperSampleReader(*parts, self.ring, arrays)
        mapped, limits = None, ReadLimits.of(self.slots)
        if self._mapped_tier is not None:
            counters, loads = self.process.counters, self._loads_mapped
            mapped = MappedObjects(self._mapped_tier, manifest.largest_bytes, fetcher, counters, loads=loads)
        if isinstance(self.ring, UnitRing):
            return UnitReader(manifest, columns, fetcher, self.ring, limits, self._units, arrays, mapped)
        return SampleGroupReader(manifest, columns, fetcher, self.ring, limits, arrays, mapped)

    @property
    def _request_bytes(self) -> float:
        """Expected size of most requests."""
        manifest, unit_bytes = self.dataset.manifest, self.config.order.unit_bytes
        if unit_bytes is None and self.slots.holds_groups:
            return sum(mean_row_bytes(manifest, self.columns).values())
        return min(unit_bytes or math.inf, manifest.size_bytes / len(manifest))

    @cached_property
    def _units(self) -> Units:
        return Units.of(self.dataset.manifest.rows, self.config.order.unit_bytes)

    def _plan_slots_for_mapped(self) -> SlotPlan:
        """Return the division of the memory, without room to load objects for a mapped tier if there is none."""
        if not self._loads_mapped:
            return self._plan_slots(0)
        staged_bytes = MappedObjects.size_bytes(self.dataset.manifest)
        try:
            return self._plan_slots(staged_bytes)
        except MemoryBudgetError:
            slots, self._loads_mapped = self._plan_slots(0), False
        _log.warning(
            "memory= has no room to load super-samples for cluster=, which takes %s: only what others have given is "
            "copied, and the rest is read by ranges; give more memory, or use fewer workers",
            format_bytes(staged_bytes),
        )
        return slots

    def _plan_slots(self, staged_bytes: int) -> SlotPlan:
        """Return the division of the memory; ``full`` is read in groups if the data set does not fit."""
        manifest, config = self.dataset.manifest, self.config
        manifest_bytes = manifest.file_bytes + config.held_bytes
        sharers = config.workers or 1
        if config.order.unit_bytes is not None:
            return plan_unit_slots(
                units=len(self._units),
                sizes=UnitSizes.of(manifest, self.columns, self._units),
                order=config.order,
                sharding=self.partition,
                manifest_bytes=manifest_bytes,
                head_bytes=HeadMemory.size_bytes(manifest, self.columns),
                hedge_buffers=config.fetch.hedge_burst,
                memory_bytes=config.memory_bytes,
                workers=sharers,
                staged_bytes=staged_bytes,
            )
        try:
            return plan_slots(
                manifest,
                manifest_bytes,
                config.order,
                self.partition,
                config.memory_bytes,
                sharers,
                max_request_bytes=config.fetch.max_request_bytes,
            )
        except MemoryBudgetError:
            if config.order.shuffle != "full":
                raise
        return plan_group_slots(
            manifest_bytes=manifest_bytes,
            head_bytes=HeadMemory.size_bytes(manifest, self.columns),
            sample_bytes=max_sample_bytes(manifest, self.columns),
            hedge_buffers=config.fetch.hedge_burst,
            memory_bytes=config.memory_bytes,
            workers=sharers,
            staged_bytes=staged_bytes,
        )

    @cached_property
    def first_touch(self) -> PagePrefaulter:
        """Touches the pages that the ring fills first."""
        return PagePrefaulter(self.ring.memory[:_FIRST_TOUCH_BYTES])

    def look_ahead(self) -> LookAhead:
        """Return a limit of the items to fetch ahead."""
        manifest, unit_bytes = self.dataset.manifest, self.config.order.unit_bytes
        item_bytes = self.slots.slot_bytes if self.slots.holds_groups else manifest.size_bytes / len(manifest)
        if unit_bytes is not None:
            item_bytes = min(unit_bytes, item_bytes)
        epoch_items = manifest.size_bytes / item_bytes / self.config.world_size
        return LookAhead(item_bytes, self.fetcher.link, epoch_items)

    def forecast(self) -> ReadForecast:
        """Return the expected requests and bytes of an epoch of this rank."""
        return self.reader.forecast(self.config.order, self.partition)

    async def track(self, positions: PositionRange) -> Callable[[int, int, int], None]:
        """Let caches evict by the order of a range; return the function to call for every item that is requested."""
        manifest = self.dataset.manifest
        return await track_positions(self.tiers, manifest, positions, self.config.other_shardings(manifest.samples))


class BatchPipeline:
    """Batches of one rank, as numpy arrays.

    One thread at a time may consume; any thread may call :meth:`stop`. After a fork, the child has its own memory,
    connections and thread, and continues at the parent's position.

    Args:
        store: store of the data set.
        manifest: pinned version of its index.
        config: settings of the pipeline.
        thread: thread that fetches; the store must be used on it only.
        arrays: makes the arrays of batches.
        recorder: records fetches and waits; None for no record.
        tier_set: tiers to read super-samples from first; groups and units are read from the cluster tier only.
        residents: samples that the consumer keeps itself, and that are not read; None if there are none. Samples that
            are read in groups are read until it has all. Once it has all, nothing is read or fetched ahead.

    Raises:
        MemoryBudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.

    Attributes:
        source: data set that the current epoch is read from.
        counters: counters of delivered batches and waits.
    """

    def __init__(
        self,
        store: Readable,
        manifest: Manifest,
        config: PipelineConfig,
        thread: LoopThread,
        *,
        arrays: BatchArrays = NEW_ARRAYS,
        recorder: Recorder | None = None,
        tier_set: TierSet | None = None,
        residents: Residents | None = None,
    ) -> None:
        self._residents = residents
        self._stream_begin = (0, 0)
        self.store, self.manifest, self.config = store, manifest, config
        self._thread, self._arrays, self._recorder = thread, arrays, recorder
        self._tier_set = TierSet() if tier_set is None else tier_set
        self.counters, self._process = StreamCounters(), _ProcessResources()
        self._tiers: Sequence[ManagedTier] = ()
        self._stream: BatchStream | ResidentStream | None = None
        self._position, self._end_epoch = (0, 0), config.end_epoch
        self._is_stopped = False
        self.source = self._open_initial()
        self.partition = self._first_sharding = self.source.partition

    # Opening data sets.

    def _open_initial(self) -> OpenDataset:
        """Return the data set to plan with until the first epoch starts."""
        return self._open(StoredDataset(self.store, self.manifest), self.config, self._tier_set)

    def _open_current(self) -> OpenDataset:
        """Return the data set for the epoch of the current position: the same for all epochs, until a fork."""
        return self.source if self._is_own_process else self._open_initial()

    def _open(self, origin: StoredDataset, config: PipelineConfig, tier_set: TierSet) -> OpenDataset:
        if self._process.pid != os.getpid():
            self._process = _ProcessResources()
        dataset = OpenDataset(origin, config, self._arrays, tier_set, self._process)
        self._tiers = dataset.tiers or self._tiers
        return dataset

    @property
    def _is_own_process(self) -> bool:
        return self.source.process.pid == os.getpid()

    @property
    def is_materialized(self) -> bool:
        """Whether the current epoch is materialized, and read from its own objects."""
        return self.source.dataset.layout is not None

    @property
    def position(self) -> tuple[int, int] | None:
        """Epoch and position of the next batch of the current stream; None without a stream."""
        stream = self._stream
        return self._position if stream is not None and not stream.is_closed and self._is_own_process else None

    # Starting and ending streams.

    def start(
        self, epoch: int, position: int = 0, *, partition: Sharding | None = None, end_epoch: int | None = None
    ) -> None:
        """End the current stream, if any, and start to fetch from a position of an epoch.

        Args:
            epoch: first epoch.
            position: position in that epoch, in the partition's numbering.
            partition: sharding of the first epoch; None for that of all epochs.
            end_epoch: epoch before which to stop reading ahead; None for the config's.

        Raises:
            MemoryBudgetError: the epoch cannot be read within the budget, of memory or of dollars.
            StokerError: a preparatory read failed.
        """
        self._end_stream()
        self._position, self._is_stopped = (epoch, position), False
        self._first_sharding = self.partition if partition is None else partition
        self._end_epoch = self.config.end_epoch if end_epoch is None else end_epoch
        self._start_at_position()

    def _start_at_position(self) -> None:
        """Fetch from the current position on, unless the run ends there."""
        self._end_stream()
        if not self._is_at_end:
            self._start_stream(self._open_current())

    @property
    def _is_at_end(self) -> bool:
        return self._end_epoch is not None and self._position[0] >= self._end_epoch

    def _start_stream(self, dataset: OpenDataset) -> None:
        """Fetch from the current position on, from the data set opened for its epoch."""
        self._check_started()
        self.source = dataset
        if self._has_all:
            stream: BatchStream | ResidentStream = ResidentStream(dataset.dataset, self._positions(dataset))
        else:
            self._prepare(dataset)
            stream = self._create_stream(dataset)
        self._stream = stream
        if self._is_stopped:  # checked after the assignment: either stop() saw the stream, or its flag is seen here
            self._stream = None
        self._check_started()
        stream.start()

    def _prepare(self, dataset: OpenDataset) -> None:
        started = time.perf_counter()
        self._thread.run(dataset.reader.prepare())
        ended = time.perf_counter()
        self.counters.wait_seconds += ended - started
        if self._recorder is not None:
            self._recorder.add_wait(Phase.START, started, ended)

    @property
    def _has_all(self) -> bool:
        """Whether the consumer has all samples itself."""
        return self._residents is not None and self._residents.is_complete

    def _positions(self, dataset: OpenDataset) -> PositionRange:
        """Return the range of the order from the current position on."""
        epoch, position = self._stream_begin = self._position
        return PositionRange(
            order=dataset.config.order,
            sharding=self._first_sharding,
            epoch=epoch,
            position=position,
            end_epoch=self._stream_end_epoch,
        )

    def _create_stream(self, dataset: OpenDataset) -> BatchStream:
        positions = self._positions(dataset)
        if self._residents is not None and self._residents.is_empty:  # it has more for the next epoch to be planned
            positions = replace(positions, end_epoch=positions.epoch + 1)
        on_request = self._thread.run(dataset.track(positions)) if dataset.tiers else None
        queue = self._create_queue(dataset, positions, on_request)
        prefetcher = Prefetcher(
            dataset.reader,
            dataset.ring,
            self.config.schedule,
            queue.next_item,
            hedge_slots=dataset.slots.hedge_slots,
            look_ahead=dataset.look_ahead() if isinstance(self.config.schedule, Continuous) else None,
            recorder=self._recorder,
        )
        return BatchStream(queue, prefetcher, dataset.reader, dataset.first_touch, self._thread, self.counters)

    def _create_queue(
        self, dataset: OpenDataset, positions: PositionRange, on_request: Callable[[Any, int, int], object] | None
    ) -> StepQueue[Any]:
        if self._residents is None or dataset.slots.holds_groups:
            return StepQueue(dataset.reader.steps(positions), on_request)
        steps = SuperSampleSteps(self.manifest.rows.samples, positions, is_resident=self._residents.has)
        return StepQueue(steps, on_request)

    @property
    def _stream_end_epoch(self) -> int | None:
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
        if self._has_all and isinstance(self._stream, BatchStream):
            self._end_stream()  # it may read what the consumer has by now
        if self.position is None:
            self._start_at_position()
        stream = self._stream
        if stream is None:
            self._check_started()
            return None
        try:
            batch = stream.next(self.source.dataset)
        except BaseException:
            self._end_stream()
            self._check_started()
            raise
        if batch is None:
            self._end_stream()
            is_over = self._is_at_end or self._position == self._stream_begin
            return None if is_over or self._residents is None else self.next()
        self.source.fetcher.end_start()
        self._position = (batch.epoch + 1, 0) if batch.is_last else (batch.epoch, batch.end)
        if batch.is_last:
            self._first_sharding = self._first_sharding.from_start()
        self.counters.repeated += batch.repeated
        self.counters.resident += batch.count_resident()
        return batch

    def is_ready(self) -> bool:
        """Return whether :meth:`next` would neither wait for the bucket nor fail."""
        stream = self._stream
        return self.position is not None and stream is not None and stream.is_ready()

    def stop(self) -> None:
        """End the current stream, if any, and stop fetching until :meth:`start`. Idempotent.

        May be called from any thread; a thread that is in :meth:`next`, or calls it later, gets a StokerError.
        """
        self._is_stopped = True
        self._end_stream()

    def _end_stream(self) -> None:
        stream = self._stream
        if stream is not None and self._is_own_process:
            stream.close()
        self._stream = None  # only now, so that the next start or stop repeats an interrupted close

    def caches(self) -> dict[str, CacheTierStatistics]:
        """Return the statistics of each cache, by name."""
        return {tier.name: tier.statistics() for tier in self._tiers}
