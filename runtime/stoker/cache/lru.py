"""Least recently used: what most caches do, and what an epoch's order defeats."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Lru"]

Key = TypeVar("Key", bound=Hashable)


class Lru(Generic[Key]):
    """Who was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = self._order.pop(key)

    def added(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = None

    def removed(self, key: Key) -> None:
        """It leaves the line."""
        del self._order[key]

    def victims(self, newcomer: Key) -> Iterator[Key]:
        """Yield all, that used last last."""
        return iter(self._order)
