"""Where the samples of a materialized epoch lie: pure arithmetic.

An epoch is a data set of its own. Its rows, laid end to end, are the places of lane 0, then those of lane 1, and so on,
so that order ``none`` with as many lanes delivers at position ``p`` what ``full`` delivers there:

    row(p) = start(p mod lanes) + ⌊p / lanes⌋,    start(l) = l · ⌊N / lanes⌋ + min(l, N mod lanes)

and row ``r`` is sample number ``F(p)`` of the data set that it was made of (see :mod:`stoker._order.random_words`).
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from stoker._format.manifest import Manifest
from stoker._format.supersample import FORMAT
from stoker._order.order import Order, OrderConfig
from stoker._order.random_words import FeistelPermutation
from stoker.errors import ConfigError

__all__ = ["EPOCHS_FOLDER", "MAX_EPOCH", "MAX_SLICES", "EpochLayout", "even_slices"]

EPOCHS_FOLDER = "epochs/"
"""Below a data set; all that is in it can be made again, and nothing else is ever deleted."""
MAX_EPOCH = 99_999_999
"""So that keys of epochs are as long as each other, and stand in their order in a listing."""
MAX_SLICES = 1 << 16


def even_slices(at_least: int, lanes: int) -> int:
    """Return the least number of slices, of so many at least, that have whole lanes each, or equal parts of one."""
    if at_least > lanes:
        return -(-at_least // lanes) * lanes
    return next(count for count in range(max(1, at_least), lanes + 1) if lanes % count == 0)


class EpochLayout:
    """The layout of one epoch of one run.

    Args:
        manifest: the pinned version of the data set that the samples come from.
        seed: of the order.
        lanes: into how many parts the epoch is cut.
        epoch: from 0.

    Raises:
        ConfigError: seed, lanes or epoch is out of range.
    """

    def __init__(self, manifest: Manifest, *, seed: int, lanes: int, epoch: int) -> None:
        if not 0 <= epoch <= MAX_EPOCH:
            raise ConfigError(f"epoch {epoch} cannot be materialized: it is not in [0, {MAX_EPOCH}]")
        self.order = Order(manifest.rows.samples, OrderConfig(seed=seed, shuffle="full", lanes=lanes), epoch)
        self.manifest, self.seed, self.lanes, self.epoch = manifest, seed, lanes, epoch
        self.samples = self.order.samples
        run = [FORMAT, manifest.dataset, manifest.version, seed, lanes]
        self.run_folder = f"{EPOCHS_FOLDER}{_digest(run)}/"
        """Of all epochs of the run: they have the data set, its version, the seed and the lanes in common."""
        self.folder = self.folder_of(epoch)
        """Of this epoch."""
        self.dataset = _digest([*run, epoch])
        """The id of the epoch's data set."""
        base, extra = divmod(self.samples, lanes)
        numbers = np.arange(lanes + 1)
        self.lane_starts: NDArray[np.int64] = numbers * base + np.minimum(numbers, extra)
        """The first row of each lane, and the row behind the last: ``int64 [lanes + 1]``."""
        self._permutation: FeistelPermutation | None = None

    def folder_of(self, epoch: int) -> str:
        """Return the folder of another epoch of the run."""
        return f"{self.run_folder}{epoch:08d}/"

    def run_id(self, *what: object) -> str:
        """Return the id of a run that packs a part of the epoch; the same part is the same run."""
        return _digest([self.dataset, *what])

    def positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which positions rows are, ``int64 [n]``."""
        lanes = np.searchsorted(self.lane_starts, rows, "right") - 1
        positions: NDArray[np.int64] = (rows - self.lane_starts[lanes]) * self.lanes + lanes
        return positions

    def samples_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers, in the packed order, of the samples that are at rows, ``int64 [n]``."""
        return self._permuted()(self.positions(rows))

    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at which samples are that are given by their numbers: the inverse of :meth:`samples_of`."""
        places, lanes = np.divmod(self._permuted().inverse(samples), self.lanes)
        rows: NDArray[np.int64] = self.lane_starts[lanes] + places
        return rows

    def slice_starts(self, slices: int) -> NDArray[np.int64]:
        """Return the first row of each slice, and the row behind the last: ``int64 [slices + 1]``.

        Raises:
            ConfigError: there cannot be so many slices; see :func:`even_slices`.
        """
        if not 1 <= slices <= MAX_SLICES or (slices % self.lanes and self.lanes % slices):
            raise ConfigError(
                f"{slices} slices are not 1 to {MAX_SLICES} with whole lanes, or equal parts, of {self.lanes}"
            )
        if slices <= self.lanes:
            return self.lane_starts[:: self.lanes // slices]
        parts = slices // self.lanes
        counts = np.diff(self.lane_starts)
        starts = self.lane_starts[:-1, None] + np.arange(parts) * counts[:, None] // parts
        return np.append(starts.ravel(), self.samples)

    def lanes_within(self, start: int, stop: int) -> list[int]:
        """Return how rows ``[start, stop)`` fall to lanes: the number of rows of each lane that has any, in order."""
        counts = np.diff(np.clip(self.lane_starts, start, stop))
        return [int(count) for count in counts if count]

    def _permuted(self) -> FeistelPermutation:
        if self._permutation is None:
            self._permutation = self.order.feistel()
        return self._permutation


def _digest(what: list[object]) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
