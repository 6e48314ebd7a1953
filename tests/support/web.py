"""Web servers of tests, on a loopback port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from stoker_local._host import serve_application

__all__ = ["served"]


@asynccontextmanager
async def served(app: web.Application, *, handler_cancellation: bool = False) -> AsyncIterator[str]:
    """Serve an application, and yield its URL, without a trailing slash."""
    async with serve_application(app, "127.0.0.1", handler_cancellation=handler_cancellation) as address:
        yield f"http://{address}"
