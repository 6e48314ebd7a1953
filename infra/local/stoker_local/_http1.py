"""HTTP/1.1 as values: parse a request head, compose a response head. No I/O.

Strict where leniency is how requests are smuggled: one length per message, no folded headers, no bare line feeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote, unquote_plus

__all__ = ["BadRequestError", "Request", "Response", "compose_head", "parse_head", "parse_query"]

Body = bytes | bytearray | memoryview

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REASONS = {status.value: status.phrase for status in HTTPStatus}


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
    body_bytes: int | None
    keep_alive: bool

    @property
    def parameters(self) -> dict[str, str]:
        """The query as a dictionary; the first value of a repeated name wins."""
        return dict(reversed(self.query))


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response; ``body_bytes`` is stated only where it is not the body's length (an answer to HEAD)."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = b""
    body_bytes: int | None = None


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
    length = len(response.body) if response.body_bytes is None else response.body_bytes
    lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if response.status not in (204, 304):
        lines.append(f"Content-Length: {length}")
    if not keep_alive:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
