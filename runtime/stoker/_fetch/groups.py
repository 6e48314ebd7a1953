"""Groups of samples from any super-samples, for a ``full`` order of a data set that does not fit in memory.

:class:`GroupSteps` splits the rank's samples into groups in their order. A group is read as one item, and contains
several whole batches, or part of a batch that is larger than a group. The first group is one batch, and each later one
has up to twice as many batches as the one before, so that the first batch only waits for its own samples.

:class:`SampleGroupReader` reads groups into ring slots by ranges, and verifies each value by its checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from stoker._base.batch_read import ObjectPart, RangePart
from stoker._base.task_group import for_each
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import NEW_ARRAYS, BatchArrays, RowLocations, ValueLocations, gather_rows
from stoker._fetch.mapped_objects import MappedObjects
from stoker._fetch.range_plan import (
    MAX_GROUP_SAMPLES,
    ReadForecast,
    ReadLimits,
    ReadPlan,
    SampleGroup,
    ValueRanges,
    forecast_groups,
    read_values,
)
from stoker._fetch.super_samples import fetch_head, open_head, verify_head
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import CHECKSUMS, Head, is_small
from stoker._memory.ring import ALIGNMENT_BYTES, Ring, anonymous_memory
from stoker._order.order import Order, OrderConfig
from stoker._order.sharding import RankStep, Sharding
from stoker._order.steps import PlannedStep, PositionRange, RowIndices, Segment, StepSource

_LOOKUP_SAMPLES = 8192


@dataclass(frozen=True, slots=True, eq=False)
class _StepSamples:
    step: RankStep
    is_last: bool
    samples: SampleGroup
    sizes: NDArray[np.int64]


class GroupSteps(StepSource[SampleGroup]):
    """A :class:`~stoker._order.steps.StepSource` whose items are groups.

    Args:
        samples: ``[super-samples]``, number of samples of each super-sample.
        positions: range of a ``full`` order to iterate over.
        sizes_of: returns the bytes to read for each sample of a group, ``int64 [samples]``.
        group_bytes: maximum bytes to read for one group, unless a single sample is larger.
    """

    def __init__(
        self,
        samples: NDArray[np.integer],
        positions: PositionRange,
        sizes_of: Callable[[SampleGroup], NDArray[np.int64]],
        group_bytes: int,
    ) -> None:
        super().__init__(samples, positions)
        self._sizes_of, self._group_bytes = sizes_of, group_bytes
        self._max_batches = 1

    def _iter_steps(self, order: Order, sharding: Sharding, position: int) -> Iterator[PlannedStep[SampleGroup]]:
        for run in self._merge_batches(self._batches(order, sharding, position)):
            yield from self._plan_run(order.epoch, run)

    def _batches(self, order: Order, sharding: Sharding, position: int) -> Iterator[_StepSamples]:
        """Yield the samples of each step; several steps at once, since a numpy call takes as long as 100 samples."""
        permuted = order.feistel()
        remaining = sharding.steps(position)
        while steps := list(islice(remaining, max(1, _LOOKUP_SAMPLES // sharding.batch_size))):
            positions = [part.positions(sharding.lanes) for step, _ in steps for part in step.slices]
            samples = SampleGroup(*order.locate(permuted(np.concatenate(positions))))
            sizes = self._sizes_of(samples)
            start = 0
            for step, is_last in steps:
                these = slice(start, start + step.samples)
                yield _StepSamples(step, is_last, samples[these], sizes[these])
                start = these.stop

    def _merge_batches(self, batches: Iterator[_StepSamples]) -> Iterator[list[_StepSamples]]:
        """Yield runs of batches that fit in one group; a batch that is too large is a run of its own."""
        run: list[_StepSamples] = []
        size_bytes = samples = 0
        for batch in batches:
            batch_bytes = int(batch.sizes.sum())
            fits = size_bytes + batch_bytes <= self._group_bytes and samples + len(batch.samples) <= MAX_GROUP_SAMPLES
            if run and (len(run) >= self._max_batches or not fits):
                yield run
                self._max_batches *= 2
                run, size_bytes, samples = [], 0, 0
            run.append(batch)
            size_bytes += batch_bytes
            samples += len(batch.samples)
        if run:
            yield run

    def _plan_run(self, epoch: int, run: list[_StepSamples]) -> Iterator[PlannedStep[SampleGroup]]:
        """Split a run into groups, usually one, and plan its steps over them."""
        samples = SampleGroup.concatenate([batch.samples for batch in run])
        cuts = split_by_bytes(np.concatenate([batch.sizes for batch in run]), self._group_bytes)
        first_item, self._next_item = self._next_item, self._next_item + len(cuts) - 1
        start = 0
        for batch in run:
            end = start + len(batch.samples)
            segments: list[Segment] = []
            first_uses: list[tuple[int, SampleGroup]] = []
            for item, (group_start, group_end) in enumerate(pairwise(cuts), first_item):
                begin, stop = max(start, group_start), min(end, group_end)
                if begin >= stop:
                    continue
                if begin == group_start:
                    first_uses.append((item, samples[group_start:group_end]))
                segments.append(
                    Segment(
                        items=(item,),
                        row_indices=partial(_row_range, begin - group_start, stop - group_start),
                        released_after=(item,) if stop == group_end else (),
                    )
                )
            step = batch.step
            number, first = next(self._numbers), tuple(first_uses)
            yield PlannedStep(number, epoch, step.end, batch.is_last, tuple(segments), step.repeated, first)
            start = end


def split_by_bytes(sizes: NDArray[np.int64], max_bytes: int) -> list[int]:
    """Return boundaries 0, …, ``len(sizes)`` of parts of at most ``max_bytes``, unless a part is one larger sample."""
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + max_bytes, "right"))))
    return cuts


def _row_range(start: int, end: int) -> RowIndices:
    return np.zeros(end - start, np.int64), np.arange(start, end)


class HeadMemory:
    """The heads of a data set, in one block of memory; nothing is allocated or read before the first load.

    A head contains the offsets of ragged columns, the checksum of every value, and the small columns, so any sample can
    be located and verified.

    Args:
        manifest: index of the data set.
        columns: name → column, of the columns to locate.
        mapped: objects in memory that processes share, whose heads are copied; None for none.
    """

    def __init__(self, manifest: Manifest, columns: Mapping[str, Column], mapped: MappedObjects | None = None) -> None:
        self._manifest, self._columns, self._mapped = manifest, columns, mapped
        self._numbers = {name: number for number, name in enumerate(manifest.schema)}
        self._head_offsets = _head_offsets(manifest)
        self._starts: dict[str, NDArray[np.int64]] = {}
        self._memory: memoryview | None = None
        self._is_loaded = np.zeros(len(manifest), bool)
        self._loading: dict[int, asyncio.Event] = {}

    @staticmethod
    def size_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> int:
        """Return the memory of all heads of a data set, including the tables of tensor offsets, in bytes."""
        tables = len(_tensor_names(columns)) + 1
        return int(_head_offsets(manifest)[-1]) + tables * 8 * (len(manifest) + 1)

    async def load(self, fetcher: Fetcher) -> None:
        """Read and verify all heads, as many at once as the fetcher allows, or several by one request. Idempotent.

        Raises:
            StoreError: a head could not be read.
            FormatError: a head does not match the manifest.
        """
        missing = np.flatnonzero(~self._is_loaded).tolist()
        if (limits := fetcher.batch_limits) is None:
            concurrency = min(len(missing), fetcher.config.max_concurrency)
            await for_each(missing, partial(self.load_head, fetcher), concurrency=concurrency)
            return
        memory, manifest = self._allocate(), self._manifest

        def accept(number: int) -> None:
            row = missing[number]
            data = self._head_memory(memory, row)[: int(manifest.rows.head_bytes[row])]
            verify_head(manifest, row, data)
            self._add(row, open_head(manifest, row, data))

        parts = [self._head_part(memory, row) for row in missing]
        await fetcher.fetch_parts(parts, into=memory, verify=accept, limits=limits, urgent=True)

    async def load_head(self, fetcher: Fetcher, row: int) -> None:
        """Read and verify the head of a super-sample, by manifest row. Idempotent; calls at the same time read once.

        Raises:
            StoreError: the head could not be read.
            FormatError: the head does not match the manifest.
        """
        while not self._is_loaded[row]:
            if (other := self._loading.get(row)) is not None:
                await other.wait()
                continue
            ended = self._loading[row] = asyncio.Event()
            try:
                await self._read(fetcher, row)
            finally:
                del self._loading[row]
                ended.set()

    async def _read(self, fetcher: Fetcher, row: int) -> None:
        manifest, into = self._manifest, self._head_memory(self._allocate(), row)
        if self._mapped is None:
            self._add(row, await fetch_head(fetcher, manifest, row, into, urgent=True))
        else:
            self._add(row, await self._read_mapped(self._mapped, fetcher, row, into))

    async def _read_mapped(self, mapped: MappedObjects, fetcher: Fetcher, row: int, into: memoryview) -> Head:
        """Copy a head from the object in the tier, or as an object of its own, so that one process fetches it."""
        manifest, ref = self._manifest, self._manifest.ref(row)
        data = into[: int(manifest.rows.head_bytes[row])]
        part = ObjectPart(ref, RangePart(0, len(data), 0))
        if await mapped.copy([part], data, lambda _: verify_head(manifest, row, data), loads=False):
            checksum = int(manifest.rows.head_crc32c[row])
            head = replace(ref, key=f"{ref.key}#head", size_bytes=len(data), crc32c=checksum, sha256_128=None)
            await mapped.fetch_once(head, data, lambda: fetch_head(fetcher, manifest, row, into, urgent=True))
        return open_head(manifest, row, data)

    def _allocate(self) -> memoryview:
        if self._memory is None:
            self._memory = anonymous_memory(int(self._head_offsets[-1]))
            self._starts = {tensor: np.empty(len(self._manifest), np.int64) for tensor in _tensor_names(self._columns)}
        return self._memory

    def _head_memory(self, memory: memoryview, row: int) -> memoryview:
        return memory[int(self._head_offsets[row]) : int(self._head_offsets[row + 1])]

    def _head_part(self, memory: memoryview, row: int) -> ObjectPart:
        """Return the part to read for a head: up to the next head in memory, so that one request reads several."""
        ref = self._manifest.ref(row)
        end = min(ref.size_bytes, self._head_memory(memory, row).nbytes)
        return ObjectPart(ref, RangePart(0, end, int(self._head_offsets[row])))

    def _add(self, row: int, head: Head) -> None:
        for tensor, table in self._starts.items():
            table[row] = head.starts[tensor]
        self._is_loaded[row] = True

    @property
    def memory(self) -> memoryview:
        """Memory that contains all heads."""
        assert self._memory is not None  # noqa: S101 - loaded before the first use
        return self._memory

    def addresses(self, tensor: str, group: SampleGroup, row_bytes: int) -> NDArray[np.int64]:
        """Return the offsets in :attr:`memory` of the rows of a tensor of the head, ``int64 [samples]``."""
        starts: NDArray[np.int64] = self._head_offsets[group.super_samples] + self._starts[tensor][group.super_samples]
        return starts + group.rows * row_bytes

    def extents(self, names: Sequence[str], group: SampleGroup) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start and end, in its object, of every value of columns, ``int64 [columns, samples]`` each."""
        extents = np.empty((2, len(names), len(group)), np.int64)
        for number, name in enumerate(names):
            column = self._columns[name]
            if column.is_fixed:
                extents[:, number] = group.rows, group.rows + 1
            else:
                offsets = self.addresses(f"{name}.offsets", group, 8)
                extents[:, number] = gather_rows(self.memory, offsets, 16).view("<i8").T
            extents[:, number] *= column.element_bytes
            extents[:, number] += self._starts[name][group.super_samples]
        return extents[0], extents[1]

    def checksums(self, names: Sequence[str], group: SampleGroup) -> NDArray[np.uint32]:
        """Return the CRC-32C of every value of columns, ``uint32 [columns, samples]``."""
        checksums = np.empty((len(names), len(group)), np.uint32)
        rows = self.addresses(CHECKSUMS, group, 4 * len(self._numbers))
        for number, name in enumerate(names):
            checksums[number] = gather_rows(self.memory, rows + 4 * self._numbers[name], 4).view("<u4").reshape(-1)
        return checksums


def _head_offsets(manifest: Manifest) -> NDArray[np.int64]:
    """Return the offset of each head, and the end of the last one, ``int64 [super-samples + 1]``."""
    sizes = -(-manifest.rows.head_bytes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return np.concatenate([[0], np.cumsum(sizes)])


def _tensor_names(columns: Mapping[str, Column]) -> list[str]:
    offsets = [f"{name}.offsets" for name, column in columns.items() if not column.is_fixed]
    return [CHECKSUMS, *offsets, *columns]


class RangedGroupReader:
    """Reads groups of samples into a ring by ranges, and locates their rows; see the subclasses for the items.

    Args:
        manifest: index of the data set.
        columns: name → column, of the wanted columns.
        fetcher: reads bytes.
        ring: ring to read into, which only this reader fills.
        limits: limits of the reads of a group.
        arrays: makes the arrays of batches.
        mapped: objects in memory that processes share, whose ranges are copied; None for none.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, Column],
        fetcher: Fetcher,
        ring: Ring,
        limits: ReadLimits,
        arrays: BatchArrays = NEW_ARRAYS,
        mapped: MappedObjects | None = None,
    ) -> None:
        self.columns, self.arrays = columns, arrays
        self._manifest, self._fetcher, self._ring, self._limits = manifest, fetcher, ring, limits
        self._mapped = mapped
        self._heads = HeadMemory(manifest, columns, mapped)
        self._large = [name for name, column in columns.items() if not is_small(column)]
        self._groups_by_slot: dict[int, tuple[SampleGroup, NDArray[np.int64]]] = {}

    def count_slots(self, ref: object) -> int:
        """Return the number of slots that an item takes: one."""
        return 1

    def _values(self, group: SampleGroup) -> ValueRanges:
        """Return the large values of a group, of loaded heads."""
        starts, ends = self._heads.extents(self._large, group)
        checksums = self._heads.checksums(self._large, group)
        return ValueRanges(samples=group, columns=self._large, starts=starts, ends=ends, checksums=checksums)

    async def _read(
        self, slot: int, values: ValueRanges, reads: ReadPlan, into: memoryview, offset: int, *, urgent: bool
    ) -> None:
        """Read the values of a slot into the memory at an offset of the ring's."""
        addresses = await read_values(
            values,
            reads,
            into,
            manifest=self._manifest,
            fetcher=self._fetcher,
            urgent=urgent,
            mapped=self._mapped,
        )
        self._groups_by_slot[slot] = values.samples, addresses + offset

    def locate(self, slots: Sequence[int], slot_indices: NDArray[np.int64], rows: NDArray[np.int64]) -> RowLocations:
        """Return the locations of samples of groups.

        Args:
            slots: slots of the groups.
            slot_indices: ``int64 [samples]``, index into ``slots``.
            rows: ``int64 [samples]``, index of the sample in its group.
        """
        memory, heads = self._ring.memory, self._heads
        used, indices = np.unique(slot_indices, return_inverse=True)
        placed = [self._groups_by_slot[slots[index]] for index in used.tolist()]
        firsts = np.cumsum([0, *(len(group) for group, _ in placed)])
        places = firsts[indices] + rows
        addresses = np.concatenate([addresses for _, addresses in placed], axis=1)[:, places]
        samples = SampleGroup.concatenate([group for group, _ in placed])[places]
        large = dict(zip(self._large, addresses, strict=True))
        values: dict[str, ValueLocations] = {}
        for name, column in self.columns.items():
            if not column.is_fixed:
                starts, ends = heads.extents([name], samples)
                values[name] = ValueLocations(memory, large[name], (ends - starts)[0] // column.element_bytes)
            elif name in large:
                values[name] = ValueLocations(memory, large[name])
            else:
                values[name] = ValueLocations(heads.memory, heads.addresses(name, samples, column.element_bytes))
        return RowLocations(samples.super_samples, samples.rows, values)


class SampleGroupReader(RangedGroupReader):
    """Reads items that are groups; fetches on the event loop, locates rows on any thread. All heads stay in memory."""

    async def prepare(self) -> None:
        """Read all heads on the first call.

        Raises:
            StoreError: a head could not be read.
            FormatError: a head does not match the manifest.
        """
        await self._heads.load(self._fetcher)

    def forecast(self, order: OrderConfig, partition: Sharding) -> ReadForecast:
        """Return the expected requests and bytes of the rank's first epoch, which also reads the heads."""
        return forecast_groups(self._manifest, self.columns, self._limits, partition, self._fetcher.batch_limits)

    def steps(self, positions: PositionRange) -> GroupSteps:
        """Return the steps of a range of the order."""
        samples = self._manifest.rows.samples
        return GroupSteps(samples, positions, self._sizes_of, self._limits.payload_bytes)

    def _sizes_of(self, group: SampleGroup) -> NDArray[np.int64]:
        starts, ends = self._heads.extents(self._large, group)
        sizes: NDArray[np.int64] = (ends - starts).sum(axis=0)
        return sizes

    async def fetch(self, ref: SampleGroup, *, urgent: bool = False) -> int:
        """Return a READY slot with the large values of a group.

        Raises:
            StoreError: a value could not be read.
            RingStateError: no slot was free.
        """
        ring = self._ring
        with ring.fill_slot(f"{len(ref)} samples", 0) as slot:
            values = self._values(ref)
            into = ring.view(slot, ring.slot_bytes)
            await self._read(slot, values, self._plan(values), into, ring.offset(slot), urgent=urgent)
        return slot

    def _plan(self, values: ValueRanges) -> ReadPlan:
        return values.plan(self._limits.for_batches(self._fetcher.batch_limits))
