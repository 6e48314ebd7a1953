"""Order of a permuted pack: `python -m benchmarks.packed_order` prints a Markdown table.

A source that is sorted by class is packed as it is and with `--shuffle`, and its packed order, or an epoch of it, is
compared with the source's order: by the measures of `shuffle_quality`, and by the histograms of classes in runs of
consecutive samples, as batches or super-samples have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.shuffle_quality import BATCH, SAMPLES_EACH, SUPER_SAMPLES, mixing, uniform_share_within
from stoker import Array, Dataset, Order, OrderConfig, Packer

SAMPLES = SUPER_SAMPLES * SAMPLES_EACH
CLASSES = 16
SEEDS = range(20)
_SUPER_SAMPLE_BYTES = SAMPLES_EACH * 12  # a number and its checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderQuality:
    """Measures of an order against the source's, each 1 for a uniform permutation, averaged over seeds.

    Attributes:
        uncorrelated: 1 less the absolute rank correlation of the positions in the order and in the source.
        neighbours: fraction of the source's neighbours that are at most ``BATCH`` positions apart, as a multiple of a
            uniform permutation's.
        distance: mean distance of the source's neighbours, as a multiple of a uniform permutation's.
        classes: variance of the number of samples of one class in ``BATCH`` consecutive samples, as a multiple of a
            uniform permutation's.
    """

    uncorrelated: float
    neighbours: float
    distance: float
    classes: float


def measure(order: NDArray[np.int64]) -> OrderQuality:
    """Return the quality of an order of all samples, each given by its number in the source, ``int64 [SAMPLES]``."""
    correlation, within, distance = mixing(np.argsort(order), BATCH)
    runs = (order * CLASSES // SAMPLES).reshape(-1, BATCH)
    counts = np.stack([(runs == each).sum(axis=1) for each in range(CLASSES)])
    share = 1 / CLASSES
    expected = BATCH * share * (1 - share) * (SAMPLES - BATCH) / (SAMPLES - 1)  # hypergeometric
    return OrderQuality(
        uncorrelated=1 - correlation,
        neighbours=within / uniform_share_within(BATCH, SAMPLES),
        distance=distance,
        classes=float(((counts - BATCH * share) ** 2).mean() / expected),
    )


@cache
def packed_order(seed: int | None) -> NDArray[np.int64]:
    """Return the source's number of each sample of a data set that is packed with or without a seed."""
    url = f"memory://packed-order/{seed}"
    schema = {"number": Array("int64")}
    with Packer(url, schema=schema, super_sample_bytes=_SUPER_SAMPLE_BYTES, shuffle=seed) as packer:
        packer.extend({"number": number} for number in range(SAMPLES))
    return np.array([int(sample["number"]) for sample in Dataset(url)])


def in_epoch(packed: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the order of an epoch of the default shuffle."""
    order = Order(np.full(SUPER_SAMPLES, SAMPLES_EACH), OrderConfig(seed=seed), epoch=0)
    return packed[order.at(0, SAMPLES)]


ORDERS: dict[str, Callable[[int], NDArray[np.int64]]] = {
    "packed": lambda _: packed_order(None),
    "packed, an epoch of `window` 8": lambda seed: in_epoch(packed_order(None), seed),
    "packed with `--shuffle`": packed_order,
    "packed with `--shuffle`, an epoch of `window` 8": lambda seed: in_epoch(packed_order(seed), seed),
    "a permutation of numpy": lambda seed: np.random.default_rng(seed).permutation(SAMPLES),
}
"""Name → function from a seed to an order of the source's samples."""


def quality(name: str) -> OrderQuality:
    """Return the mean quality of an order over all seeds."""
    found = np.array([astuple(measure(ORDERS[name](seed))) for seed in SEEDS]).mean(axis=0).tolist()
    uncorrelated, neighbours, distance, classes = found
    return OrderQuality(uncorrelated=uncorrelated, neighbours=neighbours, distance=distance, classes=classes)


def table() -> str:
    """Return the qualities as a Markdown table."""
    lines = [
        "| order | 1 - rank correlation | neighbours | distance | classes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in ORDERS:
        figures = " | ".join(f"{figure:.3f}" for figure in astuple(quality(name)))
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{SAMPLES:,} samples of {CLASSES} classes, sorted, mean of {len(SEEDS)} seeds, uniform is 1\n\n{table()}")
