"""What to read for a group of samples from anywhere, and how much that comes to: pure planning.

Values that lie next to each other in an object are read as one range, and so are values with a little between them, as
long as the slot has room for what is read in vain: the smallest gaps are bridged first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.budget import SlotPlan
from stoker.manifest import Manifest
from stoker.schema import Column
from stoker.supersample import is_small

__all__ = ["MOST_SAMPLES", "ExpectedReads", "Reads", "ReadLimits", "expected_reads", "plan_reads"]

MOST_SAMPLES = 1 << 16
"""Of a group, so that what is known of it stays small beside what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """What a group may take.

    Attributes:
        slot_bytes: of memory, for all it reads.
        gap_bytes: the widest gap that is bridged: what arrives in about the time of a first byte.
        range_bytes: a range that has become so long ends with the value; longer ones could not be hedged.
    """

    slot_bytes: int
    gap_bytes: int = 128 << 10
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


@dataclass(frozen=True, slots=True)
class ExpectedReads:
    """What an epoch will take, hedges and retries aside.

    Attributes:
        requests: GETs.
        size_bytes: read.
    """

    requests: int
    size_bytes: int


def expected_reads(
    manifest: Manifest, columns: Mapping[str, Column], limits: ReadLimits, samples: int
) -> ExpectedReads:
    """Return what it takes to read ``samples`` samples in a random order, and all heads once.

    A group holds ``k`` samples, the share ``p = k / N`` of all. Of a column with ``s`` bytes a row, a picked row begins
    a range unless one of the ``g`` rows before it is picked too, which has the probability ``(1 - p)**g`` (less at an
    object's start): ``g - 1`` is how many rows fit in a gap that is bridged; the expected gaps, the sum over
    ``m <= g`` of ``k p (1 - p)**(m - 1) (m - 1) s``, must fit in the slot's free half. A range of mean length ``l`` is
    cut ``1 / (exp(r / l) - 1)`` times where none may be longer than ``r``. Rows of ragged columns count as if all had
    the mean size.
    """
    rows = _row_bytes(manifest, columns)
    payload_bytes = sum(rows.values())
    group = min(MOST_SAMPLES, samples, limits.payload_bytes / payload_bytes if payload_bytes else samples)
    group = max(1.0, group)
    share = min(1.0, group / manifest.samples)
    requests = size_bytes = 0.0
    for row_bytes in rows.values():
        room_bytes = max(0.0, limits.slot_bytes - group * payload_bytes) * row_bytes / payload_bytes
        wasted, reach = _bridged_rows(group, share, row_bytes, min(limits.gap_bytes, room_bytes), room_bytes)
        read_bytes = group * row_bytes + wasted
        ranges = max(1.0, len(manifest) * _range_starts(manifest.samples / len(manifest), share, reach))
        ranges += ranges / np.expm1(min(500.0, limits.range_bytes / (read_bytes / ranges)))
        requests += ranges
        size_bytes += read_bytes
    groups = samples / group
    return ExpectedReads(
        requests=round(groups * requests) + len(manifest),
        size_bytes=round(groups * size_bytes) + int(manifest.rows.head_bytes.sum(dtype=np.int64)),
    )


def _bridged_rows(
    group: float, share: float, row_bytes: float, gap_bytes: float, room_bytes: float
) -> tuple[float, int]:
    """Return the bytes of all gaps that will be bridged, and from how many rows on none is."""
    distances = np.arange(1, 2 + int(gap_bytes // row_bytes))
    gaps = group * share * (1.0 - share) ** (distances - 1) * (distances - 1) * row_bytes
    wasted = np.cumsum(gaps)
    reach = int(np.searchsorted(wasted, room_bytes, "right"))
    return float(wasted[reach - 1]), reach


def _range_starts(rows: float, share: float, reach: int) -> float:
    """Return the expected number of ranges in an object, of which each row is picked with probability ``share``."""
    near = min(rows, reach)
    alone = float((1.0 - share) ** near)
    return 1.0 - alone + share * max(0.0, rows - reach) * alone


def _row_bytes(manifest: Manifest, columns: Mapping[str, Column]) -> dict[str, float]:
    """Return the mean bytes a row of the wanted large columns; ragged ones share alike what the others leave."""
    large = {name: column for name, column in manifest.schema.items() if not is_small(column)}
    fixed_bytes = sum(column.element_bytes for column in large.values() if column.is_fixed)
    ragged = sum(not column.is_fixed for column in large.values())
    bodies = manifest.size_bytes - int(manifest.rows.head_bytes.sum(dtype=np.int64))
    ragged_bytes = max(0.0, bodies / manifest.samples - fixed_bytes) / max(1, ragged)
    found = {
        name: float(column.element_bytes if column.is_fixed else ragged_bytes)
        for name, column in columns.items()
        if name in large
    }
    return {name: row_bytes for name, row_bytes in found.items() if row_bytes}
