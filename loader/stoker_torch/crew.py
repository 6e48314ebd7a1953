"""Daemon threads that do what they are given, in the order it was given."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

__all__ = ["Crew", "Executor"]

Work = Callable[[], None]


class Executor(Protocol):
    """Does work in the background, or whenever it is told to."""

    def submit(self, work: Work) -> None:
        """Have something done, and return at once."""
        ...

    def close(self) -> None:
        """Drop what is not begun, and return when what is has ended; idempotent."""
        ...


class Crew:
    """Threads, started with the first work.

    An executor of ``concurrent.futures`` would do all that is queued before it let the interpreter exit.

    Args:
        threads: how many.
        name: what their names begin with.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count, self._name = threads, name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Work) -> None:
        """Have something done; it must not raise."""
        with self._lock:
            for number in range(len(self._threads), self._count):
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name=f"{self._name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._queue.put(work)

    def close(self) -> None:
        """Drop what is queued, wait for what is being done, and end the threads."""
        if self._pid != os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            return
        with self._lock:
            threads, self._threads = self._threads, []
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # the collector runs anywhere
                thread.join()


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or an idle thread would keep what it has done alive
