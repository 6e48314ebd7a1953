"""A machine's processors, in the loop's time, and reading that ends in decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from stoker.abc import ObjectInfo, Readable
from stoker.errors import ConfigError
from stoker_sim._models.link import Shared

__all__ = ["DecodingView", "Processors"]


class Processors:
    """Cores that jobs share evenly, each on one of them at most.

    Attributes:
        cores: how many.
        busy_seconds: of work that was given to them, in seconds of one core.
    """

    def __init__(self, cores: int) -> None:
        if cores < 1:
            raise ConfigError(f"a machine has at least 1 core, not {cores}")
        self.cores = cores
        self.busy_seconds = 0.0
        self._shared = Shared(lambda jobs: min(1.0, cores / jobs))

    async def work(self, seconds: float) -> None:
        """Take what so many seconds of a core take beside the other jobs."""
        self.busy_seconds += seconds
        await self._shared.serve(seconds)


class DecodingView:
    """Another :class:`~stoker.abc.Readable`, each of whose ranges is decoded once it is there.

    Args:
        wrapped: what is read.
        processors: decode it,
        seconds: in so long.
    """

    def __init__(self, wrapped: Readable, processors: Processors, seconds: float) -> None:
        self._wrapped, self._processors, self._seconds = wrapped, processors, seconds

    @property
    def url(self) -> str:
        """The other one's."""
        return self._wrapped.url

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read, and decode."""
        info = await self._wrapped.get_range(key, start, end, into=into, tag=tag, begun=begun)
        await self._processors.work(self._seconds)
        return info

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read a whole object, and decode."""
        found = await self._wrapped.get(key)
        await self._processors.work(self._seconds)
        return found

    async def head(self, key: str) -> ObjectInfo:
        """Return what the other one says."""
        return await self._wrapped.head(key)

    def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Return what the other one says."""
        return self._wrapped.list(prefix, start_after=start_after)
