"""Functions of the user: whether one asks for a sample's context, how it is called, and the threads that run it.

A user's function may never return, and a thread cannot be killed: so whoever ends threads waits for them for a limited
time only. Where the interpreter is ending that time is short, but not zero: a daemon thread that comes back from torch
when the interpreter is gone aborts the whole process, whatever its exit status was to be.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol

from stoker._order.random_words import SampleContext
from stoker.errors import ConfigError, StokerError

ContextOf = Callable[[int], SampleContext]
"""Returns the context of the sample at a place of a batch."""
WithContext = Callable[[Any, SampleContext | None], Any]
"""A function of a value and its sample's context."""

_NAME = "context"


def asks_for_context(function: Callable[..., Any], what: str = "the function", *, is_of_batch: bool = False) -> bool:
    """Return whether a function has a parameter ``context``.

    Args:
        function: of one value.
        what: names it, for errors.
        is_of_batch: whether the value is a batch, for which there is no context.

    Raises:
        ConfigError: it cannot be called with a value, and a context if it asks for one.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of those that are written in C have none
        return False
    asks = _NAME in signature.parameters and not is_of_batch
    try:
        signature.bind(None, **({_NAME: None} if asks else {}))
    except TypeError as error:
        remedy = (
            f"only decode and transform are given a {_NAME!r}, since which samples a batch has depends on its size and "
            "on the ranks: draw there what is needed here"
            if is_of_batch
            else f"it is called with one value, and with the sample's SampleContext if it has a parameter {_NAME!r}"
        )
        raise ConfigError(f"{what} {function!r} cannot be called: {error}; {remedy}") from None
    return asks


def with_context(function: Callable[..., Any]) -> WithContext:
    """Return a function of a value and a context that calls a user's function with what it asks for."""
    if asks_for_context(function):
        return lambda value, context: function(value, context=context)
    return lambda value, _: function(value)


_CLOSE_SECONDS = 5.0
"""As long as a DataLoader waits for its worker processes."""
_EXIT_SECONDS = 2.0
"""More than a function needs for a sample, less than a launcher gives a rank that it has told to end."""

Work = Callable[[], None]


class Executor(Protocol):
    """Does work in the background, or whenever it is told to."""

    def submit(self, work: Work) -> None:
        """Have something done, and return at once."""
        ...

    def close(self) -> object:
        """Drop what is not begun, and wait a while for what is; idempotent."""
        ...


class ThreadPool:
    """Threads, started with the first work, and never again once they were dismissed or the interpreter is ending.

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
        self._is_dismissed = False

    def submit(self, work: Work) -> None:
        """Have something done; it must not raise.

        Raises:
            StokerError: the threads were dismissed, or the interpreter is ending.
        """
        with self._lock:
            if self._is_dismissed or not threading.main_thread().is_alive():
                raise StokerError(f"the threads {self._name} were closed while work was being given to them")
            for number in range(len(self._threads), self._count):
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name=f"{self._name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._queue.put(work)

    def close(self) -> bool:
        """Drop what is queued, and wait for what is being done, for 5 s, or 2 s where the interpreter is ending.

        Returns:
            Whether all threads have ended; one that has not will, if its function ever returns.
        """
        deadline = monotonic() + (_CLOSE_SECONDS if threading.main_thread().is_alive() else _EXIT_SECONDS)
        threads = [each for each in self.dismiss() if each is not threading.current_thread()]  # the collector's is any
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def dismiss(self) -> list[threading.Thread]:
        """Drop what is queued, have each thread end after what it does, and return the threads at once."""
        if self._pid != os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            return []
        with self._lock:
            self._is_dismissed = True
            threads, self._threads = self._threads, []
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()
        for _ in threads:
            self._queue.put(None)
        return threads


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or an idle thread would keep what it has done alive
