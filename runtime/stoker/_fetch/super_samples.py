"""Reads super-samples into ring slots: whole, or only the wanted columns of them where that saves enough.

Two ways to the same bytes. One GET brings the whole object. Or one brings its head and says where the columns are, and
a second round the wanted ones, which land in the slot where they would be in the whole object; so that only the bytes
between them differ, and nobody looks at these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._fetch.fetcher import Fetcher, RangePart
from stoker._fetch.gather import GatherRows, Located, PickedRows, gather_rows
from stoker._fetch.range_plan import Forecast, ReadLimits, mean_row_bytes, plan_reads, super_samples_read
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import Head
from stoker._memory.ring import Ring
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing
from stoker._order.steps import Steps, Stretch
from stoker.errors import ChecksumError, FormatError

LEAST_SAVING = 0.3
"""The share of bytes that makes up for a second round of requests."""


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


def column_parts(head: Head, names: Iterable[str]) -> list[RangePart]:
    """Return the ranges to read of columns, beside the head: in order, those that (nearly) touch as one.

    Each goes where it lies in the object, so what is bridged needs no memory besides.
    """
    outside = (head.row_range(name, 0, head.samples) for name in names if not head.is_in_head(name))
    return [RangePart(start, end, start) for start, end in _planned(tuple(outside), head.size_bytes)]


@lru_cache(maxsize=64)  # super-samples whose columns are all fixed have one layout, but for the last
def _planned(ranges: tuple[tuple[int, int], ...], size_bytes: int) -> Sequence[tuple[int, int]]:
    starts, ends = np.array(ranges, np.int64).reshape(-1, 2).T
    limits = ReadLimits(slot_bytes=size_bytes, range_bytes=size_bytes)
    reads = plan_reads(np.zeros(len(ranges), np.int64), starts, ends, limits)
    return tuple(zip(reads.starts.tolist(), reads.ends.tolist(), strict=True))


class SuperSampleReading:
    """Reads super-samples, which are its items, by manifest row; fetches on the event loop, picks rows anywhere.

    Args:
        manifest: of the data set.
        columns: the wanted ones.
        fetcher: gets bytes.
        ring: they are put into; nobody else's.
        copy_rows: how rows are copied out of the ring.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, Column],
        fetcher: Fetcher,
        ring: Ring,
        copy_rows: GatherRows = gather_rows,
    ) -> None:
        self.columns, self.copy_rows = columns, copy_rows
        self._manifest, self._fetcher, self._ring = manifest, fetcher, ring
        self._leaves_out = columns.keys() != manifest.schema.keys()
        self._opened: dict[int, tuple[int, Head]] = {}
        self._wanted_bytes = self._seen_bytes = 0

    async def prepare(self) -> None:
        """Nothing needs to be read first."""

    def forecast(self, order: OrderConfig, partition: Dealing) -> Forecast:
        """Return what an epoch of the rank will take, of super-samples of the mean size.

        Where only columns are read, each that is outside the head counts as a request of its own.
        """
        manifest = self._manifest
        count = super_samples_read(manifest, order, partition)
        rows = mean_row_bytes(manifest, self.columns)
        head_bytes = int(manifest.rows.head_bytes.sum(dtype=np.int64))
        wanted_bytes = head_bytes + sum(rows.values()) * manifest.samples
        if self._leaves_out and wanted_bytes <= (1.0 - LEAST_SAVING) * manifest.size_bytes:
            return Forecast(count * (1 + len(rows)), round(wanted_bytes / len(manifest) * count))
        return Forecast(count, round(manifest.size_bytes / len(manifest) * count))

    def steps(self, stretch: Stretch) -> Steps:
        """Return the steps of a stretch."""
        return Steps(self._manifest.rows.samples, stretch)

    @property
    def saving(self) -> float:
        """The share of bytes, 0 to 1, that reading columns has saved, or would have; 1 before anything was read."""
        return 1.0 - self._wanted_bytes / self._seen_bytes if self._seen_bytes else 1.0

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Return a READY slot with a super-sample, or as much of it as is wanted.

        Raises:
            StoreError: it could not be had.
            FormatError: it is not a super-sample, or not what the manifest says.
            BudgetError: it is larger than a slot.
            RingStateError: no slot was free.
        """
        manifest, ring, fetcher = self._manifest, self._ring, self._fetcher
        wanted = manifest.ref(ref)
        with ring.filling(wanted.key, wanted.size_bytes) as slot:
            data = ring.view(slot, wanted.size_bytes)
            if not (self._leaves_out and self.saving >= LEAST_SAVING):
                await fetcher.fetch_whole(wanted, data, urgent=urgent)
                self._hold(ref, slot, open_head(manifest, ref, data))
            elif await fetcher.tiers.read(wanted, data):
                self._hold(ref, slot, open_head(manifest, ref, data))
            else:
                head = await fetch_head(fetcher, manifest, ref, data, urgent=urgent)
                parts = [piece for part in self._hold(ref, slot, head) for piece in fetcher.split(part, urgent=urgent)]
                if parts:
                    verify = partial(self._verify, head)
                    await fetcher.fetch_ranges(wanted, parts, into=data, verify=verify, urgent=urgent)
        return slot

    def _verify(self, head: Head, data: memoryview) -> None:
        for name in self.columns:
            if not head.is_in_head(name):
                start, end = head.row_range(name, 0, head.samples)
                head.verify_rows(name, 0, data[start:end])

    def _hold(self, row: int, slot: int, head: Head) -> Sequence[RangePart]:
        """Note what a slot holds; return the ranges of its wanted columns, if some are left out."""
        self._opened[slot] = row, head
        if not self._leaves_out:
            return ()
        parts = column_parts(head, self.columns)
        self._wanted_bytes += head.head_bytes + sum(part.size_bytes for part in parts)
        self._seen_bytes += head.size_bytes
        return parts

    def picked(self, slots: Sequence[int], which: NDArray[np.int64], rows: NDArray[np.int64]) -> PickedRows:
        """Return where rows of super-samples lie."""
        opened = [self._opened[slot] for slot in slots]
        bases = np.array([self._ring.offset(slot) for slot in slots])
        values = locate(self.columns, self._ring.memory, [head for _, head in opened], bases, which, rows)
        return PickedRows(np.array([row for row, _ in opened])[which], rows, values)


def locate(
    columns: Mapping[str, Column],
    memory: memoryview,
    heads: Sequence[Head],
    bases: NDArray[np.int64],
    which: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, Located]:
    """Return where the values of rows of super-samples lie.

    Args:
        columns: that are wanted.
        memory: that the super-samples lie in.
        heads: of the super-samples.
        bases: ``int64 [super-samples]``, where each starts in the memory.
        which: ``int64 [samples]``, index into ``heads``.
        rows: ``int64 [samples]``, row in that super-sample.
    """

    def addresses(tensor: str, row_bytes: int) -> NDArray[np.int64]:
        starts = bases + np.array([head.starts[tensor] for head in heads], np.int64)
        found: NDArray[np.int64] = starts[which] + rows * row_bytes
        return found

    located: dict[str, Located] = {}
    for name, column in columns.items():
        if column.is_fixed:
            located[name] = Located(memory, addresses(name, column.element_bytes))
        else:
            borders = gather_rows(memory, addresses(f"{name}.offsets", 8), 16).view("<i8")
            starts = addresses(name, 0) + borders[:, 0] * column.element_bytes
            located[name] = Located(memory, starts, borders[:, 1] - borders[:, 0])
    return located
