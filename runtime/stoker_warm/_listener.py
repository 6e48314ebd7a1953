"""Listener of the proxy, to which nodes connect.

Anyone can connect. The number of unauthenticated connections is bounded: a new one closes the oldest. So peers that
connect and send nothing use a bounded number of file descriptors and keep no node out, because authentication takes
only one round trip. Authenticated peers are nodes, identified by their names.
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
"""Maximum number of unauthenticated connections, in addition to one for each node, since all may connect at once."""
_UNAUTHENTICATED_SECONDS = 10.0
_LOG_PAUSE_SECONDS = 10.0
"""Minimum time between two log messages about connections that ended with the same type of error."""


class Listener:
    """Listens for nodes over TCP; uses TLS, except on loopback without a certificate.

    Args:
        address: Address to listen on; port 0 selects a free port.
        advertised: Address that nodes connect to, if it differs: behind a load balancer, or with a wildcard address.
        certificate: PEM files of the certificate chain, this host's certificate first, and of its key, without a
            passphrase. None selects no TLS on loopback, and an ephemeral certificate elsewhere.

    Raises:
        ConfigError: The certificate cannot be used.
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
        """Address that nodes connect to, ``host:port``."""
        return str(self._advertised or self._address)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate in hexadecimal digits, available after ``open``; empty without TLS."""
        return "" if self._tls is None else self._tls.fingerprint

    async def open(
        self, create_connection: Callable[[], ProxyConnection], *, max_unauthenticated: int = MAX_UNAUTHENTICATED
    ) -> None:
        """Listen, and accept all connections.

        Args:
            create_connection: Function that creates the protocol of a connection.
            max_unauthenticated: Maximum number of unauthenticated connections; one more closes the oldest.

        Raises:
            ConfigError: The address cannot be used.
            MissingExtraError: A certificate is needed, and the package that creates it is not installed.
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
        """Count a connection as unauthenticated no longer: its peer is authenticated, or it has ended. Idempotent."""
        if self._unauthenticated is not None:
            self._unauthenticated.discard(connection)

    def close(self) -> None:
        """Accept no more connections, and close the unauthenticated ones. Idempotent."""
        if self._server is not None and self._unauthenticated is not None:
            self._server.close()
            self._unauthenticated.close()


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine as a task, which is cancelled when the proxy closes."""


class PeerServer:
    """All connections to a proxy. Used by the proxy's event loop only.

    Args:
        secret: Secret of the deployment.
        listener: Listener of the proxy.
        nodes: Nodes that receive their connections.
        spawn: Function that runs the task of a connection.
    """

    def __init__(self, secret: WarmSecret, listener: Listener, nodes: Sequence[NodeClient], spawn: Spawn) -> None:
        self._secret, self._listener, self._nodes, self._spawn = secret, listener, nodes, spawn
        self._connections: set[ProxyConnection] = set()
        self._logged_errors: dict[
            type[StokerError], tuple[float, int]
        ] = {}  # time of the last message, and errors since

    async def close(self) -> None:
        """Close all connections."""
        async with task_group() as group:
            for connection in list(self._connections):
                group.create_task(connection.close())

    def create_connection(self) -> ProxyConnection:
        """Create the protocol of a new connection."""
        handshake = ProxyHandshake(self._secret, fingerprint=self._listener.fingerprint)
        connection = ProxyConnection(handshake, self._forward_notice)
        self._connections.add(connection)
        self._spawn(self._handle_connection(connection))
        return connection

    def _forward_notice(self, connection: ProxyConnection, kind: Kind, head: Head) -> None:
        if connection.peer is not None:
            self._find_node(connection.peer["node"]).on_notice(connection, kind, head)

    async def _handle_connection(self, connection: ProxyConnection) -> None:
        """Authenticate a connection, pass it to its node, and wait until it ends."""
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
        """Log why a connection ended; of repeated errors, which any peer can cause, only the first and the count."""
        now_seconds, kind = asyncio.get_running_loop().time(), type(error)
        told_seconds, untold = self._logged_errors.get(kind, (float("-inf"), 0))
        if now_seconds - told_seconds < _LOG_PAUSE_SECONDS:
            self._logged_errors[kind] = told_seconds, untold + 1
            return
        self._logged_errors[kind] = now_seconds, 0
        more = f" ({untold:,} more have ended like this since the last message)" if untold else ""
        _log.warning("a connection of the warm tier ended: %s%s", error, more)
