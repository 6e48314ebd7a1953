"""The warm tier as the fetcher sees it: a place before the bucket that may be late, lack or lose anything.

Its backend, a proxy in this process or a client of one elsewhere, is opened in the background. Until that has
succeeded every read is a miss, and after a failure it is left alone for some time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.errors import StokerError

_log = logging.getLogger("stoker.warm.lazy")

_RETRY_SECONDS = 30.0


class TierBackend(Protocol):
    """Keeps objects by their names: a :class:`~stoker_warm._proxy.Proxy`, or a client of one."""

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object and return True, or False if it is not to be had.

        Raises:
            StoreError: the backend cannot be reached.
        """
        ...

    def offer(self, name: str, data: memoryview) -> None:
        """Keep an object some time; must not block, and copies what it keeps."""
        ...

    def drop(self, name: str) -> None:
        """Deliver an object no more: its bytes were wrong. Must not block."""
        ...

    async def close(self) -> None:
        """Release what it holds here. Idempotent."""
        ...


class ManagedBackend(TierBackend, Protocol):
    """A backend with what the command line asks for."""

    async def status(self, *, wakes: bool = False) -> Mapping[str, Any]:
        """Return figures as :class:`~stoker_warm._proxy.Proxy` does; calls all nodes first if it ``wakes``."""
        ...

    async def down(self, *, forgets: bool = False) -> list[str]:
        """Have nodes return, and drop what they hold if it ``forgets``; return what went wrong."""
        ...


class WarmTier:
    """A :class:`~stoker.abc.Tier` over a backend. For a fetcher, which asks the store as well when it is late.

    Args:
        backend: keeps the objects.
        max_object_bytes: size of the largest object that it can keep; None if that is not known.
    """

    name = "warm"

    def __init__(self, backend: TierBackend, *, max_object_bytes: int | None = None) -> None:
        self.backend, self.max_object_bytes = backend, max_object_bytes

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there.

        Raises:
            StoreError: the backend cannot be reached.
        """
        return await self.backend.read(name_of(ref), into)

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep an object that came from the bucket."""
        self.backend.offer(name_of(ref), data)

    def reject(self, ref: ObjectRef) -> None:
        """Forget an object of which wrong bytes were read."""
        self.backend.drop(name_of(ref))

    async def close(self) -> None:
        """Close the backend. Idempotent."""
        await self.backend.close()


class LazyBackend:
    """A :class:`TierBackend` that is opened in the background at the first read; each process has its own.

    Args:
        open_backend: opens it.
        retry_seconds: after a failure it is not opened again for this long.
    """

    def __init__(
        self, open_backend: Callable[[], Awaitable[TierBackend]], *, retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        self._open_backend, self._retry_seconds = open_backend, retry_seconds
        self._pid = os.getpid()
        self._backend: TierBackend | None = None
        self._opening: asyncio.Task[None] | None = None
        self._retry_at_seconds = float("-inf")

    @property
    def backend(self) -> TierBackend | None:
        """The backend while it is open in this process, else None."""
        return self._backend if self._pid == os.getpid() else None

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is there; begins to open the backend if it is not open."""
        if self.backend is None:
            self._begin()
            return False
        return await self.backend.read(name, into)

    def offer(self, name: str, data: memoryview) -> None:
        """Keep an object, if the backend is open."""
        if self.backend is not None:
            self.backend.offer(name, data)

    def drop(self, name: str) -> None:
        """Forget an object, if the backend is open."""
        if self.backend is not None:
            self.backend.drop(name)

    async def close(self) -> None:
        """Close what was opened. Idempotent; a read opens it anew."""
        if self._pid != os.getpid():
            self._forget()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    def _begin(self) -> None:
        if self._pid != os.getpid():
            self._forget()
        if self._opening is None and asyncio.get_running_loop().time() >= self._retry_at_seconds:
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            self._backend = await self._open_backend()
        except StokerError as error:
            self._retry_at_seconds = asyncio.get_running_loop().time() + self._retry_seconds
            _log.warning(
                "the warm tier cannot be used: %s; it is tried again in %g s, the bucket serves meanwhile",
                error,
                self._retry_seconds,
            )
        finally:
            self._opening = None

    def _forget(self) -> None:
        """Begin with nothing: what there is belongs to the process that this one was forked from."""
        self._pid, self._backend, self._opening, self._retry_at_seconds = os.getpid(), None, None, float("-inf")
