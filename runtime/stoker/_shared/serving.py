"""A tier server at an address: TLS off loopback, few connections without a valid token, a graceful end."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stoker._shared.certificate import ServerTls, ephemeral_tls
from stoker._shared.server import TierServer
from stoker._stores.options import is_this_machine
from stoker.errors import ConfigError

_MAX_GUESTS = 1024
"""Connections at a time over which no valid token has come; for one more, the first of them is closed. More than those
of 32 trainers that begin together."""
_GUEST_SECONDS = 10.0
_TLS_SECONDS = 5.0
_STOP_SECONDS = 10.0
"""What transfers may take to end when the server stops."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - to be told from addresses that can be connected to


_log = logging.getLogger("stoker.tier.http")
_log.addFilter(lambda record: not _is_of_stranger(record))


def _is_of_stranger(record: logging.LogRecord) -> bool:
    """Return whether a message tells of a request that is not HTTP: anybody can send many, and it quotes them."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens.

    Attributes:
        host: a name or an address.
        port: 0 is any that is free.
        advertised: the host that clients connect to, if it is another.
        tls: what it shows; None off loopback is an ephemeral certificate, and on loopback no TLS.

    Raises:
        ConfigError: clients cannot connect to the host, and are told no other.
    """

    host: str
    port: int
    advertised: str = ""
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        if self.host in _EVERYWHERE and not self.advertised:
            raise ConfigError(f"nobody can connect to {self.host}: say by which name or address with --advertise")

    def url(self, port: int, tls: ServerTls | None) -> str:
        """Return what to give to trainers."""
        host = self.advertised or self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}" if tls is None else f"https://{host}:{port}?fingerprint={tls.fingerprint}"


@asynccontextmanager
async def listening(server: TierServer, endpoint: Endpoint) -> AsyncIterator[str]:
    """Listen, and yield the URL for trainers; at the end let nobody in, and wait a while for transfers to end.

    Raises:
        ConfigError: the address cannot be used.
        MissingExtraError: it needs TLS, and no certificate can be made.
    """
    tls = endpoint.tls
    if tls is None and not is_this_machine(endpoint.host):
        tls = ephemeral_tls()
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        auto_decompress=False,  # of no use to anybody, and more bytes than were announced
        shutdown_timeout=_STOP_SECONDS,
        lingering_time=1.0,
        logger=_log,
    )
    await runner.setup()
    assert runner.server is not None  # noqa: S101 - it is set up
    try:
        guests = _Guests(runner.server, server, None if tls is None else tls.context)
        listener = await _listen(endpoint, guests)
        try:
            yield endpoint.url(listener.sockets[0].getsockname()[1], tls)
        finally:
            listener.close()
            await guests.close()
    finally:
        await runner.cleanup()
        await server.close()


async def _listen(endpoint: Endpoint, guests: _Guests) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(guests.connect, endpoint.host, endpoint.port)
    except OSError as error:
        raise ConfigError(
            f"the tier server cannot listen on {endpoint.host}:{endpoint.port}: {error}; take an address of this "
            "machine and a free port"
        ) from None


class _Guests:
    """Makes connections, and closes those over which no valid token comes: after a while, or when they are many.

    TLS begins when a connection is counted, and not in :meth:`asyncio.loop.create_server`, which shows a connection
    only when its handshake has ended: until then there could be any number, each with its buffers.
    """

    def __init__(self, create: Callable[[], Any], server: TierServer, context: ssl.SSLContext | None) -> None:
        self._create, self._context = create, context
        self._guests: dict[Any, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        server.admit = self._admit

    def connect(self) -> asyncio.BaseProtocol:
        """Return what meets a connection that was accepted."""
        return _Door(self._enter)

    async def close(self) -> None:
        """End the handshakes that are under way. Idempotent."""
        for task in self._handshakes:
            task.cancel()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _enter(self, door: _Door, transport: asyncio.Transport) -> None:
        if len(self._guests) >= _MAX_GUESTS:
            self._expel(next(iter(self._guests)))
        connection, loop = self._create(), asyncio.get_running_loop()
        self._guests[connection] = transport, loop.call_later(_GUEST_SECONDS, self._expel, connection)
        if self._context is None:
            door.hand_over(transport, connection)
            return
        transport.pause_reading()  # what comes belongs to TLS
        task = loop.create_task(self._shake_hands(door, transport, connection, self._context))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(
        self, door: _Door, transport: asyncio.Transport, connection: Any, context: ssl.SSLContext
    ) -> None:
        start_tls = asyncio.get_running_loop().start_tls
        with suppress(OSError):  # ssl.SSLError and ConnectionError among them
            secure = await start_tls(transport, door, context, server_side=True, ssl_handshake_timeout=_TLS_SECONDS)
            if secure is not None:  # it was not expelled
                door.hand_over(secure, connection)

    def _admit(self, connection: Any) -> None:
        if (guest := self._guests.pop(connection, None)) is not None:
            guest[1].cancel()

    def _expel(self, connection: Any) -> None:
        transport, timer = self._guests.pop(connection)
        timer.cancel()
        transport.abort()  # at once: who does not read keeps its socket no longer


class _Door(asyncio.Protocol):
    """Meets a connection, and hands it over, together with what has come by then."""

    def __init__(self, enter: Callable[[_Door, asyncio.Transport], None]) -> None:
        self._enter = enter
        self._received = bytearray()
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._enter(self, cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True

    def hand_over(self, transport: asyncio.Transport, connection: Any) -> None:
        """Let another protocol speak over the connection, unless it is lost."""
        if not self._is_lost:
            transport.set_protocol(connection)
            connection.connection_made(transport)
            if self._received:
                connection.data_received(bytes(self._received))
