"""Results of measurements: records of cells, their figures, medians over rounds and ratios within rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cells import LIMITS, OURS, Cell
from benchmarks.shuffle_quality import mixing, uniform_share_within

REALLY_SHUFFLES = 0.9
"""Minimum mean distance of packed neighbours in a real shuffle, as a fraction of a uniform permutation's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Statistics of the order of one epoch.

    Attributes:
        missing: number of samples that were not delivered.
        duplicated: number of repeated samples.
        rank_correlation: absolute rank correlation of the position in the epoch with that in the data set.
        neighbours: number of packed neighbours at most a batch apart, as a multiple of a uniform permutation's.
        distance: mean distance of packed neighbours, as a fraction of a uniform permutation's.
    """

    missing: int
    duplicated: int
    rank_correlation: float
    neighbours: float
    distance: float

    @property
    def quality(self) -> float:
        """The worst of the measures, as a share of a uniform permutation's: 0 to 1."""
        return min(1.0, self.distance, 1.0 / max(1.0, self.neighbours), 1.0 - self.rank_correlation)

    @classmethod
    def of(cls, labels: NDArray[np.int64], samples: int, batch: int) -> Mixing:
        """Return the statistics of an order.

        Args:
            labels: ``[n]``, the number of each delivered sample, in order.
            samples: number of samples of the data set.
            batch: samples per batch.
        """
        present, first = np.unique(labels, return_index=True)
        places = np.argsort(np.argsort(first))  # among the delivered ones, by number
        correlation, within, distance = mixing(places, batch)
        return cls(
            missing=samples - len(present),
            duplicated=len(labels) - len(present),
            rank_correlation=correlation,
            neighbours=within / uniform_share_within(batch, len(present)),
            distance=distance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured cell.

    Attributes:
        cell: measured cell.
        error: reason of missing figures; None if there are figures.
        result: output of the program, see ``peers/common.py``; a limit prints samples and seconds only.
        counts: request counts of the local bucket, during the run.
        stored_bytes: size of the loader's data set; 0 if it is not known.
        payload_bytes: size of the cell's samples and their labels, per epoch.
        wall_seconds: duration of the program, including imports.
        cpu_seconds: processor time of its process tree, without imports.
        extra_bytes: peak memory in excess of that of a process that has imported torch.
        disk_bytes: peak size on disk.
        mixing: statistics of the first epoch's order.
    """

    cell: Cell
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    stored_bytes: int = 0
    payload_bytes: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    extra_bytes: int = 0
    disk_bytes: int = 0
    mixing: Mixing | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        mixed = values["mixing"]
        return cls(**{**values, "cell": Cell(**values["cell"]), "mixing": None if mixed is None else Mixing(**mixed)})

    @property
    def sample_bytes(self) -> float:
        return self.payload_bytes / self.cell.samples

    @property
    def rate(self) -> float:
        """Samples per second: of a cold epoch, including the loader's construction, of later epochs, or of a limit.

        The last epochs of our steady runs are left out if they may have been read from memory, and a limit's first
        and last one, in which not all connections are in use.
        """
        epochs = self.result["epochs"]
        match self.cell.kind:
            case "limit":
                return self._rate_of(1, 2) if len(epochs) == 3 else self._rate_of(0, 1)
            case "steady":
                return self._rate_of(1, len(epochs) - self._epochs_in_memory)
            case _:
                construction = self.first_batch_seconds - self.result["first_wait"]
                return float(epochs[0]["samples"] / (epochs[0]["seconds"] + construction))

    @property
    def second_epoch_rate(self) -> float:
        """Samples per second of the second epoch of a steady run."""
        return self._rate_of(1, 2)

    def _rate_of(self, first: int, end: int) -> float:
        """Return the samples per second of some epochs.

        From a shaped bucket, samples that were read before they began do not count, so no rate is above the link's.
        """
        measured = self.result["epochs"][first:end]
        samples = sum(epoch["samples"] for epoch in measured)
        return float((samples - self._read_before(first, end, samples)) / sum(epoch["seconds"] for epoch in measured))

    def _read_before(self, first: int, end: int, samples: int) -> float:
        """Return how many of the samples the bucket had sent before these epochs, beyond what it sent for later ones.

        A loader that keeps a data set on its disk reads nothing in later epochs, so none of its samples count.
        """
        sent = self.result.get("bytes_sent")
        if self.cell.profile == "none" or not sent or not first or not self.stored_bytes or self.disk_bytes:
            return 0.0
        read = (sent[end - 1] - sent[first - 1]) * self.cell.samples / self.stored_bytes
        return float(max(0.0, samples - read))

    @property
    def _epochs_in_memory(self) -> int:
        ahead: int = math.ceil(self.result.get("budget_bytes", 0) / self.payload_bytes)
        return min(ahead, len(self.result["epochs"]) - 2)

    @property
    def bytes_per_second(self) -> float:
        return self.rate * self.sample_bytes

    @property
    def first_batch_seconds(self) -> float:
        return float(self.result["first_batch_seconds"])

    @property
    def second_batch_seconds(self) -> float:
        """Seconds that the training loop waited for the second batch."""
        return float(self.result["epochs"][0]["second_wait"])

    @property
    def delivered(self) -> int:
        """Number of samples in all epochs."""
        return int(sum(epoch["samples"] for epoch in self.result["epochs"]))

    @property
    def cpu_us_per_sample(self) -> float:
        return self.cpu_seconds / self.delivered * 1e6

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_us_per_sample * 1e3 / self.sample_bytes

    @property
    def stall(self) -> float:
        """Fraction of the loop's time after the first batch that it waited, 0 to 1."""
        epoch, first = self.result["epochs"][0], self.result["first_wait"]
        return float((epoch["wait_seconds"] - first) / (epoch["seconds"] - first))

    @property
    def start_seconds(self) -> list[float]:
        """Times to the first batch of a run of many starts."""
        return list(self.result["starts"])

    @property
    def gets(self) -> int:
        return int(self.counts["requests"].get("GetObject", 0))

    @property
    def hedges(self) -> int:
        return int(self.result.get("hedges", 0))

    @property
    def read_bytes(self) -> int:
        return int(self.counts["bytes_out"])

    @property
    def amplification(self) -> float:
        """Ratio of read bytes to payload."""
        return self.read_bytes / (self.payload_bytes * len(self.result["epochs"]))


Figure = Callable[[Record], float]


class Results:
    """Records, and medians over them. If a cell was measured again, only the latest record counts.

    Attributes:
        settings: settings of the machine and the run.
    """

    def __init__(self, records: Iterable[Record] = (), settings: dict[str, Any] | None = None) -> None:
        self._records = {record.cell: record for record in records}
        self.settings = settings or {}

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that ``compare`` wrote, without an incomplete last line."""
        settings: dict[str, Any] = {}
        records = []
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            values = json.loads(line)
            if "cell" in values:
                records.append(Record.from_dict(values))
            else:
                settings = values
        return cls(records, settings)

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._records

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def where(self, **fields: Any) -> list[Record]:
        """Return the records whose cells have these values, including those without figures."""
        return [record for record in self if all(getattr(record.cell, name) == value for name, value in fields.items())]

    def measured(self, **fields: Any) -> list[Record]:
        """Return the records with figures whose cells have these values, by round."""
        found = [record for record in self.where(**fields) if record.error is None]
        return sorted(found, key=lambda record: record.cell.round)

    def median(self, figure: Figure, **fields: Any) -> float | None:
        """Return a figure's median over the rounds, None if there is none."""
        found = [figure(record) for record in self.measured(**fields)]
        return median(found) if found else None

    def ratio(self, figure: Figure, of: dict[str, Any], to: dict[str, Any]) -> float | None:
        """Return the median of the ratios of two cells' figures within each round."""
        below = {record.cell.round: figure(record) for record in self.measured(**to)}
        first = below.get(0)
        ratios = []
        for record in self.measured(**of):
            divisor = below.get(record.cell.round, first)  # a cell of the first round only is compared with all rounds
            if divisor:
                ratios.append(figure(record) / divisor)
        return median(ratios) if ratios else None

    def shuffling_peers(self, workload: str) -> list[str]:
        """Return the peers whose distance of packed neighbours is about that of a uniform permutation."""
        found: dict[str, float] = {}
        for record in self.measured(workload=workload, kind="cold"):
            if record.cell.loader not in (*OURS, *LIMITS) and record.mixing is not None:
                found[record.cell.loader] = min(record.mixing.distance, found.get(record.cell.loader, math.inf))
        return [loader for loader, distance in found.items() if distance >= REALLY_SHUFFLES]


def quality(results: Results, **where: str) -> float | None:
    """Return the lowest shuffle quality of a loader's cold epochs, as a share of a uniform permutation's."""
    mixed = [record.mixing.quality for record in results.measured(**where, kind="cold") if record.mixing is not None]
    return min(mixed, default=None)
