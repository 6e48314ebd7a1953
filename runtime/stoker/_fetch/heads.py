"""The heads of super-samples: read and checked against the manifest, and held, by use or all of them.

:class:`HeadCache` holds heads of a few super-samples, read when they are first needed. :class:`HeadMemory` holds all
heads of a data set in one block of memory, so that any sample can be found, verified and half read: in it are the
offsets of ragged columns, the checksum of every value, and the small columns themselves.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._base.task_group import for_each
from stoker._fetch.fetcher import Fetcher, RangePart
from stoker._fetch.gather import gather_rows
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import CHECKSUMS, Head
from stoker._memory.ring import ALIGNMENT_BYTES, anonymous_memory
from stoker._memory.sample_memory import ByteBudget, head_bytes_held
from stoker.errors import ChecksumError, FormatError

__all__ = ["HeadCache", "HeadMemory", "OpenHead", "fetch_head", "open_head"]


def open_head(manifest: Manifest, row: int, data: memoryview) -> Head:
    """Return the head at the start of verified ``data`` of a manifest row's super-sample; its arrays are views.

    Raises:
        FormatError: it is not a head, or not what the manifest says.
    """
    try:
        head = Head.parse(data, int(manifest.rows.size_bytes[row]))
    except FormatError as error:
        raise FormatError(f"{manifest.key(row)}: {error}; pack the data set again") from error
    rows = manifest.rows
    if head.schema != manifest.schema or (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{manifest.key(row)} does not have the schema, samples or head that the manifest says")
    return replace(head, schema=manifest.schema)  # the same object for all heads


async def fetch_head(fetcher: Fetcher, manifest: Manifest, row: int, into: memoryview, *, urgent: bool) -> Head:
    """Read a super-sample's head into the start of ``into``, verified by its checksum in the manifest.

    Raises:
        StoreError: it could not be had; see :meth:`stoker._fetch.fetcher.Fetcher.fetch_ranges`.
        FormatError: it is not a head, or not what the manifest says.
    """
    size_bytes, wanted = int(manifest.rows.head_bytes[row]), int(manifest.rows.head_crc32c[row])
    ref, data = manifest.ref(row), into[:size_bytes]

    def verify(data: memoryview) -> None:
        if (found := crc32c(data)) != wanted:
            raise ChecksumError(f"{ref.key}: its head has crc32c {found:08x}, the manifest says {wanted:08x}")

    await fetcher.fetch_ranges(ref, [RangePart(0, size_bytes, 0)], into=data, verify=verify, urgent=urgent)
    return open_head(manifest, row, data)


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


class HeadMemory:
    """The heads; nothing is allocated or read before :meth:`load`.

    Args:
        manifest: of the data set.
        columns: the ones that will be asked for.
    """

    def __init__(self, manifest: Manifest, columns: Mapping[str, Column]) -> None:
        self._manifest = manifest
        self._columns = columns
        self._numbers = {name: number for number, name in enumerate(manifest.schema)}
        self._bases = _bases(manifest)
        self._starts: dict[str, NDArray[np.int64]] = {}
        self._memory: memoryview | None = None

    @staticmethod
    def size_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> int:
        """Return what the heads of a data set will take, with the tables of where things are in them."""
        tables = len(_tensors(columns)) + 1
        return int(_bases(manifest)[-1]) + tables * 8 * (len(manifest) + 1)

    async def load(self, fetcher: Fetcher) -> None:
        """Read and verify all heads, as many at once as the fetcher allows; of no effect the second time.

        Raises:
            StoreError: a head could not be had.
            FormatError: one is not what the manifest says.
        """
        if self._memory is not None:
            return
        memory = anonymous_memory(int(self._bases[-1]))
        starts = {tensor: np.empty(len(self._manifest), np.int64) for tensor in _tensors(self._columns)}

        async def read(row: int) -> None:
            into = memory[int(self._bases[row]) : int(self._bases[row + 1])]
            head = await fetch_head(fetcher, self._manifest, row, into, urgent=True)
            for tensor, table in starts.items():
                table[row] = head.starts[tensor]

        await for_each(range(len(self._manifest)), read, concurrency=fetcher.config.concurrency_most)
        self._memory, self._starts = memory, starts

    @property
    def memory(self) -> memoryview:
        """All heads."""
        assert self._memory is not None  # noqa: S101 - loaded before anything is asked for
        return self._memory

    def addresses(
        self, tensor: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64], row_bytes: int
    ) -> NDArray[np.int64]:
        """Return where in :attr:`memory` rows of a tensor of the head are, ``int64 [samples]``."""
        addresses: NDArray[np.int64] = (
            self._bases[super_samples] + self._starts[tensor][super_samples] + rows * row_bytes
        )
        return addresses

    def extents(
        self, name: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first byte and end, in its object, of each row's value of a column, ``int64 [samples]``."""
        column = self._columns[name]
        base, row_bytes = self._starts[name][super_samples], column.element_bytes
        if column.is_fixed:
            return base + rows * row_bytes, base + (rows + 1) * row_bytes
        borders = gather_rows(self.memory, self.addresses(f"{name}.offsets", super_samples, rows, 8), 16).view("<i8")
        return base + borders[:, 0] * row_bytes, base + borders[:, 1] * row_bytes

    def checksums(self, name: str, super_samples: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the CRC-32C of each row's value of a column, ``uint32 [samples]``."""
        places = self.addresses(CHECKSUMS, super_samples, rows, 4 * len(self._numbers)) + 4 * self._numbers[name]
        return gather_rows(self.memory, places, 4).view("<u4").reshape(-1)


def _bases(manifest: Manifest) -> NDArray[np.int64]:
    """Return where each head starts and the last one ends, ``int64 [super-samples + 1]``."""
    sizes = -(-manifest.rows.head_bytes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return np.concatenate([[0], np.cumsum(sizes)])


def _tensors(columns: Mapping[str, Column]) -> list[str]:
    offsets = [f"{name}.offsets" for name, column in columns.items() if not column.is_fixed]
    return [CHECKSUMS, *offsets, *columns]
