"""Requests, responses and refusals, as no platform in particular words them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.errors import StokerError

__all__ = ["Refusal", "Request", "Response"]

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Strict-Transport-Security": "max-age=31536000",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks.

    Attributes:
        method: of HTTP.
        path: as it was sent, or as the platform has decoded it; nothing here decodes it (again).
        query: as it was sent, without the question mark.
        headers: names in small letters; values of repeated ones joined by commas.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a client is answered. Every response carries headers that keep browsers from making more of it.

    Attributes:
        status: of HTTP.
        headers: by their usual names; ``Content-Length`` only where it is not the body's.
        body: as it is.

    Raises:
        ValueError: a header has what HTTP cannot carry.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | bytearray = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not value.isprintable():
                raise ValueError(f"a response cannot have the header {name!r} as it is")
        object.__setattr__(self, "headers", {**_SECURITY_HEADERS, **self.headers})


class Refusal(StokerError):  # noqa: N818 - an answer, not a failure
    """A request that is answered with an error: ``{"error": code, "message": text}``.

    Attributes:
        status: of HTTP.
        code: for programs.
        headers: more headers of the response.
    """

    def __init__(self, status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}

    def response(self, *, with_body: bool = True) -> Response:
        """Return what the client is told; without the body to who asks with HEAD."""
        body = json.dumps({"error": self.code, "message": str(self)}).encode()
        headers = {"Cache-Control": "no-store", "Content-Type": "application/json", **self.headers}
        if not with_body:
            headers["Content-Length"], body = str(len(body)), b""
        return Response(status=self.status, headers=headers, body=body)
