"""Connections over real sockets, with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from stoker.errors import CredentialsError
from stoker_warm._frames import Kind
from stoker_warm._peer_connections import NodeConnection, ProxyConnection
from support.tls import make_authority
from support.warm_connections import SHARD, Server, memory, node_side, proxy_side


@dataclass
class Pair:
    """Both sides of a connection over loopback."""

    proxy: ProxyConnection
    node: NodeConnection
    server: Server


@asynccontextmanager
async def over_loopback(
    server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None, fingerprint: str = ""
) -> AsyncIterator[Pair]:
    loop, serve = asyncio.get_running_loop(), Server()
    proxy = proxy_side(fingerprint=fingerprint)
    listening = await loop.create_server(lambda: proxy, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        _, node = await loop.create_connection(
            lambda: node_side(serve, fingerprint=fingerprint), "127.0.0.1", port, ssl=client
        )
        try:
            await node.wait_authenticated()
            await proxy.wait_authenticated()
            yield Pair(proxy, node, serve)
        finally:
            await node.close()
            await proxy.close()


async def exchange_over(pair: Pair) -> None:
    """Read and write over a connection, and give up some of it."""
    intos = [memory(len(SHARD)) for _ in range(20)]
    asking = [asyncio.create_task(pair.proxy.request(Kind.GET, {"shard": len(SHARD)}, into=each)) for each in intos]
    await asyncio.sleep(0)
    for each in asking[10:]:
        each.cancel()
    await asyncio.wait(asking)
    assert all(into == SHARD for into in intos[:10])
    reply = await pair.proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD] * 8, timeout_seconds=60)
    assert reply.head == {"bytes": 8 * len(SHARD)}


def test_it_works_over_a_socket() -> None:
    async def test() -> None:
        async with over_loopback() as pair:
            await exchange_over(pair)

    asyncio.run(test())


def test_it_works_over_tls_and_the_certificate_is_part_of_the_handshake(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    client = ssl.create_default_context(cafile=str(authority.bundle))
    text = (tmp_path / "server.pem").read_text()
    certificate = ssl.PEM_cert_to_DER_cert(text[: text.index("-----END") + len("-----END CERTIFICATE-----\n")])

    async def test(fingerprint: str) -> None:
        async with over_loopback(authority.server, client, fingerprint) as pair:
            await exchange_over(pair)

    asyncio.run(test(sha256(certificate).hexdigest()))
    with pytest.raises(CredentialsError, match="fingerprint"):
        asyncio.run(test("ab" * 32))


def test_what_a_socket_has_not_taken_of_a_cancelled_body_is_sent_as_it_was() -> None:
    async def test() -> None:
        async with over_loopback() as pair:
            assert pair.node._transport is not None
            pair.node._transport.pause_reading()
            body = SHARD * 12
            asking = asyncio.create_task(pair.proxy.request(Kind.SET, {"shard": "a"}, body=[body]))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
            pair.node._transport.resume_reading()
            await pair.proxy.request(Kind.PING)
            assert pair.server.stored["a"] == body

    asyncio.run(test())
