"""A global shuffle of data larger than memory, in both ways: `python -m benchmarks.materialized [KIND ...]`.

Data sets about four times as large as the loader's memory are in a local bucket with 20 ms to the first byte, 90 MB/s
per connection and 600 MB/s in total. Measured: an epoch of `full`; its materialization, in every way, in one process
with as much memory as the loader; and reading the result. The bucket counts GETs and PUTs. `small` has 50,000 samples
of 3 KB, `large` 3,000 of 100 KB. The trainer only takes batches, so its time is that of fetching.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import stoker
from stoker._base.sizes import format_bytes
from stoker.cli import main as command
from stoker_local import PROFILES, BucketConfig, BucketProcess, BucketSpec, bucket_process
from stoker_torch import Loader

BATCH = 256
SEED = 7
WAYS = ("streamed", "ranged", "scattered")
PROGRAM_BYTES = 160 << 20  # which the command subtracts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A data set, and the memory for its shuffle."""

    samples: int
    shape: tuple[int, ...]
    super_sample_bytes: int
    memory_bytes: int


KINDS = {
    "small": Kind(samples=50_000, shape=(32, 32, 3), super_sample_bytes=2 << 20, memory_bytes=48 << 20),
    "large": Kind(samples=3_000, shape=(100_000,), super_sample_bytes=4 << 20, memory_bytes=80 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Figures of one measurement."""

    seconds: float
    gets: int
    puts: int
    read_bytes: int

    def line(self, what: str) -> str:
        return f"| {what} | {self.gets:,} | {self.puts:,} | {format_bytes(self.read_bytes)} | {self.seconds:.1f} |"


class Stopwatch:
    """Measures its block: time, and the bucket's requests."""

    def __init__(self, bucket: BucketProcess) -> None:
        self._bucket = bucket

    def __enter__(self) -> Stopwatch:
        self._bucket.reset()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        counts: dict[str, Any] = self._bucket.counts()
        self.figure = Figure(
            seconds=seconds,
            gets=counts["requests"].get("GetObject", 0),
            puts=counts["requests"].get("PutObject", 0),
            read_bytes=counts["bytes_out"],
        )


def pack(kind: Kind, url: str) -> None:
    rng = np.random.default_rng(0)
    schema = {"image": stoker.Array("uint8", kind.shape), "label": stoker.Array("int64")}
    with stoker.Packer(url, schema=schema, super_sample_bytes=kind.super_sample_bytes) as packer:
        for label in range(kind.samples):
            packer.write({"image": rng.integers(0, 256, kind.shape, dtype=np.uint8), "label": label})


def labels(kind: Kind, url: str, shuffle: Any) -> list[int]:
    with Loader(url, batch_size=BATCH, shuffle=shuffle, seed=SEED, memory=kind.memory_bytes) as loader:
        return [int(label) for batch in loader for label in batch["label"]]


def measure(kind: Kind, bucket: BucketProcess, url: str) -> list[str]:
    pack(kind, url)
    with Stopwatch(bucket) as watch:
        full = labels(kind, url, "full")
    lines = [watch.figure.line("an epoch of `full`")]
    memory = str(kind.memory_bytes + PROGRAM_BYTES)
    for number, way in enumerate(WAYS):
        epoch = ["--seed", str(SEED), "--epoch", "0", "--way", way, "--memory", memory, "--quiet", "--keep", "0"]
        with Stopwatch(bucket) as watch:
            assert command(["shuffle", f"{url}-{way}" if number else url, *epoch]) == 0
        lines.append(watch.figure.line(f"making it, `{way}`"))
        if not number:
            with Stopwatch(bucket) as watch:
                assert labels(kind, url, "materialized") == full
            lines.insert(1, watch.figure.line("the same, materialized"))
        if number + 1 < len(WAYS):
            pack(kind, f"{url}-{WAYS[number + 1]}")
    return lines


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    config = BucketConfig(shape=PROFILES["cloud"], buckets=(BucketSpec(name="stoker", anonymous=True),))
    with bucket_process(config) as bucket:
        os.environ.update(bucket.environment())
        for name in names:
            kind = KINDS[name]
            size_bytes = kind.samples * int(np.prod(kind.shape))
            print(f"\n`{name}`: {kind.samples:,} samples, {format_bytes(size_bytes)}, memory", end=" ")
            print(f"{format_bytes(kind.memory_bytes)}\n\n| what | GETs | PUTs | read | seconds |")
            print("| --- | ---: | ---: | ---: | ---: |", flush=True)
            print(*measure(kind, bucket, f"s3://stoker/{name}"), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
