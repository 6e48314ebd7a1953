"""Reading objects over HTTP: what is asked, what is answered, and what holds whatever carries it.

A request is neither retried nor redirected here, and a body is never decompressed: what arrives is what is stored. A
read that ends early, cancellation included, closes its connection. Two transports carry reads, alike in all they
deliver and raise: :mod:`stoker._stores.http_direct`, and :mod:`stoker._stores.http_session` where there is a proxy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stoker.errors import ConfigError, RangeBeyondEndError, StoreError, TruncatedError, UnexpectedAnswerError

__all__ = [
    "MAX_ERROR_BYTES",
    "Call",
    "Destination",
    "HttpReader",
    "Reply",
    "checked_whole",
    "object_bytes",
    "object_bytes_of_range",
    "without_secrets",
]

MAX_ERROR_BYTES = 64 << 10
"""What is read of a refusal's body."""

_MAX_WHOLE_BYTES = 256 << 20  # what is read whole is small: a manifest of eight million super-samples fits
_SECRET_HEADERS = ("authorization", "x-amz-security-token")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request, signed and percent-encoded; ``address`` is the object's URL for messages.

    Attributes:
        data: the body to send.
        chunked: send it in HTTP chunks, its length unsaid.

    Raises:
        ConfigError: a header has what HTTP cannot carry; it may be a secret and is not repeated.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    address: str
    data: object = field(default=None, repr=False)
    chunked: bool = False

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                raise ConfigError(
                    f"{self.address}: HTTP cannot carry what stands in header {name}; "
                    "look for line ends, blanks and letters beyond ASCII in the credentials"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer. ``body`` is empty where it went into the caller's memory; of a refusal it is the first 64 KiB."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    size_bytes: int = 0

    @property
    def refused(self) -> bool:
        """Whether the store did not do what it was asked."""
        return self.status not in (200, 206)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where bytes ``[start, end)`` of an object go: ``into``, of exactly that size.

    ``begun`` is called when an answer begins that has them.
    """

    into: memoryview
    start: int
    end: int
    begun: Callable[[], None] | None = None

    def begin(self) -> None:
        """Tell whoever wants to know that the answer has begun."""
        if self.begun is not None:
            self.begun()


class HttpReader(Protocol):
    """Performs reads over the connections of one event loop."""

    async def ask(self, call: Call) -> Reply:
        """Perform a call and return its whole answer; ``size_bytes`` is the object's, from whichever header tells it.

        Raises:
            StoreError: the answer did not come, is not HTTP, or is too large to be read whole.
        """
        ...

    async def read_into(self, call: Call, destination: Destination) -> Reply:
        """Perform a call for a range and put its bytes where they are to go.

        When the call ends, however it ends, nothing writes there any more.

        Raises:
            TruncatedError: fewer bytes came than that, or more.
            UnexpectedAnswerError: the store sent another range, or ignored it.
            StoreError: the answer did not come or is not HTTP.
        """
        ...

    async def close(self) -> None:
        """Close the connections; calls in progress break."""
        ...


def without_secrets(body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return an answer without what some endpoints and proxies echo: the secrets in the request's headers."""
    for name, value in headers.items():
        if name.lower() in _SECRET_HEADERS:
            body = body.replace(value.rpartition("Signature=")[2].rpartition(" ")[2].encode(), b"***")
    return body


def checked_whole(size_bytes: int, address: str) -> None:
    """Raise StoreError if an answer has become too large to be read whole."""
    if size_bytes > _MAX_WHOLE_BYTES:
        raise StoreError(f"{address} has more than {_MAX_WHOLE_BYTES} bytes, too many to read at once")


def object_bytes(call: Call, headers: Mapping[str, str], body_bytes: int) -> int:
    """Return the size of the object that an answer of so many bytes is about."""
    if match := _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "")):
        return int(match[3])
    if call.method == "HEAD":
        return _content_length(headers) or 0
    return body_bytes


def object_bytes_of_range(call: Call, status: int, headers: Mapping[str, str], destination: Destination) -> int:
    """Return the whole object's size, having checked that the answer is about the range that was asked for.

    Raises:
        RangeBeyondEndError: the object ends before the range does.
        TruncatedError: the answer ends before the range does, and not the object.
        UnexpectedAnswerError: the answer is about another range, or about none.
    """
    start, end, address = destination.start, destination.end, call.address
    if status == 200:
        # A server may ignore the range; that is no harm where the range is the whole object.
        if start == 0 and _content_length(headers) == end:
            return end
        raise UnexpectedAnswerError(
            f"{address}: the store ignored the range [{start}, {end}); stoker needs ranged reads"
        )
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    if match is None or int(match[1]) != start or int(match[2]) >= end:
        got = "another or none" if match is None else match[0]
        raise UnexpectedAnswerError(f"{address}: asked for [{start}, {end}) and got Content-Range {got}")
    size_bytes = int(match[3])
    if size_bytes < end:
        raise RangeBeyondEndError(f"{address} has {size_bytes} bytes; range [{start}, {end}) goes beyond its end")
    if int(match[2]) + 1 < end:
        raise TruncatedError(f"{address}: asked for [{start}, {end}) and got Content-Range {match[0]}")
    return size_bytes


def _content_length(headers: Mapping[str, str]) -> int | None:
    length = headers.get("Content-Length", "")
    return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
