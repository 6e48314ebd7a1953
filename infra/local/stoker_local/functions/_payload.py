"""What Lambda takes and gives, in bytes, and how to read no more than that."""

from __future__ import annotations

from aiohttp import web

__all__ = ["MAX_EVENT_BYTES", "MAX_REQUEST_BYTES", "MAX_RESULT_BYTES", "read_body"]

MAX_REQUEST_BYTES = 6_291_456
MAX_EVENT_BYTES = 1 << 20  # of asynchronous invocations
MAX_RESULT_BYTES = 6_291_556


async def read_body(request: web.BaseRequest, *, limit_bytes: int) -> bytes | None:
    """Return a request's body, or None if it is longer than ``limit_bytes``, of which no more is kept."""
    if (request.content_length or 0) > limit_bytes:
        return None
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            return None
    return bytes(body)
