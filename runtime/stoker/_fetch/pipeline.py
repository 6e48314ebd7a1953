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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker._base.fetch_record import Phase
from stoker._base.recorder import Recorder
from stoker._base.threads import LoopThread
from stoker._cache.keeper import CacheStatistics, Nearer
from stoker._cache.tiers import follow
from stoker._fetch.batch_stream import Batch, BatchStream, Origin, Reading, StreamCounters
from stoker._fetch.fetcher import FetchConfig, Fetcher, FetchStatistics
from stoker._fetch.forecast import Forecast
from stoker._fetch.gather import GatherRows, gather_rows
from stoker._fetch.groups import GroupReading, HeadMemory
from stoker._fetch.prefetcher import Prefetcher, StepQueue
from stoker._fetch.range_plan import ReadLimits
from stoker._fetch.schedule import Continuous, Schedule
from stoker._fetch.super_samples import SuperSampleReading
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, most_sample_bytes, plan_group_slots, plan_slots
from stoker._memory.ring import FirstTouch, Ring, anonymous_memory
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing, LaneShare, Partition
from stoker._order.steps import Stretch
from stoker.abc import Readable
from stoker.errors import BudgetError, ConfigError, StokerError

__all__ = ["BatchPipeline", "PipelineConfig", "PipelineStatistics"]

_TOUCHED_BYTES = 128 << 20
"""Of the ring, taken at the start: what the first batches wait for. Taking more would slow the fetching down that it is
to help, where there are few cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What to deliver and how.

    Attributes:
        order: seed, shuffle, window and lanes.
        batch_size: samples a batch and rank.
        rank: this rank.
        world_size: how many ranks there are.
        worker: this worker process of the rank, where whole lanes are dealt to workers.
        workers: how many there are, which divide the memory; None where steps are dealt to ranks.
        local_ranks: of this machine, which share what is kept on its disks; this one may be among them or not.
        chunks: whether a worker's batches are only how samples are read.
        by_lanes: deal ``full`` by lanes, as other orders are.
        drop_last: leave out the last global batch if it is not full.
        evaluation: deliver every sample once, with no repeats and no drops; ranks may differ by one batch.
        limit: deliver only the first so many positions of every epoch.
        columns: which to deliver, in this order; all if None.
        memory_bytes: budget of this rank.
        held_bytes: of it, what is taken besides.
        end_epoch: do not look ahead into this epoch or beyond.
        schedule: how far ahead to fetch.
        fetch: deadlines, retries, hedges and concurrency.
    """

    order: OrderConfig = field(default_factory=OrderConfig)
    batch_size: int
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int | None = None
    local_ranks: Sequence[int] = ()
    chunks: bool = False
    by_lanes: bool = False
    drop_last: bool = False
    evaluation: bool = False
    limit: int | None = None
    columns: tuple[str, ...] | None = None
    memory_bytes: int = 512 << 20
    held_bytes: int = 0
    end_epoch: int | None = None
    schedule: Schedule = field(default_factory=Continuous)
    fetch: FetchConfig = field(default_factory=FetchConfig)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit} is not at least 1 sample")

    def dealing(self, samples: int) -> Dealing:
        """Return how an epoch of a data set of so many samples is dealt to this rank, or this worker of it."""
        return self.partition(samples) if self.workers is None else self.lane_share(samples)

    def other_dealings(self, samples: int) -> list[Dealing]:
        """Return how such an epoch is dealt to the other processes of the machine."""
        takers = [(rank, worker) for rank in self.local_ranks for worker in range(self.workers or 1)]
        others = [taker for taker in takers if taker != (self.rank, self.worker)]
        return [replace(self, rank=rank, worker=worker).dealing(samples) for rank, worker in others]

    def lane_share(self, samples: int) -> LaneShare:
        """Return what this worker has of an epoch."""
        return LaneShare(
            samples=samples if self.limit is None else min(samples, self.limit),
            lanes=self.order.lanes,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            worker=self.worker,
            workers=self.workers or 1,
            drop_last=self.drop_last,
            evaluation=self.evaluation,
            chunks=self.chunks,
        )

    def partition(self, samples: int) -> Partition:
        """Return what this rank has of an epoch."""
        return Partition(
            samples=samples if self.limit is None else min(samples, self.limit),
            lanes=self.order.lanes if self.by_lanes or self.order.shuffle != "full" else 1,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
            evaluation=self.evaluation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatistics:
    """Counts since the feed was made.

    Attributes:
        batches: delivered.
        samples: delivered.
        repeated: samples that all ranks together delivered a second time, to give each rank one in a last batch.
        look_ups: items that a batch asked for when it first needed them: super-samples, or groups of samples.
        misses: of these, those that were not in the ring yet.
        wait_seconds: time that the consumer waited for items, and for what must be read before the first one.
        first_batch_seconds: from the start of the first stream to its first batch, None before it.
        fetch: requests, bytes, retries and hedges.
        caches: what tiers that keep have done, by name.
    """

    batches: int
    samples: int
    repeated: int
    look_ups: int
    misses: int
    wait_seconds: float
    first_batch_seconds: float | None
    fetch: FetchStatistics
    caches: Mapping[str, CacheStatistics] = field(default_factory=dict)


class BatchPipeline:
    """Batches of one rank, as numpy arrays.

    One thread at a time consumes; any may call :meth:`stop`. After a fork the child has its own memory, connections and
    thread, and goes on where the parent was.

    Args:
        store: where the data set is.
        manifest: the pinned version of its index.
        config: what to deliver and how.
        thread: runs the fetching; the store must only be used on it.
        rows: how rows are copied out of the ring.
        allocate: returns the ring's memory.
        recorder: follows fetches, and is told of waits.
        nearer: where super-samples are looked for first; not where samples are read in groups.
        origin: says which samples the rows are, where the manifest is an epoch's own.

    Raises:
        BudgetError: the memory is too small; names the figure that fits.
        ConfigError: a column is not in the schema.
    """

    def __init__(
        self,
        store: Readable,
        manifest: Manifest,
        config: PipelineConfig,
        thread: LoopThread,
        rows: GatherRows = gather_rows,
        allocate: Callable[[int], memoryview] = anonymous_memory,
        recorder: Recorder | None = None,
        nearer: Nearer | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.store, self.manifest, self.config = store, manifest, config
        self.partition = config.dealing(manifest.samples)
        self.columns = manifest.schema.chosen(config.columns)
        self.slots: SlotPlan = self._planned_slots()
        self._nearer = Nearer() if nearer is None or self.slots.holds_groups else nearer
        self._thread, self._rows, self._allocate, self._recorder = thread, rows, allocate, recorder
        self._waits = StreamCounters()
        self._origin = origin or Origin(store.url, manifest)
        self._batches = self._samples = self._repeated = 0
        self._first_batch_seconds: float | None = None
        self._place = (0, 0)
        self._is_stopped = False
        self._begin()

    def _planned_slots(self) -> SlotPlan:
        """Return how the memory is spent; ``full`` is read in groups where not everything fits."""
        manifest, config = self.manifest, self.config
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

    def _begin(self) -> None:
        """Make what belongs to this process; nothing is allocated or connected before the first fetch."""
        self._pid = os.getpid()
        self._stream: BatchStream | None = None
        self._ring = Ring(self.slots.slots, self.slots.slot_bytes, allocate=self._allocate)
        self._first_touch: FirstTouch | None = None
        self._fetcher = Fetcher(
            self.store,
            config=self.config.fetch,
            small_hedge_bytes=self.slots.hedge_buffer_bytes,
            ring=self._ring,
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            tiers=self._nearer.tiers,
            warm=self._nearer.warm,
            is_start=True,
        )
        parts = self.manifest, self.columns, self._fetcher, self._ring
        self._reading: Reading = (
            GroupReading(*parts, ReadLimits.of(self.slots), self._rows)
            if self.slots.holds_groups
            else SuperSampleReading(*parts, self._rows)
        )

    def forecast(self) -> Forecast:
        """Return what an epoch of this rank will take."""
        return self._reading.forecast(self.config.order, self.partition)

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch and position that the stream under way would deliver next, None if there is none."""
        stream = self._stream
        return self._place if stream is not None and not stream.is_closed and self._pid == os.getpid() else None

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
            StokerError: what must be read before anything else could not be had.
        """
        self._end_stream()
        if self._pid != os.getpid():
            self._begin()
        self._place, self._is_stopped = (epoch, position), False
        self._begin_stream(partition, end_epoch)

    def _begin_stream(self, partition: Dealing | None = None, end_epoch: int | None = None) -> BatchStream:
        """Fetch from the place on."""
        epoch, position = self._place
        started = time.perf_counter()
        self._thread.run(self._reading.prepare())
        ended = time.perf_counter()
        self._waits.wait_seconds += ended - started
        if self._recorder is not None:
            self._recorder.waited(Phase.START, started, ended)
        stretch = Stretch(
            order=self.config.order,
            partition=self.partition if partition is None else partition,
            epoch=epoch,
            position=position,
            end_epoch=self.config.end_epoch if end_epoch is None else end_epoch,
        )
        taken = None
        if self._nearer.tiers:
            others = self.config.other_dealings(self.manifest.samples)
            taken = self._thread.run(follow(self._nearer.tiers, self.manifest, stretch, others))
        if self._first_touch is None:
            self._first_touch = FirstTouch(self._ring.memory[:_TOUCHED_BYTES])
        queue: StepQueue[Any] = StepQueue(self._reading.steps(stretch), taken)
        prefetcher = Prefetcher(
            self._reading,
            self._ring,
            self.config.schedule,
            queue.next_item,
            hedge_slots=self.slots.hedge_slots,
            recorder=self._recorder,
        )
        stream = self._stream = BatchStream(
            queue, prefetcher, self._reading, self._first_touch, self._thread, self._waits
        )
        if self._is_stopped:  # looked at behind the assignment: a stop has seen the stream, or is seen here
            self._stream = None
        self._check_started()
        stream.start()
        return stream

    def _check_started(self) -> None:
        """Check that nobody has stopped the feed.

        Raises:
            StokerError: somebody has.
        """
        if self._is_stopped:
            raise StokerError("the feed was stopped: its loader was closed, or iterates anew")

    def next(self) -> Batch | None:
        """Return the next batch, or None where the run ends.

        Epochs follow one another: the batch behind one that ``is_last`` is the first of the next epoch. Behind an error
        it goes on at the batch that could not be had.

        Raises:
            StokerError: a super-sample that the batch needs could not be had; names it. Or the feed was stopped.
        """
        started = time.perf_counter()
        if self._pid != os.getpid():
            self.start(*self._place)
        self._check_started()
        stream = self._stream
        if stream is None or stream.is_closed:
            stream = self._begin_stream()
        try:
            batch = stream.next(self._origin)
        except BaseException:
            self._end_stream()
            self._check_started()
            raise
        if batch is None:
            self._end_stream()
            return None
        self._fetcher.end_start()
        self._place = batch.next_place
        self._batches += 1
        self._samples += len(batch)
        self._repeated += batch.repeated
        if self._first_batch_seconds is None:
            self._first_batch_seconds = time.perf_counter() - started
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
        if stream is not None and self._pid == os.getpid():
            stream.close()
        self._stream = None  # only now: a close that was interrupted is repeated by the next start or stop

    def statistics(self) -> PipelineStatistics:
        """Return a snapshot."""
        return PipelineStatistics(
            batches=self._batches,
            samples=self._samples,
            repeated=self._repeated,
            look_ups=self._waits.look_ups,
            misses=self._waits.misses,
            wait_seconds=self._waits.wait_seconds,
            first_batch_seconds=self._first_batch_seconds,
            fetch=self._fetcher.stats,
            caches={tier.name: tier.statistics() for tier in self._nearer.tiers},
        )
