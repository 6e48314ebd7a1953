"""Bytes that may be held at a time: who asks for more waits, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stoker.errors import BudgetError

__all__ = ["ByteBudget"]


class ByteBudget:
    """Lends out ``limit_bytes``. Belongs to one event loop.

    The order of arrival keeps those who need much from being passed for ever by those who need little.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Lent out now."""
        return self._held_bytes

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold bytes for a while, after waiting for them.

        Raises:
            BudgetError: there are never so many.
        """
        await self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def acquire(self, size_bytes: int) -> None:
        """Wait for bytes and hold them until they are released. A wait that is cancelled leaves none behind.

        Raises:
            BudgetError: there are never so many.
        """
        if size_bytes > self.limit_bytes:
            raise BudgetError(f"{size_bytes} bytes are more than the {self.limit_bytes} there are; give more memory")
        if self._waiting or self._held_bytes + size_bytes > self.limit_bytes:
            await self._wait(size_bytes)
        else:
            self._held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back bytes that were acquired."""
        self._held_bytes -= size_bytes
        self._admit()

    async def _wait(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._held_bytes -= size_bytes  # they were granted just before
            self._admit()  # whom this one was in the way of
            raise

    def _admit(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if self._held_bytes + size_bytes > self.limit_bytes:
                    return
                self._held_bytes += size_bytes
                turn.set_result(None)
            self._waiting.popleft()
