"""What is shared evenly, in the loop's time: a network by its transfers, a machine by its jobs."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from itertools import count

__all__ = ["Shared", "SharedLink"]


class Shared:
    """Processor sharing: all who are served are served at one rate, which depends on how many they are.

    So one number says how far everybody has come: the work done for each so far. Somebody is done when that number has
    grown by his work (A. Demers, S. Keshav, S. Shenker, "Analysis and Simulation of a Fair Queueing Algorithm", SIGCOMM
    1989, section 2). Serving costs O(log n).

    Args:
        rate: of each, in units of work a second, by how many are served.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate_of = rate
        self._done = 0.0
        self._settled_seconds = 0.0
        self._served = 0
        self._order = count()
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, work: float) -> None:
        """Return when so much work has been done; cancelled, leave the rest to the others."""
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._done + work, next(self._order), turn))
        self._served += 1
        self._plan(loop)
        try:
            await turn
        finally:
            self._settle(loop.time())
            self._served -= 1
            self._plan(loop)

    def _rate(self) -> float:
        return self._rate_of(max(1, self._served))

    def _settle(self, now_seconds: float) -> None:
        self._done += (now_seconds - self._settled_seconds) * self._rate()
        self._settled_seconds = now_seconds

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the one timer to who is done first; those that were cancelled have nothing to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._done)
            self._timer = loop.call_later(left / self._rate(), self._end_first)

    def _end_first(self) -> None:
        turn = heapq.heappop(self._ends)[2]
        if not turn.done():
            turn.set_result(None)
        self._plan(asyncio.get_running_loop())


class SharedLink(Shared):
    """A network: every transfer gets ``min(connection, total / transfers)`` bytes a second.

    Args:
        connection_bytes_per_second: of one transfer at most.
        total_bytes_per_second: of all together.
    """

    def __init__(self, *, connection_bytes_per_second: float, total_bytes_per_second: float = math.inf) -> None:
        super().__init__(self._share)
        self.connection_bytes_per_second = connection_bytes_per_second
        self.total_bytes_per_second = total_bytes_per_second

    def _share(self, transfers: int) -> float:
        return min(self.connection_bytes_per_second, self.total_bytes_per_second / transfers)
