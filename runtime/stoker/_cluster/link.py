"""A connection to a cache process that is made again when it was lost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from stoker._base.task_group import end_tasks
from stoker._cluster.connection import Connection
from stoker.errors import StokerError


class Link:
    """A connection that is made at its first use, and again when it was lost. Belongs to one event loop.

    Args:
        open_connection: makes the connection; raises StokerError or OSError if the process cannot be reached.
        on_failure: called with the text of a failure, but not again while it stays the same.
        retry_seconds: time from the first try that failed to the next one, which doubles up to ``max_retry_seconds``.
        lost_seconds: time out of reach after which the process counts as lost; it is then tried without a use.
        on_change: called when the process becomes lost, or is reached again.

    Attributes:
        present: the connection if there is one; it may have ended.
        is_lost: whether the process counts as lost.
    """

    def __init__(
        self,
        open_connection: Callable[[], Awaitable[Connection]],
        on_failure: Callable[[str], object],
        *,
        retry_seconds: float,
        max_retry_seconds: float,
        lost_seconds: float = math.inf,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self._open, self._on_failure, self._on_change = open_connection, on_failure, on_change
        self._retry_seconds, self._max_retry_seconds = retry_seconds, max_retry_seconds
        self._lost_seconds = lost_seconds
        self._connecting: asyncio.Task[Connection | None] | None = None
        self._begun_seconds, self._next_seconds, self._pause_seconds = 0.0, -math.inf, retry_seconds
        self._failing_since, self._problem = math.inf, ""
        self._timer: asyncio.TimerHandle | None = None
        self.present: Connection | None = None
        self.is_lost = False

    async def connection(self, within_seconds: float = math.inf) -> Connection | None:
        """Return the connection; None if there is none, or not within this time of the first call that waits for it."""
        if self.present is not None and not self.present.is_lost:
            return self.present
        self.present = None
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._next_seconds:
                return None
            self._connect_soon()
        connecting, left_seconds = self._connecting, self._begun_seconds + within_seconds - loop.time()
        assert connecting is not None  # noqa: S101 - for type checkers: it has begun
        done, _ = await asyncio.wait([connecting], timeout=None if math.isinf(left_seconds) else max(0.0, left_seconds))
        return None if not done or connecting.cancelled() else connecting.result()

    def forget_failures(self) -> None:
        """Connect at the next use: there is a new address, or another reason why it may succeed now."""
        self._next_seconds, self._pause_seconds, self._failing_since = -math.inf, self._retry_seconds, math.inf
        self._set_lost(is_lost=False)

    async def close(self) -> None:
        """End the connection, once what was given has arrived."""
        self._set_lost(is_lost=False)
        if self._connecting is not None:
            await end_tasks([self._connecting])
        if self.present is not None:
            await self.present.close()

    def _connect_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            self._begun_seconds, self._connecting = loop.time(), loop.create_task(self._connect())

    async def _connect(self) -> Connection | None:
        loop = asyncio.get_running_loop()
        try:
            self.present = await self._open()
            self._problem = ""
            self.forget_failures()
        except (StokerError, OSError) as error:
            self._failing_since = min(self._failing_since, loop.time())
            self._next_seconds = loop.time() + self._pause_seconds
            if str(error) != self._problem:
                self._on_failure(str(error))
            self._problem = str(error)
            self._set_lost(is_lost=loop.time() - self._failing_since >= self._lost_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, self._max_retry_seconds)
        finally:
            self._connecting = None
        return self.present

    def _set_lost(self, *, is_lost: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if is_lost:  # it is not used any more
            self._timer = asyncio.get_running_loop().call_later(self._pause_seconds, self._connect_soon)
        if is_lost is not self.is_lost:
            self.is_lost = is_lost
            self._on_change()
