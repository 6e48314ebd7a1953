"""Messages over a pipe: four bytes of length, then so many bytes. The end of the pipe is no message."""

from __future__ import annotations

import asyncio

__all__ = ["frame", "read_frame"]

_LENGTH_BYTES = 4


def frame(message: bytes) -> bytes:
    """Return a message as it travels."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the pipe has ended, in the middle of one or before."""
    try:
        return await stream.readexactly(int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
