"""A faulty bucket that also reads ranges of several objects by one request, with the same faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from stoker._base.batch_read import BatchLimits, BatchRefusedError, ObjectRange
from support.faulty_store import FaultyStore

__all__ = ["BatchingStore"]


class BatchingStore(FaultyStore):
    """Counts requests for ranges as its base class does, and keeps those for several in ``sent_batches``.

    Requests whose response has not begun may share memory; the others may not.

    Attributes:
        limits: limits of a request; None to refuse all.
        sent_batches: ranges of each request for several.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.limits: BatchLimits | None = BatchLimits(1 << 30, 1 << 20)
        self.refuses = False
        self.sent_batches: list[list[ObjectRange]] = []

    @property
    def batch_limits(self) -> BatchLimits | None:
        return self.limits

    async def get_ranges(
        self, ranges: Sequence[ObjectRange], *, into: memoryview, begun: Callable[[], None] | None = None
    ) -> None:
        number, has_begun = len(self.sent_seconds), False
        self.sent_seconds.append(asyncio.get_running_loop().time())
        self.sent_batches.append(list(ranges))
        if self.refuses:
            raise BatchRefusedError("no batches")
        name = f"batch {number}"
        self.objects[name] = b"".join(self.objects[key][start:end] for key, start, end in ranges)
        self.tags[name] = ""
        assert len(into) == len(self.objects[name]), "into has exactly the bytes of the ranges"

        def begin() -> None:
            nonlocal has_begun
            if begun is not None:
                begun()
            self._begin_writing(number, into)
            has_begun = True

        self.active += 1
        try:
            await self._serve(number, await self.current(), (name, 0, len(into)), into, None, begin)
        except asyncio.CancelledError:
            if has_begun:
                await self._close_slowly(into)
            raise
        finally:
            self.active -= 1
            self._writing.pop(number, None)
            del self.objects[name]
