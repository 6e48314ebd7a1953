"""What is trained, on what: what a plan is made for, how often its caches have what it reads, and an excerpt of it.

An excerpt is simulated for the whole: enough to tell, and little enough to take a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from stoker._base.sizes import counted
from stoker._diagnostics.latency import LONGEST_SECONDS, BucketModel
from stoker._fetch.config import PipelineConfig
from stoker._format.manifest import Manifest, PackRun
from stoker.errors import ConfigError
from stoker_sim._caches import hit_rates

__all__ = ["Cache", "Workload", "beginning", "excerpt", "settled_hit_rate"]

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
        start_range_seconds: the least and the most of that; None if it is always the same.
        cache: of each node or rank, if any.

    Raises:
        ConfigError: there is nothing to train, a step takes more than a day, the ranks fill no whole nodes, or the
            shuffle is ``full``.
    """

    manifest: Manifest
    feed: PipelineConfig
    samples_per_second: float
    ranks_per_node: int = 1
    bucket: BucketModel = field(default_factory=BucketModel)
    node_bytes_per_second: float = math.inf
    start_seconds: float = 0.0
    start_range_seconds: tuple[float, float] | None = None
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
                "and refuses what costs more than Budget(max_dollars_per_epoch=…) allows"
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


_MOST_FETCHES = 400
_MOST_STEPS = 3_000
"""Simulated in an epoch, on all ranks together. The rest is extrapolated."""
_LEAST_WINDOWS = 4
"""Simulated on each rank, however many steps that is."""
_MOST_TINY_STEPS, _TINY_STEPS_EACH = 4 * _MOST_STEPS, 32
"""Where there are more steps than the first, some are simulated as one, but each super-sample lasts for the second."""
_START_STEPS = 2
"""Of all ranks, that are simulated of a start."""
_MOST_RANKS = 8
"""Simulated, or one node's; where there are more, each has as much to do as before, in a data set as much smaller."""


def excerpt(workload: Workload) -> Workload:
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
    rate = workload.bucket.requests_per_second * ranks / feed.world_size
    bucket = replace(workload.bucket, requests_per_second=rate)
    return replace(workload, manifest=small, feed=cut, bucket=bucket)


def beginning(small: Workload, super_samples: int) -> Workload:
    """Return as much of an excerpt as its start reads: so many super-samples or a few steps, if it has more."""
    manifest, feed = small.manifest, small.feed
    step_fetches = feed.world_size * feed.batch_size * len(manifest) / manifest.samples
    kept = max(super_samples, math.ceil(_START_STEPS * step_fetches))
    if len(manifest) <= kept:
        return small
    thinned = _thinned(manifest, kept, float(manifest.samples))
    return replace(small, manifest=thinned, feed=replace(feed, drop_last=False))


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
