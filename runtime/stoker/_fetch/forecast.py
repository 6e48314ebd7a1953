"""How many requests and bytes an epoch will take, worked out from the manifest alone; hedges and retries aside."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stoker._fetch.range_plan import MOST_SAMPLES, ReadLimits
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.supersample import is_small
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing

__all__ = ["Forecast", "forecast_groups", "mean_row_bytes", "super_samples_read"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What an epoch of one rank will take.

    Attributes:
        requests: GETs.
        size_bytes: read.
    """

    requests: int
    size_bytes: int


def super_samples_read(manifest: Manifest, order: OrderConfig, partition: Dealing) -> int:
    """Return how many super-samples a rank is expected to read in an epoch.

    Of ``full`` those with one of the rank's samples at least, ``n (1 - (1 - share)**rows)``; else those that its lanes
    come to, and one more for each lane, where that is cut.
    """
    count = len(manifest)
    fraction = partition.samples / manifest.samples
    if order.shuffle == "full":
        share = min(1.0, fraction / partition.takers)
        return round(count * (1.0 - float((1.0 - share) ** (manifest.samples / count))))
    pieces = count / partition.lanes
    touched = partition.lanes_touched()
    begun = min(pieces, _pieces_begun(order, pieces, pieces * fraction))
    return min(count, round(touched * begun) + (touched if partition.lanes > 1 else 0))


def _pieces_begun(order: OrderConfig, pieces: float, delivered: float) -> float:
    """Return how many pieces of a lane have begun when the samples of ``delivered`` pieces have been delivered.

    ``window`` deals a piece to ``G`` blocks, so its first blocks are small: ``m`` of them hold ``m (m + 1) / 2 G``
    pieces up to ``m = G``, and one more each from there on.
    """
    if order.shuffle == "block":
        return math.ceil(delivered / order.window) * order.window
    parts = min(order.window, max(1, int(pieces) // 2)) if order.shuffle == "window" else 1
    ramp = (parts + 1) / 2
    if delivered <= ramp:
        return math.ceil((math.sqrt(1 + 8 * parts * delivered) - 1) / 2)
    return math.ceil(delivered - ramp) + parts


def forecast_groups(
    manifest: Manifest, columns: Mapping[str, Column], limits: ReadLimits, partition: Dealing
) -> Forecast:
    """Return what it takes to read a rank's samples in a random order, by ranges, and all heads once.

    A group holds ``k`` samples, the share ``p = k / N`` of all. Of a column with ``s`` bytes a row, a picked row begins
    a range unless one of the ``g`` rows before it is picked too, which has the probability ``(1 - p)**g`` (less at an
    object's start); ``g - 1`` is how many rows fit in the widest gap that is bridged. That is the widest for which the
    expected gaps of all columns, the sums over ``m <= g`` of ``k p (1 - p)**(m - 1) (m - 1) s``, have room in the slot.
    A range of mean length ``l`` is cut ``1 / (exp(r / l) - 1)`` times where none may be longer than ``r``. Rows of
    ragged columns count as if all had the mean size; the small groups at the start of a run are not counted apart.
    """
    samples = -(-partition.samples // partition.takers)
    rows = mean_row_bytes(manifest, columns)
    group = _group_samples(sum(rows.values()), limits, partition.batch_size, samples)
    share = min(1.0, group / manifest.samples)
    gap_bytes = _widest_gap(rows, group, share, limits)
    requests = size_bytes = 0.0
    for row_bytes in rows.values():
        reach = 1 + int(gap_bytes // row_bytes)
        read_bytes = group * (row_bytes + _gap_rows(share, reach) * row_bytes)
        ranges = max(1.0, len(manifest) * _range_starts(manifest.samples / len(manifest), share, reach))
        requests += ranges + ranges / float(np.expm1(min(500.0, limits.range_bytes / (read_bytes / ranges))))
        size_bytes += read_bytes
    groups = samples / group
    return Forecast(
        requests=round(groups * requests) + len(manifest),
        size_bytes=round(groups * size_bytes) + int(manifest.rows.head_bytes.sum(dtype=np.int64)),
    )


def _group_samples(row_bytes: float, limits: ReadLimits, batch_size: int, samples: int) -> float:
    """Return how many samples a group holds: whole batches, if it can hold one."""
    most = min(MOST_SAMPLES, limits.payload_bytes / row_bytes) if row_bytes else MOST_SAMPLES
    return max(1.0, min(samples, most // batch_size * batch_size if most >= batch_size else most))


def _widest_gap(rows: Mapping[str, float], group: float, share: float, limits: ReadLimits) -> int:
    """Return the widest gap, in bytes, that is bridged: by bisection, since the bytes read in vain grow with it."""
    room_bytes = limits.slot_bytes - group * sum(rows.values())

    def fits(gap_bytes: int) -> bool:
        vain = (_gap_rows(share, 1 + int(gap_bytes // row_bytes)) * row_bytes for row_bytes in rows.values())
        return group * sum(vain) <= room_bytes

    return bisect_left(range(1, limits.gap_bytes + 1), True, key=lambda gap_bytes: not fits(gap_bytes))


def _gap_rows(share: float, reach: int) -> float:
    """Return the rows between a picked row and the one picked before it, 0 if that is farther than ``reach``, expected.

    The sum over ``m <= reach`` of ``p q**(m - 1) (m - 1)`` with ``q = 1 - p``.
    """
    other = 1.0 - share
    return float(other * (1.0 - reach * other ** (reach - 1) + (reach - 1) * other**reach) / share)


def _range_starts(rows: float, share: float, reach: int) -> float:
    """Return the expected number of ranges in an object, of which each row is picked with probability ``share``."""
    near = min(rows, reach)
    alone = float((1.0 - share) ** near)
    return 1.0 - alone + share * max(0.0, rows - reach) * alone


def mean_row_bytes(manifest: Manifest, columns: Iterable[str]) -> dict[str, float]:
    """Return the mean bytes a row of those of ``columns`` that lie outside the head, and have any.

    Where there are several ragged columns, they count as if they shared alike.
    """
    large = {name: column for name, column in manifest.schema.items() if not is_small(column)}
    fixed_bytes = sum(column.element_bytes for column in large.values() if column.is_fixed)
    ragged = sum(not column.is_fixed for column in large.values())
    bodies = manifest.size_bytes - int(manifest.rows.head_bytes.sum(dtype=np.int64))
    ragged_bytes = max(0.0, bodies / manifest.samples - fixed_bytes) / max(1, ragged)
    found = {
        name: float(large[name].element_bytes if large[name].is_fixed else ragged_bytes)
        for name in columns
        if name in large
    }
    return {name: row_bytes for name, row_bytes in found.items() if row_bytes}
