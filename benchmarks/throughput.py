"""Throughput of the loader and its parts: `python -m benchmarks.throughput`.

50,000 samples of uint8[32, 32, 3] and an int64 label are packed into super-samples of 8 MiB in a local bucket, in
another process of this machine. Every round measures, one after the other, plain aiohttp (the same objects, read whole
and discarded, 8 connections), `Loader` (batches of 256, steady state), and a gather from memory, so that the ratios of
a round hold although the figures drift. Two more rows are parts of the loader: its fetcher alone, which reads verified
objects into the ring; and the loader on the same objects in this process's memory, without a network. Medians of the
rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

import stoker
from benchmarks.limits import gather, pull_with_aiohttp
from stoker._fetch.fetcher import Fetcher
from stoker._format.versions import read_manifest
from stoker._memory.ring import Ring
from stoker_local import PROFILES, BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

SAMPLES = 50_000
BATCH = 256
EPOCHS = 10
ROUNDS = 5
CONNECTIONS = 8
SAMPLE_BYTES = 32 * 32 * 3 + 8
URL = "s3://stoker/images"
MEMORY_URL = "memory://benchmark/images"
TITLES = {
    "aiohttp": "plain aiohttp, objects thrown away",
    "Loader": f"`Loader`, steady state ({EPOCHS} epochs)",
    "cold": "`Loader`, first epoch, cold",
    "fetcher": "its fetcher alone",
    "memory": "`Loader` on objects in memory",
    "gather": "gather from memory, one thread",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """Figures of one measurement.

    Attributes:
        samples_per_second: samples per second of wall time.
        cpu_us_per_sample: processor time of all threads of this process, in microseconds per sample.
    """

    samples_per_second: float
    cpu_us_per_sample: float

    @property
    def mb_per_second(self) -> float:
        return self.samples_per_second * SAMPLE_BYTES / 1e6


@contextmanager
def stopwatch(found: list[Figure], samples: int) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found.append(Figure(samples / wall, cpu / samples * 1e6))


def pack(images: np.ndarray, url: str) -> list[str]:
    """Pack the images and return the paths of their objects in a bucket called ``stoker``."""
    schema = {"image": stoker.Array("uint8", (32, 32, 3)), "label": stoker.Array("int64")}
    with stoker.Packer(url, schema=schema) as packer:
        for label, image in enumerate(images):
            packer.write({"image": image, "label": label})
    assert packer.manifest is not None
    return [f"/stoker/images/{packer.manifest.key(row)}" for row in range(len(packer.manifest))]


async def fetch(url: str, epochs: int = 1) -> tuple[int, int]:
    """Fetch every object of a data set ``epochs`` times, verify and discard it; return their number and bytes."""
    store = stoker.open_store(url)
    manifest = await read_manifest(store)
    ring = Ring(2 * CONNECTIONS, manifest.largest_bytes)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(0))
    rows = iter(list(range(len(manifest))) * epochs)

    async def work() -> None:
        for row in rows:
            ring.release(await fetcher.fetch(manifest.ref(row)))

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(work())
    await store.close()
    return len(manifest) * epochs, manifest.size_bytes * epochs


def deliver(loader: Loader, epochs: int) -> None:
    for _ in range(epochs):
        for _ in loader:
            pass


def measure(profile: str, images: np.ndarray) -> dict[str, list[Figure]]:
    found: dict[str, list[Figure]] = {name: [] for name in TITLES}
    first_batch = []
    config = BucketConfig(shape=PROFILES[profile], buckets=(BucketSpec(name="stoker", anonymous=True),))
    with bucket_process(config) as bucket:
        os.environ.update(bucket.environment())
        paths = pack(images, URL)
        for _ in range(ROUNDS):
            with stopwatch(found["aiohttp"], SAMPLES * EPOCHS):
                asyncio.run(pull_with_aiohttp(bucket.url, paths * EPOCHS, CONNECTIONS))
            with Loader(URL, batch_size=BATCH, epochs=EPOCHS + 1) as loader:
                with stopwatch(found["cold"], SAMPLES):
                    deliver(loader, 1)
                with stopwatch(found["Loader"], SAMPLES * EPOCHS):
                    deliver(loader, EPOCHS)
                stats = loader.stats()
                first_batch.append(stats.construction_seconds + (stats.first_batch_seconds or 0.0))
            with stopwatch(found["fetcher"], SAMPLES * EPOCHS):
                asyncio.run(fetch(URL, EPOCHS))
            with Loader(MEMORY_URL, batch_size=BATCH, epochs=EPOCHS + 1) as loader:
                deliver(loader, 1)
                with stopwatch(found["memory"], SAMPLES * EPOCHS):
                    deliver(loader, EPOCHS)
            with stopwatch(found["gather"], SAMPLES * EPOCHS):
                gather(images, BATCH, EPOCHS)
    print(f"\nprofile `{profile}`: time to first batch {median(first_batch) * 1000:.0f} ms\n")
    return found


def table(found: dict[str, list[Figure]]) -> str:
    lines = ["| what | samples/s | MB/s | CPU µs/sample | of aiohttp |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, title in TITLES.items():
        figures = found[name]
        ratios = [
            ours.samples_per_second / theirs.samples_per_second
            for ours, theirs in zip(figures, found["aiohttp"], strict=True)
        ]
        lines.append(
            f"| {title} | {median(f.samples_per_second for f in figures):,.0f} "
            f"| {median(f.mb_per_second for f in figures):,.0f} "
            f"| {median(f.cpu_us_per_sample for f in figures):.2f} | {median(ratios):.2f} |"
        )
    return "\n".join(lines)


def main(profiles: list[str]) -> None:
    torch.set_num_threads(1)
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    print(f"{SAMPLES:,} samples of {SAMPLE_BYTES} bytes, medians of {ROUNDS} rounds, {os.cpu_count()} cores for all")
    pack(images, MEMORY_URL)
    for profile in profiles:
        print(table(measure(profile, images)))


if __name__ == "__main__":
    main(sys.argv[1:] or ["none", "cloud"])
