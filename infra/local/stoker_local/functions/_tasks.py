"""Background work that ends together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from stoker._base.task_group import task_group

__all__ = ["Tasks", "background"]

T = TypeVar("T")


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
