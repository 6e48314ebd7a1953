"""Runs a tier server at an address: TLS off loopback, a bound on unauthenticated connections, graceful shutdown."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from stoker._shared.address import Address
from stoker._shared.certificate import ServerTls, create_ephemeral_tls
from stoker._shared.server import TierServer
from stoker._shared.unauthenticated import UnauthenticatedConnections
from stoker.errors import ConfigError

_MAX_UNAUTHENTICATED = 1024
"""Maximum number of connections that have not sent a valid token yet; beyond it, the oldest one is closed. More than
those of 32 trainers that start together."""
_AUTHENTICATION_SECONDS = 10.0
_STOP_SECONDS = 10.0
"""Time for transfers to end when the server stops."""

_log = logging.getLogger("stoker.tier.http")
_log.addFilter(lambda record: not _quotes_invalid_request(record))


def _quotes_invalid_request(record: logging.LogRecord) -> bool:
    """Return whether a log record quotes a request that is not HTTP; any client could fill the log with these."""
    return record.exc_info is not None and isinstance(record.exc_info[1], HttpProcessingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """The address and certificate of a tier server.

    Attributes:
        address: Address to listen on; port 0 selects a free port.
        advertised: Host that clients connect to, if it differs from that of ``address``.
        tls: Certificate of the server. None selects no TLS on loopback, and an ephemeral certificate elsewhere.

    Raises:
        ConfigError: The host is a wildcard address, and there is no advertised host.
    """

    address: Address
    advertised: str = ""
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        if self.address.is_everywhere and not self.advertised:
            raise ConfigError(
                f"clients cannot connect to {self.address.host}; give the server's name or address with --advertise"
            )

    def url(self, port: int, tls: ServerTls | None) -> str:
        """Return the URL for trainers."""
        address = Address(self.advertised or self.address.host, port)
        return f"http://{address}" if tls is None else f"https://{address}?fingerprint={tls.fingerprint}"


@asynccontextmanager
async def serve_tier(server: TierServer, endpoint: ListenAddress) -> AsyncIterator[str]:
    """Listen, and yield the URL for trainers; on exit, refuse new connections and wait up to 10 s for transfers.

    Raises:
        ConfigError: The address cannot be used.
        MissingExtraError: TLS is needed, and the package that creates certificates is not installed.
    """
    tls = endpoint.tls
    if tls is None and not endpoint.address.is_local:
        tls = create_ephemeral_tls()
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        auto_decompress=False,  # no client compresses, and a decompressed body may exceed its announced length
        shutdown_timeout=_STOP_SECONDS,
        lingering_time=1.0,
        logger=_log,
    )
    await runner.setup()
    assert runner.server is not None  # noqa: S101 - it is set up
    try:
        context = None if tls is None else tls.context
        guests = UnauthenticatedConnections(
            runner.server, context, max_connections=_MAX_UNAUTHENTICATED, timeout_seconds=_AUTHENTICATION_SECONDS
        )
        server.on_authenticated = guests.discard
        listener = await guests.listen(endpoint.address)
        try:
            yield endpoint.url(listener.sockets[0].getsockname()[1], tls)
        finally:
            listener.close()
            guests.close()
    finally:
        await runner.cleanup()
        await server.close()
