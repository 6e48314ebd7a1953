"""Both ends of a connection of the warm tier, over a link in virtual time or a socket."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from stoker.errors import NotFoundError
from stoker.testing import run_virtual
from stoker_warm import _connection
from stoker_warm import _peer_connections as _ends
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import Head, Kind
from stoker_warm._peer_connections import NodeConnection, ProxyConnection, ReplyParts, RequestHandler
from support.warm_wires import Link, LinkConfig

__all__ = [
    "INSTANCE", "SECRET", "SHARD", "Server", "joined", "limited", "memory", "node_side", "proxy_side", "refuse", "run",
]  # fmt: skip

SECRET = WarmSecret(bytes(32))
INSTANCE = "0" * 16
NO_LIMITS: Mapping[str, float] = {}
SHARD = bytes(range(256)) * 4000  # 1 MB


def refuse(kind: Kind, head: Head, body: bytearray) -> ReplyParts:
    """Refuse every request."""
    raise NotFoundError("nothing is here")


def ignore(connection: ProxyConnection, kind: Kind, head: Head) -> None:
    """Ignore a notice."""


@dataclass
class Server:
    """Serves as a node does, and records the requests."""

    stored: dict[str, bytearray] = field(default_factory=dict)
    asked: list[tuple[Kind, Head]] = field(default_factory=list)

    def __call__(self, kind: Kind, head: Head, body: bytearray) -> ReplyParts:
        self.asked.append((kind, head))
        if kind is Kind.GET and "shard" in head:
            return Kind.FOUND, {"mac": "7"}, (SHARD[: head["shard"]],)
        if kind is Kind.GET:
            return Kind.MISSING, {}, ()
        if kind is Kind.SET:
            self.stored[head["shard"]] = body
            return Kind.STORED, {"bytes": len(body)}, ()
        return Kind.PONG, {}, ()


def proxy_side(
    notice: Callable[[ProxyConnection, Kind, Head], None] = ignore,
    secret: WarmSecret = SECRET,
    *,
    fingerprint: str = "",
) -> ProxyConnection:
    """Return the proxy's end of a connection."""
    return ProxyConnection(ProxyHandshake(secret, fingerprint=fingerprint), notice)


def node_side(serve: RequestHandler = refuse, secret: WarmSecret = SECRET, *, fingerprint: str = "") -> NodeConnection:
    """Return a node's end of a connection."""
    side = NodeHandshake(secret, "warm-7", {"instance": INSTANCE, "term": 3}, fingerprint=fingerprint)
    return NodeConnection(side, serve)


@contextmanager
def limited(limits: Mapping[str, float]) -> Iterator[None]:
    """Change limits of connections within a block: names in their modules, and values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(_ends if name == "MAX_OPEN_REQUESTS" else _connection, name, value)
        yield


@asynccontextmanager
async def joined(
    serve: RequestHandler = refuse, *, link: LinkConfig | None = None, limits: Mapping[str, float] = NO_LIMITS
) -> AsyncIterator[tuple[ProxyConnection, NodeConnection, Link]]:
    """Yield the proxy's end, the node's end and the link; checks that nothing of them is left."""
    with limited(limits):
        async with _joined(serve, link) as made:
            yield made


@asynccontextmanager
async def _joined(
    serve: RequestHandler, link: LinkConfig | None
) -> AsyncIterator[tuple[ProxyConnection, NodeConnection, Link]]:
    proxy, node, wire = proxy_side(), node_side(serve), Link(link)
    wire.join(proxy, node)
    await proxy.wait_authenticated()
    await node.wait_authenticated()
    try:
        yield proxy, node, wire
    finally:
        for end in wire.ends:
            end.thaw()
        await proxy.close()
        await node.close()
        assert not proxy.is_open
        assert not node.is_open
        assert (len(proxy._requests), len(proxy._outbox), len(node._outbox)) == (0, 0, 0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in virtual time; checks that no task and no error of the loop is left."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await test()

    run_virtual(main())
    gc.collect(1)  # errors of tasks and futures that were never awaited
    assert complaints == []


def memory(size_bytes: int) -> memoryview:
    """Return a buffer for a body."""
    return memoryview(bytearray(size_bytes))
