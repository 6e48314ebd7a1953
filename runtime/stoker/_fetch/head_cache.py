"""Heads of super-samples, read when they are first needed and kept while there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from stoker._fetch.fetcher import Fetcher
from stoker._fetch.heads import fetch_head
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head
from stoker._memory.byte_budget import ByteBudget
from stoker._memory.sample_memory import head_bytes_held

__all__ = ["HeadCache", "OpenHead"]


@dataclass(slots=True, eq=False)
class OpenHead:
    """A head in memory.

    Attributes:
        head: what it says.
        data: its bytes, with the small columns.
        users: how many hold it now.
    """

    head: Head
    data: memoryview
    users: int = 0


class HeadCache:
    """Holds heads of up to ``limit_bytes``; of those that nobody uses, the one used longest ago makes room.

    Belongs to one event loop.
    """

    def __init__(self, manifest: Manifest, fetcher: Fetcher, limit_bytes: int) -> None:
        self._manifest = manifest
        self._fetcher = fetcher
        self._in_use = ByteBudget(limit_bytes)
        self._used: dict[int, OpenHead] = {}
        self._idle: OrderedDict[int, OpenHead] = OrderedDict()
        self._idle_bytes = 0
        self._opening: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def held_bytes(self) -> int:
        """Of all heads: at most the limit, once whoever was given room for one has taken it."""
        return self._in_use.held_bytes + self._idle_bytes

    @asynccontextmanager
    async def opened(self, row: int, *, urgent: bool = False) -> AsyncIterator[OpenHead]:
        """Hold the head of a manifest row's super-sample, after waiting for room and reading it if it is not here.

        Two who ask at once read it once. Cancelling leaves nothing behind.

        Raises:
            StoreError: it could not be had.
            FormatError: it is not what the manifest says.
        """
        size_bytes = head_bytes_held(self._manifest.schema, int(self._manifest.rows.head_bytes[row]))
        async with self._opening.setdefault(row, asyncio.Lock()):
            opened = self._used.get(row)
            if opened is None:
                await self._in_use.acquire(size_bytes)
                try:
                    opened = self._found(row, size_bytes) or await self._read(row, urgent)
                except BaseException:
                    self._in_use.release(size_bytes)
                    raise
                self._used[row] = opened
            opened.users += 1
        try:
            yield opened
        finally:
            opened.users -= 1
            if not opened.users:
                self._idle[row] = self._used.pop(row)
                self._idle_bytes += size_bytes
                self._in_use.release(size_bytes)

    def _found(self, row: int, size_bytes: int) -> OpenHead | None:
        """Take a head from the idle ones, if it is there; and let go of those for which there is no more room."""
        found = self._idle.pop(row, None)
        if found is not None:
            self._idle_bytes -= size_bytes
        while self.held_bytes > self._in_use.limit_bytes:
            _, oldest = self._idle.popitem(last=False)
            self._idle_bytes -= head_bytes_held(self._manifest.schema, oldest.head.head_bytes)
        return found

    async def _read(self, row: int, urgent: bool) -> OpenHead:
        data = memoryview(bytearray(int(self._manifest.rows.head_bytes[row])))
        return OpenHead(await fetch_head(self._fetcher, self._manifest, row, data, urgent=urgent), data)
