"""The cache of a job's machines, ``cluster=``: `python -m benchmarks.cluster [--rounds 5]`.

One loader of 150 KB samples (``uint8[224, 224, 3]``): epochs from the process of its machine, from that of another
machine, from its own memory (``cache="memory:"``), and from a bucket on loopback; the same with a ``full`` order, which
does not fit in the loader's memory, and is read by ranges; and the same beside a thread that keeps the interpreter
busy, as the Python code of a training does. For comparison, a copy over one TCP connection on loopback. Last, epochs
from a bucket far away (80 ms to the first byte, 15 MB/s a connection, 150 MB/s in all), and from another machine's
process.

The other machine is a process here with a folder of its own. Its address is of loopback, or of this machine's network,
where connections use TLS.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import numpy as np
import psutil

import stoker
from benchmarks.document import table
from stoker_local import BucketConfig, BucketSpec, NetworkShape, bucket_process
from stoker_torch import Loader

URL, SAMPLES, SHAPE = "s3://cluster/images", 4_000, (224, 224, 3)
CLUSTER = {"cluster": "memory:?limit=1GB&name=benchmark&linger=1"}
REMOTE = {"cluster": "memory:?limit=150KB&name=benchmark&linger=1", "host": "127.0.0.1"}
"""Setting of a machine without room: the other one has the places of all super-samples."""
CACHE = {"cache": "memory:?limit=1GB"}
FULL, BUSY = {"shuffle": "full"}, {"is_busy": True}
WAYS: dict[str, dict[str, Any]] = {
    'the process of the machine, `cluster="memory:"`': CLUSTER,
    "another machine's process": REMOTE,
    "another machine's process, TLS": {**REMOTE, "host": ""},
    'the loader, `cache="memory:"`': CACHE,
    "a bucket on loopback": {},
    "the process of the machine, `full`": {**FULL, **CLUSTER},
    "another machine's process, `full`": {**FULL, **REMOTE},
    "a bucket on loopback, `full`": FULL,
    "the process of the machine, busy interpreter": {**BUSY, **CLUSTER},
    "another machine's process, busy interpreter": {**BUSY, **REMOTE},
    "the loader, busy interpreter": {**BUSY, **CACHE},
}
FAR_SHAPE = NetworkShape(first_byte_seconds=0.08, connection_bytes_per_second=15e6, total_bytes_per_second=150e6)
FAR: dict[str, dict[str, Any]] = {"the far bucket": {}, "another machine's process": REMOTE}
_WARM_EPOCHS = 4
"""Epochs before: a process takes new memory slower than a bucket on loopback sends, so some objects come later."""
DATA_BYTES, MEMORY_BYTES, COPIES = 600 << 20, 256 << 20, 4
"""Memory that a copy reads and writes, as large as the data set and a loader's: no processor cache holds it."""
_SENDER = f"""
import socket, sys
data = memoryview(b"x" * {DATA_BYTES})
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    for _ in range({COPIES}):
        connection.sendall(data)
"""


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time of this process and of others."""
    others = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(os.times()[:2]) + sum(each.user + each.system for each in others)


def node_pids() -> list[int]:
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if "stoker._cluster.node" in (each.info["cmdline"] or [])]


@contextmanager
def other_machine(host: str) -> Iterator[None]:
    """Run a loader of another machine, with an address of this machine's network if none is given."""
    if not host:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    job = {"STOKER_CLUSTER": f"{host}:{port}", "STOKER_CLUSTER_SECRET": secrets.token_urlsafe(32)}
    command = [sys.executable, "-m", "benchmarks.cluster", "--hold", json.dumps(CLUSTER)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **job, "XDG_RUNTIME_DIR": folder}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdout.readline()
            os.environ.update(job)
            try:
                yield
            finally:
                for name in job:
                    del os.environ[name]
                holder.stdin.close()


def hold(settings: dict[str, Any]) -> None:
    """Open a loader, say so, and keep it until the input ends."""
    with Loader(URL, batch_size=64, memory="256MB", **settings) as loader:
        next(iter(loader))
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def busy_thread() -> Iterator[None]:
    """Keep the interpreter busy."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure(epochs: int, *, is_busy: bool = False, host: str | None = None, **settings: Any) -> tuple[float, float]:
    """Return GB/s and processor seconds a GB of the fifth epoch and the next ones."""
    while node_pids():  # of the measurement before
        time.sleep(0.1)
    with (
        nullcontext() if host is None else other_machine(host),
        Loader(URL, batch_size=64, memory="256MB", **settings) as loader,
    ):
        for _ in range(_WARM_EPOCHS):
            for _ in loader:
                pass
        pids = node_pids() if "cluster" in settings else []
        with busy_thread() if is_busy else nullcontext():
            begun, cpu, samples = time.perf_counter(), cpu_seconds(pids), 0
            for _ in range(epochs):
                for batch in loader:
                    samples += len(batch["image"])
            seconds, cpu = time.perf_counter() - begun, cpu_seconds(pids) - cpu
    gigabytes = samples * np.prod(SHAPE) / 1e9
    return gigabytes / seconds, cpu / gigabytes


def copy_over_tcp() -> float:
    """Return GB/s of a copy by one connection between two processes."""
    into, filled = memoryview(bytearray(b"x" * MEMORY_BYTES)), 0
    server = socket.create_server(("127.0.0.1", 0))
    with server, subprocess.Popen([sys.executable, "-c", _SENDER, str(server.getsockname()[1])]):
        connection, _ = server.accept()
        with connection:
            begun = time.perf_counter()
            while received := connection.recv_into(into[filled % MEMORY_BYTES :]):
                filled += received
            return filled / 1e9 / (time.perf_counter() - begun)


def compare(ways: dict[str, dict[str, Any]], rounds: int, epochs: int, shape: NetworkShape) -> None:
    """Print the medians of all ways, each of which is measured once a round."""
    images = np.random.default_rng(0).integers(0, 256, (64, *SHAPE), np.uint8)
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="cluster", anonymous=True),), shape=shape)) as bucket:
        os.environ.update(bucket.environment())
        with stoker.Packer(URL, schema={"image": stoker.Array("uint8", SHAPE)}) as packer:
            packer.extend({"image": images[number % len(images)]} for number in range(SAMPLES))
        found: dict[str, list[tuple[float, float]]] = {title: [] for title in ways}
        for _ in range(rounds):
            for title, settings in ways.items():
                found[title].append(measure(epochs, **settings))
    rows = []
    for title, each in found.items():
        rate, cpu = (median(values) for values in zip(*each, strict=True))
        rows.append([title, f"{rate:.2f}", "" if "busy" in title else f"{cpu:.2f}"])
    print(table(["epochs from", "GB/s", "CPU s/GB"], rows), flush=True)


def main(rounds: int) -> None:
    print(f"a copy over one TCP connection on loopback: {median(copy_over_tcp() for _ in range(rounds)):.2f} GB/s\n")
    compare(WAYS, rounds, 3, NetworkShape())
    print()
    compare(FAR, rounds, 2, FAR_SHAPE)


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways; default 5")
    parser.add_argument("--hold", help="settings of a loader of the other machine; for this program itself")
    arguments = parser.parse_args()
    if arguments.hold is None:
        main(arguments.rounds)
    else:
        hold(json.loads(arguments.hold))
