"""Which ranges to read for values of objects, and the reading of them, each value verified by its checksum.

:func:`plan_reads` is pure: it puts ranges together for samples from anywhere, and for some of a super-sample. Values
that lie next to each other in an object are read as one range, and so are values with a little between them, as long as
there is room for what is read in vain: the smallest gaps are bridged first. :func:`read_values` runs a plan. Whole
columns go where they lie in the object, so for them there is room in any case:
:func:`~stoker._fetch.super_samples.column_parts` needs no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker._base.checksum import crc32c
from stoker._base.task_group import for_each
from stoker._fetch.config import GAP_BYTES
from stoker._fetch.fetcher import Fetcher, RangePart
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan
from stoker.errors import ChecksumError

__all__ = ["Group", "MOST_SAMPLES", "ReadLimits", "Reads", "Values", "plan_reads", "read_values"]

MOST_SAMPLES = 1 << 16
"""Of a group, so that what is known of it stays small beside what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """What a group may take.

    Attributes:
        slot_bytes: of memory, for all it reads.
        gap_bytes: the widest gap that is bridged.
        range_bytes: a range that has become so long ends with the value; longer ones could not be hedged.
    """

    slot_bytes: int
    gap_bytes: int = GAP_BYTES
    range_bytes: int

    @classmethod
    def of(cls, slots: SlotPlan) -> ReadLimits:
        """Return the limits that go with a ring of group slots."""
        return cls(slot_bytes=slots.slot_bytes, range_bytes=max(1, slots.hedge_buffer_bytes // 2))

    @property
    def payload_bytes(self) -> int:
        """Of wanted values in a group, but for one that is larger alone: half a slot, the rest is for gaps."""
        return self.slot_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """Ranges to read into a slot, and which values they hold.

    Attributes:
        objects: ``int64 [ranges]``, of which object each range is; rises.
        starts: ``int64 [ranges]``, its first byte in the object; rises within an object.
        ends: ``int64 [ranges]``, the byte behind its last.
        offsets: ``int64 [ranges]``, where in the slot its first byte goes; one range follows the other.
        values: the numbers of the values that have any bytes, in the order of the ranges.
        firsts: ``int64 [ranges + 1]``: range ``i`` holds ``values[firsts[i]:firsts[i + 1]]``.
        addresses: ``int64``, where in the slot each value lies; 0 for an empty one.
    """

    objects: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    firsts: NDArray[np.int64]
    addresses: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size_bytes(self) -> int:
        """What is read, and how much memory it takes."""
        return int((self.ends - self.starts).sum())


def plan_reads(
    objects: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], limits: ReadLimits
) -> Reads:
    """Return how to read values ``[starts, ends)`` of objects, ``int64 [values]`` each.

    Values do not overlap, unless they are the same, and all together fit in a slot.
    """
    present = np.flatnonzero(ends > starts)
    values = present[np.lexsort((starts[present], objects[present]))]
    of, begin, end = objects[values], starts[values], ends[values]
    is_first = np.ones(len(values), bool)
    is_first[1:] = ~_bridged(of, begin, end, limits)
    run = np.cumsum(is_first) - 1
    piece = (begin - begin[is_first][run]) // limits.range_bytes
    is_first[1:] |= piece[1:] > piece[:-1]
    firsts = np.append(np.flatnonzero(is_first), len(values))
    range_starts, range_ends = begin[firsts[:-1]], end[firsts[1:] - 1]
    offsets = np.cumsum(range_ends - range_starts) - (range_ends - range_starts)
    addresses = np.zeros(len(starts), np.int64)
    addresses[values] = begin + np.repeat(offsets - range_starts, np.diff(firsts))
    return Reads(
        objects=of[firsts[:-1]],
        starts=range_starts,
        ends=range_ends,
        offsets=offsets,
        values=values,
        firsts=firsts,
        addresses=addresses,
    )


def _bridged(
    of: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64], limits: ReadLimits
) -> NDArray[np.bool_]:
    """Return of each value but the first whether it is read in one go with the one before it."""
    gaps = np.maximum(begin[1:] - end[:-1], 0)
    narrow = np.flatnonzero((of[1:] == of[:-1]) & (gaps <= limits.gap_bytes))
    narrow = narrow[np.argsort(gaps[narrow], kind="stable")]
    room_bytes = limits.slot_bytes - int((end - begin).sum())
    bridged = np.zeros(len(gaps), bool)
    bridged[narrow[np.cumsum(gaps[narrow]) <= room_bytes]] = True
    return bridged


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Samples that are read together.

    Attributes:
        super_samples: ``int64 [samples]``, each sample's manifest row.
        rows: ``int64 [samples]``, its row in that super-sample.
    """

    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """Values to read, and where in their objects they are.

    Attributes:
        samples: that they belong to.
        columns: names, all of columns outside the head.
        starts: ``int64 [columns, samples]``, first byte of each value.
        ends: ``int64 [columns, samples]``, the byte behind its last.
        checksums: ``uint32 [columns, samples]``, its CRC-32C.
    """

    samples: Group
    columns: Sequence[str]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    def plan(self, limits: ReadLimits) -> Reads:
        """Return how to read them; they are numbered column by column."""
        objects = np.tile(self.samples.super_samples, len(self.columns))
        return plan_reads(objects, self.starts.ravel(), self.ends.ravel(), limits)


async def read_values(
    values: Values, reads: Reads, into: memoryview, *, manifest: Manifest, fetcher: Fetcher, urgent: bool
) -> NDArray[np.int64]:
    """Read values as planned and return where in ``into`` each one lies, ``int64 [columns, samples]``.

    Each range is an object's part in its own right, with its own retries and deadline. When the call ends, however it
    ends, nothing writes to ``into`` any more.

    Raises:
        StoreError: one could not be had; names object, column and row where its checksum is wrong.
    """
    sizes, checksums = (values.ends - values.starts).ravel(), values.checksums.ravel()

    async def read(number: int) -> None:
        ref = manifest.ref(int(reads.objects[number]))
        part = RangePart(int(reads.starts[number]), int(reads.ends[number]), int(reads.offsets[number]))
        held = reads.values[reads.firsts[number] : reads.firsts[number + 1]]

        def verify(data: memoryview) -> None:
            found = zip(reads.addresses[held].tolist(), sizes[held].tolist(), held.tolist(), strict=True)
            for address, size, value in found:
                if crc32c(data[address : address + size]) != checksums[value]:
                    column, place = divmod(value, len(values.samples))
                    name, row = values.columns[column], values.samples.rows[place]
                    raise ChecksumError(f"{ref.key}: column {name!r} of row {row} is not what was packed")

        await fetcher.fetch_ranges(ref, fetcher.split(part, urgent=urgent), into=into, verify=verify, urgent=urgent)

    await for_each(range(len(reads)), read, concurrency=min(len(reads), fetcher.config.concurrency_most))
    return reads.addresses.reshape(values.starts.shape)
