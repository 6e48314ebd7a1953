"""Every way to mix samples, with its quality and its cost: `python -m benchmarks.units [PROFILE]`.

8,000 samples of 100 KB lie in a local bucket, in another process of this machine, packed as they are and in a uniform
permutation. Each round measures all ways one after the other, each in a process of its own: two epochs at full speed,
from the construction of the loader on, and one epoch with a training step of 70 ms, which takes 60% of what the link of
profile `cloud` carries. Medians of the rounds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch

import stoker
from benchmarks.results import Mixing
from stoker.cli import main as command
from stoker_local import PROFILES, BucketConfig, BucketProcess, BucketSpec, bucket_process
from stoker_torch import Loader

SAMPLES = 8_000
SAMPLE_BYTES = 100_000
BATCH = 256
STEP_SECONDS = 0.07
EPOCHS = 2
ROUNDS = 3
SEED = 0
URL, PERMUTED_URL = "s3://stoker/samples", "s3://stoker/permuted"
GET_DOLLARS = 0.4e-6
"""Price of a GET in S3's cheapest regions."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "`window`": (URL, {}),
    "`window`, permuted pack": (PERMUTED_URL, {}),
    '`window`, `unit="1MiB"`': (URL, {"unit": "1MiB"}),
    '`window`, `unit="1MiB"`, permuted pack': (PERMUTED_URL, {"unit": "1MiB"}),
    "`full`, in memory": (URL, {"shuffle": "full", "memory": "1100MB"}),
    "`full`, beyond memory": (URL, {"shuffle": "full"}),
    "`materialized`": (URL, {"shuffle": "materialized"}),
}
"""Name → URL and settings of a loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one way.

    Attributes:
        first_seconds: time to the first batch, from the construction of the loader on.
        cold_rate: samples per second of the first epoch.
        steady_rate: samples per second of the second epoch.
        cpu_seconds: processor time of the process for both epochs, per GB.
        requests: GET requests of both epochs.
        stall: fraction of the time behind the first batch that a loop with a training step waited.
        extra_bytes: peak memory of the process in both epochs, less that before the loader.
        rank_correlation: mean of the epochs, against the source's order.
        neighbours: as ``rank_correlation``.
        distance: as ``rank_correlation``.
    """

    first_seconds: float
    cold_rate: float
    steady_rate: float
    cpu_seconds: float
    requests: int
    stall: float
    extra_bytes: int
    rank_correlation: float
    neighbours: float
    distance: float


def pack(url: str, shuffle: int | None) -> None:
    noise = np.random.default_rng(0).bytes(SAMPLE_BYTES + SAMPLES)
    schema = {"x": stoker.Bytes(), "label": stoker.Array("int64")}
    with stoker.Packer(url, schema=schema, shuffle=shuffle) as packer:
        for label in range(SAMPLES):
            packer.write({"x": noise[label : label + SAMPLE_BYTES], "label": label})


def peak_memory_bytes() -> int:
    """Return the peak of this process's resident memory; getrusage has its parent's, if that was larger."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def measure(url: str, settings: dict[str, Any]) -> Figures:
    torch.set_num_threads(1)
    with Loader(url, batch_size=1, memory="128MB") as loader:  # imports what a loader imports
        next(iter(loader))
    base_bytes = psutil.Process().memory_info().rss
    begun, cpu = time.perf_counter(), time.process_time()
    first: float | None = None
    ends: list[float] = []
    orders: list[list[torch.Tensor]] = [[] for _ in range(EPOCHS)]
    with Loader(url, batch_size=BATCH, seed=SEED, epochs=EPOCHS, **settings) as loader:
        for labels in orders:
            for batch in loader:
                first = time.perf_counter() if first is None else first
                labels.append(batch["label"])
            ends.append(time.perf_counter())
        requests = loader.stats().get_requests
    cpu_seconds = time.process_time() - cpu
    extra_bytes = peak_memory_bytes() - base_bytes
    assert first is not None
    mixed = [Mixing.of(torch.cat(labels).numpy(), SAMPLES, BATCH) for labels in orders]
    return Figures(
        first_seconds=first - begun,
        cold_rate=SAMPLES / (ends[0] - begun),
        steady_rate=SAMPLES / (ends[1] - ends[0]),
        cpu_seconds=cpu_seconds / (EPOCHS * SAMPLES * SAMPLE_BYTES / 1e9),
        requests=requests,
        stall=measure_stall(url, settings),
        extra_bytes=extra_bytes,
        rank_correlation=fmean(each.rank_correlation for each in mixed),
        neighbours=fmean(each.neighbours for each in mixed),
        distance=fmean(each.distance for each in mixed),
    )


def measure_stall(url: str, settings: dict[str, Any]) -> float:
    waited = 0.0
    with Loader(url, batch_size=BATCH, seed=SEED, epochs=1, **settings) as loader:
        batches = iter(loader)
        next(batches)
        begun = time.perf_counter()
        while True:
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
            if next(batches, None) is None:
                return waited / (asked - begun)
            waited += time.perf_counter() - asked


def materialize(bucket: BucketProcess) -> str:
    """Write the epochs of `full` once, and return what that took."""
    bucket.reset()
    started = time.perf_counter()
    for epoch in range(EPOCHS):
        assert command(["shuffle", URL, "--seed", str(SEED), "--epoch", str(epoch), "--quiet"]) == 0
    requests = bucket.counts()["requests"]
    seconds = (time.perf_counter() - started) / EPOCHS
    gets, puts = (requests.get(name, 0) // EPOCHS for name in ("GetObject", "PutObject"))
    return f"Making an epoch of `materialized` took {seconds:.0f} s, {gets:,} GETs and {puts:,} PUTs."


def line(name: str, rounds: list[Figures], window: list[Figures]) -> str:
    figures = {field.name: median(getattr(each, field.name) for each in rounds) for field in fields(Figures)}
    mixing = {name: figures[name] for name in ("rank_correlation", "neighbours", "distance")}
    quality = Mixing(missing=0, duplicated=0, **mixing).quality
    ratio = median(each.steady_rate / base.steady_rate for each, base in zip(rounds, window, strict=True))
    gets = figures["requests"] / EPOCHS
    return (
        f"| {name} | {quality:.3f} | {figures['first_seconds'] * 1e3:,.0f} ms | {figures['cold_rate']:,.0f} "
        f"| {figures['steady_rate']:,.0f} | {ratio:.2f} | {figures['stall']:.2%} | {figures['cpu_seconds']:.2f} "
        f"| {gets:,.0f} | {gets / SAMPLES * 1e6 * GET_DOLLARS:.3f} | {figures['extra_bytes'] / 1e6:,.0f} |"
    )


def main(profile: str) -> None:
    config = BucketConfig(shape=PROFILES[profile], buckets=(BucketSpec(name="stoker", anonymous=True),))
    found: dict[str, list[Figures]] = {name: [] for name in WAYS}
    with bucket_process(config) as bucket:
        os.environ.update(bucket.environment())
        for url, shuffle in ((URL, None), (PERMUTED_URL, SEED)):
            pack(url, shuffle)
        made = materialize(bucket)
        for _ in range(ROUNDS):
            for name in WAYS:
                program = [sys.executable, "-m", "benchmarks.units", "--way", name]
                printed = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout
                found[name].append(Figures(**json.loads(printed.splitlines()[-1])))
    print(f"profile `{profile}`, {SAMPLES:,} samples of {SAMPLE_BYTES:,} bytes, {os.cpu_count()} cores for all\n")
    print("| way | quality | first batch | cold samples/s | second epoch | of `window`'s | stall ", end="")
    print("| CPU s/GB | GETs an epoch | $ a million samples | memory, MB |")
    print(f"| --- {'| ---: ' * 10}|")
    for name, rounds in found.items():
        print(line(name, rounds, found["`window`"]))
    print(f"\n{made}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--way", name]:
            way = measure(*WAYS[name])
            print(json.dumps({field.name: getattr(way, field.name) for field in fields(Figures)}))
        case names:
            main(*(names or ["cloud"]))
