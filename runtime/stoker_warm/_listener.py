"""Where a proxy can be dialled.

Anyone can dial. The number of unauthenticated peers is bounded: the oldest makes room for the next one. So a peer that
dials and stays silent costs a bounded number of files and keeps no other out, since a proof takes no longer than it
takes a peer to answer once. Authenticated peers are nodes, which are distinguished by their names, and clients.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from stoker._base.task_group import task_group
from stoker.errors import ConfigError, StokerError, WireError
from stoker_warm._auth import Address, Certificate, ProxySide, Secret, check_privacy
from stoker_warm._connection import Connection
from stoker_warm._frames import Head, Kind
from stoker_warm._node_connection import Node
from stoker_warm._requests import Answer

_log = logging.getLogger("stoker.warm.door")
_log_of_peers = logging.getLogger("stoker.warm.reception")

MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections at a time, besides those of nodes that may all dial at once: more than
the workers of a job that begin together."""

_TLS_SECONDS = 5.0
_BACKLOG = 256
_ACCEPT_AGAIN_SECONDS = 1.0
"""After the system had no file for a connection."""


class Listener(Protocol):
    """Where a proxy can be dialled."""

    @property
    def address(self) -> str:
        """What to dial, ``host:port``."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the certificate that is shown; empty without TLS."""
        ...

    async def open(self, accept: Callable[[], Connection], *, max_unauthenticated: int = MAX_UNAUTHENTICATED) -> None:
        """Let everybody in, each with a connection of its own.

        Args:
            accept: makes the connection.
            max_unauthenticated: connections at a time whose handshake has not ended; for one more the oldest goes.
        """
        ...

    def close(self) -> None:
        """Accept no more connections; those whose handshake has ended stay. Idempotent."""
        ...


class TcpListener:
    """A :class:`Listener` over TCP, with TLS if there is a certificate.

    Args:
        at: where to listen; port 0 is any that is free.
        advertised: what to tell nodes, if it is not the same: behind a load balancer, or when listening everywhere.
        certificate: what to show; a must off loopback and private networks.
    """

    def __init__(
        self, at: Address, *, advertised: Address | None = None, certificate: Certificate | None = None
    ) -> None:
        self._at, self._advertised, self._certificate = at, advertised, certificate
        self._fingerprint = certificate.fingerprint() if certificate is not None else ""
        self._context: ssl.SSLContext | None = None
        self._port = at.port
        self._listening: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._max_unauthenticated = MAX_UNAUTHENTICATED

    @property
    def address(self) -> str:
        """What to dial, ``host:port``."""
        return str(self._advertised or Address(self._at.host, self._port))

    @property
    def fingerprint(self) -> str:
        """Of the certificate; empty without TLS."""
        return self._fingerprint

    @property
    def unauthenticated(self) -> int:
        """Connections whose handshake has not ended."""
        return len(self._unauthenticated)

    async def open(self, accept: Callable[[], Connection], *, max_unauthenticated: int = MAX_UNAUTHENTICATED) -> None:
        """Listen.

        Raises:
            ConfigError: without a certificate, others could listen in there; or the address cannot be used.
        """
        self._max_unauthenticated = max_unauthenticated
        try:
            listeners = await self._listeners()
        except OSError as error:
            raise ConfigError(
                f"the warm tier cannot listen on {self._at}: {error}; take an address of this machine and a free port"
            ) from None
        self._port = listeners[0].getsockname()[1]
        for listener in listeners:
            self._begin(listener, accept)

    def _begin(self, listener: socket.socket, accept: Callable[[], Connection]) -> None:
        task = asyncio.get_running_loop().create_task(self._listen(listener, accept))
        task.add_done_callback(lambda _: listener.close())
        self._listening.add(task)

    async def _listeners(self) -> list[socket.socket]:
        at, certificate, listeners = self._at, self._certificate, list[socket.socket]()
        loop, passive = asyncio.get_running_loop(), socket.AI_PASSIVE
        places = dict.fromkeys(await loop.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM, flags=passive))
        for *_, place in places:
            check_privacy(str(place[0]), has_tls=certificate is not None)
        self._context = certificate.context() if certificate is not None else None
        try:
            for family, *_, place in places:
                listeners.append(socket.create_server(place, family=family, backlog=_BACKLOG))
                listeners[-1].setblocking(False)
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def close(self) -> None:
        """Accept no more connections; those whose handshake has ended stay. Idempotent."""
        for task in (*self._listening, *self._unauthenticated):
            task.cancel()
        self._listening.clear()

    async def _listen(self, listener: socket.socket, accept: Callable[[], Connection]) -> None:
        """Accept connections, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except ConnectionError:  # the peer has gone
                continue
            except OSError as error:
                _log.warning("the warm tier cannot let anybody in: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            while len(self._unauthenticated) >= self._max_unauthenticated:
                first = next(iter(self._unauthenticated))
                del self._unauthenticated[first]
                first.cancel()
            self._let_in(sock, accept)
            await asyncio.sleep(0)  # so that other connections go on, however many come

    def _let_in(self, sock: socket.socket, accept: Callable[[], Connection]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._unauthenticated.pop(task, None)
            if task.cancelled():
                sock.close()  # if it was before the task could begin

        task = asyncio.get_running_loop().create_task(self._receive(sock, accept()))
        self._unauthenticated[task] = None
        task.add_done_callback(ended)

    async def _receive(self, sock: socket.socket, connection: Connection) -> None:
        """Be there for a connection until its handshake has ended."""
        timeout_seconds = None if self._context is None else _TLS_SECONDS
        try:
            with suppress(StokerError, OSError):  # ssl.SSLError is one; the others are in its failure
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, sock, ssl=self._context, ssl_handshake_timeout=timeout_seconds
                )
                await connection.ready()
        finally:
            if connection.peer is None and connection.failure is None:  # else it ends in its own way
                connection.abort()


_QUIET_SECONDS = 10.0
"""Between two words about connections that ended for the same kind of reason."""


class Clients(Protocol):
    """Answers peers that are clients."""

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory for the body of a request, None for it to be thrown away."""
        ...

    async def answer(self, connection: Connection, kind: Kind, head: Head, body: bytearray) -> Answer:
        """Answer a request of a client."""
        ...


class PeerServer:
    """All connections to a proxy. Lives on its event loop.

    Args:
        secret: of the deployment.
        listener: where they dial.
        nodes: by number; get their connections.
        spawn: runs a coroutine until it ends or the proxy does.
    """

    def __init__(
        self,
        secret: Secret,
        listener: Listener,
        nodes: Sequence[Node],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._secret, self._listener, self._nodes, self._spawn = secret, listener, nodes, spawn
        self.clients: Clients | None = None
        """Answers the requests of clients; without, they are turned away."""
        self._connections: set[Connection] = set()
        self._told: dict[type[StokerError], tuple[float, int]] = {}  # when last, and how many have ended like it since

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be used.
        """
        await self._listener.open(self._accept, max_unauthenticated=MAX_UNAUTHENTICATED + len(self._nodes))

    def stop_listening(self) -> None:
        """Accept no more connections. Idempotent."""
        self._listener.close()

    async def close(self) -> None:
        """End all connections."""
        async with task_group() as group:
            for connection in list(self._connections):
                group.create_task(connection.close())

    def _accept(self) -> Connection:
        connection: Connection

        def noticed(kind: Kind, head: Head) -> None:
            node = self._node_of(connection)
            if node is None:
                return
            try:
                node.noticed(connection, kind, head)
            except WireError as error:
                connection.abort(error)

        async def answer(kind: Kind, head: Head, body: bytearray) -> Answer:
            if self.clients is None or connection.peer is None or connection.peer.role != "client":
                raise WireError(f"{kind.name} is not asked of a proxy")
            return await self.clients.answer(connection, kind, head, body)

        handshake = ProxySide(self._secret, fingerprint=self._listener.fingerprint)
        room = self.clients.room if self.clients is not None else _no_room
        connection = Connection(handshake, answer, notice=noticed, room=room)
        self._spawn(self._attend(connection))
        return connection

    async def _attend(self, connection: Connection) -> None:
        """Be there for a connection until it ends."""
        self._connections.add(connection)
        node: Node | None = None
        try:
            peer = await connection.ready()
            if peer.role == "node":
                node = self._node_of(connection)
                if node is None:
                    raise WireError(f"there is no node {peer.node}")
                node.greeted(connection, peer.greeting)
            await connection.closed()
        except StokerError as error:
            self._tell(error)
            connection.abort()
        finally:
            self._connections.discard(connection)
            connection.abort()
            if node is not None:
                node.lost(connection)

    def _tell(self, error: StokerError) -> None:
        """Say why a connection ended; of many alike, which any peer can cause, only the first and their number."""
        now_seconds, kind = asyncio.get_running_loop().time(), type(error)
        told_seconds, untold = self._told.get(kind, (float("-inf"), 0))
        if now_seconds - told_seconds < _QUIET_SECONDS:
            self._told[kind] = told_seconds, untold + 1
            return
        self._told[kind] = now_seconds, 0
        more = f" ({untold:,} more have ended like this since the last word)" if untold else ""
        _log_of_peers.warning("a connection of the warm tier ended: %s%s", error, more)

    def _node_of(self, connection: Connection) -> Node | None:
        peer = connection.peer
        number = peer.node.removeprefix("warm-") if peer is not None else ""
        is_number = number.isascii() and number.isdigit() and len(number) <= 5
        return self._nodes[int(number)] if is_number and int(number) < len(self._nodes) else None


def _no_room(_: int) -> None:
    """Take no bodies: nodes send none unasked."""
