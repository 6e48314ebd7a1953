"""Reads samples by number, in any order: ranges of super-samples, or whole super-samples if most of one is requested.

The requested samples of one super-sample are read together. Its head contains the offsets and checksums of their
values, and the small columns. Heads are cached within a limit; values are not.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker._base.batch_read import RangePart
from stoker._base.task_group import for_each
from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.range_plan import (
    ReadLimits,
    SampleGroup,
    ValueRanges,
    group_by_super_sample,
    mean_row_bytes,
    read_values,
)
from stoker._fetch.super_samples import MIN_SAVING, fetch_head, open_head
from stoker._format.manifest import Manifest, sample_starts
from stoker._format.schema import Column
from stoker._format.supersample import Head, is_small
from stoker._memory.budget import ByteBudget, SampleMemory, open_head_bytes
from stoker._memory.ring import Ring
from stoker.abc import Readable


@dataclass(slots=True, eq=False)
class CachedHead:
    """A head in memory.

    Attributes:
        head: the parsed head.
        data: bytes of the head, including the small columns.
        held_bytes: memory that it takes, in bytes.
        users: number of current users.
    """

    head: Head
    data: memoryview
    held_bytes: int
    users: int = 0


class HeadCache:
    """A cache of heads with a limit; evicts the least recently used head that is not in use.

    Belongs to one event loop.

    Args:
        manifest: index of the data set.
        fetcher: reads heads.
        limit_bytes: maximum memory of all heads, in bytes.
    """

    def __init__(self, manifest: Manifest, fetcher: Fetcher, limit_bytes: int) -> None:
        self._manifest, self._fetcher = manifest, fetcher
        self._budget = ByteBudget(limit_bytes)
        self._heads: OrderedDict[int, CachedHead] = OrderedDict()  # least recently used first
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def held_bytes(self) -> int:
        """Memory of all heads, including those being read, in bytes; at most the limit."""
        return self._budget.held

    @asynccontextmanager
    async def open(self, row: int, *, urgent: bool = False) -> AsyncIterator[CachedHead]:
        """Hold the head of a manifest row's super-sample; if it is not cached, wait for room and read it.

        Concurrent requests for one head read it once. Cancelling leaves nothing behind.

        Raises:
            StoreError: the head could not be read.
            FormatError: the head does not match the manifest.
        """
        async with self._locks.setdefault(row, asyncio.Lock()):
            if row not in self._heads:
                self._heads[row] = await self._read(row, urgent)
            head = self._heads[row]
            head.users += 1
        try:
            yield head
        finally:
            head.users -= 1
            self._heads.move_to_end(row)
            self._evict(0)

    async def _read(self, row: int, urgent: bool) -> CachedHead:
        head_bytes = int(self._manifest.rows.head_bytes[row])
        size_bytes = open_head_bytes(self._manifest.schema, head_bytes)
        self._evict(size_bytes)
        await self._budget.acquire(size_bytes)
        try:
            data = memoryview(bytearray(head_bytes))
            return CachedHead(
                await fetch_head(self._fetcher, self._manifest, row, data, urgent=urgent), data, size_bytes
            )
        except BaseException:
            self._budget.release(size_bytes)
            raise

    def _evict(self, size_bytes: int) -> None:
        """Evict unused heads until ``size_bytes`` fit and no request waits for room."""
        while self._budget.has_waiters or self._budget.held + size_bytes > self._budget.limit:
            idle = next((row for row, head in self._heads.items() if not head.users), None)
            if idle is None:
                return
            self._budget.release(self._heads.pop(idle).held_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _SuperSampleRows:
    """The requested samples of one super-sample.

    Attributes:
        super_sample: manifest row of the super-sample.
        rows: ``int64 [rows]``, the requested rows, each once, ascending.
        row_indices: ``int64 [places]``, index into ``rows``.
        places: ``int64 [places]``, index in the request.
    """

    super_sample: int
    rows: NDArray[np.int64]
    row_indices: NDArray[np.int64]
    places: NDArray[np.int64]


class SampleReader:
    """Reads samples by number. Belongs to one event loop, on which any number of calls may read at once.

    Args:
        store: store of the data set.
        manifest: pinned version of its index.
        columns: name → column, of the columns to read.
        memory: memory limits of all calls together.
        config: retries, hedged requests and concurrency.
        counters: counters to update; default new ones.
    """

    def __init__(
        self,
        store: Readable,
        manifest: Manifest,
        columns: Mapping[str, Column],
        memory: SampleMemory,
        config: FetchConfig,
        counters: FetchCounters | None = None,
    ) -> None:
        self._manifest, self._columns = manifest, columns
        self._fetcher = Fetcher(
            store,
            ring=Ring(max(1, memory.hedge_slots), memory.slot_bytes),  # for hedges only
            rng=random.Random(os.urandom(8)),  # noqa: S311 - jitter
            config=config,
            counters=counters,
        )
        self._heads = HeadCache(manifest, self._fetcher, memory.head_bytes)
        self._value_budget = ByteBudget(memory.value_bytes)
        self._starts = sample_starts(manifest.rows.samples)
        self._large = [name for name, column in columns.items() if not is_small(column)]
        self._row_bytes = sum(mean_row_bytes(manifest, columns).values())

    async def read(self, indices: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return samples by their numbers in the packed order, ``int64 [samples]``, which must exist.

        The samples are in the requested order. Values own their memory, even those of a sample requested twice. A
        request to a single super-sample is urgent: a large part is read in parallel ranges. Cancelling leaves nothing
        behind.

        Raises:
            StoreError: bytes could not be read; names the object.
            FormatError: an object does not match the manifest.
        """
        samples: list[dict[str, Any]] = [{} for _ in indices]
        shares = list(self._group_rows(indices))

        async def read(share: _SuperSampleRows) -> None:
            is_whole = self._is_nearly_whole(share)
            await (self._read_whole if is_whole else self._read_ranges)(share, samples, urgent=len(shares) == 1)

        await for_each(shares, read, concurrency=min(len(shares), self._fetcher.config.max_concurrency))
        return samples

    async def value_sizes(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of a column's values in bytes, ``int64 [samples]``; of a ragged column, reads heads only.

        Raises:
            StoreError: a head could not be read; names the object.
            FormatError: an object does not match the manifest.
        """
        sizes = np.empty(len(indices), np.int64)
        if self._columns[name].is_fixed:
            sizes[:] = self._columns[name].element_bytes
            return sizes
        shares = list(self._group_rows(indices))

        async def measure(share: _SuperSampleRows) -> None:
            async with self._heads.open(share.super_sample, urgent=len(shares) == 1) as head:
                starts, ends = head.head.row_ranges(name, share.rows)
                sizes[share.places] = (ends - starts)[share.row_indices]

        await for_each(shares, measure, concurrency=min(len(shares), self._fetcher.config.max_concurrency))
        return sizes

    async def read_object(self, row: int, start: int, end: int) -> bytes:
        """Return bytes ``[start, end)`` of a manifest row's object; a whole object is verified by its checksum.

        Raises:
            StoreError: the bytes could not be read; names the object.
        """
        ref = self._manifest.ref(row)
        if start == end:
            return b""
        async with self._value_budget.reserve(end - start):
            data = memoryview(bytearray(end - start))
            if end - start == ref.size_bytes:
                await self._fetcher.fetch_whole(ref, data, urgent=True)
            else:
                parts = [RangePart(start, end, 0)]
                await self._fetcher.fetch_ranges(ref, parts, into=data, verify=lambda _: None, urgent=True)
            return bytes(data)

    def _group_rows(self, indices: NDArray[np.int64]) -> Iterator[_SuperSampleRows]:
        for super_sample, places in group_by_super_sample(np.searchsorted(self._starts, indices, "right") - 1):
            rows, which = np.unique(indices[places] - self._starts[super_sample], return_inverse=True)
            yield _SuperSampleRows(super_sample, rows, which, places)

    def _is_nearly_whole(self, share: _SuperSampleRows) -> bool:
        """Return whether reading the head and then ranges would save too little against reading the whole object."""
        rows = self._manifest.rows
        body_bytes = int(rows.size_bytes[share.super_sample]) - int(rows.head_bytes[share.super_sample])
        return 0 < (1.0 - MIN_SAVING) * body_bytes <= len(share.rows) * self._row_bytes

    async def _read_whole(self, share: _SuperSampleRows, samples: list[dict[str, Any]], *, urgent: bool) -> None:
        ref = self._manifest.ref(share.super_sample)
        async with self._value_budget.reserve(ref.size_bytes):
            data = memoryview(bytearray(ref.size_bytes))
            await self._fetcher.fetch_whole(ref, data, urgent=urgent)
            head = open_head(self._manifest, share.super_sample, data)
            self._deliver(
                share, {name: _encoded_values(head, name, share.rows, data) for name in self._columns}, samples
            )

    async def _read_ranges(self, share: _SuperSampleRows, samples: list[dict[str, Any]], *, urgent: bool) -> None:
        async with self._heads.open(share.super_sample, urgent=urgent) as head:
            values = self._locate_values(share, head.head)
            size_bytes = head.head.size_bytes
            reads = values.plan(ReadLimits(slot_bytes=size_bytes, range_bytes=size_bytes))
            async with self._value_budget.reserve(reads.size_bytes):
                data = memoryview(bytearray(reads.size_bytes))
                starts = await read_values(
                    values, reads, data, manifest=self._manifest, fetcher=self._fetcher, urgent=urgent
                )
                ends = starts + values.ends - values.starts
                large = zip(self._large, starts, ends, strict=True)
                encoded = {name: _slice(data, first, last) for name, first, last in large}
                small = [name for name in self._columns if name not in encoded]
                encoded |= {name: _encoded_values(head.head, name, share.rows, head.data) for name in small}
                self._deliver(share, encoded, samples)

    def _locate_values(self, share: _SuperSampleRows, head: Head) -> ValueRanges:
        extents = np.empty((2, len(self._large), len(share.rows)), np.int64)
        for number, name in enumerate(self._large):
            extents[:, number] = head.row_ranges(name, share.rows)
        numbers = [list(head.schema).index(name) for name in self._large]
        return ValueRanges(
            samples=SampleGroup(np.full(len(share.rows), share.super_sample), share.rows),
            columns=self._large,
            starts=extents[0],
            ends=extents[1],
            checksums=head.checksums[share.rows][:, numbers].T,
        )

    def _deliver(
        self, share: _SuperSampleRows, encoded: Mapping[str, Sequence[memoryview]], samples: list[dict[str, Any]]
    ) -> None:
        """Decode the requested samples into ``samples``, each separately, so that no two share memory."""
        for place, row in zip(share.places.tolist(), share.row_indices.tolist(), strict=True):
            samples[place] = {name: column.decode(encoded[name][row]) for name, column in self._columns.items()}


def _encoded_values(head: Head, name: str, rows: NDArray[np.int64], data: memoryview) -> list[memoryview]:
    """Return the bytes of each row's value of a column; ``data`` is the start of the object."""
    return _slice(data, *head.row_ranges(name, rows))


def _slice(data: memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[memoryview]:
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
