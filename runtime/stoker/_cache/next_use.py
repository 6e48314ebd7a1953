"""Keep what is needed again soonest: Belady's rule, which an order that is known ahead lets one follow."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, TypeVar

__all__ = ["NextUse"]

Key = TypeVar("Key", bound=Hashable)
_Entry = tuple[int, int, Key]
"""When it is needed, a number that no other entry has, and who."""

_MOST_STALE = 4
"""Entries a resident, at most, before those that are out of date are dropped."""


class NextUse(Generic[Key]):
    """Whose next use is farthest goes first, and a newcomer whose own is farther than all others' does not come in.

    L. Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966), with the
    rule of doing no harm: P. Cao and others, "A Study of Integrated Prefetching and Caching Strategies" (SIGMETRICS
    1995); for training, N. Dryden and others, "Clairvoyant Prefetching" (SC'21). Where all have one size it has the
    most hits that any policy can have.

    Args:
        next_use: when a key is needed next, behind the present: any number that rises with time. It may change for a
            key only when that key is used, or when its time has passed.
        present: what has passed.
    """

    def __init__(self, next_use: Callable[[Key], int], present: Callable[[], int]) -> None:
        self._next_use, self._present = next_use, present
        self._numbers = count()
        self._entries: dict[Key, _Entry[Key]] = {}
        self._soonest: list[_Entry[Key]] = []
        self._farthest: list[_Entry[Key]] = []

    def used(self, key: Key) -> None:
        """It is needed again at another time."""
        self.added(key)

    def added(self, key: Key) -> None:
        """Ask when it is needed."""
        time, number = self._next_use(key), next(self._numbers)
        self._entries[key] = time, number, key
        heapq.heappush(self._soonest, (time, number, key))
        heapq.heappush(self._farthest, (-time, number, key))
        if len(self._farthest) > _MOST_STALE * len(self._entries) + _MOST_STALE:
            self._tidy()

    def removed(self, key: Key) -> None:
        """Forget it."""
        del self._entries[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield those that are needed later than the newcomer, the latest first; of equals, who came first."""
        self._ask_again()
        own, taken = self._next_use(newcomer), list[_Entry[Key]]()
        try:
            while self._farthest and -self._farthest[0][0] > own:
                entry = heapq.heappop(self._farthest)
                if self._is_current(entry):
                    taken.append(entry)
                    yield entry[2]
        finally:
            for entry in taken:
                heapq.heappush(self._farthest, entry)

    def _is_current(self, entry: _Entry[Key]) -> bool:
        return self._entries.get(entry[2], (0, -1))[1] == entry[1]

    def _ask_again(self) -> None:
        """Ask anew of those that were not used when their time came: they would stay for ever."""
        present, passed = self._present(), list[Key]()
        while self._soonest and self._soonest[0][0] <= present:
            entry = heapq.heappop(self._soonest)
            if self._is_current(entry):
                passed.append(entry[2])
        for key in passed:
            self.added(key)

    def _tidy(self) -> None:
        """Drop the entries of times that hold no longer."""
        self._soonest = list(self._entries.values())
        self._farthest = [(-time, number, key) for time, number, key in self._soonest]
        heapq.heapify(self._soonest)
        heapq.heapify(self._farthest)
