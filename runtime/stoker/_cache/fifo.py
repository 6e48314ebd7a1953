"""First in, first out: what DELI's capped collection does."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Fifo"]

Key = TypeVar("Key", bound=Hashable)


class Fifo(Generic[Key]):
    """Who came first goes first, however often it is used.

    N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-B.
    """

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        """Nothing changes."""

    def added(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = None

    def removed(self, key: Key) -> None:
        """It leaves the line."""
        del self._order[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all, in the order in which they came."""
        return iter(self._order)
