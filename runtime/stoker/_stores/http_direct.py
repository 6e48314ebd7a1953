"""HTTP transport that receives bodies straight into the caller's memory, by one copy from the socket.

A range costs about 0.1 CPU seconds per GB. Data is received in pieces as large as the kernel has them, so the GIL is
released and acquired rarely, and a training loop in another thread is hardly slowed down.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
import socket
import ssl
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import cast
from urllib.parse import urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from stoker._stores.http import Destination, HttpRequest, HttpResponse
from stoker._stores.http_exchange import DirectExchange
from stoker._stores.options import HttpOptions, create_fingerprint_context, create_tls_context
from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError, StoreError, TruncatedError

CONNECTION_REMEDY = "check the address, and whether a server is running there"
"""Remedy in messages of failed connections."""
_ADDRESSES_SECONDS = 10.0  # a bucket's addresses change every few seconds; one lookup serves a burst of connections
_NEXT_ADDRESS_SECONDS = 0.25  # RFC 8305: delay before the next address is tried in parallel
# More than asyncio decrypts at a time (256 KiB and the rest of a record): data that does not fit is lost if the server
# closes right after its response.
_SCRATCH_BYTES = 320 << 10
_IDLE_SECONDS = 15.0  # shorter than S3 and similar services keep an idle connection open


class Connector:
    """Opens connections to one endpoint from one event loop.

    Each connection starts with the next of the endpoint's addresses: a bucket has many servers, so a retry after a
    late response reaches another one.

    Args:
        url: URL of the endpoint.
        context: TLS context that verifies the certificate; None for no TLS.
        timeout_seconds: Time limit of one connection, including its TLS handshake.
        fingerprint: SHA-256 that the certificate must have, in hexadecimal digits; empty for any.

    Raises:
        ConfigError: The URL has no host.
    """

    def __init__(
        self, url: str, context: ssl.SSLContext | None, timeout_seconds: float, *, fingerprint: str = ""
    ) -> None:
        parts = urlsplit(url)
        if parts.hostname is None:
            raise ConfigError(f"the endpoint {url!r} has no host")
        self._host = parts.hostname
        self._port = parts.port or (80 if context is None else 443)
        self._context, self._timeout_seconds, self._fingerprint = context, timeout_seconds, fingerprint
        self._lookup_lock = asyncio.Lock()
        self._addresses: list[AddrInfoType] = []
        self._known_until_seconds = 0.0

    async def connect(self, protocol: Callable[[], _HttpConnection], address: str) -> _HttpConnection:
        """Open a connection, and return its protocol; ``address`` is the object's URL, for messages.

        Raises:
            DeadlineError: Connecting took too long.
            StoreError: The endpoint's certificate is not trusted.
            ConnectionLostError: The connection failed for another reason.
        """
        loop = asyncio.get_running_loop()
        connection = protocol()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                addresses = await self._next_addresses(loop)
                connected = await start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop)
                name = None if self._context is None else self._host
                try:
                    transport, _ = await loop.create_connection(
                        lambda: connection, sock=connected, ssl=self._context, server_hostname=name
                    )
                except asyncio.CancelledError:
                    connection.abort()  # asyncio would shut down TLS, and wait for the server to do so
                    raise
        except TimeoutError:
            raise DeadlineError(
                f"{address}: connecting to {self._host} took more than {self._timeout_seconds:g} s; {CONNECTION_REMEDY}"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise StoreError(f"{address}: the endpoint's certificate is not trusted ({error.verify_message})") from None
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConnectionLostError(
                f"{address}: the connection could not be made; {CONNECTION_REMEDY} ({reason})"
            ) from None
        if self._fingerprint and _certificate_fingerprint(transport) != self._fingerprint:
            connection.abort()
            raise StoreError(f"{address}: the server's certificate does not have the given fingerprint; check the URL")
        return connection

    async def _next_addresses(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        async with self._lookup_lock:
            if loop.time() >= self._known_until_seconds:
                self._addresses = await self._look_up_addresses(loop)
                self._known_until_seconds = loop.time() + _ADDRESSES_SECONDS
            self._addresses = [*self._addresses[1:], self._addresses[0]]
            return self._addresses

    async def _look_up_addresses(self, loop: asyncio.AbstractEventLoop) -> list[AddrInfoType]:
        try:
            family = socket.AF_INET6 if ip_address(self._host).version == 6 else socket.AF_INET
        except ValueError:
            addresses = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
            return list(addresses)
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (self._host, self._port))]  # needs no thread


def _certificate_fingerprint(transport: asyncio.BaseTransport) -> str:
    connection = transport.get_extra_info("ssl_object")
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


class DirectTransport:
    """An :class:`~stoker._stores.http.HttpTransport` with a pool of direct connections to one endpoint.

    Idle connections are used again for 15 s, the last used one first. Proxies are not supported.

    Raises:
        ConfigError: The environment names certificates that cannot be used.
    """

    def __init__(self, options: HttpOptions, url: str, *, ca_bundle: str | None = None, fingerprint: str = "") -> None:
        context = create_tls_context(ca_bundle) if url.startswith("https://") and not fingerprint else None
        if fingerprint:
            context = create_fingerprint_context()
        self._connector = Connector(url, context, options.connect_timeout_seconds, fingerprint=fingerprint)
        self._read_timeout_seconds = options.read_timeout_seconds
        self._permits = asyncio.Semaphore(options.max_connections)
        self._idle: list[_HttpConnection] = []
        self._busy: set[_HttpConnection] = set()
        self._is_closed = False
        # Shared by all connections: its data is processed before the event loop turns to another connection.
        self._create_connection = partial(_HttpConnection, memoryview(bytearray(_SCRATCH_BYTES)))

    async def send(self, request: HttpRequest, destination: Destination | None = None) -> HttpResponse:
        """Receive a response, a range straight into its destination."""
        async with self._permits:
            connection = self._take_idle()
            if connection is not None:
                answer = DirectExchange(request, destination)
                try:
                    return await self._exchange(connection, request, answer)
                except ConnectionLostError:
                    if answer.has_begun:
                        raise
                    # The server closed the connection before it saw the request: reads may be repeated.
            if self._is_closed:
                raise ConnectionLostError(f"{request.address}: the store was closed")
            connection = await self._connector.connect(self._create_connection, request.address)
            return await self._exchange(connection, request, DirectExchange(request, destination))

    async def close(self) -> None:
        """Close the connections for good; calls in progress fail, pending ones when connected."""
        self._is_closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets close in the loop's next iteration

    def _take_idle(self) -> _HttpConnection | None:
        """Return a usable idle connection, and close unusable ones; None if there is none."""
        now_seconds = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now_seconds - connection.last_received_seconds < _IDLE_SECONDS and connection.is_reusable:
                return connection
            connection.abort()
        return None

    async def _exchange(self, connection: _HttpConnection, call: HttpRequest, answer: DirectExchange) -> HttpResponse:
        self._busy.add(connection)
        try:
            if self._is_closed:  # while it connected
                connection.abort()
            await connection.exchange(answer, call.address, self._read_timeout_seconds)
        finally:
            self._busy.discard(connection)
        if answer.is_last:
            connection.abort()
        else:
            self._idle.append(connection)
        assert answer.response is not None  # noqa: S101 - exchange() returns only with a complete response
        return answer.response


class _HttpConnection(asyncio.BufferedProtocol):
    """A connection for one exchange at a time.

    Attributes:
        last_received_seconds: Loop time of the last received data.
    """

    def __init__(self, scratch: memoryview) -> None:
        self._loop = asyncio.get_running_loop()
        self._scratch = scratch
        self._transport: asyncio.Transport | None = None
        self._poll = select.poll()
        self._exchange: DirectExchange | None = None
        self._address = ""
        self._over: asyncio.Future[None] | None = None
        self._error: StokerError | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.last_received_seconds = self._loop.time()

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be used again: it is open, and the server has neither sent data nor closed it."""
        return self._is_open and not self._poll.poll(0)

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, exchange: DirectExchange, address: str, read_timeout_seconds: float) -> None:
        """Send a request and receive its response; a failure closes the connection.

        Raises:
            ConnectionLostError: The connection broke before the response's body began.
            TruncatedError: The connection broke later.
            DeadlineError: Nothing was received for ``read_timeout_seconds``.
            StokerError: The response is invalid, or does not match the request.
        """
        if self._transport is None or not self._is_open:
            raise ConnectionLostError(f"{address}: the connection was closed")
        self._exchange, self._address, self._error = exchange, address, None
        self._over = self._loop.create_future()
        self.last_received_seconds = self._loop.time()
        if self._watch is None:
            self._check_timeout(read_timeout_seconds)
        try:
            self._transport.write(exchange.request_bytes)
            await self._over
            if self._error is not None:
                raise self._error
        except BaseException:
            self.abort()
            raise
        finally:
            self._end(None)

    def abort(self) -> None:
        """Close at once: when this returns, nothing writes to the caller's memory any more."""
        if self._exchange is not None:
            self._end(ConnectionLostError(f"{self._address}: the connection was closed"))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: StokerError | None) -> None:
        """End the present exchange with an error or None, and wake its caller."""
        self._exchange = None
        if self._over is not None and not self._over.done():
            self._error = error
            self._over.set_result(None)

    def _check_timeout(self, read_timeout_seconds: float) -> None:
        """End the exchange if nothing was received for ``read_timeout_seconds``, else check again later.

        One timer serves many exchanges: it ends when it finds none.
        """
        self._watch = None
        if self._exchange is None:
            return
        left_seconds = self.last_received_seconds + read_timeout_seconds - self._loop.time()
        if left_seconds > 0:
            self._watch = self._loop.call_later(left_seconds, self._check_timeout, read_timeout_seconds)
        else:
            self._fail(DeadlineError(f"{self._address}: the store sent nothing for {read_timeout_seconds:g} s"))

    def _fail(self, error: StokerError) -> None:
        self._end(error)
        self.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._poll.register(transport.get_extra_info("socket"), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._exchange is None else self._exchange.buffer(self._scratch)

    def buffer_updated(self, nbytes: int) -> None:
        answer = self._exchange
        if answer is None:  # the server sends data without a request
            self.abort()
            return
        self.last_received_seconds = self._loop.time()
        try:
            is_whole = answer.receive_count(nbytes, self._scratch)
        except StokerError as error:
            self._fail(error)
            return
        if is_whole:
            self._end(None)

    def eof_received(self) -> bool:
        answer = self._exchange
        if answer is not None:
            try:
                if answer.receive_eof():
                    self._end(None)
            except StokerError as error:
                self._fail(error)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._exchange
        if answer is None:
            return
        reason = "" if exc is None else f" ({type(exc).__name__}: {exc})"
        if answer.is_in_body:
            self._fail(TruncatedError(f"{self._address}: the connection ended before the object did{reason}"))
        else:
            self._fail(ConnectionLostError(f"{self._address}: the connection broke before a response came{reason}"))
