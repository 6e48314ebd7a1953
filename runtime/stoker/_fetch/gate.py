"""Permits for requests: as many at once as the controller allows, the urgent first, the rest in order of arrival."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from stoker._fetch.aimd import Aimd

__all__ = ["Gate"]


class Gate:
    """Lets at most ``aimd.limit`` requests through at a time; hedges come on top of it, but count against it."""

    def __init__(self, aimd: Aimd) -> None:
        self._aimd = aimd
        self._in_flight = 0
        self._arrivals = 0
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []

    @property
    def in_flight(self) -> int:
        """Permits held now."""
        return self._in_flight

    @property
    def saturated(self) -> bool:
        """Whether somebody waits for a permit."""
        return bool(self._waiting)

    @asynccontextmanager
    async def permit(self, *, urgent: bool) -> AsyncIterator[None]:
        """Hold a permit, after waiting for it. A wait that is cancelled leaves none behind."""
        if self._waiting or self._in_flight >= self._aimd.limit:
            await self._wait(urgent)
        else:
            self._in_flight += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def extra(self) -> Iterator[None]:
        """Hold a permit without waiting, over the limit if need be: for a hedge, which has a budget of its own."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, urgent: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._waiting, (not urgent, self._arrivals, turn))
        self._admit()  # the limit may have risen since the last one left
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the permit was granted just before
            raise

    def _leave(self) -> None:
        self._in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][2].done() or self._in_flight < self._aimd.limit):
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():  # else its waiter was cancelled
                self._in_flight += 1
                turn.set_result(None)
