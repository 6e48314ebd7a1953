"""The warm tier as the fetcher sees it: one more nearer place, which may be late, lack, lose or spoil anything.

What reads and keeps its objects, a keeper, is opened when it is first read from, and done without while it cannot
be.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.errors import StokerError


class Keeper(Protocol):
    """What keeps objects by their names: a :class:`~stoker_warm._proxy.Proxy`, or a client of one."""

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object and return True, or False if it is not to be had.

        Raises:
            StoreError: the keeper cannot be reached.
        """
        ...

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time; must not block, and copies what it keeps."""
        ...

    async def close(self) -> None:
        """Release what it holds here. Idempotent."""
        ...


class WarmTier:
    """A :class:`~stoker.abc.Tier` over a keeper. For a fetcher, which asks the store as well when it is late.

    Args:
        keeper: of the objects.
    """

    name = "warm"

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there.

        Raises:
            StoreError: the keeper cannot be reached.
        """
        return await self._keeper.read(name_of(ref), into)

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Have an object kept that came from the bucket."""
        self._keeper.offer(name_of(ref), data)

    async def close(self) -> None:
        """Release the keeper. Idempotent."""
        await self._keeper.close()


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
