"""A mounted data set: `python -m benchmarks.mount [--rounds 5]`, on a machine with libfuse and /dev/fuse.

One program reads every file of `samples/` once, in the order of the names, through `stoker mount` with a fresh mount
each time, from a bucket on loopback and from one that is shaped like a cloud's. Rates are ratios to two ways to read
the same values with `stoker.open`, in the same round: `for sample in dataset`, and `dataset[number]`, one by one. The
mount is also read by as many programs as there are cores, each a part of the files, and once more by one program, when
the kernel has the files in memory.

Last, a folder of 100,000 files is listed, and the size of each is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

import stoker
from benchmarks.cells import PROFILES
from benchmarks.document import table
from stoker_local import BucketConfig, BucketSpec, bucket_process

BUCKET, SHAPES = "mount", ("none", "cloud")
ONE_BY_ONE, LISTED = 100, 100_000
TITLES = ("bucket", "samples of", "samples/s", "MB/s", "/ dataset", "/ one by one")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples of one size.

    Attributes:
        sample_bytes: size of a sample.
        samples: number of samples.
    """

    sample_bytes: int
    samples: int

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.sample_bytes}"

    def pack(self) -> None:
        rng = np.random.default_rng(0)
        values = [rng.bytes(self.sample_bytes) for _ in range(64)]
        with stoker.Packer(self.url, schema={"data": stoker.Bytes()}) as packer:
            packer.extend({"data": values[number % 64]} for number in range(self.samples))


WORKLOADS = {"3 KB": Workload(3_000, 20_000), "110 KB": Workload(110_000, 3_000), "1 MB": Workload(1_000_000, 400)}


@contextmanager
def mounted(url: str) -> Iterator[Path]:
    """Mount a data set in a temporary folder."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stoker.cli", "mount", url, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("mounted "), "the mount failed"
            try:
                yield Path(folder)
            finally:
                process.terminate()


def read_files(names: list[str]) -> int:
    """Read files one after the other, and return their size in bytes."""
    buffer, found = bytearray(_READ_BYTES), 0
    for name in names:
        file = os.open(name, os.O_RDONLY)
        while count := os.readv(file, [buffer]):
            found += count
        os.close(file)
    return found


def rate(samples: int, work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return samples / (time.perf_counter() - begun)


def measure(work: Workload, readers: ProcessPoolExecutor, cores: int) -> dict[str, float]:
    """Return the samples per second of each way to read."""
    found = {}
    with stoker.open(work.url) as dataset:
        dataset[0]
        found["dataset"] = rate(work.samples, lambda: sum(len(sample["data"]) for sample in dataset))
        found["one by one"] = rate(ONE_BY_ONE, lambda: [dataset[number] for number in range(ONE_BY_ONE)])
    for way, programs in (("mount", 1), ("mount, all cores", cores)):
        with mounted(work.url) as folder:
            names = [f"{folder}/samples/{number:08d}" for number in range(work.samples)]
            size = -(-work.samples // programs)
            parts = [names[start : start + size] for start in range(0, work.samples, size)]
            sizes: list[int] = []
            found[way] = rate(work.samples, lambda: sizes.extend(readers.map(read_files, parts)))  # noqa: B023
            assert sum(sizes) == work.samples * work.sample_bytes
            if programs == 1:
                found["again"] = rate(work.samples, lambda: list(readers.map(read_files, parts)))  # noqa: B023
    return found


def measure_listing() -> tuple[float, float]:
    """Return the seconds to list a folder of 100,000 files, and to read their sizes then."""
    with mounted(f"s3://{BUCKET}/many") as folder:
        begun = time.perf_counter()
        names = os.listdir(folder / "samples")  # noqa: PTH208
        listed = time.perf_counter()
        assert sum(os.stat(f"{folder}/samples/{name}").st_size for name in names) == sum(range(100)) * LISTED // 100  # noqa: PTH116
        return listed - begun, time.perf_counter() - listed


def row(work: Workload, rounds: list[dict[str, float]]) -> list[str]:
    def ratio(way: str, base: str) -> str:
        return f"{median(each[way] / each[base] for each in rounds):.2f}"

    speed = median(each["mount"] for each in rounds)
    return [
        f"{speed:,.0f}",
        f"{speed * work.sample_bytes / 1e6:,.0f}",
        ratio("mount", "dataset"),
        ratio("mount", "one by one"),
        ratio("mount, all cores", "mount"),
        ratio("again", "mount"),
    ]


def main(rounds: int) -> None:
    rows, cores = [], os.cpu_count() or 1
    with (
        bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET),))) as bucket,
        ProcessPoolExecutor(cores) as readers,
    ):
        os.environ.update(bucket.environment())
        for work in WORKLOADS.values():
            work.pack()
        for shape in SHAPES:
            bucket.reshape(PROFILES[shape])
            for name, work in WORKLOADS.items():
                rows.append([shape, name, *row(work, [measure(work, readers, cores) for _ in range(rounds)])])
        print(f"one program, medians of {rounds} rounds; ratios to `for sample in dataset` and `dataset[number]`")
        print(table([*TITLES, f"{cores} programs / 1", "again / first"], rows))
        bucket.reshape(PROFILES["none"])
        with stoker.Packer(f"s3://{BUCKET}/many", schema={"data": stoker.Bytes()}) as packer:
            packer.extend({"data": b"x" * (number % 100)} for number in range(LISTED))
        listed, measured = (median(values) for values in zip(*(measure_listing() for _ in range(rounds)), strict=True))
    print(f"{LISTED:,} files: listed in {listed:.2f} s, sizes {1e6 * measured / LISTED:.0f} µs each")


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.mount", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways; default 5")
    main(parser.parse_args().rounds)
