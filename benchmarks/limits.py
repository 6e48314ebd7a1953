"""Upper limits of loaders: `python -m benchmarks.limits sockets|aiohttp|gather|decode ...` prints a result as peers do.

``sockets`` and ``aiohttp`` download the objects of a packed data set and discard them: no checksum, no shuffle, no
batch. ``gather`` copies shuffled batches out of memory with one thread, ``decode`` decodes JPEGs from memory with a
process per core.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from numpy.typing import NDArray

import stoker
from benchmarks.peers.common import SIDE
from benchmarks.workloads import Jpegs
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker.images import ImageDecoder

_BUFFER_BYTES = 1 << 20
_HEAD_END = b"\r\n\r\n"


@dataclass(slots=True)
class _Transfer:
    """One connection: the received part of the response's head, and the remaining size of the body."""

    connection: socket.socket
    head: bytearray = field(default_factory=bytearray)
    left_bytes: int | None = None

    def ask(self, host: str, path: str) -> None:
        self.head.clear()
        self.left_bytes = None
        self.connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

    def receive(self, buffer: memoryview) -> bool:
        """Receive the available bytes and return whether the response is complete."""
        got = self.connection.recv_into(buffer)
        if not got:
            raise ConnectionError("the bucket hung up")
        if self.left_bytes is None:
            self.head += buffer[:got]
            head, found, body = self.head.partition(_HEAD_END)
            if not found:
                return False
            status, *lines = head.decode("latin-1").lower().split("\r\n")
            if status.split()[1] != "200":
                raise ConnectionError(f"the bucket answered {status}")
            headers = {name: value for name, _, value in (line.partition(":") for line in lines)}
            self.left_bytes, got = int(headers["content-length"]), len(body)
        self.left_bytes -= got
        return self.left_bytes == 0


def pull_with_sockets(endpoint: str, paths: list[str], connections: int) -> list[float]:
    """Read every object through plain sockets, each into the same memory; return the time at which each was there."""
    address = urlsplit(endpoint)
    buffer, pending, ends = memoryview(bytearray(_BUFFER_BYTES)), iter(paths), []
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for _, path in zip(range(connections), pending, strict=False):  # this order of zip's arguments loses no path
            connection = socket.create_connection((address.hostname or "", address.port or 80))
            transfer = _Transfer(opened.enter_context(connection))
            selector.register(transfer.connection, selectors.EVENT_READ, transfer)
            transfer.ask(address.netloc, path)
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.receive(buffer):
                    ends.append(time.perf_counter())
                    following = next(pending, None)
                    if following is None:
                        selector.unregister(key.data.connection)
                    else:
                        key.data.ask(address.netloc, following)
    return ends


async def pull_with_aiohttp(endpoint: str, paths: list[str], connections: int) -> list[float]:
    """Read every object with plain aiohttp, whole; return the time at which each was there."""
    pending, ends = iter(paths), []

    async def work(session: aiohttp.ClientSession) -> None:
        for path in pending:
            async with session.get(f"{endpoint}{path}") as response:
                response.raise_for_status()
                await response.read()
            ends.append(time.perf_counter())

    connector = aiohttp.TCPConnector(limit=connections)
    async with (
        aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(connections):
            group.create_task(work(session))
    return ends


def _batches(samples: int, batch: int, epochs: int) -> Iterator[NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    for _ in range(epochs):
        order = generator.permutation(samples)
        for start in range(0, samples, batch):
            yield order[start : start + batch]


def gather(samples: NDArray[np.generic], batch: int, epochs: int) -> None:
    """Copy shuffled batches out of one array in memory."""
    for chosen in _batches(len(samples), batch, epochs):
        np.take(samples, chosen, axis=0)


def gather_jpegs(jpegs: Jpegs, batch: int, epochs: int) -> None:
    """Copy shuffled batches of JPEGs out of memory, those of a batch contiguously."""
    for chosen in _batches(len(jpegs), batch, epochs):
        np.concatenate([jpegs.view(index) for index in chosen])


def _decode_part(folder: Path, part: int, parts: int) -> float:
    jpegs, decode = Jpegs(folder), ImageDecoder(SIDE, SIDE)
    started = time.perf_counter()
    for index in range(part, len(jpegs), parts):
        decode(jpegs[index])
    return time.perf_counter() - started


def decode_seconds(folder: Path) -> float:
    """Return the time in which one process per core decodes all JPEGs, after each has read the files."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        return max(pool.map(partial(_decode_part, folder, parts=cores), range(cores)))


async def _manifest(url: str) -> Manifest:
    store = stoker.open_store(url)
    try:
        return await read_manifest(store)
    finally:
        await store.close()


Epochs = list[dict[str, float]]
"""Samples and seconds of each measured epoch, or of several together."""


def _pull(how: str, url: str, connections: int, epochs: int) -> Epochs:
    """Download every object ``epochs`` times; return the first epoch, those between, and the last, if there are three.

    The first and the last are apart since connections are opened in the one, and idle at the end of the other.
    """
    manifest = asyncio.run(_manifest(url))
    place = urlsplit(url)
    objects = [f"/{place.netloc}{place.path}/{manifest.key(row)}" for row in range(len(manifest))]
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    started = time.perf_counter()
    if how == "sockets":
        ends = pull_with_sockets(endpoint, objects * epochs, connections)
    else:
        ends = asyncio.run(pull_with_aiohttp(endpoint, objects * epochs, connections))
    counts = (1, epochs - 2, 1) if epochs > 2 else (epochs,)
    measured: Epochs = []
    for count, read in zip(counts, accumulate(counts), strict=True):
        end = ends[read * len(objects) - 1]
        measured.append({"samples": manifest.samples * count, "seconds": end - started})
        started = end
    return measured


def _gather(workload: str, folder: Path, batch: int, epochs: int) -> Epochs:
    if workload == "jpegs":
        jpegs = Jpegs(folder)
        samples, copy = len(jpegs), partial(gather_jpegs, jpegs)
    else:
        array = np.load(folder / f"{workload}.npy")
        samples, copy = len(array), partial(gather, array)
    started = time.perf_counter()
    copy(batch, epochs)
    return [{"samples": samples * epochs, "seconds": time.perf_counter() - started}]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("limit", choices=("sockets", "aiohttp", "gather", "decode"))
    parser.add_argument("--url")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--workload")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    measure: Callable[[], Epochs]
    if options.limit in ("sockets", "aiohttp"):
        measure = partial(_pull, options.limit, options.url, options.connections, options.epochs)
    elif options.limit == "gather":
        measure = partial(_gather, options.workload, options.source, options.batch, options.epochs)
    else:
        measure = partial(_decode, options.source)
    imports_cpu_seconds = time.process_time()
    result = {
        "epochs": measure(),
        "connections": options.connections,
        "imports_cpu_seconds": imports_cpu_seconds,
    }
    print(json.dumps(result))


def _decode(folder: Path) -> Epochs:
    return [{"samples": len(Jpegs(folder)), "seconds": decode_seconds(folder)}]


if __name__ == "__main__":
    main()
