"""Quality of each shuffle: `python -m benchmarks.shuffle_quality` prints Markdown tables.

Samples that are packed next to each other are often similar (same class, same source). So the measures are their
distance in an epoch, and the correlation of the positions in epoch and data set, compared with a uniform permutation.

The second table is about units. There the source has its samples by class, and is packed as it is or in a uniform
permutation; neighbours, correlation and classes are those of the source. Unit-mates are samples of one unit.

The third table is about sticky lanes: what stays, and what a lane, so one rank, sees of the data set over epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

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


UNITS_OF = 8
"""Units in each super-sample."""
UNIT_SUPER_SAMPLES, UNIT_SAMPLES_EACH = 256, 80
CLASSES = 100
EPOCHS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceQuality:
    """Measures of how an order mixes the source's samples, averaged over epochs.

    Attributes:
        rank_correlation: absolute rank correlation of the positions in epoch and source.
        neighbours: fraction of the source's neighbours that are at most a batch apart, over a uniform permutation's.
        distance: mean distance of the source's neighbours, as a fraction of a uniform permutation's.
        class_error: mean distance of a batch's class histogram from the data set's (total variation).
        mates: fraction of pairs of unit-mates that are at most a batch apart, over a uniform permutation's.
        mate_distance: mean distance of unit-mates, as a fraction of a uniform permutation's.
        meetings: mean number of epochs in which two unit-mates share a batch, of ``EPOCHS``.
    """

    rank_correlation: float
    neighbours: float
    distance: float
    class_error: float
    mates: float
    mate_distance: float
    meetings: float


def class_error(classes: NDArray[np.int64]) -> float:
    """Return the mean total variation between the class histograms of full batches and that of the whole epoch."""
    batches = classes[: len(classes) // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([np.bincount(batch, minlength=CLASSES) for batch in batches]) / BATCH
    everything = np.bincount(classes, minlength=CLASSES) / len(classes)
    return float(np.abs(counts - everything).sum(axis=1).mean() / 2)


def source_quality(order_of: Callable[[int], NDArray[np.int64]], packing: NDArray[np.int64]) -> SourceQuality:
    """Return the quality of an order.

    Args:
        order_of: function from an epoch to its samples, as numbers in packed order.
        packing: ``[n]``, the number in the source of each packed sample.
    """
    count, rows = len(packing), UNIT_SAMPLES_EACH // UNITS_OF
    uniform = uniform_share_within(BATCH, count)
    found, meetings = [], 0.0
    for epoch in EPOCHS:
        ids = order_of(epoch)
        places = np.argsort(ids)
        correlation, within, distance = mixing(np.argsort(packing[ids]), BATCH)
        units = places.reshape(-1, rows)
        apart = np.abs(units[:, :, None] - units[:, None, :])[:, ~np.eye(rows, dtype=bool)]
        meetings += float((units[:, :1] // BATCH == units[:, 1:] // BATCH).mean())
        errors = class_error(packing[ids] * CLASSES // count)
        mates = float((apart <= BATCH).mean()) / uniform, float(apart.mean()) / ((count + 1) / 3)
        found.append((correlation, within / uniform, distance, errors, *mates))
    means = np.array(found).mean(axis=0).tolist()
    return SourceQuality(**dict(zip(SourceQuality.__slots__, [*means, meetings], strict=True)))


def _ids(counts: NDArray[np.int64], config: OrderConfig, epoch: int) -> NDArray[np.int64]:
    order = Order(counts, config, epoch)
    return order.at(0, order.samples)


def unit_table() -> str:
    """Return the qualities of units, on a source packed as it is and in a uniform permutation, as a Markdown table."""
    samples = UNIT_SUPER_SAMPLES * UNIT_SAMPLES_EACH
    whole, units = (np.full(samples // each, each) for each in (UNIT_SAMPLES_EACH, UNIT_SAMPLES_EACH // UNITS_OF))
    packings = {"source": np.arange(samples), "permuted": np.random.default_rng(1).permutation(samples)}
    orders: list[tuple[str, NDArray[np.int64], OrderConfig]] = [
        ("`window`, 8 super-samples", whole, OrderConfig(window=8)),
        *((f"`window`, {window} units", units, OrderConfig(window=window)) for window in (64, 128, 256, 512)),
        ("`full`", whole, OrderConfig(shuffle="full")),
    ]
    names = "packing", "shuffle", "rank correlation", "neighbours", "distance", "class error", "unit-mates"
    header = " | ".join((*names, "their distance", f"batches shared in {len(EPOCHS)} epochs"))
    lines = [f"| {header} |", f"| --- | --- {'| ---: ' * 7}|"]
    for packing, permutation in packings.items():
        for name, counts, config in orders:
            quality = source_quality(partial(_ids, counts, config), permutation)
            figures = " | ".join(f"{getattr(quality, each):.3f}" for each in SourceQuality.__slots__)
            lines.append(f"| {packing} | {name} | {figures} |")
    return "\n".join(lines)


STICKY_SUPER_SAMPLES, STICKY_SAMPLES_EACH, STICKY_LANES = 1024, 64, 8
STICKY_EPOCHS = range(20)


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyQuality:
    """Measures of sticky lanes, over ``STICKY_EPOCHS``.

    Attributes:
        stays: share of the samples whose super-sample the lane had in the epoch before.
        meets_again: share of the pairs of super-samples in one lane that are in one lane in the next epoch, too.
        seen_in_5: share of the data set that a lane has had after 5 epochs.
        seen_in_20: share of the data set that a lane has had after 20 epochs.
        rank_correlation: absolute rank correlation of the positions in epoch and data set.
        distance: mean distance of packed neighbours, as a fraction of a uniform permutation's.
    """

    stays: float
    meets_again: float
    seen_in_5: float
    seen_in_20: float
    rank_correlation: float
    distance: float


def sticky_quality(sticky: float) -> StickyQuality:
    """Return the quality of a ``window`` with sticky lanes."""
    counts = np.full(STICKY_SUPER_SAMPLES, STICKY_SAMPLES_EACH)
    config = OrderConfig(lanes=STICKY_LANES, sticky=sticky)
    seen = np.zeros((STICKY_LANES, STICKY_SUPER_SAMPLES), bool)
    before: NDArray[np.bool_] | None = None
    stays, meets, shares, mixed = [], [], [], []
    for epoch in STICKY_EPOCHS:
        order = Order(counts, config, epoch)
        held = np.zeros_like(seen)
        for lane in range(STICKY_LANES):
            held[lane, order.lane(lane).super_samples] = True
        if before is not None:
            stays.append((held & before).sum() / held.sum())
            both = (before.astype(np.int64) @ held.T.astype(np.int64)).astype(np.float64)
            meets.append((both * (both - 1)).sum() / (before.sum(axis=1) * (before.sum(axis=1) - 1.0)).sum())
        before = held
        seen |= held
        shares.append(seen.mean())
        correlation, _, distance = mixing(np.argsort(order.at(0, order.samples)), BATCH)
        mixed.append((correlation, distance))
    correlation, distance = np.mean(mixed, axis=0)
    return StickyQuality(
        stays=float(np.mean(stays)),
        meets_again=float(np.mean(meets)),
        seen_in_5=float(shares[4]),
        seen_in_20=float(shares[19]),
        rank_correlation=float(correlation),
        distance=float(distance),
    )


def sticky_table() -> str:
    """Return the qualities of sticky lanes as a Markdown table."""
    names = "`sticky`", "stays", "pairs meet again", "seen in 5 epochs", "in 20", "rank correlation", "distance/uniform"
    lines = [f"| {' | '.join(names)} |", f"|{' ---: |' * len(names)}"]
    for sticky in (0.0, 0.5, 0.8, 0.9, 0.95):
        found = sticky_quality(sticky)
        shares = " | ".join(f"{getattr(found, each):.1%}" for each in StickyQuality.__slots__[:4])
        lines.append(f"| {sticky} | {shares} | {found.rank_correlation:.3f} | {found.distance:.3f} |")
    return "\n".join(lines)


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
    print(f"\n{UNIT_SUPER_SAMPLES} super-samples of {UNIT_SAMPLES_EACH} samples in {UNITS_OF} units, one lane")
    print(f"mean of {len(EPOCHS)} epochs\n\n{unit_table()}")
    print(f"\n{STICKY_SUPER_SAMPLES} super-samples of {STICKY_SAMPLES_EACH} samples, {STICKY_LANES} lanes\n")
    print(sticky_table())
