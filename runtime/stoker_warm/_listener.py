"""Where nodes dial the proxy.

Anyone can dial. The number of unauthenticated peers is bounded: the oldest makes room for the next one. So a peer that
dials and stays silent costs a bounded number of files and keeps no other out, since a proof takes no longer than it
takes a peer to answer once. Authenticated peers are nodes, which are distinguished by their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from stoker._base.task_group import task_group
from stoker._shared.address import Address
from stoker._shared.certificate import create_ephemeral_tls, load_tls
from stoker._shared.unauthenticated import UnauthenticatedConnections
from stoker.errors import StokerError, WireError
from stoker_warm._auth import ProxyHandshake, WarmSecret
from stoker_warm._frames import Head, Kind
from stoker_warm._node_client import NodeClient
from stoker_warm._peer_connections import ProxyConnection

_log = logging.getLogger("stoker.warm.reception")

MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections at a time, besides those of nodes that may all dial at once."""
_UNAUTHENTICATED_SECONDS = 10.0
_LOG_PAUSE_SECONDS = 10.0
"""Between two words about connections that ended for the same kind of reason."""


class Listener:
    """Where nodes dial, over TCP: with TLS, but on loopback if no certificate is given.

    Args:
        address: where to listen; port 0 is any that is free.
        advertised: what to tell nodes, if it is not the same: behind a load balancer, or when listening everywhere.
        certificate: PEM files of what to show, its own certificate first, and of its key, without a passphrase; where
            it is needed and not given, one is made for this process.

    Raises:
        ConfigError: the certificate cannot be used.
    """

    def __init__(
        self, address: Address, *, advertised: Address | None = None, certificate: tuple[Path, Path] | None = None
    ) -> None:
        self._address, self._advertised = address, advertised
        self._tls = None if certificate is None else load_tls(*certificate)
        self._unauthenticated: UnauthenticatedConnections | None = None
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """What to dial, ``host:port``."""
        return str(self._advertised or self._address)

    @property
    def fingerprint(self) -> str:
        """Of the certificate, once it listens; empty without TLS."""
        return "" if self._tls is None else self._tls.fingerprint

    async def open(
        self, create_connection: Callable[[], ProxyConnection], *, max_unauthenticated: int = MAX_UNAUTHENTICATED
    ) -> None:
        """Listen, and let everybody in, each with a connection of its own.

        Args:
            create_connection: makes the connection.
            max_unauthenticated: connections at a time that have not been ``discard_unauthenticated``; for one more the
                oldest goes.

        Raises:
            ConfigError: the address cannot be used.
            MissingExtraError: a certificate is needed, and cannot be made.
        """
        if self._tls is None and not (self._address.is_local and (self._advertised or self._address).is_local):
            self._tls = create_ephemeral_tls("warm")
        context = None if self._tls is None else self._tls.context
        self._unauthenticated = UnauthenticatedConnections(
            create_connection, context, max_connections=max_unauthenticated, timeout_seconds=_UNAUTHENTICATED_SECONDS
        )
        self._server = await self._unauthenticated.listen(self._address)
        self._address = Address(self._address.host, self._server.sockets[0].getsockname()[1])

    def discard_unauthenticated(self, connection: ProxyConnection) -> None:
        """The peer is known, or the connection has ended. Idempotent."""
        if self._unauthenticated is not None:
            self._unauthenticated.discard(connection)

    def close(self) -> None:
        """Accept no more connections, and end those that are not settled. Idempotent."""
        if self._server is not None and self._unauthenticated is not None:
            self._server.close()
            self._unauthenticated.close()


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine until it ends or the proxy does."""


class PeerServer:
    """All connections to a proxy. Lives on its event loop.

    Args:
        secret: of the deployment.
        listener: where they dial.
        nodes: get their connections.
        spawn: runs what attends to a connection.
    """

    def __init__(self, secret: WarmSecret, listener: Listener, nodes: Sequence[NodeClient], spawn: Spawn) -> None:
        self._secret, self._listener, self._nodes, self._spawn = secret, listener, nodes, spawn
        self._connections: set[ProxyConnection] = set()
        self._logged_errors: dict[
            type[StokerError], tuple[float, int]
        ] = {}  # when last, and how many have ended like it since

    async def close(self) -> None:
        """End all connections."""
        async with task_group() as group:
            for connection in list(self._connections):
                group.create_task(connection.close())

    def create_connection(self) -> ProxyConnection:
        """Return what speaks over a new connection."""
        handshake = ProxyHandshake(self._secret, fingerprint=self._listener.fingerprint)
        connection = ProxyConnection(handshake, self._forward_notice)
        self._connections.add(connection)
        self._spawn(self._handle_connection(connection))
        return connection

    def _forward_notice(self, connection: ProxyConnection, kind: Kind, head: Head) -> None:
        if connection.peer is not None:
            self._find_node(connection.peer["node"]).on_notice(connection, kind, head)

    async def _handle_connection(self, connection: ProxyConnection) -> None:
        """Be there for a connection until it ends."""
        node: NodeClient | None = None
        try:
            greeting = dict(await connection.wait_authenticated())
            self._listener.discard_unauthenticated(connection)
            node = self._find_node(greeting.pop("node"))
            node.on_greeting(connection, greeting)
            await connection.wait_closed()
        except StokerError as error:
            self._log_error(error)
        finally:
            self._connections.discard(connection)
            self._listener.discard_unauthenticated(connection)
            connection.abort()
            if node is not None:
                node.on_disconnected(connection)

    def _find_node(self, name: str) -> NodeClient:
        for node in self._nodes:
            if node.name == name:
                return node
        raise WireError(f"there is no node {name}")

    def _log_error(self, error: StokerError) -> None:
        """Say why a connection ended; of many alike, which any peer can cause, only the first and their number."""
        now_seconds, kind = asyncio.get_running_loop().time(), type(error)
        told_seconds, untold = self._logged_errors.get(kind, (float("-inf"), 0))
        if now_seconds - told_seconds < _LOG_PAUSE_SECONDS:
            self._logged_errors[kind] = told_seconds, untold + 1
            return
        self._logged_errors[kind] = now_seconds, 0
        more = f" ({untold:,} more have ended like this since the last word)" if untold else ""
        _log.warning("a connection of the warm tier ended: %s%s", error, more)
