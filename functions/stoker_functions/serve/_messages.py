"""Requests, responses and refusals, and how Lambda's function URLs and ASGI word them.

functions-framework gives a function Starlette's request, whose ``scope`` is ASGI's, and calls what the function returns
as an ASGI application, as uvicorn and its like do.

ASGI: https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import EventError, StokerError

__all__ = [
    "AsgiApp",
    "Refusal",
    "Request",
    "Response",
    "asgi_app",
    "from_asgi",
    "from_lambda_url",
    "to_asgi",
    "to_lambda_url",
]

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Strict-Transport-Security": "max-age=31536000",
    "X-Content-Type-Options": "nosniff",
}
_PIECE_BYTES = 256 << 10

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


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


def from_lambda_url(event: Mapping[str, Any]) -> Request:
    """Return the request in an event.

    Raises:
        EventError: it is no event of payload format 2.0.
    """
    try:
        method, path = event["requestContext"]["http"]["method"], event["rawPath"]
        query, headers = event.get("rawQueryString", ""), dict(event.get("headers") or {})
        is_known = event["version"] == "2.0"
    except (LookupError, TypeError, ValueError, AttributeError):
        is_known = False
    if not is_known or not all(isinstance(text, str) for text in (method, path, query, *headers, *headers.values())):
        raise EventError("the event is no request of payload format 2.0, as function URLs and HTTP APIs send them")
    named = {name.lower(): value for name, value in headers.items()}
    return Request(method=method, path=path, query=query, headers=named)


def to_lambda_url(response: Response) -> dict[str, Any]:
    """Return a response as what the function has to return; the body in base64, since it is bytes."""
    return {
        "statusCode": response.status,
        "headers": {name.lower(): value for name, value in response.headers.items()},
        "body": b64encode(response.body).decode(),
        "isBase64Encoded": True,
    }


def from_asgi(scope: MutableMapping[str, Any]) -> Request:
    """Return the request in a scope of type ``http``: its path as it was sent, where the server tells."""
    headers: dict[str, str] = {}
    for name, value in scope.get("headers", ()):
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    return Request(
        method=scope["method"],
        path=raw_path.partition(b"?")[0].decode("latin-1"),
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=headers,
    )


def to_asgi(response: Response) -> AsgiApp:
    """Return an ASGI application that gives this response, whatever is asked.

    Its body is copied in pieces, each when the server takes it.
    """

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        # The length beside 304 would be that of what the client has (RFC 9110, section 8.6), which is not looked up.
        length = {} if response.status == 304 else {"Content-Length": str(len(response.body))}
        named = {**length, **response.headers}
        headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body, end = memoryview(response.body), len(response.body)
        for start in range(0, max(end, 1), _PIECE_BYTES):
            piece, is_last = body[start : start + _PIECE_BYTES], start + _PIECE_BYTES >= end
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": not is_last})

    return app


def asgi_app(answer: Callable[[Request], Awaitable[Response]]) -> AsgiApp:
    """Return an ASGI application that answers requests, for a server of one's own."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await to_asgi(await answer(from_asgi(scope)))(scope, receive, send)
        else:
            raise ValueError(f"there is no answer to ASGI's {scope['type']!r}")

    return app
