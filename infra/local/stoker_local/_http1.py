"""HTTP/1.1: request heads and response heads as values, and one connection as awaitable reads and writes.

Strict where leniency is how requests are smuggled: one length per message, no folded headers, no bare line feeds.
An object's bytes are sent in slices of the buffer they stay in, each handed to the transport only when the one before
has left it, so a slow reader costs the server no memory.
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
Serve = Callable[["Wire"], Coroutine[Any, Any, None]]


class BadRequestError(Exception):
    """The peer does not speak HTTP/1.1 as it should: it is answered ``status`` and disconnected."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        raw_path: as sent, percent-encoded, without the query.
        path: decoded.
        query: decoded pairs in the order they were sent.
        headers: names in lower case; values of a repeated name joined with a comma.
        body_bytes: length of the body that follows, or None if it is chunked.
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
        """The query as a dictionary; the first value of a repeated name wins."""
        return dict(reversed(self.query))


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response, with its body even where that is not sent (an answer to HEAD)."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = b""


def parse_query(raw: str) -> tuple[tuple[str, str], ...]:
    """Return the decoded pairs of a query string, in order; ``a`` is ``("a", "")``."""
    pairs = (item.partition("=") for item in raw.split("&") if item)
    return tuple(
        (unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")) for name, _, value in pairs
    )


def parse_head(head: bytes) -> Request:
    """Parse everything up to, and without, the empty line.

    Raises:
        BadRequestError: it is not a valid HTTP/1.x request head.
    """
    lines = head.decode("latin-1").split("\r\n")
    method, target, version = _request_line(lines[0])
    headers = _headers(lines[1:])
    raw_path, _, raw_query = target.partition("?")
    try:
        path = unquote(raw_path, errors="strict")
        query = parse_query(raw_query) if raw_query else ()
    except UnicodeDecodeError as error:
        raise BadRequestError("the target is not UTF-8") from error
    connection = headers.get("connection", "").lower()
    return Request(
        method=method,
        raw_path=raw_path,
        path=path,
        query=query,
        headers=headers,
        body_bytes=_body_bytes(headers),
        keep_alive=connection == "keep-alive" if version == "HTTP/1.0" else connection != "close",
    )


def _request_line(line: str) -> tuple[str, str, str]:
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if not _TOKEN.fullmatch(method) or not target.startswith("/") or any(c <= " " or c > "~" for c in target):
        raise BadRequestError("malformed request line")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequestError("unsupported HTTP version", status=505)
    return method, target, version


def _headers(lines: list[str]) -> dict[str, str]:
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


def _body_bytes(headers: Mapping[str, str]) -> int | None:
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


def compose_head(response: Response, *, keep_alive: bool) -> bytes:
    """Return the status line and headers of a response, with its length, up to and with the empty line."""
    lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if response.status not in (204, 304):
        lines.append(f"Content-Length: {len(response.body)}")
    if not keep_alive:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Wire(asyncio.StreamReaderProtocol):
    """A connection that is served by one task, which ends with it (and it with the task).

    asyncio has already switched Nagle's algorithm off (TCP_NODELAY).

    The task is cancelled when the peer goes away, so none of the awaits here needs a time limit of its own. A peer that
    closes only its sending side counts as gone, so that an abandoned request does not outlive its client.

    Attributes:
        reader: what the peer sends.
        task: serves the connection.
    """

    def __init__(self, serve: Serve) -> None:
        self.reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
        super().__init__(self.reader)
        self._serve = serve

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the task that serves the connection."""
        super().connection_made(transport)
        loop, self.transport = asyncio.get_running_loop(), cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)
        self._writer = asyncio.StreamWriter(self.transport, self, self.reader, loop)
        self.socket: socket.socket = transport.get_extra_info("socket")
        self.peer_address: str = (transport.get_extra_info("peername") or ("0.0.0.0",))[0]  # noqa: S104  (nobody's)
        self.task = loop.create_task(self._run())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the task; there is nobody to answer."""
        super().connection_lost(exc)
        self.task.cancel()

    def eof_received(self) -> bool:
        """Let the connection end."""
        return False

    async def _run(self) -> None:
        try:
            await self._serve(self)
        finally:
            self.transport.close()

    async def read_until(self, mark: bytes) -> bytes:
        """Read up to ``mark`` and return what stands before it.

        Raises:
            BadRequestError: ``mark`` is not within 64 KiB.
        """
        try:
            return (await self.reader.readuntil(mark)).removesuffix(mark)
        except asyncio.LimitOverrunError as error:
            raise BadRequestError("too many bytes without an end", status=431) from error

    async def read_exactly(self, size_bytes: int) -> bytearray:
        """Read ``size_bytes`` bytes; memory grows with what arrives, not with what was announced."""
        body = bytearray()
        while len(body) < size_bytes:
            body += await self.reader.read(size_bytes - len(body))
        return body

    async def read_chunked(self, *, limit_bytes: int) -> bytearray:
        """Read a body in HTTP chunks and skip its trailers.

        Raises:
            BadRequestError: a chunk is malformed, or all are longer than ``limit_bytes``.
        """
        body = bytearray()
        while size := _chunk_bytes(await self.read_until(b"\r\n")):
            if len(body) + size > limit_bytes:
                raise BadRequestError("the body is too large", status=413)
            body += await self.read_exactly(size)
            if await self.read_exactly(2) != b"\r\n":
                raise BadRequestError("malformed chunk")
        while await self.read_until(b"\r\n"):
            pass
        return body

    async def write(self, data: Body) -> None:
        """Write, and return once the transport holds none of it; slices as it goes, copies nothing that fits.

        Once the connection is lost, the rest is dropped: asyncio would complain, and the task is about to end.
        """
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            self._writer.write(view[start : start + _SLICE_BYTES])
            await self._writer.drain()

    async def linger(self) -> None:
        """End our side and discard what still comes, for a moment.

        Closing with unread bytes would reset the connection, and the peer might never see why it was refused.
        """
        self._writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self.reader.read(_SLICE_BYTES):
                    pass

    def reset(self) -> None:
        """Drop the connection so that the peer sees a reset, not an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _chunk_bytes(line: bytes) -> int:
    digits = line.partition(b";")[0]
    if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadRequestError("malformed chunk size")
    return int(digits, 16)
