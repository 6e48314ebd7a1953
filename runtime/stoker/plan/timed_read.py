"""Reads whose moments are taken: when they are sent, when they begin, when they end. A late one is left behind.

Late is what the fetcher asks for a second time: what has not begun after a multiple of the median first byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from stoker.errors import StoreError, TransientError
from stoker.fetch.config import FetchConfig
from stoker.fetch.hedge import TransferTimes
from stoker.store.protocol import Readable
from stoker.tier import ObjectRef

__all__ = ["TimedRead", "TimedReader"]

_LATE_FACTOR = FetchConfig().hedge_first_byte_factor
_LEAST_LATE_SECONDS = 0.5
"""No sooner is a read late: opening dozens of connections at once takes the processor a while."""


@dataclass(frozen=True, slots=True)
class TimedRead:
    """One read: when it was sent, when its answer began, when it was complete, and its bytes.

    A store that does not tell when its answers begin has them begin when they are sent.
    """

    sent: float
    begun: float
    done: float
    size_bytes: int


class TimedReader:
    """Reads the beginnings of objects, one object after the other; nothing is kept.

    Args:
        store: where they are.
        refs: the objects, not empty.
        group: has the requests; they end with it.

    Attributes:
        requests: that were sent.
        failed: of them, those that ended in an error that may pass.
        asked_bytes: that they asked for.
        read_bytes: that arrived, late ones aside.
        last: the last error.
        first_byte_seconds: of each answer whose beginning was told, the first one aside: that one may have connected.
    """

    def __init__(self, store: Readable, refs: Sequence[ObjectRef], group: asyncio.TaskGroup) -> None:
        self._store, self._group = store, group
        self._refs: Iterator[ObjectRef] = cycle(refs)
        self._times = TransferTimes()
        self._left: set[asyncio.Task[None]] = set()
        self.requests = self.failed = self.asked_bytes = self.read_bytes = 0
        self.last: TransientError | None = None
        self.first_byte_seconds: list[float] = []

    @property
    def late_seconds(self) -> float | None:
        """After how long without a first byte a read is late; None while too few have told of theirs."""
        usual_seconds = self._times.expected_first_byte_seconds()
        if usual_seconds is None:
            return None
        return max(_LEAST_LATE_SECONDS, _LATE_FACTOR * usual_seconds)

    async def read(self, size_bytes: int) -> TimedRead | None:
        """Read the beginning of the next object; None if that failed in a way that may pass, or is late.

        Raises:
            StoreError: it failed for good.
        """
        ref = next(self._refs)
        end = min(size_bytes, ref.size_bytes)
        self.requests += 1
        self.asked_bytes += end
        is_first, loop = self.requests == 1, asyncio.get_running_loop()
        sent, begun = loop.time(), loop.create_future()
        request = self._group.create_task(self._request(ref.key, end, begun))
        await _either(request, begun, self.late_seconds)
        if not request.done() and not begun.done():
            leaving = self._group.create_task(self._leave(request, sent, begun))
            self._left.add(leaving)
            leaving.add_done_callback(self._left.discard)
            return None
        if (error := await request) is not None:
            if isinstance(error, TransientError):
                return None
            raise error
        self.read_bytes += end
        if begun.done() and not is_first:
            self._told(begun.result() - sent)
        return TimedRead(sent, begun.result() if begun.done() else sent, loop.time(), end)

    async def leave(self, seconds: float) -> None:
        """Wait so long for the first bytes of late reads; what is still to come then counts as if it came then."""
        if not self._left:
            return
        _, waiting = await asyncio.wait(self._left, timeout=seconds)
        for each in waiting:
            each.cancel()
        if waiting:
            await asyncio.wait(waiting)

    async def _request(self, key: str, end: int, begun: asyncio.Future[float]) -> StoreError | None:
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if not begun.done():
                begun.set_result(loop.time())

        try:
            await self._store.get_range(key, 0, end, into=memoryview(bytearray(end)), begun=begin)
        except TransientError as error:
            self.failed, self.last = self.failed + 1, error
            return error
        except StoreError as error:
            return error
        return None

    async def _leave(self, request: asyncio.Task[StoreError | None], sent: float, begun: asyncio.Future[float]) -> None:
        """See when a late read begins; its bytes would only be in the way of others."""
        loop = asyncio.get_running_loop()
        try:
            await _either(request, begun, None)
        finally:
            if begun.done() or not request.done():
                self._told((begun.result() if begun.done() else loop.time()) - sent)
            request.cancel()

    def _told(self, seconds: float) -> None:
        self._times.observe_first_byte(seconds)
        self.first_byte_seconds.append(seconds)


async def _either(one: asyncio.Future[Any], other: asyncio.Future[Any], seconds: float | None) -> None:
    await asyncio.wait([one, other], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
