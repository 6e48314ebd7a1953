"""A whole run in virtual time: nodes that train from one bucket, each with the fetcher's own code."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from stoker._base.clock import run_virtual
from stoker._base.meter import Operation
from stoker._base.recorder import Recorder
from stoker._base.sizes import counted, format_bytes
from stoker._base.task_group import task_group
from stoker._cache.future import Future
from stoker._cost.prices import Prices
from stoker._diagnostics.latency import BucketModel, Constant, Latency
from stoker._fetch.feed import FeedConfig
from stoker._format.manifest import Manifest
from stoker._order.order import Order
from stoker.abc import Tier, TraceSink
from stoker.errors import ConfigError, StoreError
from stoker_sim._models.bucket import BucketView, SimulatedBucket
from stoker_sim._models.dataset import bodiless, size_of
from stoker_sim._models.simulated_warm import SimulatedWarm, WarmModel, WarmTally, WarmView
from stoker_sim._models.tier_model import TierModel
from stoker_sim._scenarios.node import EpochResult, Node, NodeParts, Nothing

__all__ = ["LEAST_BYTES_PER_SECOND", "LONGEST_FIRST_BYTE_SECONDS", "Run", "Scenario", "TierMaker", "simulate"]

LEAST_BYTES_PER_SECOND = 1000.0
"""Of a link that a person describes: on a slower one no super-sample of a sensible size arrives in time."""
LONGEST_FIRST_BYTE_SECONDS = 10.0
"""Of a bucket that a person describes: by default a request is given up after twice that."""

TierMaker = Callable[[FeedConfig, Manifest], Sequence[Tier]]
"""Makes a rank's tiers."""

_ORDERS = 12
"""Orders of epochs that are kept: the present one, the next, and what caches look into."""
_GARBAGE_AFTER = 2_000_000
"""Objects made before the collector looks for circles: fetches leave none, and looking walks over all that live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        manifest: of the data set, packed or :func:`~stoker_sim._models.dataset.described`.
        feed: what each rank delivers and with which memory, schedule and fetching; its rank is each one's own.
        bucket: how the bucket answers.
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
    feed: FeedConfig
    bucket: BucketModel = field(default_factory=BucketModel)
    compute: Latency = field(default_factory=lambda: Constant(0.0))
    node_bytes_per_second: float = math.inf
    ranks_per_node: int = 1
    epochs: int = 1
    in_step: bool = False
    caches: Sequence[TierModel] = ()
    tiers: TierMaker | None = None
    warm: WarmModel | None = None
    seed: int = 0
    draws_by_object: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is not at least 1")
        if not self.node_bytes_per_second > 0:
            raise ConfigError(f"node_bytes_per_second must be more than 0, not {self.node_bytes_per_second}")
        if not self.feed.dealing(self.manifest.samples).steps_from(0):
            raise ConfigError(
                f"no global batch is whole: drop_last leaves out all {counted(self.manifest.samples, 'sample')}"
            )


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

    def request_dollars(self, prices: Prices, url: str) -> float:
        """Return what the bucket asks for the requests."""
        return self.requests * prices.request_dollars(url, Operation.GET)


def simulate(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]] = lambda rank: ()) -> Run:
    """Run a scenario on a virtual clock; the same scenario gives the same run.

    Args:
        scenario: to run.
        sinks_of: returns what is told of a rank's fetches and waits
            (:meth:`~stoker._trace.chrome.RanksTrace.sinks` for example). No record is kept of ranks that have none.

    Raises:
        BudgetError: the memory is too small for the order; or ``full`` would be read in groups, which takes bytes.
        ConfigError: a node could not have a super-sample: the bucket or the network is too slow, or fails too often.
    """
    try:
        with _rare_collections():
            return run_virtual(_simulated(scenario, sinks_of))
    except StoreError as error:
        size, network = format_bytes(scenario.manifest.largest_bytes), f"{scenario.node_bytes_per_second:g}"
        raise ConfigError(
            f"through such a bucket a loader cannot have its data, super-samples of up to {size}: {scenario.bucket}, "
            f"node_bytes_per_second={network}; the first that failed: {error}"
        ) from error


async def _simulated(scenario: Scenario, sinks_of: Callable[[int], Sequence[TraceSink]]) -> Run:
    manifest, feed = bodiless(scenario.manifest), scenario.feed
    bucket = SimulatedBucket(scenario.bucket, size_of(manifest))
    meet = asyncio.Barrier(feed.world_size) if scenario.in_step else None
    warm = SimulatedWarm(scenario.warm, f"{scenario.seed} warm") if scenario.warm is not None else None
    memory = Nothing(manifest.largest_bytes)
    order = lru_cache(maxsize=_ORDERS)(lambda epoch: Order(manifest.rows.samples, feed.order, epoch))

    @cache
    def machine(number: int) -> tuple[BucketView, random.Random]:
        rng = random.Random(f"{scenario.seed} bucket {number}")  # noqa: S311 - a model's
        seed = f"{scenario.seed} {number}" if scenario.draws_by_object else None
        return BucketView(bucket, rng, bytes_per_second=scenario.node_bytes_per_second, seed=seed), rng

    def node(rank: int) -> Node:
        mine = replace(feed, rank=rank)
        view, rng = machine(rank // scenario.ranks_per_node)
        sinks = sinks_of(rank)

        def tiers(future: Future) -> list[Tier]:
            caches: list[Tier] = [each.tier(future, rng) for each in scenario.caches]
            others = scenario.tiers(mine, manifest) if scenario.tiers is not None else ()
            functions = [WarmView(warm, scenario.node_bytes_per_second)] if warm is not None else []
            return [*caches, *others, *functions]

        return Node(
            NodeParts(
                manifest=manifest,
                feed=mine,
                bucket=view,
                compute=scenario.compute,
                epochs=scenario.epochs,
                seed=scenario.seed,
                tiers=tiers if scenario.caches or scenario.tiers is not None or warm is not None else None,
                memory=memory,
                order=lambda samples, config, epoch: order(epoch),
                meet=meet,
                recorder=Recorder(sinks) if sinks else None,
            )
        )

    nodes = [node(rank) for rank in range(feed.world_size)]
    async with task_group() as group:
        upkeep = group.create_task(warm.keep_whole(machine(0)[0])) if warm is not None else None
        found = await asyncio.gather(*(each.run() for each in nodes))
        if upkeep is not None:
            upkeep.cancel()
    ordered = sorted((each for results in found for each in results), key=lambda each: (each.epoch, each.rank))
    seconds = asyncio.get_running_loop().time()
    return Run(epochs=tuple(ordered), seconds=seconds, warm=warm.tally(seconds) if warm is not None else None)


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
