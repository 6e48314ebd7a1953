"""A whole run in virtual time: nodes that train from one bucket, each with the fetcher's own code."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from stoker._base.arguments import AtLeastOne, Bounded, Positive
from stoker._base.clock import run_virtual
from stoker._base.recorder import Recorder
from stoker._base.sizes import counted, format_bytes
from stoker._base.task_group import task_group
from stoker._cache.keeper import Future
from stoker._diagnostics.latency import BucketModel, Constant, Latency
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.config import FetchConfig, PipelineConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Prefetcher
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, plan_slots
from stoker._memory.ring import ALIGNMENT_BYTES, Ring, anonymous_memory
from stoker._order.order import Order, OrderConfig
from stoker._order.steps import OrderSource, PlannedStep, Steps, Stretch
from stoker.abc import Readable, Tier, TraceSink
from stoker.errors import ConfigError, StoreError
from stoker_sim._bucket import BucketView, SimulatedBucket, bodiless, size_of
from stoker_sim._caches import TierModel
from stoker_sim._simulated_warm import SimulatedWarm, WarmModel, WarmTally, WarmView

_log = logging.getLogger("stoker.simulated")
_log.addHandler(logging.NullHandler())
_log.propagate = False  # what is simulated is no warning to whoever plans


@dataclass(slots=True, kw_only=True)
class EpochResult:
    """What an epoch took on one node.

    Attributes:
        rank: of the node.
        epoch: its number.
        seconds: from its first step's beginning to its last step's end.
        wait_seconds: of these, for data.
        compute_seconds: of these, at work on batches.
        steps: batches.
        look_ups: super-samples that a batch asked for when it first needed them.
        misses: of these, those that were not in the ring yet.
        requests: ranged reads that were sent to the bucket meanwhile, for this epoch or the next.
        read_bytes: that these brought.
        hedges: of these requests, second ones for late bytes.
        tier_hits: super-samples that came from a nearer place, by its name.
        first_batch_seconds: from the start of the run to the first batch, in the first epoch; else None.
    """

    rank: int
    epoch: int
    seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    steps: int = 0
    look_ups: int = 0
    misses: int = 0
    requests: int = 0
    read_bytes: int = 0
    hedges: int = 0
    tier_hits: Counter[str] = field(default_factory=Counter)
    first_batch_seconds: float | None = None

    @property
    def miss_rate(self) -> float:
        """Misses of look-ups."""
        return self.misses / self.look_ups


class _RingOfNothing(Ring):
    """The states of slots. Nothing that matters is ever written to the rings of a run, so they share one slot."""

    def __init__(self, slots: int, slot_bytes: int, slot: memoryview) -> None:
        super().__init__(slots, slot_bytes, allocate=lambda _: slot[:0])
        self._slot = slot

    def view(self, slot: int, length_bytes: int) -> memoryview:
        """Return the same bytes for every slot. Copying from one to another then costs nothing, either."""
        super().view(slot, length_bytes)
        return self._slot[:length_bytes]


TierMaker = Callable[[PipelineConfig, Manifest], Sequence[Tier]]
"""Makes a rank's tiers."""

_ORDERS = 12
"""Orders of epochs that are kept: the present one, the next, and what caches look into."""
_GARBAGE_AFTER = 2_000_000
"""Objects made before the collector looks for circles: fetches leave none, and looking walks over all that live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Bounded):
    """What is simulated.

    Attributes:
        manifest: of the data set, packed or :func:`~stoker_sim._bucket.described`.
        feed: what each rank delivers and with which memory, schedule and fetching; its rank is each one's own.
        bucket: how the bucket answers.
        store: that all read from in place of a modelled bucket, through no network of theirs; None for the bucket.
        compute: what a step takes once its batch is there.
        node_bytes_per_second: of each machine's network.
        ranks_per_node: that share a machine's network; the last machine may have fewer.
        epochs: how many are trained.
        in_step: whether each step waits for the slowest node, as data-parallel training does.
        caches: of each rank, nearest first.
        tiers: makes what else is nearer than the bucket, and farther than the caches.
        warm: functions that hold super-samples for all nodes, the last place before the bucket; None for none.
        seed: of what is drawn; the order has its own.
        draws_by_object: whether what is drawn for a request depends on the object and on how often it was asked for,
            and on nothing else, so that runs that differ in a setting can be compared.
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
    caches: Sequence[TierModel] = ()
    tiers: TierMaker | None = None
    warm: WarmModel | None = None
    seed: int = 0
    draws_by_object: bool = False

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if not self.feed.dealing(self.manifest.samples).steps_from(0):
            raise ConfigError(
                f"no global batch is whole: drop_last leaves out all {counted(self.manifest.samples, 'sample')}"
            )

    @property
    def slots(self) -> SlotPlan:
        """What each rank's memory is divided into.

        Raises:
            BudgetError: it is too small for the order; names the figure that fits.
        """
        feed, manifest = self.feed, self.manifest
        fixed_bytes, dealing = manifest.file_bytes + feed.held_bytes, feed.dealing(manifest.samples)
        return plan_slots(manifest, fixed_bytes, feed.order, dealing, feed.memory_bytes)


@dataclass(kw_only=True, eq=False)
class _Node:
    """One rank's run; :meth:`run` it once, on a virtual clock.

    Attributes:
        scenario: of this rank.
        bucket: where the data set is.
        tiers: makes the nearer places, for a rank that needs super-samples when the future says so.
        memory: of one slot, which all rings share.
        order: gives the order of an epoch.
        meet: waited for after each step, where nodes go in step.
        recorder: follows fetches, and is told of waits.
        results: of its epochs so far.
    """

    scenario: Scenario
    bucket: Readable
    tiers: Callable[[Future], Sequence[Tier]] | None
    memory: memoryview
    order: OrderSource
    meet: asyncio.Barrier | None
    recorder: Recorder | None
    results: list[EpochResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manifest, feed = self.scenario.manifest, self.scenario.feed
        manifest, dealing, self.slots = self.manifest, feed.dealing(self.manifest.samples), self.scenario.slots
        self._ring = _RingOfNothing(self.slots.slots, self.slots.slot_bytes, self.memory)
        self._stretch = Stretch(order=feed.order, partition=dealing, end_epoch=self.scenario.epochs)
        self._future = Future(manifest.rows.samples, self._stretch, self.order) if self.tiers is not None else None
        self._rng = random.Random(f"{self.scenario.seed} {feed.rank}")  # noqa: S311 - a model's
        self._fetcher = Fetcher(
            self.bucket,
            ring=self._ring,
            rng=self._rng,
            config=feed.fetch,
            tiers=self.tiers(self._future) if self.tiers is not None and self._future is not None else (),
            is_start=True,
            log=_log,
            checksum=lambda _: 0,  # of what moves no bytes
        )
        self._counted = self._fetcher.stats

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Fetch a super-sample by its row: what the prefetcher asks for."""
        return await self._fetcher.fetch(self.manifest.ref(ref), urgent=urgent)

    async def run(self) -> list[EpochResult]:
        """Train; return one result an epoch.

        Raises:
            StokerError: a super-sample could not be had.
        """
        steps = Steps(self.manifest.rows.samples, self._stretch, self.order)
        queue = StepQueue(steps, None if self._future is None else self._future.take)
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
            await self._train(queue, prefetcher)
        return self.results

    async def _train(self, queue: StepQueue[int], prefetcher: Prefetcher[int]) -> None:
        loop, used = asyncio.get_running_loop(), 0
        started_seconds = epoch_seconds = loop.time()
        while (step := queue.next_step()) is not None:
            if not self.results or self.results[-1].epoch != step.epoch:
                self.results.append(EpochResult(rank=self.scenario.feed.rank, epoch=step.epoch))
            now = self.results[-1]
            used += len(step.first_uses)
            now.look_ups += len(step.first_uses)
            now.steps += 1
            prefetcher.reached(step.number, used)
            asked_seconds = loop.time()
            await self._take(step, prefetcher, now)
            self._fetcher.end_start()
            if self.recorder is not None:
                self.recorder.yielded(step.epoch, asked_seconds, loop.time())
            if step.number == 0:
                now.first_batch_seconds = loop.time() - started_seconds
            seconds = self.scenario.compute.draw(self._rng)
            now.compute_seconds += seconds
            if seconds:
                await asyncio.sleep(seconds)
            if self.meet is not None:
                await self.meet.wait()
            if step.is_last:
                now.seconds, epoch_seconds = loop.time() - epoch_seconds, loop.time()
                self._count(now)

    async def _take(self, step: PlannedStep[int], prefetcher: Prefetcher[int], now: EpochResult) -> None:
        """Have all that a step needs, and give back what it has used."""
        loop = asyncio.get_running_loop()
        for segment in step.segments:
            for item in segment.passed:
                prefetcher.release(item)
            for item in segment.items:
                if prefetcher.ready(item) is None:
                    asked_seconds = loop.time()
                    await prefetcher.wait(item)
                    now.misses += 1
                    now.wait_seconds += loop.time() - asked_seconds
                    if self.recorder is not None:
                        self.recorder.waited_for(item, asked_seconds, loop.time())
            for item in segment.done:
                prefetcher.release(item)

    def _count(self, now: EpochResult) -> None:
        """Enter what was fetched since the last time."""
        before, self._counted = self._counted, self._fetcher.stats
        now.requests = self._counted.requests - before.requests
        now.read_bytes = self._counted.bytes - before.bytes
        now.hedges = self._counted.hedges - before.hedges
        now.tier_hits = Counter(self._counted.tier_hits) - Counter(before.tier_hits)


LEAST_BYTES_PER_SECOND = 1000.0
"""Of a link that a person describes: on a slower one no super-sample of a sensible size arrives in time."""
LONGEST_FIRST_BYTE_SECONDS = 10.0
"""Of a bucket that a person describes: by default a request is given up after twice that."""


def by_lanes(
    manifest: Manifest, order: OrderConfig, batch_size: int, ring_bytes: int, fetch: FetchConfig, **settings: Any
) -> Scenario:
    """Return a scenario with a rank for each lane.

    Args:
        manifest: of the data set.
        order: of its samples.
        batch_size: of each rank.
        ring_bytes: of each rank's memory, the manifest aside.
        fetch: how each rank fetches.
        settings: the scenario's others.
    """
    memory_bytes, ranks = manifest.file_bytes + ring_bytes, order.lanes
    feed = PipelineConfig(order=order, batch_size=batch_size, world_size=ranks, memory_bytes=memory_bytes, fetch=fetch)
    return Scenario(manifest=manifest, feed=feed, **settings)


def one_by_one(at_once: int, **settings: Any) -> FetchConfig:
    """Return how to fetch whole super-samples, as many at once and none a second time for being late."""
    counts = {"concurrency_start": at_once, "concurrency_least": at_once, "concurrency_most": at_once}
    return FetchConfig(**counts, split_parts=1, hedge=False, **settings)


def slot_bytes(size_bytes: int) -> int:
    """Return the bytes of a ring's slot that holds so many."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a scenario took.

    Attributes:
        epochs: of every node, by epoch and then by rank.
        seconds: from the start to the end of the last node.
        warm: what the warm tier did, if there is one.
    """

    epochs: tuple[EpochResult, ...]
    seconds: float
    warm: WarmTally | None = None

    def of_epoch(self, epoch: int) -> tuple[EpochResult, ...]:
        """Return an epoch on all nodes, by rank."""
        return tuple(each for each in self.epochs if each.epoch == epoch)

    @property
    def wait_seconds(self) -> float:
        """For data, of all nodes in all epochs."""
        return sum(each.wait_seconds for each in self.epochs)

    @property
    def look_ups(self) -> int:
        """Super-samples that batches asked for."""
        return sum(each.look_ups for each in self.epochs)

    @property
    def requests(self) -> int:
        """Sent to the bucket by all nodes in all epochs."""
        return sum(each.requests for each in self.epochs)

    @property
    def read_bytes(self) -> int:
        """That these brought."""
        return sum(each.read_bytes for each in self.epochs)

    @property
    def stall(self) -> float:
        """The part of the nodes' time, 0 to 1, in which they waited for data."""
        return self.wait_seconds / max(1e-12, sum(each.seconds for each in self.epochs))


def simulate(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]] = lambda rank: ()) -> Run:
    """Run a scenario on a virtual clock; the same scenario gives the same run.

    Args:
        scenario: to run.
        sinks_of: returns what is told of a rank's fetches and waits
            (:func:`~stoker._trace.chrome.rank_traces` for example). No record is kept of ranks that have none.

    Raises:
        BudgetError: the memory is too small for the order; or ``full`` would be read in groups, which takes bytes.
        ConfigError: a node could not have a super-sample: the bucket or the network is too slow, or fails too often.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_GARBAGE_AFTER, *thresholds[1:])
    try:
        return run_virtual(_simulated(scenario, sinks_of))
    except StoreError as error:
        size, network = format_bytes(scenario.manifest.largest_bytes), f"{scenario.node_bytes_per_second:g}"
        raise ConfigError(
            f"through such a bucket a loader cannot have its data, super-samples of up to {size}: {scenario.bucket}, "
            f"node_bytes_per_second={network}; the first that failed: {error}"
        ) from error
    finally:
        gc.set_threshold(*thresholds)


async def _simulated(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]]) -> Run:
    manifest, feed = bodiless(scenario.manifest), scenario.feed
    bucket = SimulatedBucket(scenario.bucket, size_of(manifest))
    meet = asyncio.Barrier(feed.world_size) if scenario.in_step else None
    warm = SimulatedWarm(scenario.warm, f"{scenario.seed} warm") if scenario.warm is not None else None
    memory = anonymous_memory(manifest.largest_bytes)
    order = lru_cache(maxsize=_ORDERS)(lambda epoch: Order(manifest.rows.samples, feed.order, epoch))

    copies = [Counter[int]() for _ in scenario.caches]

    @cache
    def machine(number: int) -> tuple[BucketView, random.Random]:
        rng = random.Random(f"{scenario.seed} bucket {number}")  # noqa: S311 - a model's
        seed = f"{scenario.seed} {number}" if scenario.draws_by_object else None
        return BucketView(bucket, rng, bytes_per_second=scenario.node_bytes_per_second, seed=seed), rng

    def node(rank: int) -> _Node:
        mine = replace(scenario, manifest=manifest, feed=replace(feed, rank=rank))
        view, rng = machine(rank // scenario.ranks_per_node)
        sinks = sinks_of(rank)

        def tiers(future: Future) -> list[Tier]:
            caches: list[Tier] = [
                each.tier(future, rng, held) for each, held in zip(scenario.caches, copies, strict=True)
            ]
            others = scenario.tiers(mine.feed, manifest) if scenario.tiers is not None else ()
            functions = [WarmView(warm, scenario.node_bytes_per_second)] if warm is not None else []
            return [*caches, *others, *functions]

        return _Node(
            scenario=mine,
            bucket=view if scenario.store is None else scenario.store,
            tiers=tiers if scenario.caches or scenario.tiers is not None or warm is not None else None,
            memory=memory,
            order=lambda samples, config, epoch: order(epoch),
            meet=meet,
            recorder=Recorder(sinks) if sinks else None,
        )

    nodes = [node(rank) for rank in range(feed.world_size)]
    async with task_group() as group:
        running = [group.create_task(each.run()) for each in nodes]
    found = [task.result() for task in running]
    ordered = sorted((each for results in found for each in results), key=lambda each: (each.epoch, each.rank))
    seconds = asyncio.get_running_loop().time()
    return Run(epochs=tuple(ordered), seconds=seconds, warm=warm.tally(seconds) if warm is not None else None)
