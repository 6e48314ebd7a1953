"""Plans which ranges of objects to read for values, reads them, and forecasts the requests of an epoch.

:func:`plan_reads` is a pure function for samples from any super-samples, for some rows of one, and for whole columns.
Values that are adjacent in an object are read as one range, and so are values with a small gap between them, while
there is room for the unused bytes: the smallest gaps are merged first. :func:`read_values` runs a plan. A
:class:`ReadForecast` is computed from the manifest alone, without hedges and retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stoker._base.batch_read import BatchLimits, ObjectPart, RangePart
from stoker._base.checksum import crc32c
from stoker._base.task_group import for_each_in_turn
from stoker._fetch.config import GAP_BYTES
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.mapped_objects import MappedObjects
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import is_small
from stoker._memory.budget import SlotPlan
from stoker._order.order import Order, OrderConfig
from stoker._order.sharding import Sharding
from stoker._order.units import Units
from stoker.errors import ChecksumError

MAX_GROUP_SAMPLES = 1 << 16
"""Maximum number of samples of a group, so that its metadata stays small relative to its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits of the reads of a group.

    Attributes:
        slot_bytes: memory for all its reads, in bytes.
        gap_bytes: largest gap between two values to read in one range, in bytes.
        range_bytes: length at which a range ends with the current value, in bytes; longer ones could not be hedged.
    """

    slot_bytes: int
    gap_bytes: int = GAP_BYTES
    range_bytes: int

    @classmethod
    def of(cls, slots: SlotPlan) -> ReadLimits:
        """Return the limits for a ring of group slots."""
        return cls(slot_bytes=slots.slot_bytes, range_bytes=max(1, slots.hedge_buffer_bytes // 2))

    @property
    def payload_bytes(self) -> int:
        """Maximum bytes of values in a group, half a slot; the rest is for gaps. One larger value may exceed it."""
        return self.slot_bytes // 2

    def for_batches(self, batch_limits: BatchLimits | None) -> ReadLimits:
        """Return the limits for a store: if it reads several ranges by one request, reading gaps saves no request."""
        return self if batch_limits is None else replace(self, gap_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPlan:
    """Ranges to read into a slot, and the values that they contain.

    Attributes:
        objects: ``int64 [ranges]``, object of each range, ascending.
        starts: ``int64 [ranges]``, offset of its first byte in the object, ascending within an object.
        ends: ``int64 [ranges]``, offset behind its last byte in the object.
        offsets: ``int64 [ranges]``, offset of its first byte in the slot; the ranges are contiguous there.
        values: ``int64``, numbers of all non-empty values, in the order of the ranges.
        value_offsets: ``int64 [ranges + 1]``; range ``i`` contains ``values[firsts[i]:firsts[i + 1]]``.
        addresses: ``int64 [values]``, offset of each value in the slot; 0 for an empty value.
    """

    objects: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    value_offsets: NDArray[np.int64]
    addresses: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size_bytes(self) -> int:
        """Number of bytes to read, which is also the memory that they take."""
        return int((self.ends - self.starts).sum())


def plan_reads(
    objects: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], limits: ReadLimits
) -> ReadPlan:
    """Return how to read the values ``[starts, ends)`` of objects, ``int64 [values]`` each.

    Values must not overlap, unless they are identical, and must fit in a slot together.
    """
    present = np.flatnonzero(ends > starts)
    values = present[np.lexsort((starts[present], objects[present]))]
    owners, begin, end = objects[values], starts[values], ends[values]
    is_first = np.ones(len(values), bool)
    is_first[1:] = ~_merge_mask(owners, begin, end, limits)
    run = np.cumsum(is_first) - 1
    piece = (begin - begin[is_first][run]) // limits.range_bytes
    is_first[1:] |= piece[1:] > piece[:-1]
    firsts = np.append(np.flatnonzero(is_first), len(values))
    range_starts, range_ends = begin[firsts[:-1]], end[firsts[1:] - 1]
    offsets = np.cumsum(range_ends - range_starts) - (range_ends - range_starts)
    addresses = np.zeros(len(starts), np.int64)
    addresses[values] = begin + np.repeat(offsets - range_starts, np.diff(firsts))
    return ReadPlan(
        objects=owners[firsts[:-1]],
        starts=range_starts,
        ends=range_ends,
        offsets=offsets,
        values=values,
        value_offsets=firsts,
        addresses=addresses,
    )


def _merge_mask(
    owners: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64], limits: ReadLimits
) -> NDArray[np.bool_]:
    """Return for each value but the first whether it is read in one range with the value before it."""
    gaps = np.maximum(begin[1:] - end[:-1], 0)
    narrow = np.flatnonzero((owners[1:] == owners[:-1]) & (gaps <= limits.gap_bytes))
    narrow = narrow[np.argsort(gaps[narrow], kind="stable")]
    room_bytes = limits.slot_bytes - int((end - begin).sum())
    bridged = np.zeros(len(gaps), bool)
    bridged[narrow[np.cumsum(gaps[narrow]) <= room_bytes]] = True
    return bridged


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroup:
    """Samples that are read together.

    Attributes:
        super_samples: ``int64 [samples]``, manifest row of each sample's super-sample.
        rows: ``int64 [samples]``, row in that super-sample.
    """

    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: slice | NDArray[np.int64]) -> SampleGroup:
        return SampleGroup(self.super_samples[key], self.rows[key])

    @classmethod
    def concatenate(cls, groups: Sequence[SampleGroup]) -> SampleGroup:
        """Return the concatenated samples of groups."""
        super_samples = np.concatenate([group.super_samples for group in groups])
        return cls(super_samples, np.concatenate([group.rows for group in groups]))


def group_by_super_sample(super_samples: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each distinct super-sample of an array, ascending, with its indices in the array, ascending."""
    order = np.argsort(super_samples, kind="stable")
    rows = super_samples[order]
    borders = np.flatnonzero(np.diff(rows, prepend=-1))
    yield from zip(rows[borders].tolist(), np.split(order, borders)[1:], strict=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueRanges:
    """Values to read, and their places in the objects.

    Attributes:
        samples: samples of the values.
        columns: names of the columns, all outside the head.
        starts: ``int64 [columns, samples]``, offset of the first byte of each value in its object.
        ends: ``int64 [columns, samples]``, offset behind its last byte.
        checksums: ``uint32 [columns, samples]``, CRC-32C of each value.
    """

    samples: SampleGroup
    columns: Sequence[str]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all values."""
        return int((self.ends - self.starts).sum())

    def plan(self, limits: ReadLimits) -> ReadPlan:
        """Return how to read the values, which are numbered column by column."""
        objects = np.tile(self.samples.super_samples, len(self.columns))
        return plan_reads(objects, self.starts.ravel(), self.ends.ravel(), limits)


class _PlannedReads:
    """The ranges of a plan, by number, and the memory for them."""

    def __init__(self, values: ValueRanges, reads: ReadPlan, into: memoryview, manifest: Manifest) -> None:
        self._values, self._reads, self._into, self._manifest = values, reads, into, manifest
        self._sizes, self._checksums = (values.ends - values.starts).ravel(), values.checksums.ravel()

    def part(self, number: int) -> ObjectPart:
        """Return a range's object, and its part of that."""
        reads = self._reads
        ref = self._manifest.ref(int(reads.objects[number]))
        part = RangePart(int(reads.starts[number]), int(reads.ends[number]), int(reads.offsets[number]))
        return ObjectPart(ref, part)

    def verify(self, number: int) -> None:
        """Raise ChecksumError if a value of a range is wrong."""
        reads, values, sizes = self._reads, self._values, self._sizes
        held = reads.values[reads.value_offsets[number] : reads.value_offsets[number + 1]]
        extents = zip(reads.addresses[held].tolist(), sizes[held].tolist(), held.tolist(), strict=True)
        for address, size, value in extents:
            if crc32c(self._into[address : address + size]) != self._checksums[value]:
                column, place = divmod(value, len(values.samples))
                name, row = values.columns[column], values.samples.rows[place]
                key = self._manifest.key(int(reads.objects[number]))
                raise ChecksumError(f"{key}: column {name!r} of row {row} is not what was packed")

    async def copy(self, mapped: MappedObjects) -> Sequence[int]:
        """Copy the ranges of mapped objects; return the numbers of the other ranges."""
        refs = {row: self._manifest.ref(row) for row in np.unique(self._reads.objects).tolist()}
        columns = self._reads.objects, self._reads.starts, self._reads.ends, self._reads.offsets
        parts = [
            ObjectPart(refs[row], RangePart(*each))
            for row, *each in zip(*(each.tolist() for each in columns), strict=True)
        ]
        return await mapped.copy(parts, self._into, self.verify)


async def read_values(
    values: ValueRanges,
    reads: ReadPlan,
    into: memoryview,
    *,
    manifest: Manifest,
    fetcher: Fetcher,
    urgent: bool,
    mapped: MappedObjects | None = None,
) -> NDArray[np.int64]:
    """Read values as planned and return the offset of each in ``into``, ``int64 [columns, samples]``.

    Ranges of objects in ``mapped`` are copied. Each other range is a request with its own retries and deadline, unless
    the store reads several by one. When the call ends in any way, nothing writes to ``into`` any more.

    Raises:
        StoreError: a range could not be read; names object, column and row if a checksum is wrong.
    """
    planned = _PlannedReads(values, reads, into, manifest)
    numbers = range(len(reads)) if mapped is None else await planned.copy(mapped)

    async def read(number: int) -> None:
        ref, part = planned.part(number)
        ranges = fetcher.split(part, urgent=urgent)
        await fetcher.fetch_ranges(ref, ranges, into=into, verify=lambda _: planned.verify(number), urgent=urgent)

    if (limits := fetcher.batch_limits) is None:
        await for_each_in_turn(numbers, read, fetcher.ranges, urgent=urgent)
    elif numbers:

        def verify(place: int) -> None:
            planned.verify(numbers[place])

        parts = [planned.part(number) for number in numbers]
        await fetcher.fetch_parts(parts, into=into, verify=verify, limits=limits, urgent=urgent)
    return reads.addresses.reshape(values.starts.shape)


@dataclass(frozen=True, slots=True)
class ReadForecast:
    """Expected reads of an epoch of one rank.

    Attributes:
        requests: number of GET requests.
        size_bytes: number of bytes read.
    """

    requests: int
    size_bytes: int


def count_units_read(manifest: Manifest, order: OrderConfig, partition: Sharding) -> int:
    """Return the expected number of units that a rank reads in an epoch: super-samples, unless the order has units.

    For ``full``, those with at least one of the rank's samples: ``n (1 - (1 - share)**rows)``. For other orders, those
    in the delivered part of each of its lanes, estimated from one lane.
    """
    units = Units.of(manifest.rows, order.unit_bytes)
    count = len(units)
    if order.shuffle == "full":
        share = min(1.0, partition.samples / manifest.samples / partition.readers)
        return round(count * (1.0 - float((1.0 - share) ** (manifest.samples / count))))
    lane = Order(units, order, epoch=0).lane(int(partition.own_lanes[0]))
    delivered = -(-partition.samples // partition.lanes)
    return min(count, len(partition.own_lanes) * int(np.searchsorted(lane.first_places(), delivered)))


def forecast_groups(
    manifest: Manifest,
    columns: Mapping[str, Column],
    limits: ReadLimits,
    partition: Sharding,
    batch_limits: BatchLimits | None = None,
) -> ReadForecast:
    """Return the expected reads of a rank's samples in a random order, by ranges, and of all heads once.

    With ``batch_limits``, one request reads several ranges.

    Every group is assumed to need the same reads as one group that is drawn at random and planned. Rows of ragged
    columns are assumed to have the mean size; the smaller groups at the start of a run are not considered.
    """
    samples = -(-partition.samples // partition.readers)
    rows = mean_row_bytes(manifest, columns)
    group = _samples_per_group(sum(rows.values()), limits, partition.batch_size, samples)
    order = Order(manifest.rows.samples, OrderConfig(shuffle="full"), epoch=0)
    objects, places = order.locate(order.feistel()(np.arange(group)))
    values = np.empty((2, len(rows), group), np.int64)
    column_starts = np.zeros(len(manifest))
    for number, row_bytes in enumerate(rows.values()):
        values[:, number] = column_starts[objects] + np.array([places, places + 1]) * row_bytes
        column_starts += manifest.rows.samples * row_bytes
    starts, ends = values[0].ravel(), values[1].ravel()
    reads = plan_reads(np.tile(objects, len(rows)), starts, ends, limits.for_batches(batch_limits))
    groups = samples / group
    head_bytes = int(manifest.rows.head_bytes.sum(dtype=np.int64))
    group_requests = _count_requests(len(reads), reads.size_bytes, batch_limits)
    head_requests = _count_requests(len(manifest), head_bytes, batch_limits)
    return ReadForecast(
        requests=round(groups * group_requests) + head_requests,
        size_bytes=round(groups * reads.size_bytes) + head_bytes,
    )


def _count_requests(ranges: int, size_bytes: int, batch_limits: BatchLimits | None) -> int:
    if batch_limits is None:
        return ranges
    return min(ranges, max(-(-size_bytes // batch_limits.size_bytes), -(-ranges // batch_limits.ranges)))


def _samples_per_group(row_bytes: float, limits: ReadLimits, batch_size: int, samples: int) -> int:
    """Return the number of samples in a group: whole batches, if at least one fits."""
    most = min(MAX_GROUP_SAMPLES, int(limits.payload_bytes / row_bytes)) if row_bytes else MAX_GROUP_SAMPLES
    return max(1, min(samples, most // batch_size * batch_size if most >= batch_size else most))


def mean_row_bytes(manifest: Manifest, columns: Iterable[str]) -> dict[str, float]:
    """Return column name → mean bytes per row, for those of ``columns`` that have bytes outside the head.

    Several ragged columns are assumed to have the same mean size.
    """
    large = {name: column for name, column in manifest.schema.items() if not is_small(column)}
    fixed_bytes = sum(column.element_bytes for column in large.values() if column.is_fixed)
    ragged = sum(not column.is_fixed for column in large.values())
    bodies = manifest.size_bytes - int(manifest.rows.head_bytes.sum(dtype=np.int64))
    ragged_bytes = max(0.0, bodies / manifest.samples - fixed_bytes) / max(1, ragged)
    means = {
        name: float(large[name].element_bytes if large[name].is_fixed else ragged_bytes)
        for name in columns
        if name in large
    }
    return {name: row_bytes for name, row_bytes in means.items() if row_bytes}
