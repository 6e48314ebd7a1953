"""Connects to one endpoint: looks its name up, takes its addresses in turn, and shakes hands over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StoreError

__all__ = ["CHECK", "Dialled", "Dialer"]

CHECK = "check the address, and whether a server is running there"
"""What to do where no connection could be made."""
_ADDRESSES_SECONDS = 10.0  # a bucket's addresses change every few seconds; one look-up serves a burst of connections
_NEXT_ADDRESS_SECONDS = 0.25  # RFC 8305: how long an address has before the next one is tried beside it


class Dialled(asyncio.BaseProtocol, ABC):
    """A protocol that a dialer makes connections for."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once, if there is one."""


_P = TypeVar("_P", bound=Dialled)


class Dialer:
    """Makes connections to the endpoint ``url`` from one event loop; over TLS, verified by ``context``, if it is given.

    Each connection begins with another of the endpoint's addresses than the one before it: a bucket has many servers,
    and a late one is best answered by another.

    Raises:
        ConfigError: the URL has no host.
    """

    def __init__(self, url: str, context: ssl.SSLContext | None, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ConfigError(f"the endpoint {url!r} has no host")
        self._host, self._port = parts.hostname, parts.port or (80 if context is None else 443)
        self._context, self._timeout_seconds = context, timeout_seconds
        self._looking_up = asyncio.Lock()
        self._addresses: list[AddrInfoType] = []
        self._known_until_seconds = 0.0

    async def connect(self, protocol: Callable[[], _P], address: str) -> _P:
        """Return a protocol with a connection of its own; ``address`` is the object's URL for messages.

        Raises:
            DeadlineError: there was none in time.
            StoreError: the endpoint's certificate is not trusted.
            ConnectionLostError: there was none for another reason.
        """
        loop = asyncio.get_running_loop()
        made = protocol()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                addresses = await self._next_addresses(loop)
                connected = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop)
                name = None if self._context is None else self._host
                try:
                    await loop.create_connection(lambda: made, sock=connected, ssl=self._context, server_hostname=name)
                except asyncio.CancelledError:
                    made.abort()  # asyncio would take leave over TLS, and wait for the server to do so
                    raise
        except TimeoutError:
            raise DeadlineError(f"{address}: no connection to {self._host} could be made in time") from None
        except ssl.SSLCertVerificationError as error:
            raise StoreError(f"{address}: the endpoint's certificate is not trusted ({error.verify_message})") from None
        except OSError as error:
            what = f"{type(error).__name__}: {error}"
            raise ConnectionLostError(f"{address}: the connection could not be made; {CHECK} ({what})") from None
        return made

    async def _next_addresses(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        async with self._looking_up:
            if loop.time() >= self._known_until_seconds:
                self._addresses = await self._looked_up(loop)
                self._known_until_seconds = loop.time() + _ADDRESSES_SECONDS
            self._addresses = [*self._addresses[1:], self._addresses[0]]
            return self._addresses

    async def _looked_up(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        try:
            family = socket.AF_INET6 if ip_address(self._host).version == 6 else socket.AF_INET
        except ValueError:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            return list(found)
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (self._host, self._port))]  # needs no thread
