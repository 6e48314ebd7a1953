"""A deadline that counts only time in which this process ran.

A process that was stopped (Ctrl-Z, a frozen container or function, a paused virtual machine) finds its clock minutes
ahead when it goes on. Its requests are lost, mostly, and nobody gave the store a chance to answer others: such work
gets its time anew.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

__all__ = ["Deadline"]

STOPPED_SECONDS = 5.0
"""A timer that fires so much too late was not delayed by other work."""


class Deadline:
    """Ends the block that it is entered for, with TimeoutError, some time after :meth:`start`; until then, never."""

    __slots__ = ("_begin_seconds", "_scope", "_seconds", "_timer")

    def __init__(self) -> None:
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._begin_seconds = 0.0
        self._seconds = (0.0, 0.0)

    def start(self, seconds: float, grace_seconds: float) -> None:
        """Count from now, unless it does: ``seconds`` in which things may begin, then grace for what has begun."""
        if self._timer is None:
            self._seconds = seconds, grace_seconds
            self._count()

    def forbids(self, wait_seconds: float) -> bool:
        """Return whether nothing may be begun any more after such a wait."""
        return wait_seconds >= self.left_seconds

    @property
    def left_seconds(self) -> float:
        """How long things may begin yet; no limit until it counts."""
        return math.inf if self._timer is None else self._begin_seconds - asyncio.get_running_loop().time()

    @property
    def expired(self) -> bool:
        """Whether it has ended its block."""
        return self._scope.expired()

    def _count(self) -> None:
        loop = asyncio.get_running_loop()
        seconds, grace_seconds = self._seconds
        self._begin_seconds = loop.time() + seconds
        self._timer = loop.call_at(self._begin_seconds + grace_seconds, self._due)

    def _due(self) -> None:
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds - self._begin_seconds - self._seconds[1] > STOPPED_SECONDS:
            self._count()
        else:
            self._scope.reschedule(now_seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, traceback)
