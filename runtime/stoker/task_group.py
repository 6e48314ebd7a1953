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
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame
