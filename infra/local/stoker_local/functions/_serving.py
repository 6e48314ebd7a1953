"""A web application on a port of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ["serving"]

_SHUTDOWN_SECONDS = 0.1


@asynccontextmanager
async def serving(
    application: web.Application,
    host: str,
    port: int = 0,
    *,
    handler_cancellation: bool = False,
    max_field_size: int = 1 << 16,
) -> AsyncIterator[str]:
    """Listen, and yield ``host:port``; leaving frees the port and ends every request.

    Args:
        application: what answers.
        host: address to listen on.
        port: 0 takes a free one.
        handler_cancellation: whether a handler ends when its client goes away.
        max_field_size: longest header in bytes.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=handler_cancellation,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        max_field_size=max_field_size,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address, bound = runner.addresses[0][:2]
        yield f"[{address}]:{bound}" if ":" in address else f"{address}:{bound}"
    finally:
        await runner.cleanup()
