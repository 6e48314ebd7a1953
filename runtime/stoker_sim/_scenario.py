"""Simulation of a whole run in virtual time: ranks that train from one bucket, each with the fetcher's own code."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from stoker._base.arguments import AtLeastOne, BoundedConfig, Positive
from stoker._base.batch_read import RangePart
from stoker._base.clock import run_virtual
from stoker._base.recorder import Recorder
from stoker._base.sizes import format_bytes, format_count
from stoker._base.task_group import task_group
from stoker._cache.index import AccessForecast
from stoker._diagnostics.latency import BucketModel, Constant, Latency
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.config import PipelineConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Prefetcher
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, plan_slots
from stoker._memory.ring import Ring, anonymous_memory
from stoker._order.order import Order
from stoker._order.steps import OrderSource, PlannedStep, PositionRange, SuperSampleSteps
from stoker.abc import ObjectRef, Readable, Tier, TraceSink
from stoker.errors import ConfigError, StoreError
from stoker_sim._bucket import BucketView, ProcessorSharing, SimulatedBucket, create_size_lookup, without_checksums
from stoker_sim._caches import CacheModel
from stoker_sim._cluster import ClusterModel
from stoker_sim._processor import ProcessorModel, RankProcessor
from stoker_sim._simulated_warm import SimulatedWarmTier, WarmCounters, WarmTierModel, WarmTierView

T = TypeVar("T")

_log = logging.getLogger("stoker.simulated")
_log.addHandler(logging.NullHandler())
_log.propagate = False  # warnings about simulated faults do not concern the user


@dataclass(slots=True, kw_only=True)
class EpochResult:
    """Result of one epoch on one rank.

    Attributes:
        rank: rank of the node.
        epoch: number of the epoch.
        seconds: time from the beginning of its first step to the end of its last one, in seconds.
        wait_seconds: part of that time spent waiting for data.
        compute_seconds: part of that time spent computing on batches.
        steps: number of batches.
        lookups: number of super-samples at their first use by a batch.
        misses: number of these that were not in the ring yet.
        requests: number of ranged reads sent to the bucket during the epoch, for this epoch or the next.
        read_bytes: number of bytes that these reads returned.
        hedges: number of these reads that were second requests for late bytes.
        tier_hits: number of super-samples read from each tier, by the tier's name.
        first_batch_seconds: time from the start of the run to the first batch; None after the first epoch.
        first_step_seconds: time from the beginning of the epoch's first step to the end of its computation, in seconds.
        first_compute_seconds: part of that time spent computing.
    """

    rank: int
    epoch: int
    seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    steps: int = 0
    lookups: int = 0
    misses: int = 0
    requests: int = 0
    read_bytes: int = 0
    hedges: int = 0
    tier_hits: Counter[str] = field(default_factory=Counter)
    first_batch_seconds: float | None = None
    first_step_seconds: float = 0.0
    first_compute_seconds: float = 0.0

    @property
    def miss_rate(self) -> float:
        """Fraction of look-ups that missed, 0 to 1."""
        return self.misses / self.lookups


class _SharedSlotRing(Ring):
    """A ring that tracks the states of its slots, which share one slot's memory: no rank reads what is written."""

    def __init__(self, slots: int, slot_bytes: int, slot: memoryview) -> None:
        super().__init__(slots, slot_bytes, allocate=lambda _: slot[:0])
        self._slot = slot

    def view(self, slot: int, length_bytes: int) -> memoryview:
        """Return the same memory for every slot, so that copies between slots cost nothing."""
        super().view(slot, length_bytes)
        return self._slot[:length_bytes]


RankTierFactory = Callable[[PipelineConfig, Manifest], Sequence[Tier]]
"""Function that creates the tiers of a rank."""

_MAX_CACHED_ORDERS = 12
"""Number of epochs whose order is cached: the present one, the next, and those that caches look ahead into."""
_GC_THRESHOLD = 2_000_000
"""Allocations between runs of the garbage collector: fetches leave no cycles, and each run visits all live objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(BoundedConfig):
    """Configuration of a simulation.

    Attributes:
        manifest: manifest of the data set, of a packed one or from :func:`~stoker_sim._bucket.synthetic_manifest`.
        feed: configuration of each rank's batch pipeline: order, memory, schedule and fetching; its rank is replaced.
        bucket: model of the bucket.
        store: store that all ranks read instead of a modelled bucket, without a network model; None for the bucket.
        compute: distribution of the compute time of a step, in seconds.
        node_bytes_per_second: network bandwidth of each machine.
        ranks_per_node: number of ranks that share a machine's network; the last machine may have fewer.
        epochs: number of epochs.
        in_step: whether each step waits for the slowest rank, as data-parallel training does.
        caches: models of each rank's caches, nearest first.
        tiers: function that creates a rank's other tiers, which are asked after the caches; None for none.
        cluster: model of cache processes of all machines, asked after the caches; None for none.
        warm: model of a warm tier that all nodes share, asked last before the bucket; None for none.
        seed: seed of latencies and errors; the order has its own.
        draws_by_object: whether the draws for a request depend only on its object and on the number of earlier
            requests for it, so that runs with different settings can be compared.
        read_shares: ranges that are read of a super-sample, each as a fraction of its size; empty for all of it.
        processor: cores of each machine, and the processor time of a rank's loader.
    """

    manifest: Manifest
    feed: PipelineConfig
    bucket: BucketModel = field(default_factory=BucketModel)
    store: Readable | None = None
    compute: Latency = field(default_factory=lambda: Constant(0.0))
    node_bytes_per_second: Positive[float] = math.inf
    ranks_per_node: AtLeastOne[int] = 1
    epochs: AtLeastOne[int] = 1
    in_step: bool = False
    caches: Sequence[CacheModel] = ()
    tiers: RankTierFactory | None = None
    cluster: ClusterModel | None = None
    warm: WarmTierModel | None = None
    seed: int = 0
    draws_by_object: bool = False
    read_shares: tuple[float, ...] = ()
    processor: ProcessorModel = field(default_factory=ProcessorModel)

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)
        if not self.feed.sharding(self.manifest.samples).count_steps(0):
            raise ConfigError(
                f"no global batch is whole: drop_last leaves out all {format_count(self.manifest.samples, 'sample')}"
            )

    @property
    def slots(self) -> SlotPlan:
        """Division of each rank's memory into slots.

        Raises:
            MemoryBudgetError: the memory is too small for the order; the error names the size that fits.
        """
        feed, manifest = self.feed, self.manifest
        fixed_bytes = manifest.file_bytes + feed.held_bytes
        sharding = feed.sharding(manifest.samples)
        request_bytes = feed.fetch.max_request_bytes
        return plan_slots(
            manifest, fixed_bytes, feed.order, sharding, feed.memory_bytes, max_request_bytes=request_bytes
        )


@dataclass(kw_only=True, eq=False)
class _SimulatedRank:
    """The run of one rank; :meth:`run` may be called once, on a virtual clock.

    Attributes:
        scenario: the scenario, with this rank's number.
        bucket: store of the data set.
        tiers: function that creates the rank's tiers from its access forecast; None for no tiers.
        memory: memory of one slot, which all rings share.
        order: source of the order of an epoch.
        step_barrier: barrier after each step, if ranks train in step; otherwise None.
        recorder: recorder of fetches and waits; None for no record.
        cores: cores of the machine.
        results: results of the epochs so far.
        has_batch: set when the rank has its first batch.
    """

    scenario: Scenario
    bucket: Readable
    tiers: Callable[[AccessForecast], Sequence[Tier]] | None
    memory: memoryview
    order: OrderSource
    step_barrier: asyncio.Barrier | None
    recorder: Recorder | None
    cores: ProcessorSharing
    results: list[EpochResult] = field(default_factory=list)
    has_batch: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.manifest, feed = self.scenario.manifest, self.scenario.feed
        manifest = self.manifest
        sharding = feed.sharding(self.manifest.samples)
        self.slots = self.scenario.slots
        self._ring = _SharedSlotRing(self.slots.slots, self.slots.slot_bytes, self.memory)
        self._position_range = PositionRange(order=feed.order, sharding=sharding, end_epoch=self.scenario.epochs)
        self._access_forecast = (
            AccessForecast(manifest.rows.samples, self._position_range, self.order) if self.tiers is not None else None
        )
        self._rng = random.Random(f"{self.scenario.seed} {feed.rank}")  # noqa: S311 - a model's
        self._fetcher = Fetcher(
            self.bucket,
            ring=self._ring,
            rng=self._rng,
            config=feed.fetch,
            tiers=self.tiers(self._access_forecast)
            if self.tiers is not None and self._access_forecast is not None
            else (),
            is_start=True,
            log=_log,
            checksum=lambda _: 0,  # objects without bytes have the checksum 0
        )
        self._previous_stats = self._fetcher.stats
        self._processor = RankProcessor(self.scenario.processor, self.cores, feed.batch_size)

    def count_slots(self, ref: int) -> int:
        """Return the number of slots that a super-sample takes, for the prefetcher."""
        return self._ring.count_slots(int(self.manifest.rows.size_bytes[ref]))

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Fetch a super-sample by its row number, or the ranges of it that are read, for the prefetcher."""
        size_bytes, shares = int(self.manifest.rows.size_bytes[ref]), self.scenario.read_shares
        slot = await (self._fetch_ranges if shares else self._fetcher.fetch)(self.manifest.ref(ref), urgent=urgent)
        requests = len(shares) or -(-size_bytes // self.scenario.feed.fetch.max_request_bytes)
        slots = range(slot, slot + self.count_slots(ref))
        await self._processor.receive(slots, int(size_bytes * (sum(shares) or 1.0)), requests)
        return slot

    async def _fetch_ranges(self, object_ref: ObjectRef, *, urgent: bool) -> int:
        shares = self.scenario.read_shares
        ends = [int(end * object_ref.size_bytes) for end in accumulate(shares)]
        with self._ring.fill_slot(object_ref.key, object_ref.size_bytes) as slot:
            await self._fetcher.fetch_ranges(
                object_ref,
                [RangePart(start, end, start) for start, end in pairwise([0, *ends]) if start < end],
                into=self._ring.view(slot, object_ref.size_bytes),
                verify=lambda _: None,
                urgent=urgent,
            )
        return slot

    async def run(self) -> list[EpochResult]:
        """Train all epochs and return one result for each.

        Raises:
            StokerError: a super-sample could not be fetched.
        """
        steps = SuperSampleSteps(self.manifest.rows.samples, self._position_range, self.order)
        queue = StepQueue(steps, None if self._access_forecast is None else self._access_forecast.record_request)
        prefetcher = Prefetcher(
            self,
            self._ring,
            self.scenario.feed.schedule,
            queue.next_item,
            hedge_slots=self.slots.hedge_slots,
            recorder=self.recorder,
        )
        async with task_group() as group:
            group.create_task(prefetcher.run())
            await self._train(queue, prefetcher, group)
        return self.results

    async def _train(self, queue: StepQueue[int], prefetcher: Prefetcher[int], group: asyncio.TaskGroup) -> None:
        loop, used = asyncio.get_running_loop(), 0
        started_seconds = epoch_seconds = loop.time()
        while (step := queue.next_step()) is not None:
            if not self.results or self.results[-1].epoch != step.epoch:
                self.results.append(EpochResult(rank=self.scenario.feed.rank, epoch=step.epoch))
            now = self.results[-1]
            used += len(step.first_uses)
            now.lookups += len(step.first_uses)
            now.steps += 1
            prefetcher.advance(step.number, used)
            asked_seconds = loop.time()
            await self._read_step(step, prefetcher, now)
            gathering_seconds = loop.time()
            await self._processor.gather()
            now.wait_seconds += loop.time() - gathering_seconds
            self._fetcher.end_start()
            if self.recorder is not None:
                self.recorder.add_batch(step.epoch, asked_seconds, loop.time())
            if step.number == 0:
                now.first_batch_seconds = loop.time() - started_seconds
                self.has_batch.set()
            seconds = self.scenario.compute.draw(self._rng)
            now.compute_seconds += seconds
            if not step.is_last and (following := queue.peek()) is not None:
                self._processor.gather_ahead(group, prefetcher, following, seconds)
            if seconds:
                await asyncio.sleep(seconds)
            if now.steps == 1:
                now.first_step_seconds, now.first_compute_seconds = loop.time() - asked_seconds, seconds
            if self.step_barrier is not None:
                await self.step_barrier.wait()
            if step.is_last:
                now.seconds, epoch_seconds = loop.time() - epoch_seconds, loop.time()
                self._add_fetches(now)

    async def _read_step(self, step: PlannedStep[int], prefetcher: Prefetcher[int], now: EpochResult) -> None:
        """Wait for all super-samples of a step, and release those that it is the last to use."""
        loop = asyncio.get_running_loop()
        for segment in step.segments:
            for item in segment.released_before:
                prefetcher.release(item)
            for item in segment.items:
                if prefetcher.ready(item) is None:
                    asked_seconds = loop.time()
                    await prefetcher.wait(item)
                    now.misses += 1
                    now.wait_seconds += loop.time() - asked_seconds
                    if self.recorder is not None:
                        self.recorder.add_item_wait(item, asked_seconds, loop.time())
            for item in segment.released_after:
                prefetcher.release(item)

    def _add_fetches(self, now: EpochResult) -> None:
        """Add the fetches since the last call to an epoch's result."""
        before, self._previous_stats = self._previous_stats, self._fetcher.stats
        now.requests = self._previous_stats.requests - before.requests
        now.read_bytes = self._previous_stats.bytes - before.bytes
        now.hedges = self._previous_stats.hedges - before.hedges
        now.tier_hits = Counter(self._previous_stats.tier_hits) - Counter(before.tier_hits)


MIN_BYTES_PER_SECOND = 1000.0
"""Minimum rate of a link in a scenario: on slower ones no super-sample of a sensible size arrives in time."""
MAX_FIRST_BYTE_SECONDS = 10.0
"""Maximum time to the first byte in a scenario: half of the default timeout of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of a simulation.

    Attributes:
        epochs: results of all ranks, ordered by epoch and then by rank.
        seconds: time from the start to the end of the last rank, in seconds.
        warm: counters of the warm tier; None if there is none.
    """

    epochs: tuple[EpochResult, ...]
    seconds: float
    warm: WarmCounters | None = None

    def of_epoch(self, epoch: int) -> tuple[EpochResult, ...]:
        """Return the results of one epoch, ordered by rank."""
        return tuple(each for each in self.epochs if each.epoch == epoch)

    @property
    def wait_seconds(self) -> float:
        """Total time that ranks waited for data, in seconds."""
        return sum(each.wait_seconds for each in self.epochs)

    @property
    def lookups(self) -> int:
        """Total number of look-ups."""
        return sum(each.lookups for each in self.epochs)

    @property
    def requests(self) -> int:
        """Total number of requests to the bucket."""
        return sum(each.requests for each in self.epochs)

    @property
    def read_bytes(self) -> int:
        """Total number of bytes read from the bucket."""
        return sum(each.read_bytes for each in self.epochs)

    @property
    def stall(self) -> float:
        """Fraction of the ranks' time spent waiting for data, 0 to 1."""
        return self.wait_seconds / max(1e-12, sum(each.seconds for each in self.epochs))


def simulate(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]] = lambda rank: ()) -> SimulationResult:
    """Run a scenario on a virtual clock; the same scenario gives the same result.

    Args:
        scenario: the scenario to run.
        sinks_of: function that returns the trace sinks of a rank, for example
            :func:`~stoker._trace.chrome.rank_traces`. Ranks without sinks keep no record.

    Raises:
        MemoryBudgetError: the memory is too small for the order; or ``full`` would be read in groups, which needs
            bytes.
        ConfigError: a super-sample could not be fetched: the bucket or network is too slow, or fails too often.
    """
    return _run(scenario, _simulate(scenario, sinks_of))


def simulate_start(scenario: Scenario) -> float:
    """Return the seconds until all ranks have their first batch, and simulate no more; raises as :func:`simulate`."""
    return _run(scenario, _simulate_start(scenario))


def _run(scenario: Scenario, main: Coroutine[Any, Any, T]) -> T:
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    try:
        return run_virtual(main)
    except StoreError as error:
        size = format_bytes(scenario.manifest.largest_bytes)
        network = f"{scenario.node_bytes_per_second:g}"
        raise ConfigError(
            f"through such a bucket a loader cannot have its data, super-samples of up to {size}: {scenario.bucket}, "
            f"node_bytes_per_second={network}; the first error: {error}"
        ) from error
    finally:
        gc.set_threshold(*thresholds)


async def _simulate(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]]) -> SimulationResult:
    warm = SimulatedWarmTier(scenario.warm, f"{scenario.seed} warm") if scenario.warm is not None else None
    ranks = _create_ranks(scenario, sinks_of, warm)
    async with task_group() as group:
        running = [group.create_task(each.run()) for each in ranks]
    ordered = sorted((each for task in running for each in task.result()), key=lambda each: (each.epoch, each.rank))
    seconds = asyncio.get_running_loop().time()
    counters = None if warm is None else warm.counters(seconds)
    return SimulationResult(epochs=tuple(ordered), seconds=seconds, warm=counters)


async def _simulate_start(scenario: Scenario) -> float:
    ranks = _create_ranks(scenario, lambda rank: (), None)
    async with task_group() as group:
        running = [group.create_task(each.run()) for each in ranks]
        for each in ranks:
            await each.has_batch.wait()
        for task in running:
            task.cancel()
    return max(each.results[0].first_batch_seconds or 0.0 for each in ranks)


def _create_ranks(
    scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]], warm: SimulatedWarmTier | None
) -> list[_SimulatedRank]:
    manifest, feed = without_checksums(scenario.manifest), scenario.feed
    bucket = SimulatedBucket(scenario.bucket, create_size_lookup(manifest))
    meet = asyncio.Barrier(feed.world_size) if scenario.in_step else None
    shared = scenario.cluster and scenario.cluster.empty_tiers(manifest, f"{scenario.seed} cluster")
    memory = anonymous_memory(manifest.largest_bytes)
    order = lru_cache(maxsize=_MAX_CACHED_ORDERS)(lambda epoch: Order(manifest.rows.samples, feed.order, epoch))

    copies = [Counter[int]() for _ in scenario.caches]

    @cache
    def machine(number: int) -> tuple[BucketView, random.Random, ProcessorSharing]:
        rng = random.Random(f"{scenario.seed} bucket {number}")  # noqa: S311 - a model's
        seed = f"{scenario.seed} {number}" if scenario.draws_by_object else None
        return (
            BucketView(bucket, rng, bytes_per_second=scenario.node_bytes_per_second, seed=seed),
            rng,
            scenario.processor.share_cores(),
        )

    def node(rank: int) -> _SimulatedRank:
        own_scenario = replace(scenario, manifest=manifest, feed=replace(feed, rank=rank))
        view, rng, cores = machine(rank // scenario.ranks_per_node)
        sinks = sinks_of(rank)

        def tiers(future: AccessForecast) -> list[Tier]:
            caches: list[Tier] = [
                each.create_tier(future, rng, held) for each, held in zip(scenario.caches, copies, strict=True)
            ]
            others = scenario.tiers(own_scenario.feed, manifest) if scenario.tiers is not None else ()
            processes = [shared(rank // scenario.ranks_per_node)] if shared else []
            functions = [WarmTierView(warm, scenario.node_bytes_per_second)] if warm is not None else []
            return [*caches, *processes, *others, *functions]

        return _SimulatedRank(
            scenario=own_scenario,
            bucket=view if scenario.store is None else scenario.store,
            tiers=tiers if scenario.caches or shared or scenario.tiers is not None or warm is not None else None,
            memory=memory,
            order=lambda samples, config, epoch: order(epoch),
            step_barrier=meet,
            recorder=Recorder(sinks) if sinks else None,
            cores=cores,
        )

    return [node(rank) for rank in range(feed.world_size)]
