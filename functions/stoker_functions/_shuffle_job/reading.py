"""Reads samples from anywhere in a data set, in the order in which they are to be written, as they are stored.

Two ways: whole super-samples, from each of which the wanted samples are kept until all are there; or ranges, group by
group. The bytes are verified as they arrive, and the checksum of each value travels with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker._base.sizes import format_bytes
from stoker._base.task_group import for_each
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.heads import HeadMemory, open_head
from stoker._fetch.range_plan import MOST_SAMPLES, Group, ReadLimits, Values, read_values
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head, is_small
from stoker.errors import BudgetError, DeadlineError
from stoker_functions._shuffle_job.task import held_bytes

__all__ = ["Samples", "SampleSource", "read_groups", "read_whole"]


@dataclass(slots=True, eq=False)
class Samples:
    """Consecutive samples, as they are stored.

    Attributes:
        values: of each sample, all columns one behind the other, in the schema's order.
        sizes: ``int64 [samples, columns]``, the bytes of each value.
        checksums: ``uint32 [samples, columns]``, as they were when the sample was packed.
    """

    values: list[bytes]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @classmethod
    def empty(cls, samples: int, columns: int) -> Samples:
        """Return room for samples."""
        shape = samples, columns
        return cls([b""] * samples, np.zeros(shape, np.int64), np.zeros(shape, np.uint32))

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """What samples are read from.

    Attributes:
        manifest: of the data set.
        fetcher: reads from its store.
        values_bytes: the most that may be held.
        stop_at_seconds: on the clock of the event loop, when reading that cannot be made use of any more ends.
    """

    manifest: Manifest
    fetcher: Fetcher
    values_bytes: int
    stop_at_seconds: float


async def read_whole(source: SampleSource, wanted: Group, reads: int) -> Samples:
    """Return samples from super-samples that are read whole, each once.

    Args:
        source: where they are.
        wanted: which, in order.
        reads: super-samples on their way at once.

    Raises:
        BudgetError: they do not fit in memory together.
        DeadlineError: there is no time to read all of them.
        StoreError: a super-sample could not be had.
        FormatError: one is not what the manifest says.
    """
    loop = asyncio.get_running_loop()
    manifest = source.manifest
    samples = Samples.empty(len(wanted), len(manifest.schema))
    room_bytes = source.values_bytes - held_bytes(len(manifest.schema), len(wanted), 0)
    held = done = 0

    async def read(share: tuple[int, NDArray[np.int64]]) -> None:
        nonlocal held, done
        row, places = share
        if loop.time() >= source.stop_at_seconds:
            raise DeadlineError(
                f"the time was enough to read {done} of {len(shares)} super-samples, and nothing can be written before "
                "all are read; give the function more time or more processors, or cut the work into more parts"
            )
        ref = manifest.ref(row)
        data = memoryview(bytearray(ref.size_bytes))
        await source.fetcher.fetch_whole(ref, data)
        held += _keep(samples, open_head(manifest, row, data), data, wanted.rows[places], places)
        done += 1
        if held > room_bytes:
            raise BudgetError(
                f"{len(wanted)} samples do not fit in {format_bytes(source.values_bytes)} of memory: cut the epoch "
                f"into about {len(shares) / done * held / max(room_bytes, 1):.1f} times as many parts, or give more "
                "memory"
            )

    shares = list(_shares(wanted))
    await for_each(shares, read, concurrency=reads)
    return samples


def _shares(wanted: Group) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield every super-sample that is needed, and the places of its samples in what is wanted."""
    order = np.argsort(wanted.super_samples, kind="stable")
    rows = wanted.super_samples[order]
    borders = np.flatnonzero(np.diff(rows, prepend=-1))
    yield from zip(rows[borders].tolist(), np.split(order, borders)[1:], strict=True)


def _keep(samples: Samples, head: Head, data: memoryview, rows: NDArray[np.int64], places: NDArray[np.int64]) -> int:
    """Copy rows of a super-sample to their places, and return how many bytes their values have."""
    extents = [head.row_ranges(name, rows) for name in head.schema]
    starts, ends = (np.stack(part, axis=1) for part in zip(*extents, strict=True))
    samples.sizes[places] = ends - starts
    samples.checksums[places] = head.checksums[rows]
    for place, first, last in zip(places.tolist(), starts.tolist(), ends.tolist(), strict=True):
        samples.values[place] = b"".join([data[start:end] for start, end in zip(first, last, strict=True)])
    return int((ends - starts).sum())


async def read_groups(source: SampleSource, blocks: Iterable[Group], group_bytes: int) -> AsyncGenerator[Samples, None]:
    """Yield samples that are read by ranges, in order, a group at a time; while one is used, the next is read.

    Args:
        source: where they are; the heads of all its super-samples are read first.
        blocks: which are wanted, in order: some at a time.
        group_bytes: that a group takes while it is read, at most.

    Raises:
        StoreError: bytes could not be had.
        FormatError: a super-sample is not what the manifest says.
    """
    reader = _GroupReader(source, group_bytes)
    await reader.prepare()
    ahead: asyncio.Task[Samples] | None = None
    try:
        for group in reader.groups(blocks):
            following = asyncio.create_task(reader.read(group))
            if ahead is not None:
                ready, ahead = ahead, following
                yield await ready
            ahead = following
        if ahead is not None:
            yield await ahead
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)


class _GroupReader:
    def __init__(self, source: SampleSource, group_bytes: int) -> None:
        self._source = source
        self._schema = source.manifest.schema
        self._heads = HeadMemory(source.manifest, self._schema)
        self._limits = ReadLimits(slot_bytes=group_bytes, range_bytes=source.manifest.largest_bytes)
        self._large = [name for name, column in self._schema.items() if not is_small(column)]

    async def prepare(self) -> None:
        await self._heads.load(self._source.fetcher)

    def groups(self, blocks: Iterable[Group]) -> Iterator[Group]:
        """Cut blocks so that the values of a group leave room for what is read in vain."""
        for block in blocks:
            starts, ends = self._extents(block)
            reached = np.cumsum((ends - starts).sum(axis=0))
            begin = 0
            while begin < len(block):
                before = int(reached[begin - 1]) if begin else 0
                end = int(np.searchsorted(reached, before + self._limits.payload_bytes, "right"))
                end = max(begin + 1, min(end, begin + MOST_SAMPLES))
                yield Group(block.super_samples[begin:end], block.rows[begin:end])
                begin = end

    def _extents(self, group: Group) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        extents = np.empty((2, len(self._large), len(group)), np.int64)
        for number, name in enumerate(self._large):
            extents[:, number] = self._heads.extents(name, group.super_samples, group.rows)
        return extents[0], extents[1]

    async def read(self, group: Group) -> Samples:
        checksums = [self._heads.checksums(name, group.super_samples, group.rows) for name in self._schema]
        samples = Samples.empty(len(group), len(self._schema))
        samples.checksums[:] = np.stack(checksums, axis=1)
        starts, ends = self._extents(group)
        large = [list(self._schema).index(name) for name in self._large]
        values = Values(
            samples=group, columns=self._large, starts=starts, ends=ends, checksums=samples.checksums[:, large].T.copy()
        )
        reads = values.plan(self._limits)
        data = memoryview(bytearray(reads.size_bytes))
        source = self._source
        addresses = await read_values(
            values, reads, data, manifest=source.manifest, fetcher=source.fetcher, urgent=False
        )
        samples.sizes[:, large] = (ends - starts).T
        self._assemble(group, samples, data, dict(zip(self._large, addresses, strict=True)))
        return samples

    def _assemble(
        self, group: Group, samples: Samples, data: memoryview, addresses: Mapping[str, NDArray[np.int64]]
    ) -> None:
        """Put the values of each sample one behind the other: large ones from ``data``, small ones from the heads."""
        columns: list[list[memoryview]] = []
        for number, (name, column) in enumerate(self._schema.items()):
            if name in addresses:
                memory, starts = data, addresses[name]
            else:
                memory, size_bytes = self._heads.memory, column.element_bytes
                starts = self._heads.addresses(name, group.super_samples, group.rows, size_bytes)
                samples.sizes[:, number] = size_bytes
            ends = starts + samples.sizes[:, number]
            columns.append([memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        samples.values[:] = map(b"".join, zip(*columns, strict=True))
