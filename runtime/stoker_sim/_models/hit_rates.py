"""How often a cache has what is read, found by asking its policy about every reading of known epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stoker._cache.eviction import Residents, policy_factory

__all__ = ["hit_rates"]


class _Epochs:
    """The objects that one node reads, epoch after epoch; and, of each reading, when the same object is read next."""

    def __init__(self, epochs: Sequence[NDArray[np.int64]]) -> None:
        self.sequence = np.concatenate(epochs)
        self.present = -1
        self._next = np.full(len(self.sequence), np.iinfo(np.int64).max)
        order = np.argsort(self.sequence, kind="stable")
        for before, after in pairwise(order.tolist()):
            if self.sequence[before] == self.sequence[after]:
                self._next[before] = after
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
        policy: one of :data:`~stoker._cache.eviction.POLICIES`.

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
