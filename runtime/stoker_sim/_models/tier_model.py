"""Caches of a node, as a scenario describes them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from operator import attrgetter

from stoker._cache.eviction import Residents, policy_factory
from stoker._cache.future import Future
from stoker._diagnostics.latency import Constant, Latency
from stoker.errors import ConfigError
from stoker_sim._models.simulated_tier import SimulatedTier

__all__ = ["TierModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel:
    """A cache of one node.

    Attributes:
        name: in the results.
        limit_bytes: what it holds.
        policy: who goes, one of :data:`~stoker._cache.eviction.POLICIES`.
        bytes_per_second: of its device; all who read share it.
        latency: before a read's first byte.
    """

    name: str = "disk"
    limit_bytes: int
    policy: str = "next-use"
    bytes_per_second: float = 2e9
    latency: Latency = field(default_factory=lambda: Constant(0.0001))

    def __post_init__(self) -> None:
        policy_factory(self.policy)
        if not self.limit_bytes >= 0:
            raise ConfigError(f"limit_bytes must be at least 0, not {self.limit_bytes}")
        if not self.bytes_per_second > 0:
            raise ConfigError(f"bytes_per_second must be more than 0, not {self.bytes_per_second}")

    def tier(self, future: Future, rng: random.Random) -> SimulatedTier[int]:
        """Return the cache of a rank that needs super-samples when the future says so, empty."""
        return SimulatedTier(
            Residents(policy_factory(self.policy)(future), self.limit_bytes),
            attrgetter("row"),
            bytes_per_second=self.bytes_per_second,
            latency=self.latency,
            rng=rng,
            name=self.name,
        )
