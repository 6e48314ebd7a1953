"""Connections belong to the event loop and the process that opened them: one set per loop, none across a fork."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerLoop"]

_T = TypeVar("_T")

# What a forked child found in its memory. It is kept, not closed: closing would say goodbye on the parent's TLS
# connections and take its sockets out of the epoll set that the two processes share.
_inherited: list[object] = []


class PerLoop(Generic[_T]):
    """One value per event loop, made on first use in it; loops in several threads may use the same one."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._pid = os.getpid()
        # No lock: each entry is written only by its own loop's thread, and a lock may be held while forking.
        self._made: dict[asyncio.AbstractEventLoop, _T] = {}

    def get(self) -> _T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        self._drop_dead()
        if (value := self._made.get(loop)) is None:
            value = self._made[loop] = self._make()
        return value

    def take(self) -> _T | None:
        """Remove and return the running loop's value, for its end; None if there is none."""
        self._drop_dead()
        return self._made.pop(asyncio.get_running_loop(), None)

    def _drop_dead(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._made)
            self._made, self._pid = {}, os.getpid()
        for loop in [loop for loop in tuple(self._made) if loop.is_closed()]:
            self._made.pop(loop, None)
