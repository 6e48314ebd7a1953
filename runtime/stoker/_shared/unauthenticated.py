"""Connections of which it is not known yet who made them: bounded in number and in time, so that they keep nobody out.

Anybody can connect to a server. A connection is a guest until the server says that it knows who made it; guests that
keep silent, or are slow, are closed after a while, and the first of them when there are too many.
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
    """Makes what speaks over connections, and closes those that stay guests: after a while, or when they are many.

    TLS begins when a connection is counted, and not in :meth:`asyncio.loop.create_server`, which shows a connection
    only when its handshake has ended: until then there could be any number, each with its buffers.

    Args:
        create_protocol: makes the protocol of a connection, once TLS has begun on it.
        context: of TLS; None for none.
        max_connections: guests at a time; for one more, the first of them is closed.
        timeout_seconds: after which a guest is closed, TLS' handshake included.
    """

    def __init__(
        self,
        create_protocol: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
        *,
        max_connections: int,
        timeout_seconds: float,
    ) -> None:
        self._create_protocol, self._context, self._max_connections, self._timeout_seconds = (
            create_protocol,
            context,
            max_connections,
            timeout_seconds,
        )
        self._connections: dict[
            asyncio.BaseProtocol, _UnauthenticatedConnection
        ] = {}  # by what speaks; the first to be closed comes first
        self._handshakes: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._connections)

    async def listen(self, address: Address) -> asyncio.Server:
        """Accept connections at an address, until the server that is returned is closed.

        Raises:
            ConfigError: the address cannot be used.
        """
        try:
            return await asyncio.get_running_loop().create_server(
                lambda: _UnauthenticatedConnection(self), address.host, address.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"this process cannot listen on {address}: {error}; take an address of this machine and a free port"
            ) from None

    def discard(self, protocol: object) -> None:
        """Count a connection no longer: it is known who made it, or it has ended. Idempotent.

        Args:
            protocol: that speaks over it.
        """
        door = self._connections.pop(cast("asyncio.BaseProtocol", protocol), None)
        if door is not None and door.timer is not None:
            door.timer.cancel()

    def close(self) -> None:
        """Close all guests. Idempotent."""
        for door in list(self._connections.values()):
            self._close_connection(door)

    def add(self, door: _UnauthenticatedConnection, transport: asyncio.Transport) -> None:
        """Count a connection, and begin TLS on it."""
        if len(self._connections) >= self._max_connections:
            self._close_connection(next(iter(self._connections.values())))
        loop = asyncio.get_running_loop()
        door.transport, door.timer = transport, loop.call_later(self._timeout_seconds, self._close_connection, door)
        self._connections[door] = door
        if self._context is None:
            self._start_protocol(door, transport)
            return
        transport.pause_reading()  # what comes belongs to TLS
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
        """Let a protocol speak over a connection, with what has come by then, unless it is lost."""
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
            door.transport.abort()  # at once: who does not read keeps its socket no longer


class _UnauthenticatedConnection(asyncio.Protocol):
    """Meets a connection, and keeps what comes until it is handed over."""

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
    """Give a protocol what was received for it."""
    if data and isinstance(protocol, asyncio.Protocol):
        protocol.data_received(data)
        return
    buffered = cast("asyncio.BufferedProtocol", protocol)
    while data:
        buffer = memoryview(buffered.get_buffer(len(data)))
        taken = min(len(buffer), len(data))
        buffer[:taken] = data[:taken]
        buffered.buffer_updated(taken)
        data = data[taken:]
