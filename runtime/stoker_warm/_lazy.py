"""A keeper that is opened when it is first read from, and done without while it cannot be."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from stoker.errors import StokerError
from stoker_warm._tier import Keeper

__all__ = ["LazyKeeper"]

_log = logging.getLogger("stoker.warm.lazy")

_PATIENCE_SECONDS = 30.0


class LazyKeeper:
    """A :class:`~stoker_warm._tier.Keeper` that costs nothing before it is used; each process has its own.

    Args:
        open_keeper: makes the keeper ready.
        patience_seconds: after a failure it is not tried again for so long.
    """

    def __init__(
        self, open_keeper: Callable[[], Awaitable[Keeper]], *, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        self._open, self._patience_seconds = open_keeper, patience_seconds
        self._pid = os.getpid()
        self._opening: asyncio.Future[Keeper | None] | None = None
        self._keeper: Keeper | None = None
        self._failed_seconds = float("-inf")

    @property
    def keeper(self) -> Keeper | None:
        """What was opened, None before and after."""
        return self._keeper if self._pid == os.getpid() else None

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there, opening what is needed first."""
        keeper = await self._opened()
        return keeper is not None and await keeper.read(name, into)

    def offer(self, name: str, data: memoryview) -> None:
        """Have an object kept, if there is somebody to keep it."""
        if self.keeper is not None:
            self.keeper.offer(name, data)

    async def close(self) -> None:
        """Close what was opened. Idempotent; a read opens it anew."""
        if self._pid != os.getpid():
            self._forget()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        keeper, self._keeper, self._opening = self._keeper, None, None
        if keeper is not None:
            await keeper.close()

    async def _opened(self) -> Keeper | None:
        if self._pid != os.getpid():
            self._forget()
        if self._keeper is not None:
            return self._keeper
        loop = asyncio.get_running_loop()
        if self._opening is None:
            if loop.time() - self._failed_seconds < self._patience_seconds:
                return None
            self._opening = asyncio.ensure_future(self._begin())
        # Whoever wants it waits for the same one; a reader that leaves, leaves it to the others.
        await asyncio.wait([self._opening])
        return self._keeper

    async def _begin(self) -> Keeper | None:
        try:
            self._keeper = await self._open()
        except StokerError as error:
            self._failed_seconds = asyncio.get_running_loop().time()
            _log.warning(
                "the warm tier cannot be used: %s; it is tried again in %g s, the bucket serves meanwhile",
                error,
                self._patience_seconds,
            )
        finally:
            self._opening = None
        return self._keeper

    def _forget(self) -> None:
        """Forget what belongs to the process that this one was forked from."""
        self._pid, self._keeper, self._opening, self._failed_seconds = os.getpid(), None, None, float("-inf")
