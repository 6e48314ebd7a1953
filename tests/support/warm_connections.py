"""Both sides of a connection of the warm tier, joined by a link in virtual time or by a socket."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import NotFoundError
from stoker.testing import run_virtual
from stoker_warm._auth import PeerSide, ProxySide, Secret
from stoker_warm._connection import Connection
from stoker_warm._frames import Head, Kind
from stoker_warm._requests import Answer, Serve
from support.warm_wires import Link, LinkConfig

__all__ = [
    "INSTANCE", "SECRET", "SHARD", "Server", "joined", "memory", "node_side", "proxy_side", "refuse", "run",
]  # fmt: skip

SECRET = Secret(bytes(32))
INSTANCE = "0" * 16
SHARD = bytes(range(256)) * 4000  # 1 MB


async def refuse(kind: Kind, head: Head, body: bytearray) -> Answer:
    """Serve nothing."""
    raise NotFoundError("nothing is here")


@dataclass
class Server:
    """Serves as a node does, and remembers what it was asked."""

    seconds: float = 0.0
    stored: dict[str, bytearray] = field(default_factory=dict)
    asked: list[tuple[Kind, Head]] = field(default_factory=list)
    cancelled: int = 0
    serving: int = 0
    most_serving: int = 0

    async def __call__(self, kind: Kind, head: Head, body: bytearray) -> Answer:
        self.asked.append((kind, head))
        self.serving += 1
        self.most_serving = max(self.most_serving, self.serving)
        try:
            if self.seconds or "seconds" in head:
                await asyncio.sleep(head.get("seconds", self.seconds))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.serving -= 1
        if kind is Kind.GET and "shard" in head:
            return Kind.FOUND, {"mac": "7"}, (SHARD[: head["shard"]],)
        if kind is Kind.GET:
            return Kind.MISSING, {}, ()
        if kind is Kind.SET:
            self.stored[head["shard"]] = body
            return Kind.STORED, {"bytes": len(body)}, ()
        return Kind.PONG, {}, ()


def proxy_side(serve: Serve = refuse, secret: Secret = SECRET, *, fingerprint: str = "", **options: Any) -> Connection:
    """Return the proxy's end of a connection."""
    return Connection(ProxySide(secret, fingerprint=fingerprint), serve, **options)


def node_side(serve: Serve = refuse, secret: Secret = SECRET, *, fingerprint: str = "", **options: Any) -> Connection:
    """Return a node's end of a connection."""
    side = PeerSide(secret, "node", "warm-7", INSTANCE, greeting={"term": 3}, fingerprint=fingerprint)
    return Connection(side, serve, **options)


@asynccontextmanager
async def joined(
    serve: Serve = refuse, *, link: LinkConfig | None = None, ask: Serve = refuse, **options: Any
) -> AsyncIterator[tuple[Connection, Connection, Link]]:
    """Yield the proxy's side, the node's, which serves, and the link; afterwards nothing may be left of them."""
    proxy, node, wire = proxy_side(ask, **options), node_side(serve, **options), Link(link)
    wire.join(proxy, node)
    await proxy.ready()
    await node.ready()
    try:
        yield proxy, node, wire
    finally:
        for end in wire.ends:
            end.thaw()
        await proxy.close()
        await node.close()
        for side in (proxy, node):
            assert not side.is_open
            statistics = side.statistics()
            assert (statistics.open_requests, statistics.serving_requests, statistics.serving_bytes) == (0, 0, 0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in virtual time; neither tasks nor complaints of the loop may be left."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await test()

    run_virtual(main())
    gc.collect(1)  # what tasks and futures that nobody asked have to say
    assert complaints == []


def memory(size_bytes: int) -> memoryview:
    """Return memory for a body."""
    return memoryview(bytearray(size_bytes))
