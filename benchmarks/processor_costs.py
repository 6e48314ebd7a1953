"""Processor time of a loader on this machine: `python -m benchmarks.processor_costs`.

Prints the flags of `stoker plan` for it. Each figure is the processor time of the thread that does the work: reading
and verifying objects of two sizes from a local bucket in another process, gathering values of two sizes from memory,
delivering small batches, and writing to new memory. Medians of the rounds.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import numpy as np

import stoker
from benchmarks.throughput import fetch
from stoker._fetch.gather import RowLocations, gather
from stoker._fetch.super_samples import locate_values
from stoker._memory.ring import anonymous_memory
from stoker_local import BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

ROUNDS = 5
_LARGE, _SMALL = 4 << 20, 64 << 10
"""Sizes of objects, in bytes."""
_RING_BYTES, _NEW_BYTES = 256 << 20, 4 << 30
"""Memory to gather from, and to write to for the first time, as much as several loaders use."""
_BATCHES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCosts:
    """Processor time of one core, in the units of the flags of `stoker plan` with these names."""

    cpu_per_request: float
    cpu_per_gb: float
    cpu_per_batch: float
    cpu_per_value: float
    cpu_per_gathered_gb: float
    cpu_per_new_gb: float

    @property
    def flags(self) -> list[str]:
        """Flags of `stoker plan`."""
        pairs = ((f"--{name.replace('_', '-')}", f"{value:.3g}") for name, value in asdict(self).items())
        return [part for pair in pairs for part in pair]


def thread_seconds(work: Callable[[], object]) -> float:
    """Return the median processor time that this thread takes for some work, in seconds, without the first time."""
    work()
    found = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return median(found)


def pack(url: str, size_bytes: int, count: int) -> None:
    """Pack samples of one size, each in a super-sample of its own."""
    noise = np.random.default_rng(0).bytes(size_bytes)
    with stoker.Packer(url, schema={"data": stoker.Bytes()}, super_sample_bytes=size_bytes) as packer:
        packer.extend({"data": noise} for _ in range(count))


def fetch_all(url: str) -> None:
    """Run :func:`~benchmarks.throughput.fetch` on an event loop of its own."""
    asyncio.run(fetch(url))


def request_and_byte_seconds() -> tuple[float, float]:
    """Return the time of a request, and that of a byte, from objects of two sizes."""
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="costs", anonymous=True),))) as bucket:
        os.environ.update(bucket.environment())
        equations, seconds = [], []
        for size_bytes, count in ((_LARGE, 64), (_SMALL, 1024)):
            url = f"s3://costs/{size_bytes}"
            pack(url, size_bytes, count)
            equations.append(asyncio.run(fetch(url)))
            seconds.append(thread_seconds(partial(fetch_all, url)))
    request_seconds, byte_seconds = np.linalg.solve(np.array(equations, np.float64), seconds)
    return float(request_seconds), float(byte_seconds)


def value_and_byte_seconds() -> tuple[float, float]:
    """Return the time to gather a value, and that of a byte, from values of two sizes that are in no cache."""
    equations, seconds = [], []
    for elements, columns, rows in ((1, 40, 16_384), (16_384, 1, 512)):
        work = random_gather({str(n): stoker.Array("float32", (elements,)) for n in range(columns)}, rows)
        equations.append((columns * rows, 4 * elements * columns * rows))
        seconds.append(thread_seconds(work))
    value_seconds, byte_seconds = np.linalg.solve(np.array(equations, np.float64), seconds)
    return float(value_seconds), float(byte_seconds)


def random_gather(columns: Mapping[str, stoker.Column], rows: int) -> Callable[[], object]:
    """Return a function that gathers other random rows of eight super-samples of 32 MiB at each call."""
    memory = anonymous_memory(_RING_BYTES)  # as a ring's; pages of arrays may be huge
    np.frombuffer(memory, np.uint8)[:] = 1
    parts = 8
    size_bytes = _RING_BYTES // parts // len(columns) // 4096 * 4096
    starts = {name: place * size_bytes for place, name in enumerate(columns)}
    bases = np.arange(parts) * (_RING_BYTES // parts)
    held = size_bytes // next(iter(columns.values())).element_bytes
    rng = np.random.default_rng(0)
    is_narrow = len(columns) > 1

    def work() -> None:
        picked = rng.integers(0, parts * held, rows)
        places = rng.permutation(rows)
        picked = np.sort(picked) if is_narrow else picked
        located = locate_values(columns, memory, [starts] * parts, bases, picked // held, picked % held)
        gather(RowLocations(picked, picked, located, places if is_narrow else None), columns)

    return work


def batch_seconds() -> float:
    """Return the processor time of a batch of one small sample, with that of the loader's other thread."""
    url = "memory://costs/batches"
    with stoker.Packer(url, schema={"data": stoker.Array("uint8", (8,))}) as packer:
        packer.extend({"data": np.zeros(8, np.uint8)} for _ in range(_BATCHES))
    with Loader(url, batch_size=1, memory="64MB", epochs=ROUNDS + 1) as loader:
        return thread_seconds(lambda: sum(1 for _ in loader)) / _BATCHES


def new_byte_seconds() -> float:
    """Return the time of the first write to a byte of memory, measured once: memory that was in use before is faster.

    A virtual machine gets its memory from its host page by page, which takes most of the time.
    """
    begun = time.thread_time()
    np.frombuffer(anonymous_memory(_NEW_BYTES), np.uint8)[:: mmap.PAGESIZE] = 1
    return (time.thread_time() - begun) / _NEW_BYTES


def measure() -> ProcessorCosts:
    """Measure the processor time of a loader on this machine."""
    new_byte = new_byte_seconds()  # first, while no other memory has been in use
    request, fetched_byte = request_and_byte_seconds()
    value, gathered_byte = value_and_byte_seconds()
    return ProcessorCosts(
        cpu_per_request=1e6 * request,
        cpu_per_gb=1e9 * fetched_byte,
        cpu_per_batch=1e6 * batch_seconds(),
        cpu_per_value=1e9 * value,
        cpu_per_gathered_gb=1e9 * gathered_byte,
        cpu_per_new_gb=1e9 * new_byte,
    )


if __name__ == "__main__":
    print(" ".join(measure().flags))
