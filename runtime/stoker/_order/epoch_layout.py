"""The layout of materialized epochs: which sample is at which row of an epoch that is a data set of its own."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from stoker._base.computed import cached_property
from stoker._format.manifest import Manifest
from stoker._format.supersample import FORMAT
from stoker._order.order import Order, OrderConfig, keyed_permutation
from stoker._order.random_words import FeistelPermutation, Purpose
from stoker.errors import ConfigError

EPOCHS_FOLDER = "epochs/"
"""Folder of materialized epochs in a data set; they can be recreated, and nothing outside is ever deleted."""
MAX_EPOCH = 99_999_999
"""Keys of epochs have eight digits, so that listings are in order of the epochs."""
MAX_SLICES = 1 << 16


def even_slice_count(min_slices: int, lanes: int) -> int:
    """Return the least number of slices, from ``min_slices`` on, of whole lanes or equal parts of one lane."""
    if min_slices > lanes:
        return -(-min_slices // lanes) * lanes
    return next(count for count in range(max(1, min_slices), lanes + 1) if lanes % count == 0)


class EpochLayout:
    """The layout of a materialized epoch of a run: pure arithmetic.

    The epoch is a data set of its own. Its rows are the places of lane 0, followed by those of lane 1, and so on. With
    the same number of lanes, order ``none`` of the epoch then delivers the same samples as ``full``. Position ``p``
    delivers this row::

        row(p) = start(p mod lanes) + ⌊p / lanes⌋,    start(l) = l · ⌊N / lanes⌋ + min(l, N mod lanes)

    Row ``row(p)`` is sample number ``F(p)`` of the original data set (see :mod:`stoker._order.random_words`).

    Args:
        manifest: manifest of the original data set.
        seed: seed of the order.
        lanes: number of lanes of the epoch.
        epoch: number of the epoch, from 0.
        purpose: permutation of the samples: that of ``full``, or ``PACK`` for that of ``pack --shuffle``, which writes
            a data set like an epoch 0 with one lane.

    Raises:
        ConfigError: seed, lanes or epoch is out of range.
    """

    def __init__(
        self, manifest: Manifest, *, seed: int, lanes: int, epoch: int, purpose: Purpose = Purpose.FULL
    ) -> None:
        if not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epoch {epoch} cannot be materialized: it is not in [0, {MAX_EPOCH}]")
        self.order = Order(manifest.rows.samples, OrderConfig(seed=seed, shuffle="full", lanes=lanes), epoch)
        self.manifest, self.seed, self.lanes, self.epoch, self._purpose = manifest, seed, lanes, epoch, purpose
        self.samples = self.order.samples
        run = [FORMAT, manifest.dataset, manifest.version, seed, lanes]
        self.run_folder = f"{EPOCHS_FOLDER}{_digest(run)}/"
        """Folder of all epochs of the run, which share the data set, its version, the seed and the lanes."""
        self.folder = self.folder_of(epoch)
        """Folder of this epoch."""
        self.dataset = _digest([*run, epoch])
        """Id of the epoch's data set."""
        base, extra = divmod(self.samples, lanes)
        numbers = np.arange(lanes + 1)
        self.lane_starts: NDArray[np.int64] = numbers * base + np.minimum(numbers, extra)
        """First row of each lane, and the row behind the last, ``int64 [lanes + 1]``."""

    def folder_of(self, epoch: int) -> str:
        """Return the folder of any epoch of the run."""
        return f"{self.run_folder}{epoch:08d}/"

    def run_id(self, *values: object) -> str:
        """Return the id of the pack run for a part of the epoch; equal parts give equal ids."""
        return _digest([self.dataset, *values])

    def positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of rows, ``int64 [n]``."""
        lanes = np.searchsorted(self.lane_starts, rows, "right") - 1
        positions: NDArray[np.int64] = (rows - self.lane_starts[lanes]) * self.lanes + lanes
        return positions

    def samples_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at rows, as numbers in the original's packed order, ``int64 [n]``."""
        return self._permutation(self.positions(rows))

    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of samples given by number, ``int64 [n]``: the inverse of :meth:`samples_of`."""
        places, lanes = np.divmod(self._permutation.inverse(samples), self.lanes)
        rows: NDArray[np.int64] = self.lane_starts[lanes] + places
        return rows

    def slice_starts(self, slices: int) -> NDArray[np.int64]:
        """Return the first row of each slice, and the row behind the last, ``int64 [slices + 1]``.

        Raises:
            ConfigError: the number of slices is out of range or uneven; see :func:`even_slice_count`.
        """
        if not 1 <= slices <= MAX_SLICES or (slices % self.lanes and self.lanes % slices):
            raise ConfigError(
                f"{slices} slices do not divide {self.lanes} lanes evenly: give at most {MAX_SLICES}, a multiple or a "
                f"divisor of {self.lanes}"
            )
        if slices <= self.lanes:
            return self.lane_starts[:: self.lanes // slices]
        parts = slices // self.lanes
        counts = np.diff(self.lane_starts)
        starts = self.lane_starts[:-1, None] + np.arange(parts) * counts[:, None] // parts
        return np.append(starts.ravel(), self.samples)

    def lane_row_counts(self, start: int, stop: int) -> list[int]:
        """Return the number of rows in ``[start, stop)`` of each lane that has any, in order of the lanes."""
        counts = np.diff(np.clip(self.lane_starts, start, stop))
        return [int(count) for count in counts if count]

    @cached_property
    def _permutation(self) -> FeistelPermutation:
        return keyed_permutation(self.order, self._purpose)


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
