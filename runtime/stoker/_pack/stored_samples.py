"""Reads stored samples from anywhere in a data set, in a given order, within a memory budget.

They are read in two ways: whole super-samples, of which the wanted samples are kept until all are read; or ranges,
group by group. The bytes are verified as they arrive, and each value keeps its checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker._base.sizes import format_bytes
from stoker._base.task_group import MAX_AHEAD_BYTES, for_each, run_in_order
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.groups import HeadMemory, split_by_bytes
from stoker._fetch.range_plan import ReadLimits, SampleGroup, ValueRanges, group_by_super_sample, read_values
from stoker._fetch.super_samples import open_head
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head, is_small
from stoker._memory.budget import max_sample_bytes
from stoker.errors import DeadlineError, MemoryBudgetError

_RESERVED_BYTES = 160 << 20
"""Memory of an instance for the interpreter, libraries and connections."""
_SAMPLE_BYTES = 192
"""Memory of a sample besides its values and columns: measured, and rounded up."""
_COLUMN_BYTES = 16
"""Memory of a sample for each column: a length and a checksum."""
HEADER_BYTES = 64 << 10
"""Upper bound of a super-sample's header, unless there are hundreds of columns."""
_MAX_READS, _MAX_UPLOADS = 16, 8
_MIN_CONCURRENCY = 2
_HEDGES = 2
_TRANSFER_FRACTION = 8
"""Objects being read, and objects being written, each take at most the memory divided by this."""
_MAX_GROUP_BYTES = 64 << 20
_TWO_AHEAD_BYTES = MAX_AHEAD_BYTES // 2


def usable_bytes(instance_bytes: int) -> int:
    """Return the memory of an instance that a task may use, in bytes."""
    return max(0, instance_bytes - _RESERVED_BYTES)


def sample_bytes(columns: int, samples: float, size_bytes: float) -> float:
    """Return the memory in bytes of samples whose values have ``size_bytes`` in total."""
    return size_bytes + samples * (_SAMPLE_BYTES + _COLUMN_BYTES * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMemory:
    """The memory of one task.

    Attributes:
        reads: number of objects that are read at a time.
        hedges: number of second reads for late ones.
        uploads: number of objects that are uploaded at a time; two more are under construction.
        values_bytes: memory for the samples that are held, with their lengths and checksums.
    """

    reads: int
    hedges: int
    uploads: int
    values_bytes: int

    @classmethod
    def plan(cls, memory_bytes: int, *, largest_bytes: int, object_bytes: int) -> Self:
        """Return the division of ``memory_bytes``.

        Args:
            memory_bytes: memory budget of the task.
            largest_bytes: size of the largest object that is read.
            object_bytes: limit of a written object's data.

        Raises:
            MemoryBudgetError: the budget is too small; the message has the figure that fits.
        """
        written_bytes = object_bytes + HEADER_BYTES
        reads = max(_MIN_CONCURRENCY, min(_MAX_READS, memory_bytes // _TRANSFER_FRACTION // largest_bytes))
        uploads = max(_MIN_CONCURRENCY, min(_MAX_UPLOADS, memory_bytes // _TRANSFER_FRACTION // written_bytes))
        passing_bytes = (reads + _HEDGES) * largest_bytes + (uploads + 2) * written_bytes
        if memory_bytes < 2 * passing_bytes:
            raise MemoryBudgetError(
                f"memory of {format_bytes(memory_bytes)} besides the program is too small to shuffle super-samples of "
                f"up to {format_bytes(largest_bytes)}: give {format_bytes(2 * passing_bytes + _RESERVED_BYTES)} or "
                f"more in total, or {format_bytes(2 * passing_bytes)} besides it"
            )
        return cls(reads=reads, hedges=_HEDGES, uploads=uploads, values_bytes=memory_bytes - passing_bytes)

    def group_bytes(self, manifest: Manifest) -> int:
        """Return the size limit of a group that is read by ranges; memory holds three groups and all heads.

        Raises:
            MemoryBudgetError: the memory is too small; the message has the figures.
        """
        heads_bytes = HeadMemory.size_bytes(manifest, manifest.schema)
        group_bytes = min(_MAX_GROUP_BYTES, (self.values_bytes - heads_bytes) // 3)
        least_bytes = max(2 * max_sample_bytes(manifest, manifest.schema), 1)
        if group_bytes < least_bytes:
            raise MemoryBudgetError(
                f"reading by ranges needs {format_bytes(heads_bytes)} for the heads of all super-samples and "
                f"{format_bytes(3 * least_bytes)} for three groups of samples, but {format_bytes(self.values_bytes)} "
                "are available; give more memory, or another way"
            )
        return group_bytes


SampleRow: TypeAlias = tuple[list[bytes], bytes]
"""The values of a sample, and their checksums in the form of a super-sample."""


@dataclass(slots=True, eq=False)
class StoredSamples:
    """Consecutive samples in their stored form.

    Attributes:
        values: bytes of each sample: the values of its columns one after the other, in the schema's order.
        sizes: size of each value in bytes, ``int64 [samples, columns]``.
        checksums: checksum of each value from packing, ``uint32 [samples, columns]``.
    """

    values: list[bytes]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @classmethod
    def empty(cls, samples: int, columns: int) -> StoredSamples:
        """Return empty samples, to be filled in."""
        shape = samples, columns
        return cls([b""] * samples, np.zeros(shape, np.int64), np.zeros(shape, np.uint32))

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Iterator[SampleRow]:
        """Yield the samples one by one, and release each."""
        for position, value in enumerate(self.values):
            ends = accumulate(self.sizes[position].tolist(), initial=0)
            self.values[position] = b""
            yield [value[start:end] for start, end in pairwise(ends)], self.checksums[position].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """A data set to read samples from.

    Attributes:
        manifest: manifest of the data set.
        fetcher: fetcher that reads from its store.
        memory: memory of the task.
        stop_at_seconds: time on the clock of the event loop after which no more is read, since it could not be written.
    """

    manifest: Manifest
    fetcher: Fetcher
    memory: TaskMemory
    stop_at_seconds: float


async def read_whole(source: SampleSource, wanted: SampleGroup) -> StoredSamples:
    """Return samples, reading each of their super-samples once and whole.

    Args:
        source: data set of the samples.
        wanted: super-sample and row of each sample, in order.

    Raises:
        MemoryBudgetError: the samples do not fit in memory together.
        DeadlineError: there is no time to read all super-samples.
        StoreError: a super-sample could not be read.
        FormatError: a super-sample does not match the manifest.
    """
    loop = asyncio.get_running_loop()
    manifest, values_bytes = source.manifest, source.memory.values_bytes
    samples = StoredSamples.empty(len(wanted), len(manifest.schema))
    room_bytes = values_bytes - sample_bytes(len(manifest.schema), len(wanted), 0)
    held_bytes = done = 0

    async def read(share: tuple[int, NDArray[np.int64]]) -> None:
        nonlocal held_bytes, done
        row, places = share
        if loop.time() >= source.stop_at_seconds:
            raise DeadlineError(
                f"the time was enough to read {done} of {len(shares)} super-samples, and nothing can be written before "
                "all are read; give the function more time or more processors, or cut the work into more parts"
            )
        ref = manifest.ref(row)
        data = memoryview(bytearray(ref.size_bytes))
        await source.fetcher.fetch_whole(ref, data)
        held_bytes += _copy_rows(samples, open_head(manifest, row, data), data, wanted.rows[places], places)
        done += 1
        if held_bytes > room_bytes:
            raise MemoryBudgetError(
                f"{len(wanted)} samples do not fit in {format_bytes(values_bytes)} of memory: cut the epoch into about "
                f"{len(shares) / done * held_bytes / max(room_bytes, 1):.1f} times as many parts, or give more memory"
            )

    shares = list(group_by_super_sample(wanted.super_samples))
    await for_each(shares, read, concurrency=source.memory.reads)
    return samples


def _copy_rows(
    samples: StoredSamples, head: Head, data: memoryview, rows: NDArray[np.int64], places: NDArray[np.int64]
) -> int:
    """Copy rows of a super-sample to their places, and return the size of their values in bytes."""
    extents = [head.row_ranges(name, rows) for name in head.schema]
    starts, ends = (np.stack(part, axis=1) for part in zip(*extents, strict=True))
    samples.sizes[places] = ends - starts
    samples.checksums[places] = head.checksums[rows]
    for position, first, last in zip(places.tolist(), starts.tolist(), ends.tolist(), strict=True):
        samples.values[position] = b"".join([data[start:end] for start, end in zip(first, last, strict=True)])
    return int((ends - starts).sum())


async def read_groups(source: SampleSource, blocks: Iterable[SampleGroup]) -> AsyncGenerator[StoredSamples, None]:
    """Yield samples that are read by ranges, in order, a group at a time; the next group is read ahead.

    Args:
        source: data set of the samples; the heads of all its super-samples are read first.
        blocks: super-sample and row of each sample, in order, in blocks of any size.

    Raises:
        MemoryBudgetError: the memory is too small for groups.
        StoreError: a range could not be read.
        FormatError: a super-sample does not match the manifest.
    """
    reader = _GroupReader(source)
    await reader.heads.load(source.fetcher)
    jobs = ((_TWO_AHEAD_BYTES, partial(reader.read, group)) for group in reader.groups(blocks))
    async with aclosing(run_in_order(jobs)) as groups:
        async for samples in groups:
            yield samples


class _GroupReader:
    def __init__(self, source: SampleSource) -> None:
        self._source = source
        manifest = source.manifest
        self._schema = manifest.schema
        self.heads = HeadMemory(manifest, self._schema)
        self._limits = ReadLimits(slot_bytes=source.memory.group_bytes(manifest), range_bytes=manifest.largest_bytes)
        self._large = [name for name, column in self._schema.items() if not is_small(column)]

    def groups(self, blocks: Iterable[SampleGroup]) -> Iterator[SampleGroup]:
        """Cut blocks into groups whose values leave room for unneeded bytes inside ranges."""
        for block in blocks:
            starts, ends = self.heads.extents(self._large, block)
            cuts = split_by_bytes((ends - starts).sum(axis=0), self._limits.payload_bytes)
            yield from (block[begin:end] for begin, end in pairwise(cuts))

    async def read(self, group: SampleGroup) -> StoredSamples:
        samples = StoredSamples.empty(len(group), len(self._schema))
        checksums = self.heads.checksums(list(self._schema), group)
        samples.checksums[:] = checksums.T
        starts, ends = self.heads.extents(self._large, group)
        large = [list(self._schema).index(name) for name in self._large]
        values = ValueRanges(samples=group, columns=self._large, starts=starts, ends=ends, checksums=checksums[large])
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
        self, group: SampleGroup, samples: StoredSamples, data: memoryview, addresses: Mapping[str, NDArray[np.int64]]
    ) -> None:
        """Join the values of each sample: large ones from ``data``, small ones from the heads."""
        columns: list[list[memoryview]] = []
        for number, (name, column) in enumerate(self._schema.items()):
            if name in addresses:
                memory, starts = data, addresses[name]
            else:
                memory, size_bytes = self.heads.memory, column.element_bytes
                starts = self.heads.addresses(name, group, size_bytes)
                samples.sizes[:, number] = size_bytes
            ends = starts + samples.sizes[:, number]
            columns.append([memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        samples.values[:] = map(b"".join, zip(*columns, strict=True))
