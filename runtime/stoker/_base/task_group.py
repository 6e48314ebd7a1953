"""Structured concurrency: task groups whose failures keep their type, and bounds on what goes on at a time."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_READS = 64  # at 30 ms to the first byte: 740 small objects a second on 2 cores (CPU-bound); 16 reach 450
MAX_AHEAD_BYTES = 64 << 20


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


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until all have ended; what they end with, or had ended with, is dropped.

    If it is cancelled itself, it still waits until they have ended.
    """
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Limiter:
    """Lends out units of something, as many at a time as its limit. Belongs to one event loop.

    Urgent calls come first, then those that arrived first: so nobody who needs much is passed for ever by those who
    need little.

    Attributes:
        limit: units that may be held; may change.
        held: units lent out now.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._arrivals = 0
        self._waiting: list[tuple[bool, int, int, asyncio.Future[None]]] = []

    @property
    def saturated(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def acquire(self, units: int = 1, *, urgent: bool = False) -> None:
        """Wait for units, and hold them until they are released. A wait that is cancelled leaves none behind."""
        if self._waiting or self.held + units > self.limit:
            await self._wait(units, urgent)
        else:
            self.held += units

    def release(self, units: int = 1) -> None:
        """Give units back."""
        self.held -= units
        self._admit()

    async def _wait(self, units: int, urgent: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._waiting, (not urgent, self._arrivals, units, turn))
        self._admit()  # the limit may have risen since the last one left
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.held -= units  # they were granted just before
            self._admit()  # whom this one was in the way of
            raise

    def _admit(self) -> None:
        while self._waiting:
            *_, units, turn = self._waiting[0]
            if not turn.done():  # else its waiter was cancelled
                if self.held + units > self.limit:
                    return
                self.held += units
                turn.set_result(None)
            heapq.heappop(self._waiting)


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


async def in_order(jobs: Iterable[tuple[int, Callable[[], Awaitable[T]]]]) -> AsyncGenerator[T, None]:
    """Yield the results of ``jobs`` in their order while the next ones run.

    Jobs start one after the other as long as there are at most ``MAX_READS`` and their sizes sum up to at most
    ``MAX_AHEAD_BYTES``; one always runs. Closing the generator cancels the others and awaits their end.

    Args:
        jobs: (size of the result in bytes, function that returns the awaitable) each; taken when there is room.
    """
    ahead: deque[tuple[int, asyncio.Future[T]]] = deque()
    ahead_bytes = 0
    try:
        for size_bytes, job in jobs:
            while ahead and (len(ahead) >= MAX_READS or ahead_bytes + size_bytes > MAX_AHEAD_BYTES):
                result = await ahead[0][1]
                ahead_bytes -= ahead.popleft()[0]
                yield result
            ahead.append((size_bytes, asyncio.ensure_future(job())))
            ahead_bytes += size_bytes
        while ahead:
            result = await ahead[0][1]
            ahead.popleft()
            yield result
    finally:
        await end_tasks(task for _, task in ahead)


class InOrder(Generic[T]):
    """Pieces of work side by side, whose results are counted in the order in which the pieces were given.

    Whoever gives some calls :meth:`cancel` at the end.

    Args:
        concurrency: pieces under way at once; one more may wait for its turn.
        count: is given results, in order, as soon as there is none missing before them.
    """

    def __init__(self, concurrency: int, count: Callable[[list[T]], object]) -> None:
        self._concurrency = concurrency
        self._count = count
        self._room = asyncio.Semaphore(concurrency)
        self._tasks: deque[asyncio.Task[T]] = deque()

    async def add(self, work: Callable[[], Awaitable[T]]) -> None:
        """Begin a piece of work; waits while more than ``concurrency`` have not ended.

        A call that is cancelled has taken its piece.

        Raises:
            Exception: what a piece of work raised.
        """
        self._tasks.append(asyncio.create_task(self._in_turn(work)))
        await self._settle(self._concurrency)

    async def finish(self) -> None:
        """Wait for all pieces.

        Raises:
            Exception: what one of them raised, also if those before it still run.
        """
        await self._settle(0)

    async def keep(self, seconds: float | None = None) -> bool:
        """Wait for all pieces, for so long at most, and return whether none has failed; what can be counted is."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        has_failed = any(task.done() and task.exception() is not None for task in self._tasks)
        self._count_ended()
        return not has_failed

    async def cancel(self) -> None:
        """End all pieces; what was not counted is lost."""
        await end_tasks(self._tasks)
        self._tasks.clear()

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._room:
            return await work()

    async def _settle(self, left: int) -> None:
        """Wait until at most that many pieces have not ended."""
        while True:
            for task in self._tasks:
                if task.done():
                    task.result()
            self._count_ended()
            pending = [task for task in self._tasks if not task.done()]
            if len(pending) <= left:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    def _count_ended(self) -> None:
        ended: list[T] = []
        while self._tasks and self._tasks[0].done() and self._tasks[0].exception() is None:
            ended.append(self._tasks.popleft().result())
        if ended:
            self._count(ended)
