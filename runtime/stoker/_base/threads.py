"""Work in a thread that somebody awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

__all__ = ["WithdrawableMemory", "in_thread", "in_thread_until_cancelled"]

T = TypeVar("T")


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run ``work(cancelled)`` in a thread and, however the call ends, return only when the thread is done with it.

    While the interpreter ends there are no threads to be had, and the work is done on the event loop's.

    Args:
        work: looks now and then whether it was cancelled, if it takes long.

    Raises:
        Exception: what the work raised.
    """
    cancelled = threading.Event()
    try:
        # A future, not a task: a loop that shuts down cancels tasks, and this must outlast that too.
        thread = asyncio.get_running_loop().run_in_executor(None, work, cancelled)
    except RuntimeError:  # the interpreter is ending and starts no thread: what closes behind that does it here
        return work(cancelled)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        cancelled.set()
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:  # the first cancellation is the one that is raised below
                continue
        thread.exception()  # seen: the caller who would care has gone
        raise


class WithdrawableMemory:
    """Memory that a thread fills until it is withdrawn: from then on it is not written to, whatever the thread does.

    Args:
        into: the memory; is referred to until it is withdrawn.
    """

    def __init__(self, into: memoryview) -> None:
        self.nbytes = into.nbytes
        self._into: memoryview | None = into
        self._lock = threading.Lock()

    def fill(self, start: int, data: memoryview) -> bool:
        """Copy ``data`` to where it belongs; return False if the memory was withdrawn.

        Holds a lock meanwhile: ``data`` has a few MiB at most.
        """
        with self._lock:
            if self._into is None:
                return False
            self._into[start : start + data.nbytes] = data
            return True

    def withdraw(self) -> None:
        """Take the memory back. Waits for one :meth:`fill` at most."""
        with self._lock:
            self._into = None


async def in_thread_until_cancelled(work: Callable[[], T], executor: Executor, left: set[threading.Event]) -> T:
    """Run ``work()`` in a thread; when the call is cancelled, return at once and leave the thread to itself.

    Args:
        work: not begun at all if the call is cancelled before.
        executor: whose thread it is.
        left: an event for each thread that was left and has not ended; set when it ends.

    Raises:
        Exception: what the work raised.
    """
    begun, ended = threading.Event(), threading.Event()

    def run() -> T:
        begun.set()
        try:
            return work()
        finally:
            ended.set()
            left.discard(ended)

    try:
        thread = asyncio.get_running_loop().run_in_executor(executor, run)
    except RuntimeError:  # the interpreter is ending and starts no thread
        return work()
    try:
        return await thread
    except asyncio.CancelledError:
        if begun.is_set():
            left.add(ended)
            if ended.is_set():
                left.discard(ended)
        raise
