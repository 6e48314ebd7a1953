"""What is trained, on what: what a plan is made for, and how often its caches have what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from stoker._base.sizes import counted
from stoker._diagnostics.latency import LONGEST_SECONDS, BucketModel
from stoker._fetch.feed import FeedConfig
from stoker._format.manifest import Manifest
from stoker.errors import ConfigError
from stoker_sim._models.hit_rates import hit_rates

__all__ = ["Cache", "Workload", "settled_hit_rate"]

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
    feed: FeedConfig
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
