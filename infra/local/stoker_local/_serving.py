"""A web application on a port of this machine, and background work, which both end with a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from stoker._base.task_group import task_group

__all__ = ["Tasks", "background", "serving"]

_SHUTDOWN_SECONDS = 0.1
T = TypeVar("T")


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


class Tasks:
    """Tasks of a group, which are cancelled when :func:`background`'s block is left."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[Any]] = set()
        self._has_ended = False

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task.

        Raises:
            RuntimeError: the block has been left.
        """
        if self._has_ended:
            work.close()
            raise RuntimeError("the function cloud has ended")
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all, and refuse more."""
        self._has_ended = True
        for task in self._running:
            task.cancel()


@asynccontextmanager
async def background() -> AsyncIterator[Tasks]:
    """Yield tasks that end with the block; one that fails ends the block, with its error."""
    async with task_group() as group:
        tasks = Tasks(group)
        try:
            yield tasks
        finally:
            tasks.cancel()
