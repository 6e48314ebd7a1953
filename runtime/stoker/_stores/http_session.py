"""HTTP transport over aiohttp, for writes, listings and metadata, and for reads through a proxy.

Reads cost 0.2 to 0.3 CPU seconds per GB: each piece is received into new memory, and copied from there.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohappyeyeballs import AddrInfoType
from aiohttp import ClientHandlerType, ClientRequest
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from stoker._stores.http import Destination, HttpRequest, HttpResponse, HttpTransport, ResponseReceiver
from stoker._stores.http_direct import CONNECTION_REMEDY, DirectTransport
from stoker._stores.options import HttpOptions, create_tls_context, find_proxy
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    ServerError,
    StokerError,
    StoreError,
    TruncatedError,
)

_MIN_SENT_BYTES_PER_SECOND = 8 << 10  # time limit of sending a body; several requests may share a slow link
_CONDITIONS = ("If-None-Match", "If-Match")
_MAX_AHEAD_BYTES = 256 << 10  # maximum size of interim responses, which could go on for ever
_HEAD_END, _LAST_CHUNK = b"\r\n\r\n", b"0\r\n\r\n"

# The first matching row applies.
_ERRORS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[StokerError], str], ...] = (
    (aiohttp.InvalidURL, ConfigError, "the endpoint is not a valid URL"),
    (
        (aiohttp.ClientConnectorCertificateError, aiohttp.ServerFingerprintMismatch),
        StoreError,
        "the endpoint's certificate is not trusted",
    ),
    (TimeoutError, DeadlineError, "the store did not answer in time"),
    (
        (aiohttp.ClientHttpProxyError, aiohttp.ClientProxyConnectionError),
        ConnectionLostError,
        "the proxy refused the connection; check HTTPS_PROXY and NO_PROXY",
    ),
    (aiohttp.ClientPayloadError, TruncatedError, "the connection ended before the object did"),
    (aiohttp.ClientResponseError, ServerError, "the response is not valid HTTP"),
    (aiohttp.ClientConnectorError, ConnectionLostError, f"the connection could not be made; {CONNECTION_REMEDY}"),
    ((aiohttp.ClientError, OSError), ConnectionLostError, "the connection broke"),
)


def open_session(
    options: HttpOptions, url: str, *, ca_bundle: str | None = None, fingerprint: str = ""
) -> aiohttp.ClientSession:
    """Return a session for requests to the endpoint ``url`` in the running loop, through the environment's proxy.

    The first request connects. ``trust_env`` stays off: it would read ~/.netrc in a thread for each request, and
    replace our signature by the credentials in that file.

    Raises:
        ConfigError: The environment names a proxy or certificates that cannot be used.
    """
    verify: ssl.SSLContext | aiohttp.Fingerprint | bool = True
    if fingerprint:
        verify = aiohttp.Fingerprint(bytes.fromhex(fingerprint))
    elif url.startswith("https://"):
        verify = create_tls_context(ca_bundle)
    tracing = aiohttp.TraceConfig()
    tracing.on_request_chunk_sent.append(_extend_timeout)
    sockets = partial(_create_socket, options.read_timeout_seconds)
    return aiohttp.ClientSession(
        connector=StrictConnector(limit=options.max_connections, ssl=verify, socket_factory=sockets),
        trace_configs=[tracing],
        proxy=find_proxy(url),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=options.receive_buffer_bytes,
        timeout=aiohttp.ClientTimeout(
            total=None,
            sock_connect=options.connect_timeout_seconds,
            sock_read=options.read_timeout_seconds,
        ),
        middlewares=(_send_conditions_once,),
    )


async def _send_conditions_once(request: ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep aiohttp from repeating a conditional PUT whose connection broke before the response.

    The second request would find the object of the first, and its 412 would look like another writer's.
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:  # nothing was sent, and aiohttp does not try it again
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method == "PUT" and any(name in request.headers for name in _CONDITIONS):
            raise aiohttp.ClientConnectionError(str(error)) from error  # a class that aiohttp does not retry
        raise


class Connections:
    """Connections to one endpoint from one event loop.

    Args:
        options: Connection limits.
        url: URL of the endpoint.
        ca_bundle: File or folder of trusted authorities. Default: those of the environment.
        fingerprint: SHA-256, in hexadecimal digits, of the only accepted certificate, whatever its signature.

    Attributes:
        reader: Transport of reads: direct, unless the options or a proxy prevent it.
        writer: Transport of all other requests.

    Raises:
        ConfigError: The environment names certificates that cannot be used.
    """

    def __init__(self, options: HttpOptions, url: str, *, ca_bundle: str | None = None, fingerprint: str = "") -> None:
        is_direct = options.transport == "direct" and find_proxy(url) is None
        reader = DirectTransport(options, url, ca_bundle=ca_bundle, fingerprint=fingerprint) if is_direct else None
        self._session = open_session(options, url, ca_bundle=ca_bundle, fingerprint=fingerprint)
        self.writer: HttpTransport = SessionTransport(self._session)
        self.reader: HttpTransport = reader or self.writer

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        await self.reader.close()
        await self._session.close()


class SessionTransport:
    """An :class:`~stoker._stores.http.HttpTransport`, also for writes, over a session that the caller closes."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def send(self, request: HttpRequest, destination: Destination | None = None) -> HttpResponse:
        """Receive a response, and copy a range into its destination as it arrives.

        The timeout here also covers waiting for ``100 Continue`` and for the response after interim ones, for which
        aiohttp has none.
        """
        times = self._session.timeout
        with _translate_errors(request.address):
            async with (
                asyncio.timeout((times.sock_connect or 0.0) + (times.sock_read or 0.0)) as until_head,
                self._session.request(
                    request.method,
                    URL(request.url, encoded=True),
                    headers={**request.headers, "Accept-Encoding": "identity"},
                    data=BytesIO(request.data)
                    if isinstance(request.data, bytes)
                    else request.data,  # BytesIO: sent in pieces
                    allow_redirects=False,
                    trace_request_ctx=until_head,
                ) as response,
            ):
                until_head.reschedule(None)
                receipt = ResponseReceiver(request, destination)
                try:
                    receipt.begin(response.status, response.headers)
                    while not receipt.is_enough and (chunk := await response.content.readany()):
                        receipt.receive(chunk)
                    return receipt.finish()
                except BaseException:
                    response.close()  # bytes may still arrive, so the connection cannot be used again
                    raise

    async def close(self) -> None:
        """Do nothing: the session belongs to the caller."""


async def _extend_timeout(
    _session: aiohttp.ClientSession, context: SimpleNamespace, sent: aiohttp.TraceRequestChunkSentParams
) -> None:
    """Extend the timeout of the response by the time that a sent piece of the body may take."""
    until_head: asyncio.Timeout | None = context.trace_request_ctx
    if until_head is not None and (due_seconds := until_head.when()) is not None and not until_head.expired():
        until_head.reschedule(due_seconds + len(sent.chunk) / _MIN_SENT_BYTES_PER_SECOND)


def _create_socket(silence_seconds: float, address: AddrInfoType) -> socket.socket:
    """Return a socket whose connection fails if sent data is not acknowledged for ``silence_seconds``."""
    family, kind, protocol, *_ = address
    new_socket = socket.socket(family, kind, protocol)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        new_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(silence_seconds * 1000)))
    return new_socket


@contextmanager
def _translate_errors(address: str) -> Iterator[None]:
    """Translate errors of aiohttp; a StokerError passes unchanged."""
    try:
        yield
    except StokerError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        kind, problem = next((kind, problem) for types, kind, problem in _ERRORS if isinstance(error, types))
        # Only the status of a response: the rest is untrusted text.
        cause = getattr(error, "os_error", error)  # without the address, which the message has already
        detail = error.status if isinstance(error, aiohttp.ClientResponseError) else cause
        # Not chained: aiohttp's error holds the request with its signature, and a proxy's password.
        raise kind(f"{address}: {problem} ({type(cause).__name__}: {detail})") from None


class StrictConnector(aiohttp.TCPConnector):
    """Creates connections that close on any data beyond one response per request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = cast("partial[ResponseHandler]", partial(_SingleResponseHandler, loop=self._loop))


class _SingleResponseHandler(ResponseHandler):
    """Closes its connection if unexpected data arrives, with a response or after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._is_expecting = False
        self._heads: list[Any] = []  # of interim responses, of the final one, and unexpected ones
        self._ahead = b""  # received until the final head was complete
        self._behind_bytes = 0  # number of bytes received after that

    def set_response_params(self, **parameters: Any) -> None:
        """Expect a response."""
        self._is_expecting, self._payload, self._ahead, self._behind_bytes = True, None, b"", 0
        self._heads.clear()
        super().set_response_params(**parameters)

    def feed_data(self, data: Any, *size: Any) -> None:
        """Record a head; interim ones come before the final one."""
        self._heads.append(data[0])
        super().feed_data(data, *size)

    def data_received(self, data: bytes) -> None:
        """Process data of the expected response."""
        if not self._is_expecting:
            if data:
                self._close_now()
            return
        if self._has_head:
            self._behind_bytes += len(data)
        else:
            self._ahead += data
        super().data_received(data)
        if not self._has_head and len(self._ahead) > _MAX_AHEAD_BYTES:
            self._close_now()
        if self._has_head and self._payload is not None and self._payload.is_eof():
            self._is_expecting = False
            if self._has_more(data, self._payload.total_bytes):
                self._close_now()

    def _close_now(self) -> None:
        """Close the connection, which may be back in the pool already."""
        self.force_close()
        self.abort()

    @property
    def _has_head(self) -> bool:
        return any(head.code >= 200 for head in self._heads)

    def _has_more(self, data: bytes, body_bytes: int) -> bool:
        """Return whether data follows the response that ends in ``data``, whose body has ``body_bytes``."""
        if any(head.code >= 200 for head in self._heads[:-1]):
            return True
        if self._heads[-1].chunked:
            return not data.endswith(_LAST_CHUNK[-len(data) :])
        end = 0
        for _ in self._heads:
            end = self._ahead.find(_HEAD_END, end) + len(_HEAD_END)
        return len(self._ahead) + self._behind_bytes > end + body_bytes
