"""Work in a thread that somebody awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

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
