"""A machine's processors, in the loop's time, and reading that ends in decoding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from stoker._base.meter import Operation
from stoker._base.store_wrapper import ReaderWrapper
from stoker.abc import Readable
from stoker.errors import ConfigError
from stoker_sim._models.link import Shared

__all__ = ["DecodingView", "Processors"]

T = TypeVar("T")


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


class DecodingView(ReaderWrapper[Readable]):
    """Another store to read from, each of whose answers is decoded once it is there.

    Args:
        wrapped: what is read.
        processors: CPU cores that decode.
        seconds: decode time of one answer, in seconds.
    """

    def __init__(self, wrapped: Readable, processors: Processors, seconds: float) -> None:
        super().__init__(wrapped)
        self._processors, self._seconds = processors, seconds

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Read, and decode what has bytes."""
        answer = await request()
        if operation is Operation.GET:
            await self._processors.work(self._seconds)
        return answer
