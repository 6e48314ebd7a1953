"""The cost of a plan for a large data set: `python -m benchmarks.planning`.

A manifest of 1,000,000 super-samples and 1,000,000,000 samples, `window` shuffle: reading the manifest from its bytes,
the plan of a run's first batch with its rows, and the same from a position in the middle of a later epoch, for one of
8 ranks and for a rank alone. Peak memory is that of the plan's arrays, the manifest not included.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from stoker import Array, OrderConfig, Schema
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps

SUPER_SAMPLES = 1_000_000
SAMPLES_EACH = 1000
RANKS = (8, 1)
ROUNDS = 5


def manifest() -> Manifest:
    column = np.full(SUPER_SAMPLES, 8 << 20, "<u4")
    rows = ManifestRows(
        size_bytes=column,
        samples=np.full(SUPER_SAMPLES, SAMPLES_EACH, "<u4"),
        head_bytes=column // 100,
        head_crc32c=column,
        crc32c=column,
        tags=np.zeros((SUPER_SAMPLES, 16), np.uint8),
    )
    run = PackRun("0123456789abcdef", 0, SUPER_SAMPLES)
    schema = Schema({"x": Array("uint8", (8000,)), "label": Array("int64")})
    return Manifest(dataset="huge", version=1, schema=schema, rows=rows, runs=(run,))


def first_batch(index: Manifest, ranks: int, epoch: int, position: int) -> None:
    """Plan the step at a position, down to the rows of its samples, and the key of its first object."""
    order = OrderConfig(seed=7, shuffle="window", window=8, lanes=ranks)
    sharding = RankSharding(samples=index.samples, lanes=ranks, batch_size=256, rank=ranks // 2, world_size=ranks)
    positions = PositionRange(order=order, sharding=sharding, epoch=epoch, position=position)
    step = SuperSampleSteps(index.rows.samples, positions).next()
    assert step is not None
    assert sum(len(segment.row_indices()[1]) for segment in step.segments) == 256
    index.key(step.first_uses[0][1])


def measure_seconds(function: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def measure_peak_bytes(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    data = manifest().to_bytes()
    index = Manifest.from_bytes(data)
    rows = [(f"read the manifest ({len(data) / 1e6:.0f} MB)", partial(Manifest.from_bytes, data))]
    for ranks in RANKS:
        whose = f"one of {ranks} ranks" if ranks > 1 else "a rank alone"
        rows.append((f"first batch of the run, {whose}", partial(first_batch, index, ranks, 0, 0)))
        middle = partial(first_batch, index, ranks, 3, index.samples // 2 + 12_345)
        rows.append((f"first batch from the middle of epoch 3, {whose}", middle))
    print(f"{SUPER_SAMPLES:,} super-samples, {index.samples:,} samples; median of {ROUNDS} rounds\n")
    print("| what | seconds | peak memory |\n| --- | ---: | ---: |")
    for what, function in rows:
        print(f"| {what} | {measure_seconds(function):.3f} | {measure_peak_bytes(function) / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
