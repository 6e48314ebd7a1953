"""The cost of the warm tier's connection, compared with a plain TCP copy: `python -m benchmarks.warm_wire`.

Each variant has two processes, connected over loopback. The plain copy is one blocking connection: a request of 16
bytes, then `sendall` and `recv_into` of 8 MiB into reused memory. The warm tier transfers one body of 8 MiB, or a tenth
of it on each of eleven connections, as in a read of 10+1 shards. Variants take turns in each round, so that other load
on the machine affects all equally; figures are medians: GB/s, processor seconds per GB of both processes together, and
both relative to the plain copy.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from statistics import median

from stoker_warm import _connection
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import Head, Kind
from stoker_warm._peer_connections import NodeConnection, ProxyConnection

OBJECT_BYTES = 8 << 20
SECRET = WarmSecret(bytes(32))
WORKS = ("plain", "1 x 8 MiB", "11 x 0.8 MiB")
SHARDS = {"1 x 8 MiB": (1, OBJECT_BYTES), "11 x 0.8 MiB": (11, OBJECT_BYTES // 10)}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# The sending side.


def give_plain(server: socket.socket) -> None:
    data = memoryview(bytearray(b"\xa5" * OBJECT_BYTES))
    with server.accept()[0] as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while peer.recv(16, socket.MSG_WAITALL):
            peer.sendall(data)


async def give(port: int, shards: int, shard_bytes: int) -> None:
    data = memoryview(bytearray(b"\xa5" * shard_bytes))

    def serve(kind: Kind, head: Head, body: bytearray) -> tuple[Kind, Head, tuple[memoryview]]:
        return Kind.FOUND, {"mac": "0" * 56}, (data,)

    loop = asyncio.get_running_loop()
    dialled = [
        await loop.create_connection(
            lambda: NodeConnection(NodeHandshake(SECRET, "warm-0", {}), serve), "127.0.0.1", port
        )
        for _ in range(shards)
    ]
    for _, connection in dialled:
        await connection.wait_closed()


def giver(work: str, port: int, server: socket.socket | None, told: Pipe) -> None:
    used = processor_seconds()
    if server is not None:
        give_plain(server)
    else:
        asyncio.run(give(port, *SHARDS[work]))
    told.send(processor_seconds() - used)


# The receiving side.


@contextmanager
def giving(work: str, port: int, server: socket.socket | None) -> Iterator[Pipe]:
    asked, told = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=giver, args=(work, port, server, told))
    process.start()
    try:
        yield asked
    finally:
        process.join(10)
        process.kill()


def plain(reads: int) -> tuple[float, float]:
    into = memoryview(bytearray(OBJECT_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server, giving("plain", 0, server) as asked:
        with socket.create_connection(server.getsockname()) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def read() -> None:
                peer.sendall(bytes(16))
                done = 0
                while done < OBJECT_BYTES:
                    done += peer.recv_into(into[done:])

            read()
            started, used = time.perf_counter(), processor_seconds()
            for _ in range(reads):
                read()
            seconds, used = time.perf_counter() - started, processor_seconds() - used
        return seconds, used + asked.recv()


async def transfer_over_connections(work: str, reads: int) -> tuple[float, float]:
    shards, shard_bytes = SHARDS[work]
    into = [memoryview(bytearray(shard_bytes)) for _ in range(shards)]
    made: list[ProxyConnection] = []
    all_made = asyncio.Event()

    def ignore(connection: ProxyConnection, kind: Kind, head: Head) -> None:
        """Ignore a notice."""

    def accept() -> ProxyConnection:
        made.append(ProxyConnection(ProxyHandshake(SECRET), ignore))
        if len(made) == shards:
            all_made.set()
        return made[-1]

    async def read() -> None:
        wanted: list[Awaitable[object]] = [
            connection.request(Kind.GET, {"shard": "0"}, into=memory, timeout_seconds=10)
            for connection, memory in zip(made, into, strict=True)
        ]
        await asyncio.gather(*wanted)

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    async with server:
        with giving(work, server.sockets[0].getsockname()[1], None) as asked:
            await all_made.wait()
            for connection in made:
                await connection.wait_authenticated()
            await read()
            started, used = time.perf_counter(), processor_seconds()
            for _ in range(reads):
                await read()
            seconds, used = time.perf_counter() - started, processor_seconds() - used
            assert all(bytes(memory[-3:]) == b"\xa5" * 3 for memory in into)
            for connection in made:
                await connection.close()
            return seconds, used + asked.recv()


def measure(rounds: int, reads: int) -> dict[str, tuple[float, float]]:
    """Return GB/s and processor seconds per GB of each variant, medians over rounds."""
    doing: dict[str, Callable[[], tuple[float, float]]] = {
        "plain": lambda: plain(reads),
        **{work: lambda work=work: asyncio.run(transfer_over_connections(work, reads)) for work in SHARDS},  # type: ignore[misc]
    }
    found: dict[str, list[tuple[float, float]]] = {work: [] for work in WORKS}
    for _ in range(rounds):
        for work, perform in doing.items():
            seconds, used = perform()
            count = reads * (1 if work == "plain" else SHARDS[work][0] * SHARDS[work][1] / OBJECT_BYTES)
            gigabytes = count * OBJECT_BYTES / 1e9
            found[work].append((gigabytes / seconds, used / gigabytes))
    return {work: (median(rate for rate, _ in each), median(used for _, used in each)) for work, each in found.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reads", type=int, default=60, help="of 8 MiB, in each round")
    parser.add_argument("--piece-kib", type=int, nargs="*", default=[], help="sizes of pieces to compare")
    options = parser.parse_args(arguments)
    print("| piece KiB | work | GB/s | of plain | CPU s/GB | of plain |\n|---|---|---|---|---|---|")
    for size_kib in options.piece_kib or [_connection.MAX_WRITE_BYTES >> 10]:
        _connection.MAX_WRITE_BYTES = size_kib << 10  # also for processes that are forked later
        figures = measure(options.rounds, options.reads)
        rate, used = figures["plain"]
        for work, (its_rate, its_used) in figures.items():
            print(
                f"| {size_kib} | {work} | {its_rate:.2f} | {its_rate / rate:.2f} "
                f"| {its_used:.3f} | {its_used / used:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
