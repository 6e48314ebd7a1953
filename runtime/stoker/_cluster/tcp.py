"""Connections between machines: TCP, with TLS 1.3 unless both ends are on one machine or the setting says no.

The certificate of a process is its own, and nobody signs it: proofs of the job's secret name it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import cache

from stoker._base.threads import compute_in_thread
from stoker._cluster.connection import Connection
from stoker._cluster.secret import ClusterSecret
from stoker._cluster.serving import Listener, Node, NodeConnection
from stoker._shared.address import Address
from stoker._shared.certificate import ServerTls, create_ephemeral_tls
from stoker._shared.unauthenticated import UnauthenticatedConnections
from stoker.errors import ConnectionLostError

_MAX_UNPROVEN = 256
"""Maximum number of connections that have proved nothing yet; one more closes the oldest one."""
_PROVE_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 20
"""Time after which the system ends a connection to a machine that acknowledges nothing."""


class _TcpListener:
    """Accepts connections; see :class:`~stoker._cluster.serving.Listener`."""

    def __init__(self, node: Node, tls: ServerTls | None) -> None:
        self._node, self._fingerprint = node, "" if tls is None else tls.fingerprint
        self._unproven = UnauthenticatedConnections(
            self._create,
            None if tls is None else tls.context,
            max_connections=_MAX_UNPROVEN,
            timeout_seconds=_PROVE_SECONDS,
        )
        self._server: asyncio.Server | None = None
        self.address = Address("", 0)

    async def listen(self, address: Address) -> None:
        self._server = await self._unproven.listen(address)
        self.address = Address(address.host, self._server.sockets[0].getsockname()[1])

    def _create(self) -> NodeConnection:
        return NodeConnection(self._node, self, self._fingerprint)

    def discard(self, connection: NodeConnection) -> None:
        """Count a connection as unauthenticated no longer: it has proved that it has a secret, or has ended."""
        if connection.transport is not None:
            watch_silence(connection.transport)
        self._unproven.discard(connection)

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()
        self._unproven.close()


async def listen_tcp(node: Node, address: Address, *, tls: bool) -> Listener:
    """Accept connections at an address, port 0 for any free one, over TLS if asked to unless it is a loopback address.

    Raises:
        ConfigError: the address cannot be used.
        MissingExtraError: TLS is needed, and the package that creates certificates is not installed.
    """
    listener = _TcpListener(node, await compute_in_thread(_create_tls) if tls and not address.is_local else None)
    await listener.listen(address)
    return listener


@cache
def _create_tls() -> ServerTls:
    return create_ephemeral_tls()


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proof of the process names its certificate
    return context


async def open_tcp(address: Address, secret: ClusterSecret, *, tls: bool = True) -> Connection:
    """Connect to a process of another machine, over TLS unless it has a loopback address, or ``tls`` is false.

    Raises:
        ConnectionLostError: it cannot be reached, or does not have the secret.
    """
    context = _client_context() if tls and not address.is_local else None
    connecting = asyncio.get_running_loop().create_connection(
        lambda: Connection(secret=secret), address.host, address.port, ssl=context
    )
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, connection = await connecting
    except (OSError, TimeoutError) as error:  # ssl.SSLError among them
        raise ConnectionLostError(f"the cache process at {address} cannot be reached: {error or 'no answer'}") from None
    try:
        await connection.prove(_PROVE_SECONDS)
    except BaseException:
        connection.abort()
        raise
    assert connection.transport is not None  # noqa: S101 - it is connected
    watch_silence(connection.transport)
    return connection


def watch_silence(transport: asyncio.Transport) -> None:
    """Have the system end a connection whose other machine is lost, also while nothing is sent."""
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None:
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _SILENT_SECONDS // 2, "TCP_KEEPALIVE": _SILENT_SECONDS // 2, "TCP_KEEPINTVL": 5}
    options |= {"TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": _SILENT_SECONDS * 1000}
    for name, value in options.items():
        if hasattr(socket, name):  # each system has its own
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
