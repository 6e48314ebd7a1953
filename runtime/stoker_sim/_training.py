"""A training to predict, and the part of it that is simulated: fewer nodes, and fewer super-samples of each rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stoker._base.arguments import Positive
from stoker._base.sizes import format_bytes, format_count
from stoker._diagnostics.latency import MAX_SECONDS
from stoker._format.manifest import Manifest, PackRun
from stoker.errors import ConfigError
from stoker_sim._caches import PlannedCache, settled_hit_rate
from stoker_sim._cluster import ClusterModel
from stoker_sim._scenario import Scenario

_ALL_HELD = 0.999
"""Fraction of the super-samples from which a cluster cache counts as holding all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining(Scenario):
    """A training to predict: a scenario with the rate of the accelerators.

    Attributes:
        samples_per_second: samples that the accelerator of one rank trains per second.
        start_seconds: time from constructing a loader until it may fetch, in seconds: DNS, handshakes, the manifest.
        start_range_seconds: minimum and maximum of that time; None if it is constant.
        cache: cache of each rank or of each node; None for none.

    Raises:
        ConfigError: there is nothing to train, a step takes more than a day, the number of ranks is no multiple of
            ``ranks_per_node``, the shuffle is ``full`` without a cluster cache, or the cluster cache keeps nothing.
    """

    samples_per_second: Positive[float]
    start_seconds: float = 0.0
    start_range_seconds: tuple[float, float] | None = None
    cache: PlannedCache | None = None

    def __post_init__(self) -> None:
        Scenario.__post_init__(self)
        if not self.step_seconds <= MAX_SECONDS:
            raise ConfigError(
                f"a batch of {self.feed.batch_size:,} takes {self.step_seconds:,.0f} s at {self.samples_per_second:g} "
                f"samples a second; the maximum is {MAX_SECONDS:,.0f} s: give a smaller batch_size or more "
                "samples_per_second"
            )
        if self.feed.world_size % self.ranks_per_node:
            raise ConfigError(
                f"{format_count(self.feed.world_size, 'rank')} cannot be divided into nodes of "
                f"{self.ranks_per_node} each"
            )
        if self.cluster is not None:
            self._check_cluster(self.cluster)
        elif self.feed.order.shuffle == "full":
            raise ConfigError(
                "shuffle 'full' is not planned without a cluster cache (--cluster): it holds the whole data set or "
                "reads single samples, so no part of an epoch is typical of the rest; Loader(shuffle='full') itself "
                "reports the requests of an epoch, and refuses to exceed Budget(max_dollars_per_epoch=…)"
            )

    def _check_cluster(self, cluster: ClusterModel) -> None:
        """Raise ConfigError if the cache processes would keep nothing, or not all that ``full`` needs."""
        manifest, capacity = self.manifest, cluster.capacity
        if self.read_shares:
            raise ConfigError(
                "a cluster cache keeps whole super-samples, and loaders that read some columns put nothing there: "
                "plan without a cluster cache, or with all columns"
            )
        if cluster.limit_bytes < manifest.largest_bytes:
            raise ConfigError(
                f"a cluster cache of {format_bytes(cluster.limit_bytes)} on each node keeps no super-sample of "
                f"{format_bytes(manifest.largest_bytes)}, the largest one here: give a larger limit="
            )
        if self.feed.order.shuffle == "full" and cluster.held_share(manifest) < _ALL_HELD:
            enough = capacity.sufficient_bytes(len(manifest), manifest.size_bytes)
            raise ConfigError(
                f"shuffle 'full' is planned if the cluster cache holds the whole data set: limit= of {enough} "
                f"({format_bytes(enough)}) on each of {format_count(self.nodes, 'node')} does, "
                f"{format_bytes(cluster.limit_bytes)} holds {cluster.held_share(manifest):.1%}"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.feed.world_size // self.ranks_per_node

    @property
    def steps(self) -> int:
        """Number of steps of each rank in an epoch."""
        return self.feed.sharding(self.manifest.samples).count_steps(0)

    @property
    def step_seconds(self) -> float:
        """Time that an accelerator takes for a batch, in seconds."""
        return self.feed.batch_size / self.samples_per_second

    @property
    def read_bytes(self) -> float:
        """Number of bytes read in an epoch, without a cache."""
        return self.manifest.size_bytes * (sum(self.read_shares) or 1.0)

    @property
    def sample_bytes(self) -> float:
        """Average size of what is read of a sample, including its part of heads and padding, in bytes."""
        return self.read_bytes / self.manifest.samples

    @property
    def hit_rate(self) -> float:
        """Fraction of its super-samples that a rank finds in a settled cache, or in a cluster cache, 0 to 1."""
        if self.cluster is not None:
            return self.cluster.held_share(self.manifest)
        if self.cache is None or self.read_shares:  # single columns are not cached
            return 0.0
        caches = self.feed.world_size if self.cache.is_per_rank else self.nodes
        share_bytes = self.manifest.size_bytes / caches
        return settled_hit_rate(self.cache.size_bytes / share_bytes, caches, "next-use")

    @property
    def mean_requests(self) -> float:
        """Mean number of requests of a super-sample: one, those of its wanted columns, or those of its size."""
        if self.read_shares:
            return float(len(self.read_shares))
        return self.manifest.mean_requests(self.feed.fetch.max_request_bytes)


_MAX_FETCHES = 400
_MAX_STEPS = 3_000
"""Maximum fetches and steps simulated in an epoch, of all ranks together. The rest is extrapolated."""
_MIN_WINDOWS = 4
"""Minimum number of windows simulated on each rank, even if that exceeds the maximum number of steps."""
_MAX_TINY_STEPS, _MIN_STEPS_PER_SUPER_SAMPLE = 4 * _MAX_STEPS, 32
"""Above the first number of steps, several are simulated as one, but at least the second for each super-sample."""
_START_STEPS = 2
"""Number of steps of all ranks simulated for a start."""
_MAX_RANKS = 8
"""Maximum number of ranks simulated, but at least one node's; the data set shrinks with the number of ranks."""


def scale_down(workload: PlannedTraining) -> PlannedTraining:
    """Return the part of a workload to simulate: fewer nodes, and fewer super-samples for each of their ranks.

    The incomplete last step of an epoch, for which some super-samples are read again, occurs once in an epoch; so a
    part that is extrapolated leaves it out.
    """
    feed, manifest = workload.feed, workload.manifest
    ranks = workload.ranks_per_node * min(workload.nodes, max(1, _MAX_RANKS // workload.ranks_per_node))
    share = len(manifest) * ranks / feed.world_size
    step_fetches = feed.batch_size * len(manifest) / manifest.samples
    minimum = _MIN_WINDOWS * feed.order.window * feed.order.lanes * ranks // feed.world_size
    super_samples = max(min(_MAX_FETCHES, int(_MAX_STEPS * step_fetches)), minimum)
    if super_samples >= share and ranks == feed.world_size:
        batch_size = _simulated_batch_size(feed.batch_size, manifest)
        return _without_unused_memory(replace(workload, feed=replace(feed, batch_size=batch_size)))
    small = _thin_out(manifest, max(1, min(super_samples, round(share))), manifest.samples * ranks / feed.world_size)
    lanes = max(1, feed.order.lanes * ranks // feed.world_size)
    held_bytes = feed.held_bytes + manifest.file_bytes - small.file_bytes
    batch_size = _simulated_batch_size(feed.batch_size, small)
    cut = replace(
        feed,
        batch_size=batch_size,
        world_size=ranks,
        held_bytes=held_bytes,
        order=replace(feed.order, lanes=lanes),
        drop_last=feed.drop_last or small.samples >= 2 * batch_size * ranks,
    )
    rate = workload.bucket.requests_per_second * ranks / feed.world_size
    bucket = replace(workload.bucket, requests_per_second=rate)
    return _without_unused_memory(replace(workload, manifest=small, feed=cut, bucket=bucket))


def _without_unused_memory(workload: PlannedTraining) -> PlannedTraining:
    """Return a training whose loaders have the same slots in no more memory: more of it makes no other excerpt."""
    return replace(workload, feed=replace(workload.feed, memory_bytes=workload.slots.size_bytes))


def scale_down_to_start(small: PlannedTraining, super_samples: int) -> PlannedTraining:
    """Return the part of an excerpt that a start reads: ``super_samples`` of them, or a few steps if that is more."""
    manifest, feed = small.manifest, small.feed
    step_fetches = feed.world_size * feed.batch_size * len(manifest) / manifest.samples
    scaled = max(super_samples, math.ceil(_START_STEPS * step_fetches))
    if len(manifest) <= scaled:
        return small
    thinned = _thin_out(manifest, scaled, float(manifest.samples))
    return _without_unused_memory(replace(small, manifest=thinned, feed=replace(feed, drop_last=False)))


def _simulated_batch_size(batch_size: int, manifest: Manifest) -> int:
    """Return the batch size to simulate: a multiple if steps are many and batches small beside super-samples."""
    several = manifest.samples // (batch_size * _MAX_TINY_STEPS)
    each = manifest.samples // (batch_size * len(manifest) * _MIN_STEPS_PER_SUPER_SAMPLE)
    return batch_size * max(1, min(several, each))


@lru_cache(maxsize=16)
def _thin_out(manifest: Manifest, super_samples: int, max_samples: float) -> Manifest:
    """Return a manifest of ``super_samples`` super-samples at even distances, always including the largest one.

    If they have more than ``max_samples`` samples together, the samples of each are reduced, since ranks that are not
    simulated use the others. The same arguments give the same object, so equal excerpts of one data set are equal.
    """
    rows = manifest.rows
    keep = np.zeros(len(manifest), np.bool_)
    keep[np.linspace(0, len(manifest) - 1, super_samples).astype(np.int64)] = True
    largest = int(rows.size_bytes.argmax())
    if not keep[largest]:
        keep[int(np.flatnonzero(keep)[0])], keep[largest] = False, True
    run = PackRun(manifest.runs[0].run, 0, int(keep.sum()))
    rows = rows.select(keep)
    too_many = float(rows.samples.sum()) / max_samples
    if too_many > 1.0:
        rows = replace(rows, samples=np.maximum(1, rows.samples / too_many).astype(rows.samples.dtype))
    return replace(manifest, rows=rows, runs=(run,))
