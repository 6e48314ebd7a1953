"""HTTP/1.1 without I/O: the request, the response, and the destination of each received byte.

Requests are neither retried nor redirected here, and bodies are never decompressed: objects are read as stored. A read
that ends early, also by cancellation, closes its connection. Two transports return the same results and errors:
:mod:`stoker._stores.http_direct`, and :mod:`stoker._stores.http_session`, which supports proxies.

An error response becomes a typed error that names the object, the cause and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from stoker._base.fields import make_printable
from stoker.errors import (
    ConfigError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    RangeBeyondEndError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientError,
    TruncatedError,
    UnexpectedAnswerError,
)

MAX_ERROR_BYTES = 64 << 10
"""Maximum number of bytes to read from the body of an error response."""

_MAX_WHOLE_BYTES = 256 << 20  # a manifest of eight million super-samples fits
_SECRET_HEADERS = ("authorization", "x-amz-security-token")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_URL = re.compile(r"(https?://[^/?#]+)([!\"$-~]*)", re.ASCII)


@lru_cache(maxsize=64)
def host_of(origin: str) -> str:
    """Return the header ``Host`` for an origin as signatures have it: in lower case, without a default port."""
    parts = urlsplit(origin)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port in (None, {"http": 80, "https": 443}[parts.scheme]) else f"{host}:{parts.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """An HTTP request, signed and percent-encoded.

    Attributes:
        method: HTTP method.
        url: Percent-encoded URL.
        headers: Headers, including the signature.
        address: URL of the object, for messages.
        data: Body to send; None for none.
        on_body: Receives the response body in pieces, if it has several destinations; may raise a StokerError.

    Raises:
        ConfigError: A header has characters that HTTP does not allow; the message does not show it, since it may be a
            secret.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    address: str
    data: object = field(default=None, repr=False)
    on_body: Callable[[bytes | bytearray], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                raise ConfigError(
                    f"{self.address}: the header {name} has characters that HTTP does not allow; "
                    "check the credentials for line ends, surrounding blanks and non-ASCII characters"
                )

    def serialise(self) -> bytes:
        """Return the bytes to send: the head, which asks for no compression, and the data.

        Raises:
            ConfigError: The URL has characters that HTTP does not allow.
        """
        match = _URL.fullmatch(self.url)
        if match is None:
            raise ConfigError(f"{self.address}: the URL of its request has characters that HTTP does not allow")
        origin, target = match.groups()
        slash = "" if target.startswith("/") else "/"
        lines = [f"{self.method} {slash}{target} HTTP/1.1", f"Host: {host_of(origin)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if "Accept-Encoding" not in self.headers:
            lines.append("Accept-Encoding: identity")
        head = "\r\n".join((*lines, "", "")).encode("ascii")
        return head + self.data if isinstance(self.data, bytes) else head


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An HTTP response.

    Attributes:
        status: Status code.
        headers: Headers.
        body: Body; empty if it was received into a destination, at most the first 64 KiB of an error response.
        size_bytes: Size of the whole object, even if the response has only a range of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    size_bytes: int = 0

    @property
    def is_error(self) -> bool:
        """Whether the response is an error."""
        return self.status not in (200, 206)

    @property
    def document(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is not one."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that receives the bytes ``[start, end)`` of an object.

    Attributes:
        into: Memory of exactly that size.
        start: Offset of the first byte in the object.
        end: Offset after the last byte.
        on_begin: Called when a response with these bytes begins.
    """

    into: memoryview
    start: int
    end: int
    on_begin: Callable[[], None] | None = None

    def begin(self) -> None:
        """Call ``begun``: the response has begun."""
        if self.on_begin is not None:
            self.on_begin()


class HttpTransport(Protocol):
    """Sends requests over the connections of one event loop."""

    async def send(self, request: HttpRequest, destination: Destination | None = None) -> HttpResponse:
        """Send a request, and receive the response, into ``destination`` if that is given.

        When the call has ended, even by an error or cancellation, nothing writes to the destination any more.

        Raises:
            TruncatedError: The response has fewer or more bytes than the range.
            UnexpectedAnswerError: The store sent another range, or ignored it.
            StoreError: There was no response, it is not valid HTTP, or it is too large.
        """
        ...

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        ...


def mask_secrets(body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a response body with the secrets of the request's headers masked; some endpoints and proxies echo them."""
    for name, value in headers.items():
        if name.lower() in _SECRET_HEADERS:
            body = body.replace(value.rpartition("Signature=")[2].rpartition(" ")[2].encode(), b"***")
    return body


class ResponseReceiver:
    """Receives the response to one request: checks the head, and copies the body to its destination.

    A transport passes the head, the pieces of the body, and the end. Methods raise a StokerError if the response does
    not match the request, or is too large.
    """

    def __init__(self, request: HttpRequest, destination: Destination | None = None) -> None:
        self._call, self._destination = request, destination
        self._status = self._received_bytes = self._size_bytes = 0
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()

    @property
    def is_enough(self) -> bool:
        """Whether the rest of the body can be skipped, since enough of an error response was read."""
        return self._is_error and len(self._body) >= MAX_ERROR_BYTES

    @property
    def _is_error(self) -> bool:
        return bool(self._status) and self._status not in (200, 206)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the head; call :meth:`Destination.begin` if the response has its bytes.

        Raises:
            RangeBeyondEndError: The object ends before the range does.
            TruncatedError: The response ends before the range does, although the object does not.
            UnexpectedAnswerError: The response has another range, or none.
        """
        self._status, self._headers = status, headers
        if self._destination is not None and not self._is_error:
            self._size_bytes = self._check_range(self._destination.start, self._destination.end)
            self._destination.begin()

    def receive(self, data: bytes | bytearray) -> None:
        """Receive a piece of the body."""
        destination, address = self._destination, self._call.address
        if self._call.on_body is not None and not self._is_error:
            self._call.on_body(data)
            return
        if destination is None or self._is_error:
            self._body += data
            if not self._is_error and len(self._body) > _MAX_WHOLE_BYTES:
                raise StoreError(f"{address} has more than {_MAX_WHOLE_BYTES} bytes, too many to read at once")
            return
        size_bytes, done = destination.into.nbytes, self._received_bytes + len(data)
        if done > size_bytes:
            raise TruncatedError(f"{address}: the store sent more than the {size_bytes} bytes asked for")
        destination.into[self._received_bytes : done] = data
        self._received_bytes = done

    def finish(self) -> HttpResponse:
        """Return the response at the end of its body.

        Raises:
            TruncatedError: Bytes of the range are missing.
        """
        body, destination = bytes(self._body), self._destination
        if self._is_error:
            body = mask_secrets(body[:MAX_ERROR_BYTES], self._call.headers)
        elif destination is None:
            self._size_bytes = self._object_bytes()
        elif self._received_bytes < (wanted_bytes := destination.into.nbytes):
            address = self._call.address
            raise TruncatedError(f"{address}: the body ended after {self._received_bytes} of {wanted_bytes} bytes")
        return HttpResponse(status=self._status, headers=self._headers, body=body, size_bytes=self._size_bytes)

    def _object_bytes(self) -> int:
        """Return the size of the whole object, from the headers."""
        if match := _CONTENT_RANGE.fullmatch(self._headers.get("Content-Range", "")):
            return int(match[3])
        return self._content_length() or 0 if self._call.method == "HEAD" else len(self._body)

    def _check_range(self, start: int, end: int) -> int:
        """Check that the response has the requested range, and return the size of the whole object."""
        address = self._call.address
        if self._status == 200:
            # A server may ignore the range; that is harmless if the range is the whole object.
            if start == 0 and self._content_length() == end:
                return end
            raise UnexpectedAnswerError(
                f"{address}: the store ignored the range [{start}, {end}); stoker needs ranged reads"
            )
        match = _CONTENT_RANGE.fullmatch(self._headers.get("Content-Range", ""))
        if match is None or int(match[1]) != start or int(match[2]) >= end:
            got = "another or none" if match is None else match[0]
            raise UnexpectedAnswerError(f"{address}: asked for [{start}, {end}) and got Content-Range {got}")
        size_bytes = int(match[3])
        if size_bytes < end:
            raise RangeBeyondEndError(f"{address} has {size_bytes} bytes; range [{start}, {end}) goes beyond its end")
        if int(match[2]) + 1 < end:
            raise TruncatedError(f"{address}: asked for [{start}, {end}) and got Content-Range {match[0]}")
        return size_bytes

    def _content_length(self) -> int | None:
        length = self._headers.get("Content-Length", "")
        return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None


ErrorRule: TypeAlias = tuple[type[StoreError], str]

_CHANGED: ErrorRule = (ObjectChangedError, "the object was overwritten since the manifest pinned it")
_CONFLICT: ErrorRule = (PreconditionFailedError, "it was written by another writer; read it again and decide")
_UNSUPPORTED: ErrorRule = (StoreError, "the store cannot do this")
_SERVER: ErrorRule = (ServerError, "the store failed inside; try again")
_THROTTLED: ErrorRule = (ThrottledError, "the store asks to slow down; send fewer requests at once")

_BY_STATUS: dict[int, ErrorRule] = {
    401: (CredentialsError, "the credentials are missing or not valid"),
    403: (PermissionDeniedError, "these credentials may not do this; ask the bucket's owner for permission"),
    404: (NotFoundError, "it does not exist"),
    408: (DeadlineError, "the store waited too long for the request; try again"),
    409: _CONFLICT,
    412: _CHANGED,
    416: (RangeBeyondEndError, "the range begins beyond the object's end"),
    429: _THROTTLED,
    501: _UNSUPPORTED,
    503: _THROTTLED,
    505: _UNSUPPORTED,
}
"""Every other status from 500 on counts as 500: Cloudflare, and so R2, has 520 to 530, others 507 and 529."""
_UNKNOWN: ErrorRule = (StoreError, "the store refused the request")
_MAX_TEXT = 300


def create_error(
    address: str,
    response: HttpResponse,
    rules: Mapping[str, ErrorRule],
    code: str = "",
    text: str = "",
    *,
    region: str = "",
    is_write: bool = False,
) -> StoreError:
    """Return the error for an error response: by the store's code or status if ``rules`` has it, else by status.

    Args:
        address: URL of the object or bucket, for the message.
        response: The error response.
        rules: Code or status → error class and remedy of this store.
        code: The store's error code, or empty.
        text: The store's explanation, or empty.
        region: Region of the bucket according to the store, or empty.
        is_write: Whether the request was a write: a failed precondition then means another writer, not a changed
            object.
    """
    status = response.status
    rule = rules.get(code) or rules.get(str(status))
    kind, remedy = rule or _BY_STATUS.get(status, _SERVER if status >= 500 else _UNKNOWN)
    if is_write and kind is ObjectChangedError:
        kind, remedy = _CONFLICT
    code, text, region = (make_printable(part[:_MAX_TEXT]) for part in (code, text, region))
    details = ": ".join(filter(None, (f"{status} {code}".strip(), text)))
    message = f"{address}: {remedy.format(region=region or '(unknown)')} ({details})"
    if issubclass(kind, TransientError):
        return kind(message, retry_after_seconds=retry_after_seconds(response.headers))
    return kind(message)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the delay in a ``Retry-After`` header, in seconds; None if it is missing or malformed.

    A date counts from the response's own ``Date``, so this machine's clock does not matter.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    header = lowered.get("retry-after")
    if header is None:
        return None
    if re.fullmatch(r"[ \t]*[0-9]{1,9}[ \t]*", header):
        return float(header)
    until, now = parse_date(header), parse_date(lowered.get("date"))
    if until is None:
        return None
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def parse_date(header: str | None) -> datetime | None:
    """Return the time in a ``Date`` header, in UTC; None if it is missing or malformed."""
    try:
        date = parsedate_to_datetime(header) if header else None
    except (ValueError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date and date.tzinfo is None else date
