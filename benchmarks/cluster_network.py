"""Rate of a cache process for loaders of other machines: `python -m benchmarks.cluster_network [--rounds 5]`.

One client on this machine reads objects of 8 MiB from a process over TCP, by the loopback address, and by the machine's
own address, which takes TLS as other machines do. The default of `stoker plan --network` is the second figure.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import time
from argparse import ArgumentParser
from statistics import median

from stoker._base.checksum import crc32c
from stoker._base.task_group import for_each
from stoker._cache.index import name_of
from stoker._cluster.client import open_local
from stoker._cluster.connection import Connection
from stoker._cluster.frames import Frame, Kind, Need
from stoker._cluster.members import Member
from stoker._cluster.secret import ClusterSecret
from stoker._cluster.spec import ClusterSpec
from stoker._cluster.tcp import open_tcp
from stoker._shared.address import Address
from stoker.abc import ObjectRef

OBJECTS, OBJECT_BYTES, AT_ONCE = 24, 8 << 20, 8


def own_host() -> str:
    """Return this machine's address towards others. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


async def fill(node: Connection, refs: list[ObjectRef], bodies: list[bytes]) -> None:
    """Give objects to a process."""
    for ref, body in zip(refs, bodies, strict=True):
        asked, into = Frame(Kind.ASK, 0, name_of(ref), Need(0)), memoryview(bytearray(OBJECT_BYTES))
        assert not await node.read(asked, into)
        node.give(name_of(ref), memoryview(body))
        assert await node.read(asked, into)


async def listen(node: Connection, host: str, secret: ClusterSecret) -> Address:
    """Have a process accept clients at an address."""
    asked = {"job": host, "addresses": [str(Address(host, 0))], "secret": secret.reveal()}
    answer = json.loads(await node.send_and_receive(Kind.LISTEN, json.dumps(asked).encode()))
    return Member.decode(answer["own"]).address


async def read_all(peer: Connection, refs: list[ObjectRef]) -> float:
    """Return the GB/s of one read of all objects, with their checksums."""
    memory = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(AT_ONCE)]
    begun = time.perf_counter()

    async def read(ref: ObjectRef) -> None:
        into = memory.pop()
        assert await peer.read(Frame(Kind.ASK, 0, name_of(ref), Need(0)), into)
        assert crc32c(into) == ref.crc32c
        memory.append(into)

    await for_each(refs, read, concurrency=AT_ONCE)
    return len(refs) * OBJECT_BYTES / 1e9 / (time.perf_counter() - begun)


async def main(rounds: int) -> None:
    text = f"memory:?limit={OBJECTS * OBJECT_BYTES}&linger=1"
    bodies = [os.urandom(OBJECT_BYTES) for _ in range(OBJECTS)]
    refs = [
        ObjectRef(key=f"{number}", size_bytes=OBJECT_BYTES, crc32c=crc32c(body)) for number, body in enumerate(bodies)
    ]
    node = await open_local(ClusterSpec.parse(text), text)
    await fill(node, refs, bodies)
    for host in ("127.0.0.1", own_host()):
        secret = ClusterSecret.generate()
        peer = await open_tcp(await listen(node, host, secret), secret)
        await read_all(peer, refs)
        rates = [await read_all(peer, refs) for _ in range(rounds)]
        print(f"{'loopback' if host == '127.0.0.1' else 'with TLS'}: {median(rates):.2f} GB/s")
        peer.abort()
    node.abort()


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.cluster_network", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each way; default 5")
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        asyncio.run(main(parser.parse_args().rounds))
