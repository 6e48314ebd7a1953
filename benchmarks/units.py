"""Units against whole super-samples in a window: `python -m benchmarks.units [PROFILE]`.

12,000 samples of 100 KB lie in a local bucket, in another process of this machine. Each round measures, for both
windows: two epochs at full speed, from the construction of the loader on, and one epoch with a training step of 70 ms,
which takes 60% of what the link of profile `cloud` carries. Medians of the rounds.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

import stoker
from stoker_local import PROFILES, BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

SAMPLES = 12_000
SAMPLE_BYTES = 100_000
BATCH = 256
STEP_SECONDS = 0.07
ROUNDS = 3
URL = "s3://stoker/samples"
WINDOWS: dict[str, dict[str, Any]] = {"window": {}, "window, unit 1 MiB": {"unit": "1MiB"}}
"""Name → settings of a loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one loader.

    Attributes:
        first_seconds: time to the first batch, from the construction of the loader on.
        cold_rate: samples per second of the first epoch.
        steady_rate: samples per second of the second epoch.
        cpu_seconds: processor time of this process for both epochs, per GB.
        requests: GET requests of both epochs.
        stall: fraction of the time behind the first batch that a loop with a training step waited.
    """

    first_seconds: float
    cold_rate: float
    steady_rate: float
    cpu_seconds: float
    requests: int
    stall: float


def pack() -> None:
    noise = np.random.default_rng(0).bytes(SAMPLE_BYTES + SAMPLES)
    with stoker.Packer(URL, schema={"x": stoker.Bytes(), "label": stoker.Array("int64")}) as packer:
        for label in range(SAMPLES):
            packer.write({"x": noise[label : label + SAMPLE_BYTES], "label": label})


def measure(settings: dict[str, Any]) -> Figures:
    begun, cpu = time.perf_counter(), time.process_time()
    first: float | None = None
    ends: list[float] = []
    with Loader(URL, batch_size=BATCH, seed=0, epochs=2, **settings) as loader:
        for _ in range(2):
            for _ in loader:
                first = time.perf_counter() if first is None else first
            ends.append(time.perf_counter())
        requests = loader.stats().get_requests
    cpu_seconds = time.process_time() - cpu
    assert first is not None
    return Figures(
        first_seconds=first - begun,
        cold_rate=SAMPLES / (ends[0] - begun),
        steady_rate=SAMPLES / (ends[1] - ends[0]),
        cpu_seconds=cpu_seconds / (2 * SAMPLES * SAMPLE_BYTES / 1e9),
        requests=requests,
        stall=measure_stall(settings),
    )


def measure_stall(settings: dict[str, Any]) -> float:
    waited = 0.0
    with Loader(URL, batch_size=BATCH, seed=0, epochs=1, **settings) as loader:
        batches = iter(loader)
        next(batches)
        begun = time.perf_counter()
        while True:
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
            if next(batches, None) is None:
                return waited / (asked - begun)
            waited += time.perf_counter() - asked


def main(profile: str) -> None:
    torch.set_num_threads(1)
    config = BucketConfig(shape=PROFILES[profile], buckets=(BucketSpec(name="stoker", anonymous=True),))
    found: dict[str, list[Figures]] = {name: [] for name in WINDOWS}
    with bucket_process(config) as bucket:
        os.environ.update(bucket.environment())
        pack()
        for _ in range(ROUNDS):
            for name, settings in WINDOWS.items():
                found[name].append(measure(settings))
    print(f"profile `{profile}`, {SAMPLES:,} samples of {SAMPLE_BYTES:,} bytes, {os.cpu_count()} cores for all\n")
    print("| loader | first batch | cold samples/s | steady samples/s | of window's | CPU s/GB | GETs | stall |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    whole = found["window"]
    for name, rounds in found.items():
        ratio = median(each.steady_rate / base.steady_rate for each, base in zip(rounds, whole, strict=True))
        figures = {field: median(getattr(each, field) for each in rounds) for field in Figures.__slots__}
        print(
            f"| {name} | {figures['first_seconds'] * 1e3:,.0f} ms | {figures['cold_rate']:,.0f} "
            f"| {figures['steady_rate']:,.0f} | {ratio:.2f} | {figures['cpu_seconds']:.2f} "
            f"| {figures['requests']:,.0f} | {figures['stall']:.2%} |"
        )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cloud"]))
