"""Doing one thing to many items, a few at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from stoker.task_group import task_group

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

    async with task_group() as group:
        for _ in range(concurrency):
            group.create_task(worker())
