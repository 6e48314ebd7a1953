"""Caches of a node in virtual time: real policies and real accounts of bytes, on devices that move none."""

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

from stoker._base.arguments import Bounded, NotNegative, Positive
from stoker._cache.eviction import Lru, Residents, policy_factory
from stoker._cache.keeper import Future
from stoker._diagnostics.latency import Constant, Latency
from stoker.abc import EvictionPolicy, ObjectRef
from stoker_sim._bucket import SharedLink

Key = TypeVar("Key", bound=Hashable)
REPLICA_AWARE = "replica-aware"
"""The policy that only a simulated cache has: a loader's does not know what the caches of other nodes hold."""


class ModelledTier:
    """A :class:`~stoker.abc.Tier` on a virtual-clock loop: what a read takes is its subclass's, and no bytes move."""

    name = "cache"

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep nothing that is not here."""

    async def close(self) -> None:
        """Nothing to release."""


class SettledTier(ModelledTier):
    """A tier that finds a steady part of what it is asked for.

    Args:
        device: that all who read share.
        hit_rate: that part, 0 to 1.
    """

    def __init__(self, device: SharedLink, hit_rate: float) -> None:
        self._device, self._hit_rate, self._asked = device, hit_rate, 0

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Take the time of a read where the object is here; ``into`` is left as it is."""
        self._asked += 1
        if int(self._asked * self._hit_rate) == int((self._asked - 1) * self._hit_rate):
            return False
        await self._device.serve(ref.size_bytes)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel(Bounded):
    """A cache of one node.

    Attributes:
        name: in the results.
        limit_bytes: what it holds.
        policy: name of the eviction policy, as a loader's cache has it, or ``replica-aware``.
        bytes_per_second: of its device; all who read share it.
        latency: before a read's first byte.
    """

    name: str = "disk"
    limit_bytes: NotNegative[int]
    policy: str = "next-use"
    bytes_per_second: Positive[float] = 2e9
    latency: Latency = field(default_factory=lambda: Constant(0.0001))

    def tier(self, future: Future, rng: random.Random, copies: Counter[int]) -> SimulatedTier[int]:
        """Return the empty cache of one rank.

        Args:
            future: when the rank needs each super-sample next.
            rng: source of what is drawn.
            copies: number of ranks whose cache of this model holds each super-sample; all ranks share the counter.
        """
        is_shared = self.policy == REPLICA_AWARE
        policy: EvictionPolicy[int] = ReplicaAware(copies) if is_shared else policy_factory(self.policy)(future)
        return SimulatedTier(Residents(policy, self.limit_bytes), attrgetter("row"), self, rng)


class SimulatedTier(ModelledTier, Generic[Key]):
    """A cache. Nodes that are given the same one share it.

    What is offered is resident at once and costs the device nothing: a tier writes behind its readers' backs.

    Args:
        residents: what is here, in bytes, by the policy under test.
        key_of: what the residents call an object: its row for policies that know the order, else its key.
        model: of the cache, whose limit and policy are the residents' own.
        rng: for what is drawn.
    """

    def __init__(
        self, residents: Residents[Key], key_of: Callable[[ObjectRef], Key], model: TierModel, rng: random.Random
    ) -> None:
        self.residents, self.name = residents, model.name
        self._key_of, self._latency, self._rng, rate = key_of, model.latency, rng, model.bytes_per_second
        self._device = SharedLink(connection_bytes_per_second=rate, total_bytes_per_second=rate)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Take the time that a read would if the object is here, none if it is not; ``into`` is left as it is."""
        if not self.residents.look_up(self._key_of(ref)):
            return False
        await asyncio.sleep(self._latency.draw(self._rng))
        await self._device.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep the object if the policy wants it."""
        self.residents.offer(self._key_of(ref), ref.size_bytes)


class ReplicaAware(Lru[Key]):
    """Global eviction: evicts first the entry whose recency and rarity together are worth least.

    The value of an entry is ``recency - other copies``, where recency is 1 for the entry used last and 0 for the least
    recently used one. After Alluxio's global eviction, in which workers report their replicas to the master and receive
    all counts with its heartbeats; here counts are never late.

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
        """Count a copy less."""
        super().removed(key)
        self._copies[key] -= 1

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all entries by rising value; of equals, the least recently used first. Takes time linear in entries."""
        last = max(1, len(self._order) - 1)
        worth = [(place / last - (self._copies[key] - 1), place, key) for place, key in enumerate(self._order)]
        heapq.heapify(worth)
        while worth:
            yield heapq.heappop(worth)[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A nearer place.

    Attributes:
        size_bytes: that it may hold.
        bytes_per_second: of its device.
        is_of_rank: whether each rank has one of its own, as in its memory; else a node's ranks share one, as a disk.
    """

    size_bytes: int
    bytes_per_second: float = 2e9
    is_of_rank: bool = False


class _Epochs:
    """The objects that one node reads, epoch after epoch; and, of each reading, when the same object is read next."""

    def __init__(self, epochs: Sequence[NDArray[np.int64]]) -> None:
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
        """Return when a key that was read before is read next."""
        return int(self._next[self._latest[key]])


def hit_rates(epochs: Sequence[NDArray[np.int64]], capacity: int, policy: str) -> list[float]:
    """Return the hit rate of each epoch of a node whose cache takes what it reads.

    Args:
        epochs: ``int64 [readings]``, the objects that are read in each.
        capacity: of the cache, in objects.
        policy: name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.

    Raises:
        ConfigError: there is no such policy.
    """
    known = _Epochs(epochs)
    residents: Residents[int] = Residents(policy_factory(policy)(known), capacity)
    hits = []
    for key in known:
        hits.append(residents.look_up(key))
        residents.offer(key)
    ends = np.cumsum([len(epoch) for epoch in epochs])
    return [float(np.mean(each)) for each in np.split(np.array(hits), ends[:-1])]


_HIT_OBJECTS, _HIT_EPOCHS, _HIT_SETTLED = 300, 12, 6
"""Of a reader in an epoch; epochs; and from which of them on a cache counts as settled. Costs milliseconds."""


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
