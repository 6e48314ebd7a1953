"""The cost of a cache hit: `python -m benchmarks.cache_tiers [FOLDER]`.

The loaders' fetcher reads objects of 8 MiB into the slots of a ring, and verifies their checksums: from memory, from
files in the page cache of FOLDER's disk (a temporary folder by default), and from a bucket in memory that answers at
once, which is the cost of the fetcher alone. For comparison: one copy into memory that is already mapped. Then the time
that the event loop spends to admit an object into memory and into the queue of the disk, and its longest stall while
four objects are fetched at a time. Medians of the rounds; GB are 10^9 bytes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stoker import Bytes, OrderConfig, Schema, open_store
from stoker._base.checksum import crc32c
from stoker._cache.disk_folder import FolderConfig
from stoker._cache.disk_tier import DiskTier
from stoker._cache.index import AccessForecast, ManagedTier
from stoker._cache.tiers import MemoryTier
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._memory.ring import Ring
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange
from stoker.abc import Store

OBJECT_BYTES, OBJECTS, ROUNDS, AT_ONCE = 8 << 20, 48, 9, 4


def data_set(objects: int = OBJECTS, size_bytes: int = OBJECT_BYTES) -> tuple[Manifest, list[bytes]]:
    bodies = [random.Random(number).randbytes(size_bytes) for number in range(objects)]
    column = np.full(objects, size_bytes, "<u4")
    rows = ManifestRows(
        size_bytes=column,
        samples=np.full(objects, 100, "<u4"),
        head_bytes=column // 100,
        head_crc32c=column,
        crc32c=np.array([crc32c(body) for body in bodies], "<u4"),
        tags=("",) * objects,
    )
    run = PackRun("0123456789abcdef", 0, objects)
    return Manifest(dataset="hits", version=1, schema=Schema({"data": Bytes()}), rows=rows, runs=(run,)), bodies


def forecast(manifest: Manifest) -> AccessForecast:
    """Return the access forecast of a loader with the default order."""
    partition = RankSharding(samples=manifest.samples, batch_size=256)
    return AccessForecast(manifest.rows.samples, PositionRange(order=OrderConfig(), sharding=partition))


def copy_seconds(bodies: list[bytes]) -> float:
    """Return the time of one copy of an object, in seconds."""
    slots = memoryview(bytearray(AT_ONCE * OBJECT_BYTES))
    seconds = []
    for number, body in enumerate(bodies * 2):
        place = number % AT_ONCE * OBJECT_BYTES
        started = time.perf_counter()
        slots[place : place + OBJECT_BYTES] = body
        seconds.append(time.perf_counter() - started)
    return median(seconds[OBJECTS:])


async def longest_stall(work: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Return the duration of some work and the longest stall of the event loop meanwhile, both in seconds."""
    longest, last = 0.0, time.perf_counter()

    async def watch() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watching = asyncio.create_task(watch())
    started = time.perf_counter()
    await work
    seconds = time.perf_counter() - started
    watching.cancel()
    return seconds, longest


class Bench:
    """One ring, and a fetcher with tiers."""

    def __init__(self, manifest: Manifest, store: Store, tiers: Sequence[ManagedTier]) -> None:
        self.manifest, self.tiers = manifest, tiers
        self.ring = Ring(AT_ONCE + 2, OBJECT_BYTES)
        self.fetcher = Fetcher(store, ring=self.ring, rng=random.Random(1), tiers=tiers)

    async def fetch(self, row: int) -> None:
        self.ring.release(await self.fetcher.fetch(self.manifest.ref(row)))

    async def fetch_all(self, at_once: int) -> None:
        rows = iter(range(OBJECTS))

        async def fetch_some() -> None:
            for row in rows:
                await asyncio.create_task(self.fetch(row))  # as the prefetcher does

        await asyncio.gather(*(fetch_some() for _ in range(at_once)))

    async def seconds(self, at_once: int) -> float:
        """Return the time per object, in seconds, with ``at_once`` concurrent fetches."""
        found = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await self.fetch_all(at_once)
            found.append((time.perf_counter() - started) / OBJECTS)
        return median(found)


async def offering_seconds(tier: ManagedTier, manifest: Manifest, bodies: Sequence[bytes]) -> float:
    """Return the time that the event loop spends on an offered object, in seconds, with pauses between the offers."""
    found = []
    for row, body in enumerate(bodies):
        started = time.perf_counter()
        tier.offer(manifest.ref(row), memoryview(body))
        found.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)  # the time to fetch one at 400 MB/s
    return median(found)


def print_time(what: str, seconds: float) -> None:
    print(f"{what:58} {seconds * 1e3:7.2f} ms {OBJECT_BYTES / seconds / 1e9:7.1f} GB/s")


async def measure(folder: Path) -> None:
    manifest, bodies = data_set()
    store = open_store("memory://cache-tiers/ds")
    for row, body in enumerate(bodies):
        await store.put(manifest.key(row), body)
    future = forecast(manifest)
    config = FolderConfig(path=folder, dataset="hits", owners=1, preferred=0, share_bytes=2 * OBJECTS * OBJECT_BYTES)
    memory = MemoryTier(OBJECTS * OBJECT_BYTES, "next-use", largest_bytes=OBJECT_BYTES)
    disk = DiskTier(config, "next-use", largest_bytes=OBJECT_BYTES, max_queued_bytes=OBJECTS * OBJECT_BYTES)
    print_time("one copy", copy_seconds(bodies))
    for name, tier in (("memory", memory), ("disk, page cache", disk)):
        await tier.follow(manifest, future)
        print_time(f"taking in, {name}", await offering_seconds(tier, manifest, bodies))
        if isinstance(tier, DiskTier):
            await tier.flush()
    benches: dict[str, list[ManagedTier]] = {"memory": [memory], "disk, page cache": [disk], "bucket in memory": []}
    for name, tiers in benches.items():
        bench = Bench(manifest, store, tiers)
        await bench.fetch_all(AT_ONCE)  # so that the ring's pages are mapped
        print_time(f"fetching, {name}: one at a time", await bench.seconds(1))
        print_time(f"fetching, {name}: {AT_ONCE} at a time", await bench.seconds(AT_ONCE))
        stalls = [(await longest_stall(bench.fetch_all(AT_ONCE)))[1] for _ in range(ROUNDS)]
        print(f"  the event loop stood still for {median(stalls) * 1e3:.2f} ms at most")
        assert not tiers or bench.fetcher.stats.requests == 0
    for tier in (memory, disk):
        await tier.close()
    await store.close()


def main() -> None:
    with TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        asyncio.run(measure(Path(folder)))


if __name__ == "__main__":
    main()
