"""Structured concurrency whose failures keep their type."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["task_group"]


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Like asyncio.TaskGroup, but what failed first is raised itself, with its cause, instead of in a group.

    When the block is left, however it is left, all its tasks have ended.
    """
    first: BaseException | None = None
    parent = asyncio.current_task()
    assert parent is not None  # noqa: S101 - there is one wherever something can be awaited
    cancels = parent.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        # Before Python 3.13, a task that fails while the group waits for the others leaves the cancellation of the
        # parent counted, and no asyncio.timeout around it would know its own any more.
        while parent.cancelling() > cancels:
            parent.uncancel()
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame
