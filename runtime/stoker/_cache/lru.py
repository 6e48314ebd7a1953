"""Least recently used: what most caches do, and what an epoch's order defeats."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from stoker._cache.fifo import Fifo

__all__ = ["Lru"]

Key = TypeVar("Key", bound=Hashable)


class Lru(Fifo[Key]):
    """Who was not used for longest goes first: a line at whose end everybody begins again who is used."""

    def used(self, key: Key) -> None:
        """It is last in line."""
        self._order[key] = self._order.pop(key)
