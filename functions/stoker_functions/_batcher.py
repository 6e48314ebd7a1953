"""Joining what several requests of one instance ask for at the same time into one piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Batcher"]

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects items until there are enough of them or the first has waited long enough, then works on all at once.

    One batch is worked on at a time, since it has the memory of the whole instance; the next one collects meanwhile.

    Args:
        work: gets the items, and returns for each how its request ends: an error, or None if all is well. What it
            raises, all of them end with.
        most_items: in one batch.
        wait_seconds: that the first item of a batch waits for others.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Awaitable[Sequence[Exception | None]]],
        *,
        most_items: int,
        wait_seconds: float,
    ) -> None:
        self._work = work
        self._most_items = most_items
        self._wait_seconds = wait_seconds
        self._items: list[T] = []
        self._is_full = asyncio.Event()
        self._at_work = asyncio.Lock()
        self._batch: asyncio.Task[Sequence[Exception | None]] | None = None

    async def add(self, item: T) -> None:
        """Wait until the batch that has the item is done. Cancelled, the item stays in its batch.

        Raises:
            Exception: what the work came to with the item, or raised.
        """
        if self._batch is None:
            self._items, self._is_full = [], asyncio.Event()
            self._batch = asyncio.create_task(self._run(self._items, self._is_full))
        batch, number = self._batch, len(self._items)
        self._items.append(item)
        if len(self._items) >= self._most_items:
            self._close()
        error = (await asyncio.shield(batch))[number]
        if error is not None:
            raise error

    def _close(self) -> None:
        """Let the open batch begin, and the next item open another."""
        self._is_full.set()
        self._batch = None

    async def _run(self, items: Sequence[T], is_full: asyncio.Event) -> Sequence[Exception | None]:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                await is_full.wait()
        async with self._at_work:
            if items is self._items:
                self._close()
            return await self._work(items)
