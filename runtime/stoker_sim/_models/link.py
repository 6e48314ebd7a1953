"""What is shared evenly, in the loop's time: a network by its transfers, a machine by its jobs."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from itertools import count

__all__ = ["Shared", "SharedLink"]


_End = tuple[float, int, asyncio.Future[None]]
"""The work that is done for all when somebody's is, a number that nobody else has, and his turn to go."""


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
        self._ends: list[_End] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timed: tuple[_End, float] | None = None
        """Who is waited for, and at which rate."""

    @property
    def next_end_seconds(self) -> float:
        """When somebody is done if nobody comes or goes before, in the loop's time; infinity if nobody is served."""
        return math.inf if self._timer is None else self._timer.when()

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
        except asyncio.CancelledError:
            if turn.cancelled():  # else it was done just before
                self._settle(loop.time())
                self._served -= 1
                self._plan(loop)
            raise

    def set_rate(self, rate: Callable[[int], float]) -> None:
        """Serve all at another rate from now on; what has been done stays done."""
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        self._rate_of = rate
        self._plan(loop)

    def _rate(self) -> float:
        return self._rate_of(max(1, self._served))

    def _settle(self, now_seconds: float) -> None:
        self._done += (now_seconds - self._settled_seconds) * self._rate()
        self._settled_seconds = now_seconds

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the one timer to who is done first; those that were cancelled have nothing to wait for."""
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        timed = (self._ends[0], self._rate()) if self._ends else None
        if timed == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed, self._timer = timed, None
        if timed is not None:
            (end, _, _), rate = timed
            self._timer = loop.call_later(max(0.0, end - self._done) / rate, self._end_first)

    def _end_first(self) -> None:
        loop = asyncio.get_running_loop()
        self._settle(loop.time())
        self._done = max(self._done, self._ends[0][0])  # what rounding has left of it
        self._timed = self._timer = None
        while self._ends and self._ends[0][0] <= self._done:
            turn = heapq.heappop(self._ends)[2]
            if not turn.done():
                turn.set_result(None)
                self._served -= 1
        self._plan(loop)


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
