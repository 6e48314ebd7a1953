"""The cost of recording waits and of writing a trace: `python -m benchmarks.trace_overhead`.

One loader reads 50,000 samples of `uint8[32, 32, 3]` and an `int64` label from memory without pauses, in batches of
256, from a store that answers at once, so that no wait hides the cost. Variants in turn: no record, twice, which shows
the accuracy; the record of every loader (`stats()`); and a trace file. A round gives the ratio of each to no record, of
samples per second and of samples per second of processor time; figures are medians of the ratios. On a machine with
other load, the second ratio is more accurate.

Before that: the processor time of the record alone, and of a fetch of 1,000 bytes on the virtual clock, which has only
the overhead of the code.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import stoker
from benchmarks.virtual_clock import BODY, REF, SleepingStore
from stoker import Continuous
from stoker._base.fetch_record import start_activity
from stoker._base.recorder import Recorder
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.pipeline import BatchPipeline
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._format.manifest import Manifest
from stoker._memory.ring import Ring
from stoker.testing import VirtualClockLoop, run_virtual
from stoker.trace import ChromeTrace, Phase, Request
from stoker_torch import Loader

SAMPLES, BATCH, ROUNDS = 50_000, 256, 25
FETCHES, FETCH_ROUNDS = 10_000, 5
"""Number of fetches, large enough that full garbage collections, which visit all objects, affect all rounds equally."""
RECORDS, KEY = 4_000, "data/90f25dfd4803e5f7/00000004"
SETTLE_SECONDS = 0.1
"""Pause in which the rings of the other loaders fill."""
SCHEMA = {"image": stoker.Array("uint8", (32, 32, 3)), "label": stoker.Array("int64")}
SIZES = (8 << 20, 1 << 20, 128 << 10)


class NullRecorder(Recorder):
    """A recorder that records nothing."""

    def add_start(self, asked_seconds: float, now_seconds: float) -> None:
        pass

    def add_batch(self, epoch: int, asked_seconds: float, now_seconds: float) -> None:
        pass


class Unrecorded(Loader):
    """A loader without a record."""

    def _create_pipeline(self, manifest: Manifest, lanes: int) -> BatchPipeline:
        self._recorder, self._resources.recorder = NullRecorder(), None
        return super()._create_pipeline(manifest, lanes)


def pack(size_bytes: int) -> str:
    url = f"memory://overhead-{size_bytes}/ds"
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8)
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=size_bytes) as packer:
        packer.extend({"image": image, "label": number} for number, image in enumerate(images))
    return url


def speeds(loader: Loader) -> tuple[float, float]:
    """Return samples per second of the clock and per second of all processors, over one epoch."""
    time.sleep(SETTLE_SECONDS)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        pass
    return SAMPLES / (time.perf_counter() - begun), SAMPLES / (time.process_time() - begun_cpu)


def measure(loaders: Mapping[str, Loader]) -> dict[str, list[tuple[float, float]]]:
    """Return the speeds of each loader, one per round; the order of turns is random in each round."""
    rng = random.Random(0)
    for loader in loaders.values():
        speeds(loader)  # maps the ring's pages
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for _ in range(ROUNDS):
        for name in rng.sample(list(loaders), len(loaders)):
            found[name].append(speeds(loaders[name]))
    return found


async def fetch_all(recorder: Recorder | None) -> None:
    """Fetch, wait for and release all small items."""
    loop, ring = asyncio.get_running_loop(), Ring(32, len(BODY))
    fetcher = Fetcher(SleepingStore(), ring=ring, rng=random.Random(0))
    items = (Item(index, REF, index) for index in range(FETCHES))
    prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=4, recorder=recorder)
    async with asyncio.TaskGroup() as group:
        group.create_task(prefetcher.run())
        for index in range(FETCHES):
            asked = loop.time()
            await prefetcher.wait(index)
            if recorder is not None:
                recorder.add_item_wait(index, asked, loop.time())
                recorder.add_batch(0, asked, loop.time())
            prefetcher.release(index)


def measure_record() -> None:
    """Print the time of the record, and of the record with a trace, without fetches."""
    costs: dict[str, list[float]] = {"record": [], "trace": []}
    with tempfile.TemporaryDirectory() as folder, ChromeTrace(Path(folder) / "trace.json", limit="1GB") as trace:
        for _ in range(ROUNDS):
            for name, recorder in zip(costs, (Recorder(), Recorder([trace])), strict=True):
                begun = time.process_time()
                run_virtual(record_all(recorder))
                costs[name].append((time.process_time() - begun) / RECORDS * 1e6)
    told = ", ".join(f"{name} {median(figures):.1f}" for name, figures in costs.items())
    print(f"µs to record a fetch, a wait for it and a batch, medians of {ROUNDS} rounds: {told}")


async def record_all(recorder: Recorder) -> None:
    """Record fetches of one request each, with a wait for each."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    for item in range(RECORDS):
        asked = loop.time()
        with recorder.track(item, item) as fetch:
            with start_activity(KEY, Phase.QUEUE) as told:
                loop.jump(0.02)
                told.add_attempt([Request(asked, asked + 0.01, asked + 0.02, 1000, is_whole=True, object=KEY)])
            with start_activity(KEY, Phase.VERIFY):
                loop.jump(0.001)
            fetch.slot = item % 32
        recorder.add_item_wait(item, asked, loop.time())
        recorder.add_batch(0, asked, loop.time())
        recorder.remove_fetch(item - 16)


def measure_fetches() -> None:
    """Print the total time of a fetch, a wait for it and a batch."""
    costs: dict[str, list[float]] = {"no record": [], "record": [], "trace": []}
    with tempfile.TemporaryDirectory() as folder, ChromeTrace(Path(folder) / "trace.json", limit="1GB") as trace:
        for _ in range(FETCH_ROUNDS):
            recorders = (None, Recorder(), Recorder([trace]))
            for name, recorder in zip(costs, recorders, strict=True):
                begun = time.process_time()
                run_virtual(fetch_all(recorder))
                costs[name].append((time.process_time() - begun) / FETCHES * 1e6)
    base = costs["no record"]
    told = (
        f"{name} {median(figures):.0f} ({median(map(truediv, figures, base)):.2f})" for name, figures in costs.items()
    )
    print(f"µs of processor time for a fetch, a wait and a batch (ratio), medians of {FETCH_ROUNDS} rounds:")
    print(f"  {', '.join(told)}")


def main() -> None:
    measure_record()
    measure_fetches()
    print(f"medians of {ROUNDS} rounds of an epoch for each, in turn")
    for size_bytes in SIZES:
        url = pack(size_bytes)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            trace = Path(folder) / "trace.json"
            settings: dict[str, Any] = {"batch_size": BATCH, "memory": "256MB"}
            loaders = {
                "no record": stack.enter_context(Unrecorded(url, **settings)),
                "no record, again": stack.enter_context(Unrecorded(url, **settings)),
                "record": stack.enter_context(Loader(url, **settings)),
                "trace": stack.enter_context(Loader(url, trace=trace, **settings)),
            }
            found = measure(loaders)
            loaders["trace"].close()
            written = trace.stat().st_size / (ROUNDS + 1) / 1e6
        print(f"super-samples of {size_bytes >> 10:5} KiB; the trace has {written:.2f} MB an epoch")
        for name, figures in found.items():
            pairs = list(zip(figures, found["no record"], strict=True))
            clock, processor = (median(figure[way] / base[way] for figure, base in pairs) for way in (0, 1))
            speed = median(figure[0] for figure in figures)
            print(f"  {name:16} {speed:10,.0f} samples/s; ratio {clock:.3f}, of processor time {processor:.3f}")


if __name__ == "__main__":
    main()
