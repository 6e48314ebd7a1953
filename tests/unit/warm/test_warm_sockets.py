"""Where the proxy is dialled, over real sockets: whoever keeps silent is bounded, and keeps nobody out."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stoker.errors import ConfigError, StokerError
from stoker.testing import run_virtual
from stoker_warm._auth import Address, Certificate, PeerSide, ProxySide, Secret, dial
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._frames import Head, Kind
from stoker_warm._listener import MAX_UNAUTHENTICATED, TcpListener
from stoker_warm._requests import Answer
from support.tls import make_authority
from support.waiting import until
from support.warm_platform import MemoryListener, Tier

SECRET = Secret(bytes(32))
LOOPBACK = Address("127.0.0.1", 0)


async def pong(kind: Kind, head: Head, body: bytearray) -> Answer:
    return Kind.PONG, {}, ()


class Host:
    """A door, and whom it has let in."""

    def __init__(self, certificate: Certificate | None) -> None:
        self.listener = TcpListener(LOOPBACK, certificate=certificate)
        self.connections: list[Connection] = []
        self.dialled: list[socket.socket] = []
        self.max_unauthenticated = 0

    def accept(self) -> Connection:
        self.max_unauthenticated = max(self.max_unauthenticated, self.listener.unauthenticated)
        connection = Connection(ProxySide(SECRET, fingerprint=self.listener.fingerprint), pong)
        self.connections.append(connection)
        return connection

    async def node(self, secret: Secret = SECRET) -> Connection:
        """Return the connection of a node that has dialled, at its end."""
        fingerprint = self.listener.fingerprint

        def made() -> Connection:
            return Connection(PeerSide(secret, "node", "warm-0", "0" * 16, fingerprint=fingerprint), pong)

        return await dial(Address.parse(self.listener.address), fingerprint, made)

    async def silent(self, count: int) -> list[socket.socket]:
        """Return sockets that have dialled and say nothing."""
        address, loop = Address.parse(self.listener.address), asyncio.get_running_loop()
        before = len(self.connections)
        for _ in range(count):
            sock = socket.socket()
            self.dialled.append(sock)
            sock.setblocking(False)
            await loop.sock_connect(sock, (address.host, address.port))
        await until(lambda: len(self.connections) >= before + count)
        return self.dialled[-count:]


@asynccontextmanager
async def host(certificate: Certificate | None = None, *, max_unauthenticated: int = 8) -> AsyncIterator[Host]:
    made = Host(certificate)
    await made.listener.open(made.accept, max_unauthenticated=max_unauthenticated)
    try:
        yield made
    finally:
        made.listener.close()
        for connection in made.connections:
            await connection.close()
        for sock in made.dialled:
            sock.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def certified(folder: Path) -> Certificate:
    make_authority(folder)
    pem = folder / "server.pem"
    return Certificate(chain=pem, key=pem)


@pytest.fixture(params=["plain", "tls"])
def certificate(request: pytest.FixtureRequest, tmp_path: Path) -> Certificate | None:
    return certified(tmp_path) if request.param == "tls" else None


def test_a_node_that_knows_the_secret_is_let_in_and_is_no_stranger_then(certificate: Certificate | None) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            node = await made.node()
            await node.ready()
            (connection,) = made.connections
            await connection.ready()
            assert (await connection.request(Kind.PING)).kind is Kind.PONG
            await until(lambda: not made.listener.unauthenticated)
            made.listener.close()
            assert (await connection.request(Kind.PING)).kind is Kind.PONG, "who is in stays"
            await node.close()

    asyncio.run(test())


def test_those_who_dial_and_keep_silent_take_up_a_bounded_number_of_files_and_keep_no_node_out(
    certificate: Certificate | None,
) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            node = await made.node()
            await node.ready()
            before = open_files()
            silent = await made.silent(100)
            await until(lambda: open_files() - before - len(silent) <= 8)
            assert made.max_unauthenticated <= 8
            other = await made.node()
            await other.ready()
            assert (await other.request(Kind.PING)).kind is Kind.PONG
            assert node.is_open
            await node.close()
            await other.close()

    asyncio.run(test())


def test_who_came_first_goes_first(certificate: Certificate | None) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            await made.silent(12)
            for connection in made.connections[:4]:
                await connection.closed()
            assert [connection.failure is None for connection in made.connections] == [False] * 4 + [True] * 8

    asyncio.run(test())


def test_nothing_is_left_of_strangers_when_the_door_closes(certificate: Certificate | None) -> None:
    async def test() -> None:
        before = open_files()
        async with host(certificate) as made:
            await made.silent(5)
            made.listener.close()
            for connection in made.connections:
                await connection.closed()
            await until(lambda: not made.listener.unauthenticated)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert open_files() == before

    asyncio.run(test())


def test_who_does_not_know_the_secret_and_who_speaks_no_tls_is_no_stranger_for_long(
    certificate: Certificate | None,
) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            (sock,) = await made.silent(1)
            await asyncio.get_running_loop().sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            wrong = await made.node(Secret(b"x" * 32))
            with pytest.raises(StokerError):
                await wrong.ready()
            for connection in made.connections:
                await connection.closed()
            await until(lambda: not made.listener.unauthenticated)

    asyncio.run(test())


def test_nodes_that_all_dial_at_once_do_not_push_each_other_out() -> None:
    async def main() -> None:
        async with Tier(WarmConfig(nodes=100)) as tier:
            assert isinstance(tier.proxy.listener, MemoryListener)
            assert tier.proxy.listener.max_unauthenticated == 100 + MAX_UNAUTHENTICATED

    run_virtual(main())


def test_a_name_with_several_addresses_is_listened_to_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()

        async def found(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 0)) for last in (1, 2, 1)]

        monkeypatch.setattr(loop, "getaddrinfo", found)
        door = TcpListener(Address("localhost", 0))
        await door.open(lambda: Connection(ProxySide(SECRET), pong))
        assert len(door._listening) == 2
        door.close()

    asyncio.run(test())


def test_an_address_that_is_taken_or_open_to_all_is_refused() -> None:
    async def test() -> None:
        async with host() as made:
            with pytest.raises(ConfigError, match="cannot listen"):
                await TcpListener(Address.parse(made.listener.address)).open(made.accept)
        with pytest.raises(ConfigError, match="private network"):
            await TcpListener(Address("0.0.0.0", 0)).open(made.accept)  # noqa: S104 - which is what is refused

    asyncio.run(test())


def test_a_system_without_files_for_more_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_warm._listener._ACCEPT_AGAIN_SECONDS", 0.001)

    async def test() -> None:
        loop, refused = asyncio.get_running_loop(), [OSError(24, "Too many open files"), ConnectionAbortedError()]
        accept = loop.sock_accept

        async def failing(sock: socket.socket) -> object:
            if refused:
                raise refused.pop(0)
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", failing)
        async with host() as made:
            node = await made.node()
            await node.ready()
            await node.close()
        assert not refused

    asyncio.run(test())


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    certificate = certified(tmp_path)
    assert isinstance(certificate.context(), ssl.SSLContext)
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(chain=certificate.chain, key=tmp_path / "empty.pem").context()
    with pytest.raises(ConfigError, match="holds no certificate"):
        Certificate(chain=tmp_path / "empty.pem", key=certificate.key).fingerprint()
