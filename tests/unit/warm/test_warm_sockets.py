"""The proxy's listener, over real sockets: silent peers are limited in number and time, and block no others."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from stoker._shared.address import Address
from stoker.errors import ConfigError, CredentialsError, MissingExtraError, StokerError
from stoker.testing import run_virtual
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret, connect_to_proxy
from stoker_warm._config import WarmConfig
from stoker_warm._frames import Head, Kind
from stoker_warm._listener import MAX_UNAUTHENTICATED, Listener
from stoker_warm._peer_connections import NodeConnection, ProxyConnection, ReplyParts
from support.tls import make_authority
from support.waiting import until
from support.warm_platform import MemoryListener, Tier

SECRET = WarmSecret(bytes(32))
LOOPBACK = Address("127.0.0.1", 0)
Pem = tuple[Path, Path]
"""Files of a certificate and of its key."""


def ignore(connection: ProxyConnection, kind: Kind, head: Head) -> None:
    """Take no note of a notice."""


def pong(kind: Kind, head: Head, body: bytearray) -> ReplyParts:
    return Kind.PONG, {}, ()


class Host:
    """A listener, and the connections that it has accepted."""

    def __init__(self, certificate: Pem | None, limit: int) -> None:
        self.limit = limit
        self.listener = Listener(LOOPBACK, certificate=certificate)
        self.connections: list[ProxyConnection] = []
        self.settling: set[asyncio.Task[None]] = set()
        self.dialled: list[socket.socket] = []
        self.max_unauthenticated = 0

    @property
    def unauthenticated(self) -> int:
        return len(self.listener._unauthenticated or ())

    def accept(self) -> ProxyConnection:
        self.max_unauthenticated = max(self.max_unauthenticated, self.unauthenticated)
        connection = ProxyConnection(ProxyHandshake(SECRET, fingerprint=self.listener.fingerprint), ignore)
        self.connections.append(connection)
        task = asyncio.get_running_loop().create_task(self._settle(connection))
        self.settling.add(task)
        task.add_done_callback(self.settling.discard)
        return connection

    async def _settle(self, connection: ProxyConnection) -> None:
        with suppress(StokerError):
            await connection.wait_authenticated()
        self.listener.discard_unauthenticated(connection)

    async def node(self, secret: WarmSecret = SECRET) -> NodeConnection:
        """Return the connection of a node that has dialled, at its end."""
        fingerprint = self.listener.fingerprint

        def create_connection() -> NodeConnection:
            return self.node_end(fingerprint, secret)

        return await connect_to_proxy(Address.parse(self.listener.address), fingerprint, create_connection)

    def node_end(self, fingerprint: str | None = None, secret: WarmSecret = SECRET) -> NodeConnection:
        """Return a node's end that expects a certificate: the listener's if none is given."""
        fingerprint = self.listener.fingerprint if fingerprint is None else fingerprint
        return NodeConnection(NodeHandshake(secret, "warm-0", {}, fingerprint=fingerprint), pong)

    async def silent(self, count: int) -> list[socket.socket]:
        """Return sockets that have dialled and say nothing."""
        address, loop = Address.parse(self.listener.address), asyncio.get_running_loop()
        wanted = min(self.unauthenticated + count, self.limit)
        for _ in range(count):
            sock = socket.socket()
            self.dialled.append(sock)
            sock.setblocking(False)
            await loop.sock_connect(sock, (address.host, address.port))
        await until(lambda: self.unauthenticated >= wanted)
        return self.dialled[-count:]


@asynccontextmanager
async def host(certificate: Pem | None = None, *, max_unauthenticated: int = 8) -> AsyncIterator[Host]:
    made = Host(certificate, max_unauthenticated)
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


def certified(folder: Path) -> Pem:
    make_authority(folder)
    pem = folder / "server.pem"
    return pem, pem


@pytest.fixture(params=["plain", "tls"])
def certificate(request: pytest.FixtureRequest, tmp_path: Path) -> Pem | None:
    return certified(tmp_path) if request.param == "tls" else None


def test_a_node_with_the_secret_is_authenticated(certificate: Pem | None) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            node = await made.node()
            await node.wait_authenticated()
            (connection,) = made.connections
            await connection.wait_authenticated()
            assert (await connection.request(Kind.PING)).kind is Kind.PONG
            await until(lambda: not made.unauthenticated)
            made.listener.close()
            assert (await connection.request(Kind.PING)).kind is Kind.PONG, "who is in stays"
            await node.close()

    asyncio.run(test())


def test_silent_peers_use_a_bounded_number_of_files_and_block_no_node(
    certificate: Pem | None,
) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            node = await made.node()
            await node.wait_authenticated()
            before = open_files()
            silent = await made.silent(100)
            await until(lambda: open_files() - before - len(silent) <= 8)
            assert made.max_unauthenticated <= 8
            other = await made.node()
            await other.wait_authenticated()
            assert other.is_open
            assert node.is_open
            await node.close()
            await other.close()

    asyncio.run(test())


def test_the_oldest_connection_is_closed_first(certificate: Pem | None) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            silent = await made.silent(8)
            await made.silent(4)
            for sock in silent[:4]:
                with suppress(ConnectionError):
                    while await asyncio.get_running_loop().sock_recv(sock, 1000):
                        pass
            assert made.unauthenticated == 8
            for sock in silent[4:]:
                with suppress(BlockingIOError):
                    assert sock.recv(1000), "it is there"

    asyncio.run(test())


def test_silent_peers_are_disconnected_in_time(certificate: Pem | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_warm._listener._UNAUTHENTICATED_SECONDS", 0.1)

    async def test() -> None:
        async with host(certificate) as made:
            (sock,) = await made.silent(1)
            async with asyncio.timeout(3):
                with suppress(ConnectionError):
                    while await asyncio.get_running_loop().sock_recv(sock, 1000):
                        pass
            assert not made.unauthenticated

    asyncio.run(test())


def test_closing_the_listener_closes_unauthenticated_connections(certificate: Pem | None) -> None:
    async def test() -> None:
        before = open_files()
        async with host(certificate) as made:
            await made.silent(5)
            made.listener.close()
            for connection in made.connections:
                await connection.wait_closed()
            await until(lambda: not made.unauthenticated)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        await until(lambda: open_files() == before)

    asyncio.run(test())


def test_peers_without_secret_or_tls_are_disconnected_in_time(
    certificate: Pem | None,
) -> None:
    async def test() -> None:
        async with host(certificate) as made:
            (sock,) = await made.silent(1)
            await asyncio.get_running_loop().sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            wrong = await made.node(WarmSecret(b"x" * 32))
            with pytest.raises(StokerError):
                await wrong.wait_authenticated()
            for connection in made.connections:
                await connection.wait_closed()
            await until(lambda: not made.unauthenticated)

    asyncio.run(test())


def test_nodes_that_all_dial_at_once_do_not_push_each_other_out() -> None:
    async def main() -> None:
        async with Tier(WarmConfig(nodes=100)) as tier:
            assert isinstance(tier.proxy.listener, MemoryListener)
            assert tier.proxy.listener.max_unauthenticated == 100 + MAX_UNAUTHENTICATED

    run_virtual(main())


def test_an_address_that_is_taken_is_refused() -> None:
    async def test() -> None:
        async with host() as made:
            with pytest.raises(ConfigError, match="cannot listen"):
                await Listener(Address.parse(made.listener.address)).open(made.accept)

    asyncio.run(test())


def test_a_system_without_files_for_more_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.001)
    refused, accept = [OSError(24, "Too many open files"), ConnectionAbortedError()], socket.socket.accept

    def failing(self: socket.socket) -> object:
        if refused:
            raise refused.pop(0)
        return accept(self)

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # which tells of it
        async with host() as made:
            monkeypatch.setattr(socket.socket, "accept", failing)
            node = await made.node()
            await node.wait_authenticated()
            await node.close()
        assert not refused

    asyncio.run(test())


# Off loopback there is TLS.

ELSEWHERE = Address("10.0.0.5", 7411)


def test_a_proxy_that_nodes_dial_off_loopback_makes_a_certificate_which_they_pin() -> None:
    async def test() -> None:
        listener = Listener(LOOPBACK, advertised=ELSEWHERE)
        assert listener.fingerprint == ""
        made = Host(None, 8)
        made.listener = listener
        await listener.open(made.accept)
        try:
            assert listener.address == "10.0.0.5:7411"
            assert len(listener.fingerprint) == 64
            port = listener._address.port
            node = await connect_to_proxy(Address("127.0.0.1", port), listener.fingerprint, lambda: made.node_end())
            await node.wait_authenticated()
            assert (await made.connections[0].request(Kind.PING)).kind is Kind.PONG
            await node.close()
            other = await connect_to_proxy(Address("127.0.0.1", port), "ab" * 32, lambda: made.node_end("ab" * 32))
            with pytest.raises(CredentialsError, match="expected was abab"):
                await other.wait_authenticated()
            plain = await connect_to_proxy(Address("127.0.0.1", port), "", lambda: made.node_end(""))
            with pytest.raises(StokerError):
                await plain.wait_authenticated()
            assert len(made.connections) <= 2, "nobody speaks without TLS"
        finally:
            listener.close()

    asyncio.run(test())


def test_two_proxies_do_not_have_the_same_certificate() -> None:
    async def test() -> None:
        prints = set()
        for _ in range(2):
            listener = Listener(LOOPBACK, advertised=ELSEWHERE)
            await listener.open(lambda: ProxyConnection(ProxyHandshake(SECRET), ignore))
            listener.close()
            prints.add(listener.fingerprint)
        assert len(prints) == 2

    asyncio.run(test())


def test_where_a_certificate_cannot_be_made_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)

    async def test() -> None:
        listener = Listener(LOOPBACK, advertised=ELSEWHERE)
        with pytest.raises(MissingExtraError, match=r"pip install 'stoker\[warm\]'"):
            await listener.open(lambda: ProxyConnection(ProxyHandshake(SECRET), ignore))

    asyncio.run(test())


@pytest.mark.parametrize("host_name", ["10.0.0.5", "example.org", "fd00::5", "0.0.0.0", "192.168.0.1"])  # noqa: S104
def test_a_proxy_elsewhere_is_not_dialled_without_tls(host_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async def connect(*_: object, **__: object) -> None:
            raise AssertionError("it is dialled")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
        address = Address(host_name, 7411)
        with pytest.raises(ConfigError, match="loopback only; pass the fingerprint") as refused:
            await connect_to_proxy(address, "", lambda: NodeConnection(NodeHandshake(SECRET, "warm-0", {}), pong))
        assert str(address) in str(refused.value)

    asyncio.run(test())


def test_a_certificate_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    certificate = certified(tmp_path)
    Listener(LOOPBACK, certificate=certificate)
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Listener(LOOPBACK, certificate=(certificate[0], tmp_path / "empty.pem"))
