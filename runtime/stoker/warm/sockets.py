"""Sockets of the warm tier: the proxy listens, nodes and clients dial, and TLS wherever others could listen in.

The proxy's certificate may be one that it has signed itself: who dials is told the certificate's fingerprint by a
channel that is trusted already (the invocation, the URL), takes no other, and binds it into the handshake.

Anybody can dial. Those who have not proved who they are yet are few at a time: the one who came first goes for the next
one. So whoever dials and keeps silent costs a bounded number of files and keeps nobody out, for a proof takes no longer
than it takes a peer to answer once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError
from stoker.warm.connection import Connection
from stoker.warm.handshake import is_private

__all__ = ["MOST_STRANGERS", "Address", "Certificate", "Door", "TcpDoor", "dial"]

_log = logging.getLogger(__name__)

MOST_STRANGERS = 256
"""Connections at a time without a proof of who is there, besides those of nodes that may all dial at once: more than
the workers of a job that begin together."""

P = TypeVar("P", bound=asyncio.BaseProtocol)

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DIAL_SECONDS = 5.0
_TLS_SECONDS = 5.0
_BACKLOG = 256
_ACCEPT_AGAIN_SECONDS = 1.0
"""After the system had no file for a connection."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: a name or an address.
        port: 0 to 65535; 0 is for listening only, on any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return what ``host:port`` or ``[v6]:port`` says.

        Raises:
            ConfigError: it says something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"{text!r:.80} is no address; write for example 10.0.0.5:7411 or [fd00::5]:7411")
        return cls(match[1].strip("[]"), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the proxy shows, in PEM files.

    Attributes:
        chain: the certificate, its own first.
        key: its private key, without a passphrase.
    """

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return how to listen with it.

        Raises:
            ConfigError: the files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.chain, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate {self.chain} and its key {self.key} cannot be used: {error}") from None
        return context

    def fingerprint(self) -> str:
        """Return the SHA-256 of the certificate, 64 hexadecimal digits.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            text = self.chain.read_text("ascii")
            first = text[: text.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"
            return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :])).hexdigest()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.chain} holds no certificate: {error}") from None


class Door(Protocol):
    """Where a proxy can be dialled."""

    @property
    def address(self) -> str:
        """What to dial, ``host:port``."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the certificate that is shown; empty without TLS."""
        ...

    async def open(self, accept: Callable[[], Connection], *, most_strangers: int = MOST_STRANGERS) -> None:
        """Let everybody in, each with a connection of its own.

        Args:
            accept: makes the connection.
            most_strangers: connections at a time whose handshake has not ended; for one more the first of them goes.
        """
        ...

    def close(self) -> None:
        """Let nobody in any more; connections whose handshake has ended stay. Idempotent."""
        ...


class TcpDoor:
    """A :class:`Door` over TCP, with TLS if there is a certificate.

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
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._most_strangers = MOST_STRANGERS

    @property
    def address(self) -> str:
        """What to dial, ``host:port``."""
        return str(self._advertised or Address(self._at.host, self._port))

    @property
    def fingerprint(self) -> str:
        """Of the certificate; empty without TLS."""
        return self._fingerprint

    @property
    def strangers(self) -> int:
        """Connections whose handshake has not ended."""
        return len(self._strangers)

    async def open(self, accept: Callable[[], Connection], *, most_strangers: int = MOST_STRANGERS) -> None:
        """Listen.

        Raises:
            ConfigError: without a certificate, others could listen in there; or the address cannot be used.
        """
        self._most_strangers = most_strangers
        try:
            listeners = await self._listeners()
        except OSError as error:
            raise ConfigError(
                f"the warm tier cannot listen on {self._at}: {error}; "
                "it takes an address of this machine, and a free port"
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
            _check(str(place[0]), has_tls=certificate is not None)
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
        """Let nobody in any more; connections whose handshake has ended stay. Idempotent."""
        for task in (*self._listening, *self._strangers):
            task.cancel()
        self._listening.clear()

    async def _listen(self, listener: socket.socket, accept: Callable[[], Connection]) -> None:
        """Let in whoever dials, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except ConnectionError:  # who dialled has gone
                continue
            except OSError as error:
                _log.warning("the warm tier cannot let anybody in: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            while len(self._strangers) >= self._most_strangers:
                first = next(iter(self._strangers))
                del self._strangers[first]
                first.cancel()
            self._let_in(sock, accept)
            await asyncio.sleep(0)  # so that those who are in can go on, however many come

    def _let_in(self, sock: socket.socket, accept: Callable[[], Connection]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._strangers.pop(task, None)
            if task.cancelled():
                sock.close()  # if it was before the task could begin

        task = asyncio.get_running_loop().create_task(self._receive(sock, accept()))
        self._strangers[task] = None
        task.add_done_callback(ended)

    async def _receive(self, sock: socket.socket, connection: Connection) -> None:
        """Be there for a connection until its handshake has ended."""
        timeout_seconds = None if self._context is None else _TLS_SECONDS
        try:
            with suppress(StokerError, OSError):  # ssl.SSLError is one; of the others its owner is told
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, sock, ssl=self._context, ssl_handshake_timeout=timeout_seconds
                )
                await connection.ready()
        finally:
            if connection.peer is None and connection.failure is None:  # else it ends in its own way
                connection.abort()


async def dial(address: Address, fingerprint: str, protocol: Callable[[], P], seconds: float = _DIAL_SECONDS) -> P:
    """Connect to a proxy. Its certificate is compared by the handshake, which must be told the fingerprint, too.

    Args:
        address: of the proxy.
        fingerprint: of its certificate; empty for no TLS.
        protocol: makes what speaks.
        seconds: that it may take.

    Raises:
        ConfigError: without a fingerprint, others could listen in on the way; or it is none.
        ConnectionLostError: there is nobody.
        DeadlineError: nobody answers in time.
    """
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError("a certificate's fingerprint is its SHA-256 in 64 hexadecimal digits")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            transport, spoken = await loop.create_connection(
                protocol, address.host, address.port, ssl=_pinning() if fingerprint else None
            )
    except TimeoutError:
        raise DeadlineError(f"the warm tier's proxy at {address} does not answer within {seconds:g} s") from None
    except OSError as error:  # ssl.SSLError is one
        raise ConnectionLostError(
            f"the warm tier's proxy at {address} cannot be reached: {error}; does `stoker warm proxy` run there?"
        ) from None
    peer = transport.get_extra_info("peername")
    if peer is not None:  # else it has ended already, and what speaks knows why
        try:
            _check(peer[0], has_tls=bool(fingerprint))
        except BaseException:
            transport.abort()
            raise
    return spoken


def _check(address: str, *, has_tls: bool) -> None:
    if not has_tls and not is_private(address):
        raise ConfigError(
            f"{address} is on no private network: give the proxy a certificate and its key, and tell its fingerprint"
        )


def _pinning() -> ssl.SSLContext:
    """Return a context that takes any certificate: the handshake knows which one it must be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
