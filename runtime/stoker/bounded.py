"""Doing one thing to many items, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

__all__ = ["for_each"]

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[object]], *, concurrency: int) -> None:
    """Await ``work(item)`` for every item, at most ``concurrency`` at once; items are drawn as work is free to start.

    Cancelling it, or an error of any piece of work, cancels the pieces under way; all have ended when it returns.

    Raises:
        Exception: the first error of a piece of work, as it was raised.
    """
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
