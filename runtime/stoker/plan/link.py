"""A link in the loop's time that transfers share evenly, each at most at the rate of one connection."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

__all__ = ["SharedLink"]


class SharedLink:
    """Generalised processor sharing: every transfer gets ``min(connection, total / transfers)`` bytes per second.

    Since all get the same, one number says how far everybody has come: the bytes served to each so far. A transfer
    ends when that number has grown by its size (Demers, Keshav and Shenker, "Fair Queueing", 1989, section 2).

    Args:
        connection_bytes_per_second: of one transfer at most.
        total_bytes_per_second: of all together.
    """

    def __init__(self, *, connection_bytes_per_second: float, total_bytes_per_second: float = float("inf")) -> None:
        self.connection_bytes_per_second = connection_bytes_per_second
        self.total_bytes_per_second = total_bytes_per_second
        self._served_bytes = 0.0
        self._settled_seconds = 0.0
        self._transfers = 0
        self._order = count()
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def carry(self, size_bytes: float) -> None:
        """Return when so many bytes have been served; cancelled, leave the rest to the others."""
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._served_bytes + size_bytes, next(self._order), turn))
        self._transfers += 1
        self._plan(loop)
        try:
            await turn
        finally:
            self._settle(loop.time())
            self._transfers -= 1
            self._plan(loop)

    def _rate(self) -> float:
        return min(self.connection_bytes_per_second, self.total_bytes_per_second / max(1, self._transfers))

    def _settle(self, now_seconds: float) -> None:
        self._served_bytes += (now_seconds - self._settled_seconds) * self._rate()
        self._settled_seconds = now_seconds

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the one timer to the transfer that ends first; those that were cancelled have nothing to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        if self._ends:
            left_bytes = max(0.0, self._ends[0][0] - self._served_bytes)
            self._timer = loop.call_later(left_bytes / self._rate(), self._end_first)

    def _end_first(self) -> None:
        turn = heapq.heappop(self._ends)[2]
        if not turn.done():
            turn.set_result(None)
        self._plan(asyncio.get_running_loop())
