"""What a run will take: its epochs simulated with the fetcher's own code, beside the bound that nothing can beat."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from stoker.budget import plan_slots
from stoker.errors import ConfigError
from stoker.feed import FeedConfig
from stoker.manifest import Manifest, PackRun
from stoker.plan.bound import Bound, Demand, bound_of
from stoker.plan.bucket import BucketModel
from stoker.plan.experiments.caching import hit_rates
from stoker.plan.latency import LONGEST_SECONDS, Constant
from stoker.plan.link import SharedLink
from stoker.plan.scenario import Run, Scenario, TierMaker, simulate
from stoker.prices import Egress, Operation, Prices
from stoker.sizes import counted
from stoker.tier import ObjectRef

__all__ = ["Cache", "EpochForecast", "Prediction", "Workload", "predict", "settled_hit_rate"]

_MOST_FETCHES = 400
_MOST_STEPS = 3_000
"""Simulated in an epoch, on all ranks together: less than a second. The rest is extrapolated."""
_LEAST_WINDOWS = 4
"""Simulated on each rank, however many steps that is."""
_MOST_TINY_STEPS, _TINY_STEPS_EACH = 4 * _MOST_STEPS, 32
"""Where there are more steps than the first, some are simulated as one, but each super-sample lasts for the second."""
_MOST_RANKS = 8
"""Simulated, or one node's; where there are more, each has as much to do as before, in a data set as much smaller."""
_EPOCHS = 3
"""The second is what every later one is like: begun with a full ring, and with another one to look ahead into."""
_DRAWS = 501
"""Of a first byte, for its median: odd, so that it is one of them."""
_HIT_OBJECTS, _HIT_EPOCHS, _HIT_SETTLED = 300, 12, 6
"""Of a reader in an epoch; epochs; and from which of them on a cache counts as settled. Costs milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A nearer place.

    Attributes:
        size_bytes: that it may hold.
        bytes_per_second: of its device.
        policy: "fifo", "lru", "uniform" or "next-use".
        is_of_rank: whether each rank has one of its own, as in its memory; else a node's ranks share one, as a disk.
    """

    size_bytes: int
    bytes_per_second: float = 2e9
    policy: str = "next-use"
    is_of_rank: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, on what.

    Attributes:
        manifest: of the data set.
        feed: batch size and world size, order, memory and schedule; its rank is each rank's own.
        samples_per_second: that the accelerator of one rank takes.
        ranks_per_node: that share a node's network, and its cache if that is a disk.
        bucket: how it answers a node.
        node_bytes_per_second: of a node's network.
        start_seconds: from constructing a loader until its fetching may begin: names, handshakes, the manifest.
        cache: of each node or rank, if any.

    Raises:
        ConfigError: there is nothing to train, a step takes more than a day, the ranks fill no whole nodes, or the
            shuffle is ``full``.
    """

    manifest: Manifest
    feed: FeedConfig
    samples_per_second: float
    ranks_per_node: int = 1
    bucket: BucketModel = field(default_factory=BucketModel)
    node_bytes_per_second: float = math.inf
    start_seconds: float = 0.0
    cache: Cache | None = None

    def __post_init__(self) -> None:
        if not self.samples_per_second > 0 or not self.manifest.samples:
            raise ConfigError(f"a prediction needs samples and samples_per_second > 0, not {self.samples_per_second}")
        if not self.step_seconds <= LONGEST_SECONDS:
            raise ConfigError(
                f"a batch of {self.feed.batch_size:,} takes {self.step_seconds:,.0f} s at {self.samples_per_second:g} "
                f"samples a second, and what takes more than {LONGEST_SECONDS:,.0f} s is not planned: give a smaller "
                "batch_size or more samples_per_second"
            )
        if self.ranks_per_node < 1 or self.feed.world_size % self.ranks_per_node:
            raise ConfigError(f"{counted(self.feed.world_size, 'rank')} make no nodes of {self.ranks_per_node} each")
        if self.feed.order.shuffle == "full":
            raise ConfigError(
                "shuffle 'full' is not planned: it holds the whole data set, or reads single samples, and no part "
                "of an epoch tells of the rest; Loader(shuffle='full') itself says how many requests an epoch takes, "
                "and refuses what costs more than max_dollars_per_epoch"
            )

    @property
    def nodes(self) -> int:
        """Machines that train."""
        return self.feed.world_size // self.ranks_per_node

    @property
    def steps(self) -> int:
        """Of each rank in an epoch."""
        return self.feed.partition(self.manifest.samples).steps_from(0)

    @property
    def step_seconds(self) -> float:
        """What an accelerator takes for a batch."""
        return self.feed.batch_size / self.samples_per_second

    @property
    def sample_bytes(self) -> float:
        """The average size of a sample, with its part of everything that stands around it."""
        return self.manifest.size_bytes / self.manifest.samples

    @property
    def hit_rate(self) -> float:
        """The part of its super-samples, 0 to 1, that a rank finds in its cache once that has settled."""
        if self.cache is None:
            return 0.0
        caches = self.feed.world_size if self.cache.is_of_rank else self.nodes
        share_bytes = self.manifest.size_bytes / caches
        return settled_hit_rate(self.cache.size_bytes / share_bytes, caches, self.cache.policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochForecast:
    """One epoch, of the slowest rank where it is about time, of all ranks where it is about requests.

    Attributes:
        seconds: that it takes.
        wait_seconds: of these, for data.
        requests: of all ranks.
        read_bytes: of all ranks.
    """

    seconds: float
    wait_seconds: float
    requests: float
    read_bytes: float

    @property
    def stall(self) -> float:
        """The part of the time, 0 to 1, that is waited."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    def grown(self, factor: float) -> EpochForecast:
        """Return an epoch that is ``factor`` times as long."""
        return EpochForecast(
            seconds=factor * self.seconds,
            wait_seconds=factor * self.wait_seconds,
            requests=factor * self.requests,
            read_bytes=factor * self.read_bytes,
        )

    def at_least(self, seconds: float) -> EpochForecast:
        """Return an epoch that takes no less: one that found more in its ring than it left there is not typical."""
        more = max(0.0, seconds - self.seconds)
        return replace(self, seconds=self.seconds + more, wait_seconds=self.wait_seconds + more)

    def followed_by(self, other: EpochForecast) -> EpochForecast:
        """Return an epoch whose second part is another."""
        return EpochForecast(
            seconds=self.seconds + other.seconds,
            wait_seconds=self.wait_seconds + other.wait_seconds,
            requests=self.requests + other.requests,
            read_bytes=self.read_bytes + other.read_bytes,
        )

    def dollars(self, prices: Prices, url: str, egress: Egress = "same_region") -> float:
        """Return what the store asks for the requests and the bytes."""
        store = prices.store(url)
        moved = store.transfer_dollars(read_bytes=round(self.read_bytes), written_bytes=0, egress=egress)
        return self.requests * store.request_dollars(Operation.GET) + moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a workload will take.

    Attributes:
        first_batch_seconds: from constructing the loader.
        first: epoch, in which caches are empty.
        later: epochs.
        bound: of a later epoch.
        hit_rate: of the cache in later epochs.
        simulated: the part of an epoch, 0 to 1, that was simulated; the rest is extrapolated.
        slots: of each rank's ring.
    """

    first_batch_seconds: float
    first: EpochForecast
    later: EpochForecast
    bound: Bound
    hit_rate: float
    simulated: float
    slots: int


def predict(workload: Workload, *, seed: int = 0) -> Prediction:
    """Simulate a workload, or as much of it as is worth its time, and extrapolate.

    The same workload gives the same prediction.

    Raises:
        BudgetError: the memory is too small for the order; names the figure that fits.
        ConfigError: the bucket or the network is so slow that a loader could not have its data.
    """
    feed, small, hit_rate = workload.feed, _cut(workload), workload.hit_rate
    slots = plan_slots(
        workload.manifest,
        workload.manifest.file_bytes + feed.held_bytes,
        feed.order,
        feed.partition(workload.manifest.samples),
        feed.memory_bytes,
    )
    cold = _simulated(small, 0.0, seed)
    settled = _simulated(small, hit_rate, seed) if hit_rate else cold
    each_for = feed.world_size / small.feed.world_size
    growth = max(1.0, workload.manifest.samples / each_for / small.manifest.samples)
    begun = max(each.first_batch_seconds or 0.0 for each in cold.of_epoch(0))
    rest = _forecast(cold, 1, each_for).grown(growth - 1.0)
    bound = bound_of(_demand(workload, slots.slots - slots.window_slots - slots.hedge_slots, hit_rate))
    return Prediction(
        first_batch_seconds=workload.start_seconds + begun,
        first=_forecast(cold, 0, each_for).followed_by(rest),
        later=_forecast(settled, 1, each_for).grown(growth).at_least(bound.seconds),
        bound=bound,
        hit_rate=hit_rate,
        simulated=min(1.0, 1.0 / growth),
        slots=slots.slots,
    )


def settled_hit_rate(share: float, caches: int, policy: str) -> float:
    """Return the hit rate of a cache that has room for ``share`` of what its reader reads in an epoch.

    A lone reader reads everything each epoch in another order; one of several reads another part each epoch. Found by
    the policy itself on epochs of 300 objects.

    Args:
        share: of an epoch's bytes.
        caches: each with a reader of its own, among whom each epoch is dealt.
        policy: who goes.
    """
    capacity = int(share * _HIT_OBJECTS)
    if not capacity or share >= caches:
        return float(capacity > 0)
    rng = np.random.default_rng(0)
    epochs = [rng.permutation(_HIT_OBJECTS * caches)[:_HIT_OBJECTS] for _ in range(_HIT_EPOCHS)]
    settled = hit_rates(epochs, capacity, policy)[_HIT_SETTLED : _HIT_EPOCHS - 1]  # the last one has no future
    return float(np.mean(settled))


def _cut(workload: Workload) -> Workload:
    """Return as much of a workload as is simulated: fewer nodes, and fewer super-samples for each of their ranks.

    A short last step, for which some super-samples are read again, comes once in a whole epoch, and is left out of a
    part that stands for more.
    """
    feed, manifest = workload.feed, workload.manifest
    ranks = workload.ranks_per_node * min(workload.nodes, max(1, _MOST_RANKS // workload.ranks_per_node))
    share = len(manifest) * ranks / feed.world_size
    step_fetches = feed.batch_size * len(manifest) / manifest.samples
    least = _LEAST_WINDOWS * feed.order.window * feed.order.lanes * ranks // feed.world_size
    kept = max(min(_MOST_FETCHES, int(_MOST_STEPS * step_fetches)), least)
    if kept >= share and ranks == feed.world_size:
        return replace(workload, feed=replace(feed, batch_size=_coarse_batch(feed.batch_size, manifest)))
    small = _thinned(manifest, max(1, min(kept, round(share))), manifest.samples * ranks / feed.world_size)
    lanes = max(1, feed.order.lanes * ranks // feed.world_size)
    held_bytes = feed.held_bytes + manifest.file_bytes - small.file_bytes
    batch_size = _coarse_batch(feed.batch_size, small)
    cut = replace(
        feed,
        batch_size=batch_size,
        world_size=ranks,
        held_bytes=held_bytes,
        order=replace(feed.order, lanes=lanes),
        drop_last=feed.drop_last or small.samples >= 2 * batch_size * ranks,
    )
    return replace(workload, manifest=small, feed=cut)


def _coarse_batch(batch_size: int, manifest: Manifest) -> int:
    """Return the size of batches to simulate: several at once where they are many, and tiny beside super-samples."""
    several = manifest.samples // (batch_size * _MOST_TINY_STEPS)
    each = manifest.samples // (batch_size * len(manifest) * _TINY_STEPS_EACH)
    return batch_size * max(1, min(several, each))


def _thinned(manifest: Manifest, kept: int, most_samples: float) -> Manifest:
    """Return a manifest of so many super-samples evenly taken from another, the largest one always among them.

    Where more ranks share a super-sample than are simulated, each has fewer samples, ``most_samples`` in all.
    """
    rows = manifest.rows
    keep = np.zeros(len(manifest), np.bool_)
    keep[np.linspace(0, len(manifest) - 1, kept).astype(np.int64)] = True
    largest = int(rows.size_bytes.argmax())
    if not keep[largest]:
        keep[int(np.flatnonzero(keep)[0])], keep[largest] = False, True
    run = PackRun(manifest.runs[0].run, 0, int(keep.sum()))
    rows = rows.kept(keep)
    too_many = float(rows.samples.sum()) / most_samples
    if too_many > 1.0:
        rows = replace(rows, samples=np.maximum(1, rows.samples / too_many).astype(rows.samples.dtype))
    return replace(manifest, rows=rows, runs=(run,))


def _simulated(workload: Workload, hit_rate: float, seed: int) -> Run:
    return simulate(
        Scenario(
            manifest=workload.manifest,
            feed=workload.feed,
            bucket=workload.bucket,
            compute=Constant(workload.step_seconds),
            node_bytes_per_second=workload.node_bytes_per_second,
            ranks_per_node=workload.ranks_per_node,
            epochs=_EPOCHS,
            tiers=_settled(workload.cache, workload.ranks_per_node, hit_rate) if workload.cache and hit_rate else None,
            seed=seed,
        )
    )


def _settled(cache: Cache, ranks_per_node: int, hit_rate: float) -> TierMaker:
    """Return what makes a rank's cache, whose device is its own or its node's."""
    rate, readers = cache.bytes_per_second, 1 if cache.is_of_rank else ranks_per_node
    devices = defaultdict[int, SharedLink](
        lambda: SharedLink(connection_bytes_per_second=rate, total_bytes_per_second=rate)
    )
    return lambda feed, _: [_SettledCache(devices[feed.rank // readers], hit_rate)]


class _SettledCache:
    """A tier that finds a steady part of what it is asked for."""

    name = "cache"

    def __init__(self, device: SharedLink, hit_rate: float) -> None:
        self._device, self._hit_rate, self._asked = device, hit_rate, 0

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Take the time of a read where the object is here; ``into`` is left as it is."""
        self._asked += 1
        if int(self._asked * self._hit_rate) == int((self._asked - 1) * self._hit_rate):
            return False
        await self._device.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Change nothing: it has settled."""

    async def close(self) -> None:
        """Nothing to release."""


def _forecast(run: Run, epoch: int, each_for: float) -> EpochForecast:
    """Return an epoch of a run whose every rank stands for ``each_for``.

    What is fetched ahead is counted in the epoch that uses it. Ranges into which the first super-samples of a run are
    cut are requests of its first epoch; hedges are spread over all.
    """
    results = run.of_epoch(epoch)
    slowest = max(results, key=lambda each: each.seconds)
    reads_of = [sum(each.look_ups for each in run.of_epoch(number)) for number in range(_EPOCHS)]
    hits = sum(each.tier_hits.total() for each in run.epochs)
    hedges = sum(each.hedges for each in run.epochs)
    missed = 1.0 - hits / sum(reads_of)
    reads = sum(reads_of) - hits
    extra = run.requests - hedges - reads if epoch == 0 else 0
    return EpochForecast(
        seconds=slowest.seconds,
        wait_seconds=slowest.wait_seconds,
        requests=each_for * (reads_of[epoch] * missed * (1.0 + hedges / max(1, reads)) + extra),
        read_bytes=each_for * run.read_bytes * reads_of[epoch] / sum(reads_of),
    )


def _demand(workload: Workload, ahead: int, hit_rate: float) -> Demand:
    """Return what an epoch asks of one node, whose every rank has ``ahead`` slots to fetch into."""
    feed, bucket, nodes = workload.feed, workload.bucket, workload.nodes
    rng = random.Random(0)  # noqa: S311 - a model's
    concurrency = workload.ranks_per_node * max(1, min(feed.fetch.concurrency_most, ahead))
    return Demand(
        compute_seconds=workload.steps * workload.step_seconds,
        size_bytes=workload.manifest.size_bytes / nodes,
        gets=len(workload.manifest) / nodes,
        hit_rate=hit_rate,
        bytes_per_second=min(workload.node_bytes_per_second, concurrency * bucket.connection_bytes_per_second),
        latency_seconds=median(bucket.first_byte.draw(rng) for _ in range(_DRAWS)),
        concurrency=concurrency,
    )
