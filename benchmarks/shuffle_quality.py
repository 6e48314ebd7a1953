"""Quality of each shuffle: `python -m benchmarks.shuffle_quality` prints a Markdown table.

Samples that are packed next to each other are often similar (same class, same source). So the measures are their
distance in an epoch, and the correlation of the positions in epoch and data set, compared with a uniform permutation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker import Order, OrderConfig
from stoker._order.order import Lane, Shuffle

SUPER_SAMPLES = 64
SAMPLES_EACH = 256
BATCH = 256
SEEDS = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Measures of an order's mixing, averaged over seeds.

    Attributes:
        rank_correlation: absolute rank correlation of the positions in epoch and data set; uniform: about 0.
        neighbours_in_batch: fraction of packed neighbours that are delivered at most ``BATCH`` positions apart.
        distance: mean distance of packed neighbours, as a fraction of a uniform permutation's.
        borders: positions in the epoch at which no super-sample is partly delivered: samples never mix across them.
        super_samples_in_memory: number of super-samples that an order needs at a time; all for ``full``.
    """

    rank_correlation: float
    neighbours_in_batch: float
    distance: float
    borders: float
    super_samples_in_memory: int


def uniform_share_within(apart: int, samples: int) -> float:
    """Return the probability that two samples of a uniform permutation are at most ``apart`` positions apart."""
    apart = min(apart, samples - 1)
    return (2 * apart * samples - apart * (apart + 1)) / (samples * (samples - 1))


def mixing(places: NDArray[np.int64], within: int) -> tuple[float, float, float]:
    """Return measures of how well an order mixes neighbouring samples.

    Args:
        places: ``[n]``, a permutation of 0 to n - 1: position in the epoch of each sample, in packed order.
        within: maximum distance of packed neighbours that count as close.

    Returns:
        The absolute rank correlation of the positions in epoch and data set; the fraction of packed neighbours that
        are close; their mean distance, as a fraction of a uniform permutation's.
    """
    apart = np.abs(np.diff(places))
    correlation = abs(np.corrcoef(np.arange(len(places)), places)[0, 1])
    return float(correlation), float(np.mean(apart <= within)), float(np.mean(apart) / ((len(places) + 1) / 3))


def borders(super_samples: NDArray[np.int64]) -> int:
    """Return the number of positions at which no super-sample is partly delivered, given each sample's super-sample."""
    _, first = np.unique(super_samples, return_index=True)
    _, last = np.unique(super_samples[::-1], return_index=True)
    last = len(super_samples) - 1 - last
    begun = np.searchsorted(np.sort(first), np.arange(1, len(super_samples)))  # by samples before a position
    ended = np.searchsorted(np.sort(last), np.arange(1, len(super_samples)))
    return int(np.count_nonzero(begun == ended))


def max_pieces(lane: Lane) -> int:
    """Return the maximum number of super-samples in one block."""
    return max(len(lane.pieces_of(block)) for block in range(len(lane.block_ends)))


def quality(shuffle: Shuffle, window: int = 1, seeds: Iterable[int] = SEEDS) -> Quality:
    """Return the quality of a shuffle on ``SUPER_SAMPLES`` super-samples of ``SAMPLES_EACH`` samples."""
    counts = np.full(SUPER_SAMPLES, SAMPLES_EACH)
    found = []
    for seed in seeds:
        order = Order(counts, OrderConfig(seed=seed, shuffle=shuffle, window=window), epoch=0)
        ids = order.at(0, order.samples)
        found.append((*mixing(np.argsort(ids), BATCH), borders(order.locate(ids)[0])))
    correlation, within, distance, closed = np.array(found, np.float64).mean(axis=0)
    return Quality(
        rank_correlation=float(correlation),
        neighbours_in_batch=float(within),
        distance=float(distance),
        borders=float(closed),
        super_samples_in_memory=SUPER_SAMPLES if shuffle == "full" else max_pieces(order.lane(0)),
    )


def table() -> str:
    """Return the qualities as a Markdown table."""
    rows: list[tuple[Shuffle, int]] = [("none", 1)]
    rows += [(shuffle, window) for shuffle in ("block", "window") for window in (1, 2, 4, 8, 16, 32)]
    rows.append(("full", 1))
    lines = [
        f"| shuffle | window | rank correlation | neighbours within {BATCH} | distance/uniform | borders | in memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for shuffle, window in rows:
        found = quality(shuffle, window)
        shown = window if shuffle in ("block", "window") else "-"
        lines.append(
            f"| `{shuffle}` | {shown} | {found.rank_correlation:.3f} | {found.neighbours_in_batch:.1%} "
            f"| {found.distance:.3f} | {found.borders:.0f} | {found.super_samples_in_memory} |"
        )
    uniform = uniform_share_within(BATCH, SUPER_SAMPLES * SAMPLES_EACH)
    lines.append(f"| uniform permutation | - | 0 | {uniform:.1%} | 1 | 0 | {SUPER_SAMPLES} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{SUPER_SAMPLES} super-samples of {SAMPLES_EACH} samples, one lane, mean of {len(SEEDS)} seeds\n\n{table()}")
