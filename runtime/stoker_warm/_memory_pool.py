"""Memory that is lent out and comes back by itself, once nobody refers to it any more.

What is read for several clients at once is sent to each at its own pace, and who will be the last to need it is not
known before. The interpreter knows: views keep what is behind them alive, and its end is noticed.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVarTuple

import numpy as np

from stoker._memory.budget import ByteBudget

__all__ = ["Lent", "MemoryAccount", "MemoryPool"]

Ts = TypeVarTuple("Ts")

_LEAST_BYTES = 4096


class Lent(NamedTuple):
    """Memory of a pool.

    Attributes:
        memory: of whatever content.
        give_back: gives it back before its last view is gone, once nobody uses these any more: the frames of a task
            that was cancelled may be around for long. Idempotent.
    """

    memory: memoryview
    give_back: Callable[[], object]


class MemoryPool:
    """Lends memory of any size, and uses it again; belongs to one event loop.

    All that is lent out and kept for later is ``limit_bytes`` at most. Who asks for more waits, in order of arrival.

    Args:
        limit_bytes: of all memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)
        self._spare: list[bytearray] = []
        self._spare_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """What others have now; sizes are rounded up, by a quarter at most."""
        return self._budget.held_bytes

    @property
    def most_bytes(self) -> int:
        """The size of the largest memory that can be had."""
        return self._budget.limit_bytes

    async def take(self, size_bytes: int) -> Lent:
        """Return memory, after waiting for it. It is taken back when no view of it is left.

        Raises:
            BudgetError: there is never so much.
        """
        if not size_bytes:
            return Lent(memoryview(bytearray()), bytes)
        rounded = min(_rounded(size_bytes), max(size_bytes, self._budget.limit_bytes))
        await self._budget.acquire(rounded)
        memory = self._spare_of(rounded)
        array = np.frombuffer(memory, np.uint8, size_bytes)
        return Lent(array.data, _when_gone(array, self._back, memory))

    def _spare_of(self, size_bytes: int) -> bytearray:
        for place, memory in enumerate(self._spare):
            if len(memory) == size_bytes:
                self._spare_bytes -= size_bytes
                return self._spare.pop(place)
        while self._spare and self._budget.held_bytes + self._spare_bytes > self._budget.limit_bytes:
            self._spare_bytes -= len(self._spare.pop(0))
        return bytearray(size_bytes)

    def _back(self, memory: bytearray) -> None:
        self._spare.append(memory)
        self._spare_bytes += len(memory)
        self._budget.release(len(memory))


class MemoryAccount:
    """Makes memory that is counted for as long as it exists; belongs to one event loop.

    Args:
        limit_bytes: of all memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory, None if it would be too much in all."""
        if self.held_bytes + size_bytes > self._limit_bytes:
            return None
        self.held_bytes += size_bytes
        made = _Counted(size_bytes)
        _when_gone(made, self._gone, size_bytes)
        return made

    def _gone(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


class _Counted(bytearray):
    """Memory whose end can be noticed, which that of a bytearray cannot."""


def _when_gone(thing: object, call: Callable[[*Ts], None], *args: *Ts) -> Callable[[], object]:
    """Call something from the running loop once nothing refers to a thing any more, or what is returned was called.

    That may come to pass in a thread, or in the middle of anything; what is called is called between two things.
    """
    loop = asyncio.get_running_loop()

    def gone() -> None:
        with suppress(RuntimeError):  # the loop is closed, and what it served with it
            loop.call_soon_threadsafe(call, *args)

    finalizer = weakref.finalize(thing, gone)
    finalizer.atexit = False
    return finalizer


def _rounded(size_bytes: int) -> int:
    """Return the size rounded up to a quarter of a power of two, so that few sizes are in use."""
    step = max(_LEAST_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step
