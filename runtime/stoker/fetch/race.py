"""A nearer place that may be late: then the store is asked as well, and whoever is first delivers.

The rule and the budget are those of hedges: see :mod:`stoker.fetch.hedge`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from stoker.errors import StokerError
from stoker.fetch.config import FetchConfig
from stoker.fetch.hedge import TransferTimes
from stoker.fetch.range_reader import LOOK_SECONDS, RangeReader
from stoker.task_group import task_group
from stoker.tier import ObjectRef

__all__ = ["Found", "Race"]


class Found(enum.Enum):
    """Where an object came from."""

    NOWHERE = enum.auto()
    TIER = enum.auto()
    STORE = enum.auto()


class Race:
    """Reads from a tier, and from the store as well when that is late. Lives on one event loop.

    Args:
        tier: fills memory with an object, verified, and returns True; False if it cannot. Raises no StokerError.
        reader: of the store; lends memory for what is read from there, as far as budget and ring allow.
        config: when something is late.
    """

    def __init__(
        self, tier: Callable[[ObjectRef, memoryview], Awaitable[bool]], reader: RangeReader, config: FetchConfig
    ) -> None:
        self._tier, self._reader, self._config = tier, reader, config
        self._times = TransferTimes()

    async def read(self, ref: ObjectRef, into: memoryview, store: Callable[[memoryview], Awaitable[None]]) -> Found:
        """Fill ``into`` with an object and say from where; NOWHERE if the tier said in time that it cannot.

        When the call ends, however it ends, nothing writes to ``into`` any more.

        Args:
            ref: the object.
            into: memory of its size.
            store: fills other memory of this size from the store.

        Raises:
            StokerError: the tier was late and then could not, and neither could the store.
        """
        with ExitStack() as lent:
            async with task_group() as group:
                near = group.create_task(self._read_tier(ref, into))
                data = await self._memory_when_late(near, ref.size_bytes, lent)
                if data is None:
                    return Found.TIER if near.result() else Found.NOWHERE
                far = group.create_task(_failure_of(store(data)))
                await asyncio.wait([near, far], return_when=asyncio.FIRST_COMPLETED)
                if near.done() and not near.result():
                    await asyncio.wait([far])
                elif far.done() and far.result() is not None:
                    await asyncio.wait([near])
                near.cancel()
                far.cancel()
            if not near.cancelled() and near.result():
                return Found.TIER
            if (error := far.result()) is not None:
                raise error
            self._reader.won()
            into[:] = data
            return Found.STORE

    async def _memory_when_late(self, near: asyncio.Task[bool], size_bytes: int, lent: ExitStack) -> memoryview | None:
        """Return memory for a second reading as soon as the first is late; None if that ended before."""
        left_seconds = self._late_seconds(size_bytes)
        while True:
            await asyncio.wait([near], timeout=left_seconds)
            if near.done():
                return None
            if (data := self._reader.lend(size_bytes, lent)) is not None:
                return data
            left_seconds = LOOK_SECONDS

    def _late_seconds(self, size_bytes: int) -> float | None:
        config, expected_seconds = self._config, self._times.expected_seconds(size_bytes)
        if not config.hedge:
            return None
        if expected_seconds is None:
            return config.hedge_first_seconds
        return max(config.hedge_least_seconds, config.hedge_after_factor * expected_seconds)

    async def _read_tier(self, ref: ObjectRef, into: memoryview) -> bool:
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        self._reader.earn()
        found = await self._tier(ref, into)
        if found:
            self._times.observe(ref.size_bytes, loop.time() - begun_seconds)
        return found


async def _failure_of(reading: Awaitable[None]) -> StokerError | None:
    try:
        await reading
    except StokerError as error:
        return error
    return None
