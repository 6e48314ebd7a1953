"""Unauthenticated connections of a server, bounded in number and in time, so that they cannot keep clients out.

Anyone can connect to a server. A connection counts as unauthenticated until the server discards it from
:class:`UnauthenticatedConnections`. It is closed after a timeout, or as the oldest one when there are too many.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from stoker._shared.address import Address
from stoker.errors import ConfigError

_BACKLOG = 128
_TLS_SECONDS = 5.0


class UnauthenticatedConnections:
    """Creates the protocols of connections, and closes connections that stay unauthenticated.

    TLS begins after a connection is counted, and not in :meth:`asyncio.loop.create_server`, which reports a connection
    only after its handshake: the number of connections in the handshake, each with buffers, would be unbounded.

    Args:
        create_protocol: Function that creates the protocol of a connection, called after the TLS handshake.
        context: TLS context; None for no TLS.
        max_connections: Maximum number of unauthenticated connections; one more closes the oldest.
        timeout_seconds: Time after which an unauthenticated connection is closed, including the TLS handshake.
    """

    def __init__(
        self,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
        *,
        max_connections: int,
        timeout_seconds: float,
    ) -> None:
        self._create_protocol = create_protocol
        self._context = context
        self._max_connections = max_connections
        self._timeout_seconds = timeout_seconds
        # The oldest connection comes first.
        self._connections: dict[asyncio.BaseProtocol, _UnauthenticatedConnection] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._connections)

    async def listen(self, address: Address) -> asyncio.Server:
        """Accept connections at an address, until the returned server is closed.

        Raises:
            ConfigError: The address cannot be used.
        """
        try:
            return await asyncio.get_running_loop().create_server(
                lambda: _UnauthenticatedConnection(self), address.host, address.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"this process cannot listen on {address}: {error}; use an address of this machine and a free port"
            ) from None

    def discard(self, protocol: object) -> None:
        """Count a connection as unauthenticated no longer: it was authenticated, or has ended. Idempotent.

        Args:
            protocol: Protocol of the connection.
        """
        door = self._connections.pop(cast("asyncio.BaseProtocol", protocol), None)
        if door is not None and door.timer is not None:
            door.timer.cancel()

    def close(self) -> None:
        """Close all unauthenticated connections. Idempotent."""
        for door in list(self._connections.values()):
            self._close_connection(door)

    def add(self, door: _UnauthenticatedConnection, transport: asyncio.Transport) -> None:
        """Count a new connection, and begin TLS on it."""
        if len(self._connections) >= self._max_connections:
            self._close_connection(next(iter(self._connections.values())))
        loop = asyncio.get_running_loop()
        door.transport, door.timer = transport, loop.call_later(self._timeout_seconds, self._close_connection, door)
        self._connections[door] = door
        if self._context is None:
            self._start_protocol(door, transport)
            return
        transport.pause_reading()  # the TLS layer reads the data
        task = loop.create_task(self._start_tls(door, transport, self._context))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _start_tls(
        self, door: _UnauthenticatedConnection, transport: asyncio.Transport, context: ssl.SSLContext
    ) -> None:
        start_tls = asyncio.get_running_loop().start_tls
        try:
            with suppress(OSError):  # ssl.SSLError and ConnectionError among them
                secure = await start_tls(transport, door, context, server_side=True, ssl_handshake_timeout=_TLS_SECONDS)
                if secure is not None:  # it was not closed meanwhile
                    self._start_protocol(door, secure)
        finally:
            self.discard(door)

    def _start_protocol(self, door: _UnauthenticatedConnection, transport: asyncio.Transport) -> None:
        """Create the protocol of a connection, and pass it the data received so far, unless the connection is lost."""
        if self._connections.pop(door, None) is None:
            return
        door.protocol = self._create_protocol()
        self._connections[door.protocol] = door
        transport.set_protocol(door.protocol)
        door.protocol.connection_made(transport)
        _replay(door.protocol, door.received)

    def _close_connection(self, door: _UnauthenticatedConnection) -> None:
        self.discard(door.protocol)
        if door.transport is not None:
            door.transport.abort()  # without waiting for a peer that does not read


class _UnauthenticatedConnection(asyncio.Protocol):
    """Protocol of a new connection, which buffers received data until the final protocol takes over."""

    def __init__(self, guests: UnauthenticatedConnections) -> None:
        self._connections = guests
        self.protocol: asyncio.BaseProtocol = self
        self.transport: asyncio.Transport | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self, cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)


def _replay(protocol: asyncio.BaseProtocol, data: bytes) -> None:
    """Pass received data to a protocol, of either kind."""
    if data and isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    buffered = cast("asyncio.BufferedProtocol", protocol)
    while data:
        buffer = memoryview(buffered.get_buffer(len(data)))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        buffered.buffer_updated(size)
        data = data[size:]
