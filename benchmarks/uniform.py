"""Exact `full` beyond memory, against plain sockets: `python -m benchmarks.uniform [PROFILE ...]`.

3,000 samples of about 110 KB, as JPEGs have, lie in a local bucket, in another process of this machine; the loader gets
memory for a part of them, so that `full` reads groups of samples by ranges. Each round measures three epochs of the
loader from its construction on, then the same through a function that serves the data set, in a third process, and then
a client that reads the same ranges over plain keep-alive connections into one piece of memory, without signatures,
checksums, retries or batches. Medians of the rounds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

import stoker
from stoker._base.threads import LoopThread
from stoker._fetch.config import PipelineConfig
from stoker._fetch.pipeline import BatchPipeline
from stoker._format.versions import read_manifest
from stoker.abc import ObjectInfo, Store
from stoker_functions.serve import GOOGLE_ANSWER_BYTES, LAMBDA_ANSWER_BYTES
from stoker_local import PROFILES, BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

SAMPLES = 3_000
SAMPLE_BYTES = 110_000
MEMORY_BYTES = 200 << 20
BATCH = 64
CONNECTIONS = 64
EPOCHS = 3
ROUNDS = 3
ANSWER_BYTES = (GOOGLE_ANSWER_BYTES, LAMBDA_ANSWER_BYTES)
URL = "s3://stoker/jpegs"
_BUFFER_BYTES = 1 << 20
_SERVER = """
import sys, stoker, uvicorn
from stoker_functions.serve import ServeConfig, Service, asgi_app
config = ServeConfig(datasets={"jpegs": sys.argv[1]}, answer_bytes=int(sys.argv[3]))
uvicorn.run(asgi_app(Service(config, stoker.open_store).answer), port=int(sys.argv[2]), log_level="warning")
"""

Range = tuple[str, int, int]
"""Key, start and end."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Wall time and processor time of this process."""

    seconds: float
    cpu_seconds: float


@contextmanager
def stopwatch(found: list[Figure]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found.append(Figure(time.perf_counter() - wall, time.process_time() - cpu))


def pack() -> None:
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(SAMPLE_BYTES), 0.3, SAMPLES), 10_000, 400_000).astype(int)
    schema = {"jpeg": stoker.Bytes(), "label": stoker.Array("int64")}
    with stoker.Packer(URL, schema=schema) as packer:
        for label, size in enumerate(sizes):
            packer.write({"jpeg": rng.bytes(int(size)), "label": label})


@dataclass(slots=True)
class RecordingStore:
    """Reads through a store, and records the ranges."""

    wrapped: Store
    ranges: list[Range] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.wrapped.url

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        self.ranges.append((key, start, end))
        return await self.wrapped.get_range(key, start, end, into=into, tag=tag, begun=begun)


def record_ranges() -> list[Range]:
    """Return the ranges of the epochs, in the order in which the loader's pipeline asks for them."""
    store = RecordingStore(stoker.open_store(URL))
    thread = LoopThread("ranges", on_close=store.wrapped.close)
    config = PipelineConfig(
        batch_size=BATCH,
        order=stoker.OrderConfig(shuffle="full"),
        memory_bytes=MEMORY_BYTES,
        fetch=stoker.FetchConfig(hedge=False),
        end_epoch=EPOCHS,
    )
    pipeline = BatchPipeline(store, thread.run(read_manifest(store.wrapped)), config, thread)
    pipeline.start(0)
    while pipeline.next() is not None:
        pass
    thread.close()
    return store.ranges


class RawConnection(asyncio.BufferedProtocol):
    """A keep-alive connection that reads ranges, one after the other, into the same memory."""

    def __init__(self, host: str, requests: Iterator[bytes], buffer: memoryview, over: asyncio.Future[None]) -> None:
        self._requests, self._buffer, self._over = requests, buffer, over
        self._left_bytes = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
        elif not self._over.done():
            self._transport.close()
            self._over.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._left_bytes:
            head, found, _ = bytes(self._buffer[: min(nbytes, 4096)]).partition(b"\r\n\r\n")
            if not found or not head.startswith(b"HTTP/1.1 206"):
                raise ConnectionError(f"the bucket answered {head[:100]!r}")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._left_bytes = int(length) + len(head) + len(found)
        self._left_bytes -= nbytes
        if not self._left_bytes:
            self._ask()


async def read_raw(endpoint: str, ranges: Sequence[Range]) -> None:
    """Read ranges through plain connections, each into the same memory."""
    address, loop = urlsplit(endpoint), asyncio.get_running_loop()
    requests = (
        f"GET /stoker/jpegs/{key} HTTP/1.1\r\nHost: {address.netloc}\r\nRange: bytes={start}-{end - 1}\r\n\r\n".encode()
        for key, start, end in ranges
    )
    buffer = memoryview(bytearray(_BUFFER_BYTES))

    async def read() -> None:
        over: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(
            lambda: RawConnection(address.netloc, requests, buffer, over), address.hostname, address.port
        )
        await over

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(read())


@contextmanager
def serving(answer_bytes: int) -> Iterator[str]:
    """Serve the data set from another process; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _SERVER, URL, str(port), str(answer_bytes)]
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            yield f"stoker+http://127.0.0.1:{port}/v1/jpegs"
        finally:
            server.terminate()


def deliver(last: list[Figure], url: str = URL) -> float:
    """Take all epochs, and return the requests of the loader for each batch.

    The figure of the last epoch, which begins with what the loader has learnt, is added to ``last``.
    """
    with Loader(url, batch_size=BATCH, shuffle="full", seed=0, memory=MEMORY_BYTES, epochs=EPOCHS) as loader:
        for epoch in range(EPOCHS):
            with stopwatch(last):
                for _ in loader:
                    pass
            if epoch < EPOCHS - 1:
                last.pop()
        return loader.stats().get_requests / len(loader) / EPOCHS


@dataclass(slots=True)
class Row:
    """Measurements of one way to read: figures of the rounds, the epochs of each, and requests for each batch."""

    name: str
    epochs: int = EPOCHS
    figures: list[Figure] = field(default_factory=list)
    requests: float = 0.0

    def show(self, raw: Row) -> None:
        rate = median(SAMPLES * self.epochs / f.seconds for f in self.figures)
        cpu_us = median(f.cpu_seconds / SAMPLES / self.epochs * 1e6 for f in self.figures)
        pairs = zip(self.figures, raw.figures, strict=True)
        ratio = median(f.seconds / self.epochs / each.seconds * raw.epochs for f, each in pairs)
        print(f"| {self.name} | {rate:,.0f} | {cpu_us:.0f} | {self.requests:.2f} | {ratio:.2f} |")


def measure(profile: str) -> None:
    config = BucketConfig(shape=PROFILES[profile], buckets=(BucketSpec(name="stoker", anonymous=True),))
    loader, last, raw = Row("`Loader`, `full`"), Row("its last epoch", epochs=1), Row("plain sockets, same ranges")
    served = {limit: Row(f"through a function, answers of {limit / 1e6:.1f} MB") for limit in ANSWER_BYTES}
    with bucket_process(config) as bucket:
        os.environ.update(bucket.environment())
        pack()
        ranges = record_ranges()
        raw.requests = len(ranges) / EPOCHS / -(-SAMPLES // BATCH)
        for _ in range(ROUNDS):
            with stopwatch(loader.figures):
                loader.requests = last.requests = deliver(last.figures)
            for limit, row in served.items():
                with serving(limit) as url, stopwatch(row.figures):
                    row.requests = deliver([], url)
            with stopwatch(raw.figures):
                asyncio.run(read_raw(bucket.url, ranges))
    print(f"\nprofile `{profile}`: {len(ranges):,} ranges\n")
    print("| what | samples/s | CPU µs/sample | requests a batch | time of plain sockets |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in (loader, last, *served.values(), raw):
        row.show(raw)


def main(profiles: list[str]) -> None:
    torch.set_num_threads(1)
    print(f"{SAMPLES:,} samples of {SAMPLE_BYTES:,} bytes, medians of {ROUNDS} rounds, {os.cpu_count()} cores for all")
    for profile in profiles:
        measure(profile)


if __name__ == "__main__":
    main(sys.argv[1:] or ["none", "cloud"])
