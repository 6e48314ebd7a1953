"""An HTTP/1.1 server connection: parsing of request heads, and reading and writing of bodies.

The parser is strict where leniency would permit request smuggling: one length per message, no folded headers, no bare
line feeds. A body is sent in slices of its own buffer, each written after the transport has sent the previous one, so
that a slow client does not increase the server's memory.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote, unquote_plus

Body = bytes | bytearray | memoryview
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_MAX_HEAD_BYTES = 1 << 16
_LINGER_SECONDS = 1.0
_SLICE_BYTES = 1 << 19
ConnectionHandler = Callable[["ServerConnection"], Coroutine[Any, Any, None]]


class BadRequestError(Exception):
    """A violation of HTTP/1.1 by the peer, which gets a response with ``status`` and is disconnected."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """The head of one request.

    Attributes:
        raw_path: percent-encoded path as sent, without the query.
        path: decoded path.
        query: decoded names and values of the query, in order.
        headers: headers by lower-case name; values of a repeated name are joined with commas.
        body_bytes: length of the body, in bytes; None if the body is chunked.
    """

    method: str
    raw_path: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    body_bytes: int | None = 0
    keep_alive: bool = True

    @property
    def parameters(self) -> dict[str, str]:
        """Query as a dictionary, with the first value of each name."""
        return dict(reversed(self.query))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResponse:
    """One response, including the body of a HEAD response, which is not sent; ``headers`` lacks Content-Length."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = b""


def parse_query(raw: str) -> tuple[tuple[str, str], ...]:
    """Return the decoded names and values of a query string, in order; ``a`` becomes ``("a", "")``."""
    pairs = (item.partition("=") for item in raw.split("&") if item)
    return tuple(
        (unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")) for name, _, value in pairs
    )


def parse_head(head: bytes) -> ServerRequest:
    """Parse a request head, without its final empty line.

    Raises:
        BadRequestError: the bytes are not a valid HTTP/1.x request head.
    """
    lines = head.decode("latin-1").split("\r\n")
    method, target, version = _parse_request_line(lines[0])
    headers = _parse_headers(lines[1:])
    raw_path, _, raw_query = target.partition("?")
    try:
        path = unquote(raw_path, errors="strict")
        query = parse_query(raw_query) if raw_query else ()
    except UnicodeDecodeError as error:
        raise BadRequestError("the target is not UTF-8") from error
    connection = headers.get("connection", "").lower()
    return ServerRequest(
        method=method,
        raw_path=raw_path,
        path=path,
        query=query,
        headers=headers,
        body_bytes=_parse_body_bytes(headers),
        keep_alive=connection == "keep-alive" if version == "HTTP/1.0" else connection != "close",
    )


def _parse_request_line(line: str) -> tuple[str, str, str]:
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if not _TOKEN.fullmatch(method) or not target.startswith("/") or any(c <= " " or c > "~" for c in target):
        raise BadRequestError("malformed request line")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequestError("unsupported HTTP version", status=505)
    return method, target, version


def _parse_headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or "\n" in value or "\r" in value or "\0" in value:
            raise BadRequestError("malformed header")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name in ("content-length", "transfer-encoding", "host", "authorization"):
                raise BadRequestError(f"repeated {name}")
            value = f"{headers[name]},{value}"
        headers[name] = value
    return headers


def _parse_body_bytes(headers: Mapping[str, str]) -> int | None:
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if length is not None or coding.lower() != "chunked":
            raise BadRequestError("ambiguous body length")
        return None
    if length is None:
        return 0
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        raise BadRequestError("malformed Content-Length")
    return int(length)


def compose_head(response: ServerResponse, *, keep_alive: bool) -> bytes:
    """Return the head of a response: the status line, headers, Content-Length and the empty line."""
    lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if response.status not in (204, 304):
        lines.append(f"Content-Length: {len(response.body)}")
    if not keep_alive:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class ServerConnection(asyncio.StreamReaderProtocol):
    """A server connection with one task that serves it; either ends when the other does.

    asyncio itself disables Nagle's algorithm (TCP_NODELAY).

    The task is cancelled when the peer disconnects, so the awaits here need no time limit. A peer that closes only its
    sending side counts as disconnected, so that an abandoned request does not outlive its client.

    Attributes:
        reader: stream of the bytes from the peer.
    """

    def __init__(self, handler: ConnectionHandler) -> None:
        self.reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
        super().__init__(self.reader)
        self._handler = handler

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the task that serves the connection."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)
        self._writer = asyncio.StreamWriter(self.transport, self, self.reader, loop)
        self.socket: socket.socket = transport.get_extra_info("socket")
        self.peer_address: str = (transport.get_extra_info("peername") or ("0.0.0.0",))[0]  # noqa: S104  (unknown)
        self.task = loop.create_task(self._run())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the task, because no response can be sent any more."""
        super().connection_lost(exc)
        self.task.cancel()

    def eof_received(self) -> bool:
        """Close the connection when the peer closes its sending side."""
        return False

    async def _run(self) -> None:
        try:
            await self._handler(self)
        finally:
            self.transport.close()

    async def read_until(self, separator: bytes) -> bytes:
        """Read through the next ``separator``; return the bytes before it.

        Raises:
            BadRequestError: the next 64 KiB do not contain ``separator``.
        """
        try:
            return (await self.reader.readuntil(separator)).removesuffix(separator)
        except asyncio.LimitOverrunError as error:
            raise BadRequestError("too many bytes without an end", status=431) from error

    async def read_exactly(self, size_bytes: int) -> bytearray:
        """Read ``size_bytes`` bytes; memory is allocated as bytes arrive, not for the announced size."""
        body = bytearray()
        while len(body) < size_bytes:
            body += await self.reader.read(size_bytes - len(body))
        return body

    async def read_chunked(self, *, limit_bytes: int) -> bytearray:
        """Read a chunked body and skip its trailers.

        Raises:
            BadRequestError: a chunk is malformed, or the body is longer than ``limit_bytes``.
        """
        body = bytearray()
        while size := _parse_chunk_bytes(await self.read_until(b"\r\n")):
            if len(body) + size > limit_bytes:
                raise BadRequestError("the body is too large", status=413)
            body += await self.read_exactly(size)
            if await self.read_exactly(2) != b"\r\n":
                raise BadRequestError("malformed chunk")
        while await self.read_until(b"\r\n"):
            pass
        return body

    async def write(self, data: Body) -> None:
        """Write ``data`` in slices; return when the transport's buffer is empty.

        If the connection is lost, the rest is dropped: asyncio would log a warning, and the task is about to end.
        """
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            self._writer.write(view[start : start + _SLICE_BYTES])
            await self._writer.drain()

    async def linger(self) -> None:
        """Close the sending side and discard incoming bytes for at most one second.

        Closing with unread bytes would reset the connection, and the peer might not receive the error response.
        """
        self._writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self.reader.read(_SLICE_BYTES):
                    pass

    def reset(self) -> None:
        """Abort the connection with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _parse_chunk_bytes(line: bytes) -> int:
    digits = line.partition(b";")[0]
    if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadRequestError("malformed chunk size")
    return int(digits, 16)
