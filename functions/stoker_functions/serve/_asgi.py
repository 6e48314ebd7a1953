"""Requests and responses as ASGI words them, which functions-framework, uvicorn and their like speak.

functions-framework gives a function Starlette's request, whose ``scope`` is ASGI's, and calls what the function
returns as an ASGI application.

ASGI: https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from stoker_functions.serve._messages import Request, Response

__all__ = ["AsgiApp", "asgi_app", "from_asgi", "to_asgi"]

_PIECE_BYTES = 256 << 10

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


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
