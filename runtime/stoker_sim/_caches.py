"""Caches of a node in virtual time: real eviction policies and byte accounts, without the bytes."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import BoundedConfig, NotNegative, Positive
from stoker._cache.eviction import CacheEntries, Lru, policy_factory
from stoker._cache.index import AccessForecast
from stoker._diagnostics.latency import Constant, Latency
from stoker.abc import EvictionPolicy, ObjectRef
from stoker_sim._bucket import SharedLink

Key = TypeVar("Key", bound=Hashable)
REPLICA_AWARE = "replica-aware"
"""Policy of simulated caches only: a loader's cache does not know what the caches of other nodes hold."""


class ModelledTier:
    """Base class of tiers on a virtual clock: a :class:`~stoker.abc.Tier` whose reads take time and move no bytes."""

    name = "cache"

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Discard the object."""

    async def close(self) -> None:
        """Do nothing."""


class SettledTier(ModelledTier):
    """A tier with a constant hit rate.

    Args:
        device: link that all readers share.
        hit_rate: fraction of reads that hit, 0 to 1.
    """

    def __init__(self, device: SharedLink, hit_rate: float) -> None:
        self._device, self._hit_rate, self._reads = device, hit_rate, 0

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes and return True; return False at once on a miss. ``into`` is unchanged."""
        self._reads += 1
        if int(self._reads * self._hit_rate) == int((self._reads - 1) * self._hit_rate):
            return False
        await self._device.serve(ref.size_bytes)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel(BoundedConfig):
    """Model of one node's cache.

    Attributes:
        name: name of the cache in the results.
        limit_bytes: capacity in bytes.
        policy: name of the eviction policy: one of a loader's cache, or ``replica-aware``.
        bytes_per_second: bandwidth of the device, shared by all readers.
        latency: distribution of the time to a read's first byte.
    """

    name: str = "disk"
    limit_bytes: NotNegative[int]
    policy: str = "next-use"
    bytes_per_second: Positive[float] = 2e9
    latency: Latency = field(default_factory=lambda: Constant(0.0001))

    def create_tier(self, future: AccessForecast, rng: random.Random, copies: Counter[int]) -> SimulatedCache[int]:
        """Return the empty cache of one rank.

        Args:
            future: access forecast of the rank.
            rng: generator of latencies.
            copies: number of ranks whose cache of this model holds each super-sample; all ranks share the counter.
        """
        is_shared = self.policy == REPLICA_AWARE
        policy: EvictionPolicy[int] = ReplicaAware(copies) if is_shared else policy_factory(self.policy)(future)
        return SimulatedCache(CacheEntries(policy, self.limit_bytes), attrgetter("row"), self, rng)


class SimulatedCache(ModelledTier, Generic[Key]):
    """A simulated cache, shared by all nodes that get the same instance.

    An offered object is stored at once and takes no time on the device, since a tier writes in the background.

    Args:
        entries: entries of the cache with their eviction policy.
        key_of: function from an object to its key in ``entries``: its row for policies that know the order.
        model: model of the cache; its limit and policy are those of ``entries``.
        rng: generator of latencies.
    """

    def __init__(
        self, entries: CacheEntries[Key], key_of: Callable[[ObjectRef], Key], model: CacheModel, rng: random.Random
    ) -> None:
        self.entries, self.name = entries, model.name
        self._key_of, self._latency, self._rng, rate = key_of, model.latency, rng, model.bytes_per_second
        self._device = SharedLink(connection_bytes_per_second=rate, total_bytes_per_second=rate)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes and return True; return False at once on a miss. ``into`` is unchanged."""
        if not self.entries.look_up(self._key_of(ref)):
            return False
        await asyncio.sleep(self._latency.draw(self._rng))
        await self._device.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Store the object if the policy admits it."""
        self.entries.offer(self._key_of(ref), ref.size_bytes)


class ReplicaAware(Lru[Key]):
    """Global eviction: evicts the entry with the least value, which falls with its age and its number of copies.

    The value of an entry is ``recency - other copies``, where recency is 1 for the entry used last and 0 for the least
    recently used one. After Alluxio's global eviction, in which workers report their replicas to the master and receive
    all counts with its heartbeats; here counts are always current.

    Args:
        copies: counter of the caches that hold each key, which these caches share.
    """

    def __init__(self, copies: Counter[Key]) -> None:
        super().__init__()
        self._copies = copies

    def added(self, key: Key) -> None:
        """Count a copy."""
        super().added(key)
        self._copies[key] += 1

    def removed(self, key: Key) -> None:
        """Remove a copy from the count."""
        super().removed(key)
        self._copies[key] -= 1

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all entries by rising value; of equal ones, the least recently used first. O(n) before the first."""
        last = max(1, len(self._order) - 1)
        worth = [(position / last - (self._copies[key] - 1), position, key) for position, key in enumerate(self._order)]
        heapq.heapify(worth)
        while worth:
            yield heapq.heappop(worth)[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCache:
    """A cache of a planned training.

    Attributes:
        size_bytes: capacity in bytes.
        bytes_per_second: bandwidth of its device.
        is_per_rank: whether each rank has its own cache, as in memory; otherwise the ranks of a node share one, as on a
            disk.
    """

    size_bytes: int
    bytes_per_second: float = 2e9
    is_per_rank: bool = False


class _ReadSequence:
    """The sequence of objects that one node reads over all epochs, with the position of each object's next read."""

    def __init__(self, epochs: Sequence[NDArray[np.integer]]) -> None:
        self.sequence = np.concatenate(epochs)
        self.present = -1
        self._next = np.full(len(self.sequence), np.iinfo(np.int64).max)
        order = np.argsort(self.sequence, kind="stable")
        is_again = self.sequence[order[:-1]] == self.sequence[order[1:]]
        self._next[order[:-1][is_again]] = order[1:][is_again]
        self._latest: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        for present, key in enumerate(self.sequence.tolist()):
            self.present = self._latest[key] = present
            yield key

    def next_use(self, key: int) -> int:
        """Return the position at which a key that was read before is read next."""
        return int(self._next[self._latest[key]])


def hit_rates(epochs: Sequence[NDArray[np.integer]], capacity: int, policy: str) -> list[float]:
    """Return the hit rate of each epoch of a node that offers all objects it reads to its cache.

    Args:
        epochs: for each epoch an integer array ``[reads]`` of the objects read.
        capacity: capacity of the cache, in objects.
        policy: name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.

    Raises:
        ConfigError: there is no such policy.
    """
    known = _ReadSequence(epochs)
    residents: CacheEntries[int] = CacheEntries(policy_factory(policy)(known), capacity)
    hits = []
    for key in known:
        hits.append(residents.look_up(key))
        residents.offer(key)
    ends = np.cumsum([len(epoch) for epoch in epochs])
    return [float(np.mean(each)) for each in np.split(np.array(hits), ends[:-1])]


_SIMULATED_OBJECTS, _SIMULATED_EPOCHS, _FIRST_SETTLED_EPOCH = 300, 12, 6
"""Objects a reader reads in an epoch, epochs, and the first epoch with a settled cache. Takes milliseconds."""


def settled_hit_rate(share: float, caches: int, policy: str) -> float:
    """Return the hit rate of a settled cache, found by running the policy on epochs of 300 objects.

    A single reader reads the whole data set in each epoch, in another order; one of several reads another random part.

    Args:
        share: capacity of the cache, as a fraction of the bytes that its reader reads in an epoch.
        caches: number of caches, each with its own reader; an epoch is divided among the readers.
        policy: name of the eviction policy.
    """
    capacity = int(share * _SIMULATED_OBJECTS)
    if not capacity or share >= caches:
        return float(capacity > 0)
    rng = np.random.default_rng(0)
    epochs = [rng.permutation(_SIMULATED_OBJECTS * caches)[:_SIMULATED_OBJECTS] for _ in range(_SIMULATED_EPOCHS)]
    settled = hit_rates(epochs, capacity, policy)[
        _FIRST_SETTLED_EPOCH : _SIMULATED_EPOCHS - 1
    ]  # the last one has no next uses
    return float(np.mean(settled))
