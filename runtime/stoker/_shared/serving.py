"""A tier server at an address: TLS off loopback, few connections without a valid token, a graceful end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stoker._shared.address import Address
from stoker._shared.certificate import ServerTls, ephemeral_tls
from stoker._shared.guests import Guests
from stoker._shared.server import TierServer
from stoker.errors import ConfigError

_MAX_GUESTS = 1024
"""Connections at a time over which no valid token has come; for one more, the first of them is closed. More than those
of 32 trainers that begin together."""
_GUEST_SECONDS = 10.0
_STOP_SECONDS = 10.0
"""What transfers may take to end when the server stops."""

_log = logging.getLogger("stoker.tier.http")
_log.addFilter(lambda record: not _is_of_stranger(record))


def _is_of_stranger(record: logging.LogRecord) -> bool:
    """Return whether a message tells of a request that is not HTTP: anybody can send many, and it quotes them."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens.

    Attributes:
        address: port 0 is any that is free.
        advertised: the host that clients connect to, if it is another.
        tls: what it shows; None off loopback is an ephemeral certificate, and on loopback no TLS.

    Raises:
        ConfigError: clients cannot connect to the host, and are told no other.
    """

    address: Address
    advertised: str = ""
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        if self.address.is_everywhere and not self.advertised:
            raise ConfigError(f"nobody can connect to {self.address.host}: say where they can with --advertise")

    def url(self, port: int, tls: ServerTls | None) -> str:
        """Return what to give to trainers."""
        address = Address(self.advertised or self.address.host, port)
        return f"http://{address}" if tls is None else f"https://{address}?fingerprint={tls.fingerprint}"


@asynccontextmanager
async def listening(server: TierServer, endpoint: Endpoint) -> AsyncIterator[str]:
    """Listen, and yield the URL for trainers; at the end let nobody in, and wait a while for transfers to end.

    Raises:
        ConfigError: the address cannot be used.
        MissingExtraError: it needs TLS, and no certificate can be made.
    """
    tls = endpoint.tls
    if tls is None and not endpoint.address.is_local:
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
        context = None if tls is None else tls.context
        guests = Guests(runner.server, context, limit=_MAX_GUESTS, seconds=_GUEST_SECONDS)
        server.admit = guests.leave
        listener = await guests.listen(endpoint.address)
        try:
            yield endpoint.url(listener.sockets[0].getsockname()[1], tls)
        finally:
            listener.close()
            guests.close()
    finally:
        await runner.cleanup()
        await server.close()
