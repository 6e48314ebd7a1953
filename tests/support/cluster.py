"""A cache process for tests: in this process, or as loaders start it, with its files in a folder of the test."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from stoker._base.checksum import crc32c
from stoker._cluster import node
from stoker._cluster.arena import Arena
from stoker._cluster.client import ClusterTier
from stoker._cluster.files import machine_label, runtime_folder
from stoker._cluster.serving import Node
from stoker._cluster.spec import ClusterSpec
from stoker.abc import ObjectRef

__all__ = [
    "check_with_node",
    "node_processes",
    "object_of",
    "own_runtime_folder",
    "read_object",
    "running_node",
    "wait_until_gone",
]


@contextmanager
def own_runtime_folder() -> Iterator[Path]:
    """Use a folder of the test for sockets; its cache processes are killed at the end."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(prefix="run") as folder:  # a socket's path has at most 107 characters
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield runtime_folder()
        finally:
            for process in node_processes():
                process.send_signal(signal.SIGKILL)
            wait_until_gone(10)
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before


def node_processes() -> list[psutil.Process]:
    """Return the cache processes whose files are in the present folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "stoker._cluster.node" in line and any(str(runtime_folder()) in each for each in line):
            found.append(process)
    return found


def wait_until_gone(seconds: float) -> bool:
    """Return whether all cache processes end within a time."""
    until = time.monotonic() + seconds
    while node_processes():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


@asynccontextmanager
async def running_node(text: str) -> AsyncIterator[Node]:
    """Run a cache process's server in this event loop, where clients find it."""
    spec, nodes = ClusterSpec.parse(text), list[Node]()
    path = (runtime_folder() / spec.key).with_suffix(".sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    arena = Arena(spec.limit_bytes, spec.path)
    label = machine_label(path.with_suffix(".label"))
    serving = asyncio.create_task(node.serve(listener, arena, spec, label, nodes.append))
    await asyncio.sleep(0)
    try:
        yield nodes[0]
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        listener.close()
        arena.close()
        path.unlink()


def object_of(number: int, size_bytes: int = 300_000) -> tuple[ObjectRef, bytes]:
    body = random.Random(number).randbytes(size_bytes)
    return ObjectRef(key=f"data/{number}", size_bytes=size_bytes, crc32c=crc32c(body)), body


def check_with_node(check: Callable[[Node], Awaitable[None]], text: str) -> None:
    """Run a check with a cache process's server in the same event loop."""

    async def main() -> None:
        async with running_node(text) as running, asyncio.timeout(60):
            await check(running)

    asyncio.run(main())


async def read_object(tier: ClusterTier, ref: ObjectRef) -> bytes | None:
    into = memoryview(bytearray(ref.size_bytes))
    return bytes(into) if await tier.read(ref, into) else None
