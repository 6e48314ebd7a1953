"""The units of a data set: what an order permutes, its super-samples or runs of their consecutive rows.

Units follow from the manifest alone. With ``unit_bytes``, a unit of super-sample ``s`` has
``max(1, ⌊unit_bytes · samples(s) / body_bytes(s)⌋)`` rows, and the last one of ``s`` the rest; the body of a
super-sample is what follows its head. Units are numbered in packed order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker._base.computed import cached_property
from stoker._format.manifest import ManifestRows, sample_starts


class Units:
    """The units of a data set, in packed order.

    Args:
        super_sample_counts: number of samples in each super-sample, integer ``[super-samples]``.
        unit_bytes: target size of a unit's bytes; None if the super-samples are the units.
        rows_per_unit: number of rows in each unit of a super-sample but its last, integer ``[super-samples]``; None if
            the super-samples are the units.

    Attributes:
        samples: number of samples in each unit, integer ``[units]``.
        unit_bytes: target size of a unit's bytes; None if the super-samples are the units.
        rows_per_unit: number of rows in each unit of a super-sample but its last, integer ``[super-samples]``.
    """

    def __init__(
        self,
        super_sample_counts: NDArray[np.integer],
        unit_bytes: int | None = None,
        rows_per_unit: NDArray[np.integer] | None = None,
    ) -> None:
        self.unit_bytes = unit_bytes
        self._counts, self._rows_per_unit = np.asarray(super_sample_counts), rows_per_unit
        self.rows_per_unit: NDArray[np.integer] = self._counts if rows_per_unit is None else rows_per_unit
        self.samples: NDArray[np.integer] = self._counts if rows_per_unit is None else self._split(rows_per_unit)

    @classmethod
    def of(cls, rows: ManifestRows, unit_bytes: int | None) -> Units:
        """Return the units of a manifest's rows for a target size; None makes every super-sample a unit."""
        if unit_bytes is None:
            return cls(rows.samples)
        bodies = rows.size_bytes.astype(np.int64) - rows.head_bytes
        counts = rows.samples.astype(np.int64)
        rows_per_unit = unit_bytes * counts // np.maximum(1, bodies)
        return cls(rows.samples, unit_bytes, np.clip(rows_per_unit, 1, np.maximum(1, counts)))

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.samples)

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Number of units before each super-sample, and of all, ``int64 [super-samples + 1]``."""
        per_unit = np.ones(len(self._counts), np.int64) if self._rows_per_unit is None else self._rows_per_unit
        return sample_starts(-(-self._counts.astype(np.int64) // per_unit))

    def _split(self, rows_per_unit: NDArray[np.integer]) -> NDArray[np.uint32]:
        samples = np.repeat(rows_per_unit, np.diff(self._firsts)).astype(np.uint32)
        present = self._counts > 0
        last = self._firsts[1:][present] - 1
        samples[last] = (self._counts[present] - 1) % rows_per_unit[present] + 1
        return samples

    def locate(
        self, units: NDArray[np.integer], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Return super-sample and row, integer ``[samples]`` each, of samples given by unit and row in the unit."""
        if self._rows_per_unit is None:
            return units, rows
        super_samples = np.searchsorted(self._firsts, units, "right") - 1
        first_rows = (units - self._firsts[super_samples]) * self._rows_per_unit[super_samples]
        return super_samples, first_rows + rows

    def rows_of(self, unit: int) -> tuple[int, range]:
        """Return the super-sample of a unit, and its rows there."""
        super_samples, first = self.locate(np.array([unit], np.int64), np.zeros(1, np.int64))
        return int(super_samples[0]), range(int(first[0]), int(first[0]) + int(self.samples[unit]))
