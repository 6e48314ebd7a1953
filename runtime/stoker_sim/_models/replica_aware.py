"""Let go what others have too: global eviction, as Alluxio does it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from stoker._cache.eviction import Lru
from stoker.errors import ConfigError

__all__ = ["ReplicaAware"]

Key = TypeVar("Key", bound=Hashable)


class ReplicaAware(Lru[Key]):
    """Whose recency and rarity together are worth least goes first.

    The value of a resident is ``recency · recency_weight - replicas · replica_weight``, recency being 1 for who was
    used last and 0 for who was not used for longest. With a ``replica_weight`` of 0 it is
    :class:`~stoker._cache.eviction.Lru`.
    After Alluxio's global eviction, in which workers report their replicas to the master and hear all counts with its
    heartbeats; so counts may be a little old.

    Args:
        replicas: how many others have a key.
        recency_weight: and
        replica_weight: not both 0.
    """

    def __init__(
        self, replicas: Callable[[Key], int], *, recency_weight: float = 1.0, replica_weight: float = 1.0
    ) -> None:
        if not (recency_weight >= 0 and replica_weight >= 0 and recency_weight + replica_weight > 0):
            raise ConfigError(f"weights must be at least 0 and not both 0, not {recency_weight} and {replica_weight}")
        super().__init__()
        self._replicas = replicas
        self._recency_weight, self._replica_weight = recency_weight, replica_weight

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all, that worth least first; of equals, that used last last. Takes time in proportion to residents."""
        last = max(1, len(self._order) - 1)
        worth = [
            (place / last * self._recency_weight - self._replicas(key) * self._replica_weight, place, key)
            for place, key in enumerate(self._order)
        ]
        heapq.heapify(worth)
        while worth:
            yield heapq.heappop(worth)[2]
