"""Reads super-samples into ring slots: whole, or only the wanted columns if that saves enough.

There are three ways. One GET reads the whole object. Or one GET reads its head, which contains the offsets of the
columns, and a second round of requests reads the wanted columns to the same offsets in the slot as in the whole object,
so that only the unused bytes between them differ. Of a wide super-sample, whose head has many small columns, one round
of requests reads the header and the wanted columns, if they are fixed: the manifest determines their offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from stoker._base.batch_read import RangePart
from stoker._base.checksum import crc32c
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import NEW_ARRAYS, BatchArrays, RowLocations, ValueLocations, gather_rows
from stoker._fetch.range_plan import ReadForecast, ReadLimits, count_units_read, mean_row_bytes, plan_reads
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import Head, is_wide
from stoker._format.wide import FixedLayout, fixed_layout, parse_checksums
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import Sharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, FormatError

_NARROW_BYTES, _MIN_SORTED_COLUMNS = 8, 8
"""From 8 columns on whose values have at most 8 bytes, a batch's rows are copied in their order in memory, and then
moved to their places in the batch, because random reads of memory take longer than both."""
MIN_SAVING = 0.3
"""Minimum fraction of bytes to save for a second round of requests to be worth it."""


def open_head(manifest: Manifest, row: int, data: memoryview) -> Head:
    """Return the head at the start of verified ``data`` of a manifest row's super-sample; its arrays are views.

    Raises:
        FormatError: the data is not a head, or does not match the manifest.
    """
    try:
        head = Head.parse(data, int(manifest.rows.size_bytes[row]))
    except FormatError as error:
        raise FormatError(f"{manifest.key(row)}: {error}; pack the data set again") from error
    rows = manifest.rows
    if head.schema != manifest.schema or (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{manifest.key(row)} does not have the schema, samples or head size in the manifest")
    return replace(head, schema=manifest.schema)  # the same object for all heads


async def fetch_head(fetcher: Fetcher, manifest: Manifest, row: int, into: memoryview, *, urgent: bool) -> Head:
    """Read a super-sample's head into the start of ``into``, verified by its checksum in the manifest.

    Raises:
        StoreError: the head could not be read; see :meth:`stoker._fetch.fetcher.Fetcher.fetch_ranges`.
        FormatError: the data is not a head, or does not match the manifest.
    """
    size_bytes = int(manifest.rows.head_bytes[row])
    ref, data = manifest.ref(row), into[:size_bytes]
    verify = partial(verify_head, manifest, row)
    await fetcher.fetch_ranges(ref, [RangePart(0, size_bytes, 0)], into=data, verify=verify, urgent=urgent)
    return open_head(manifest, row, data)


def verify_head(manifest: Manifest, row: int, data: memoryview) -> None:
    """Raise ChecksumError unless ``data`` has the checksum of a head in the manifest."""
    expected = int(manifest.rows.head_crc32c[row])
    if (checksum := crc32c(data)) != expected:
        key = manifest.key(row)
        raise ChecksumError(f"{key}: its head has crc32c {checksum:08x}, the manifest says {expected:08x}")


def column_parts(head: Head, names: Iterable[str]) -> list[RangePart]:
    """Return the ranges of columns to read in addition to the head, in order; adjacent and close ones are merged.

    Each range is read to its offset in the object, so gaps between merged ranges need no additional memory.
    """
    outside = (head.row_range(name, 0, head.samples) for name in names if not head.is_in_head(name))
    return [RangePart(start, end, start) for start, end in _plan_ranges(tuple(outside), head.size_bytes)]


@lru_cache(maxsize=64)  # super-samples with only fixed columns have one layout, except the last
def _plan_ranges(ranges: tuple[tuple[int, int], ...], size_bytes: int) -> Sequence[tuple[int, int]]:
    starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    limits = ReadLimits(slot_bytes=size_bytes, range_bytes=size_bytes)
    reads = plan_reads(np.zeros(len(ranges), np.int64), starts, ends, limits)
    return tuple(zip(reads.starts.tolist(), reads.ends.tolist(), strict=True))


def wide_layout(manifest: Manifest, row: int) -> FixedLayout:
    """Return the positions of the fixed columns of a manifest row's super-sample."""
    rows = manifest.rows
    return fixed_layout(manifest.schema, int(rows.samples[row]), int(rows.head_bytes[row]))


def wide_parts(manifest: Manifest, names: Iterable[str], row: int) -> list[RangePart]:
    """Return the ranges to read for fixed columns of a wide super-sample: its header, and the columns, merged."""
    layout = wide_layout(manifest, row)
    ranges = ((0, layout.header_bytes), *(layout.ranges[name] for name in names))
    return [RangePart(start, end, start) for start, end in _plan_ranges(ranges, int(manifest.rows.size_bytes[row]))]


def read_shares(manifest: Manifest, columns: Mapping[str, Column]) -> tuple[float, ...]:
    """Return the ranges that are read of a super-sample for some columns, each as a fraction of its size.

    Super-samples are assumed to be like the one with the most samples. Empty if the whole super-sample is read.
    """
    row = int(manifest.rows.samples.argmax())
    size_bytes = int(manifest.rows.size_bytes[row])
    if columns.keys() == manifest.schema.keys():
        return ()
    if is_wide(manifest.schema) and all(column.is_fixed for column in columns.values()):
        sizes = [float(part.size_bytes) for part in wide_parts(manifest, columns, row)]
    else:
        rows = mean_row_bytes(manifest, columns)
        sizes = [
            float(manifest.rows.head_bytes[row]),
            *(each * int(manifest.rows.samples[row]) for each in rows.values()),
        ]
    return tuple(size / size_bytes for size in sizes) if sum(sizes) <= (1.0 - MIN_SAVING) * size_bytes else ()


class SuperSampleReader:
    """Reads items that are super-samples, by manifest row; fetches on the event loop, locates rows on any thread.

    Args:
        manifest: index of the data set.
        columns: name → column, of the wanted columns.
        fetcher: reads bytes.
        ring: ring to read into, which only this reader fills.
        arrays: makes the arrays of batches.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, Column],
        fetcher: Fetcher,
        ring: Ring,
        arrays: BatchArrays = NEW_ARRAYS,
    ) -> None:
        self.columns, self.arrays = columns, arrays
        self._manifest, self._fetcher, self._ring = manifest, fetcher, ring
        self._is_partial = columns.keys() != manifest.schema.keys()
        self._is_wide = (
            self._is_partial and is_wide(manifest.schema) and all(each.is_fixed for each in columns.values())
        )
        narrow = (column.is_fixed and column.element_bytes <= _NARROW_BYTES for column in columns.values())
        self._is_narrow = len(columns) >= _MIN_SORTED_COLUMNS and arrays.copies_twice and all(narrow)
        self._starts_by_slot: dict[int, tuple[int, Mapping[str, int]]] = {}
        self._wanted_bytes = self._seen_bytes = 0

    async def prepare(self) -> None:
        """Do nothing: no preparatory read is needed."""

    def forecast(self, order: OrderConfig, partition: Sharding) -> ReadForecast:
        """Return the expected requests and bytes of an epoch of the rank, from the mean size of super-samples.

        If only some columns are read, each column outside the head counts as one request, or several if it is large.
        """
        manifest = self._manifest
        count = count_units_read(manifest, order, partition)
        if self._is_wide and (shares := read_shares(manifest, self.columns)):
            return ReadForecast(count * len(shares), round(sum(shares) * manifest.size_bytes / len(manifest) * count))
        rows = mean_row_bytes(manifest, self.columns)
        head_bytes = int(manifest.rows.head_bytes.sum(dtype=np.int64))
        wanted_bytes = head_bytes + sum(rows.values()) * manifest.samples
        max_request_bytes = self._fetcher.config.max_request_bytes
        if self._is_partial and wanted_bytes <= (1.0 - MIN_SAVING) * manifest.size_bytes:
            column_bytes = [row_bytes * manifest.samples / len(manifest) for row_bytes in rows.values()]
            requests = 1 + sum(math.ceil(size_bytes / max_request_bytes) for size_bytes in column_bytes)
            return ReadForecast(count * requests, round(wanted_bytes / len(manifest) * count))
        mean_requests = manifest.mean_requests(max_request_bytes)
        return ReadForecast(round(count * mean_requests), round(manifest.size_bytes / len(manifest) * count))

    def steps(self, positions: PositionRange) -> SuperSampleSteps:
        """Return the steps of a range of the order."""
        return SuperSampleSteps(self._manifest.rows.samples, positions)

    @property
    def saving(self) -> float:
        """Fraction of bytes, 0 to 1, that reading only columns saved or would have saved; 1 before the first read."""
        return 1.0 - self._wanted_bytes / self._seen_bytes if self._seen_bytes else 1.0

    def count_slots(self, ref: int) -> int:
        """Return the number of slots that a super-sample takes."""
        return self._ring.count_slots(int(self._manifest.rows.size_bytes[ref]))

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Return a READY slot with a super-sample, or its wanted columns.

        Raises:
            StoreError: the object could not be read.
            FormatError: the object is not a super-sample, or does not match the manifest.
            MemoryBudgetError: the object is larger than the ring.
            RingStateError: no slot was free.
        """
        manifest, ring, fetcher = self._manifest, self._ring, self._fetcher
        object_ref = manifest.ref(ref)
        with ring.fill_slot(object_ref.key, object_ref.size_bytes) as slot:
            data = ring.view(slot, object_ref.size_bytes)
            if not (self._is_partial and self.saving >= MIN_SAVING):
                await fetcher.fetch_whole(object_ref, data, urgent=urgent)
                self._record_contents(ref, slot, open_head(manifest, ref, data))
            elif await fetcher.tiers.read(object_ref, data):
                self._record_contents(ref, slot, open_head(manifest, ref, data))
            elif not (self._is_wide and await self._fetch_wide(ref, slot, data, urgent)):
                head = await fetch_head(fetcher, manifest, ref, data, urgent=urgent)
                parts = [
                    piece
                    for part in self._record_contents(ref, slot, head)
                    for piece in fetcher.split(part, urgent=urgent)
                ]
                if parts:
                    verify = partial(self._verify, head)
                    await fetcher.fetch_ranges(object_ref, parts, into=data, verify=verify, urgent=urgent)
        return slot

    async def _fetch_wide(self, ref: int, slot: int, data: memoryview, urgent: bool) -> bool:
        """Read the wanted columns of a wide super-sample; return False if its header does not have their checksums."""
        object_ref, layout = self._manifest.ref(ref), wide_layout(self._manifest, ref)
        parts = wide_parts(self._manifest, self.columns, ref)
        pieces = [piece for part in parts for piece in self._fetcher.split(part, urgent=urgent)]
        verify = partial(self._verify_wide, object_ref, layout)
        await self._fetcher.fetch_ranges(object_ref, pieces, into=data, verify=verify, urgent=urgent)
        if self._is_wide:
            self._starts_by_slot[slot] = ref, {name: layout.ranges[name][0] for name in self.columns}
            self._wanted_bytes += sum(part.size_bytes for part in parts)
            self._seen_bytes += object_ref.size_bytes
        return self._is_wide

    def _verify_wide(self, ref: ObjectRef, layout: FixedLayout, data: memoryview) -> None:
        checksums = parse_checksums(data[: layout.header_bytes], layout, ref)
        if checksums is None:  # packed before headers had them
            self._is_wide = False
            return
        for name in self.columns:
            start, end = layout.ranges[name]
            if crc32c(data[start:end]) != checksums[name]:
                raise ChecksumError(f"{ref.key}: column {name!r} is not what was packed: its checksum differs")

    def _verify(self, head: Head, data: memoryview) -> None:
        for name in self.columns:
            if not head.is_in_head(name):
                start, end = head.row_range(name, 0, head.samples)
                head.verify_rows(name, 0, data[start:end])

    def _record_contents(self, row: int, slot: int, head: Head) -> Sequence[RangePart]:
        """Record the contents of a slot; return the ranges of its wanted columns if others are left out."""
        self._starts_by_slot[slot] = row, head.starts
        if not self._is_partial:
            return ()
        parts = column_parts(head, self.columns)
        self._wanted_bytes += head.head_bytes + sum(part.size_bytes for part in parts)
        self._seen_bytes += head.size_bytes
        return parts

    def locate(self, slots: Sequence[int], slot_indices: NDArray[np.int64], rows: NDArray[np.int64]) -> RowLocations:
        """Return the locations of rows of super-samples.

        Args:
            slots: slots of the super-samples.
            slot_indices: ``int64 [samples]``, index into ``slots``.
            rows: ``int64 [samples]``, row in that super-sample.
        """
        placed = [self._starts_by_slot[slot] for slot in slots]
        bases = np.array([self._ring.offset(slot) for slot in slots])
        starts = [tensor_starts for _, tensor_starts in placed]
        super_samples = np.array([row for row, _ in placed])[slot_indices]
        if not self._is_narrow:
            values = locate_values(self.columns, self._ring.memory, starts, bases, slot_indices, rows)
            return RowLocations(super_samples, rows, values)
        order = np.argsort(bases[slot_indices] + rows)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        values = locate_values(self.columns, self._ring.memory, starts, bases, slot_indices[order], rows[order])
        return RowLocations(super_samples, rows, values, places)


def locate_values(
    columns: Mapping[str, Column],
    memory: memoryview,
    tensor_starts: Sequence[Mapping[str, int]],
    bases: NDArray[np.int64],
    indices: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, ValueLocations]:
    """Return column name → locations of the values of rows of super-samples.

    Args:
        columns: name → column, of the wanted columns.
        memory: memory that contains the super-samples.
        tensor_starts: offset of each tensor in the super-sample, by name, for each super-sample.
        bases: ``int64 [super-samples]``, offset of each super-sample in the memory.
        indices: ``int64 [samples]``, index of the super-sample.
        rows: ``int64 [samples]``, row in that super-sample.
    """

    @cache
    def row_offsets(row_bytes: int) -> NDArray[np.int64]:
        offsets: NDArray[np.int64] = bases[indices] + rows * row_bytes
        return offsets

    def addresses(tensor: str, row_bytes: int) -> tuple[memoryview, NDArray[np.int64]]:
        starts = [each[tensor] for each in tensor_starts]
        if starts.count(starts[0]) == len(starts):  # as in all super-samples of one size
            return memory[starts[0] :], row_offsets(row_bytes)
        return memory, row_offsets(row_bytes) + np.array(starts, np.int64)[indices]

    located: dict[str, ValueLocations] = {}
    for name, column in columns.items():
        if column.is_fixed:
            located[name] = ValueLocations(*addresses(name, column.element_bytes))
        else:
            borders = gather_rows(*addresses(f"{name}.offsets", 8), 16).view("<i8")
            values, starts = addresses(name, 0)
            located[name] = ValueLocations(
                values, starts + borders[:, 0] * column.element_bytes, borders[:, 1] - borders[:, 0]
            )
    return located
