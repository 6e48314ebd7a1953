"""The user's functions: whether one needs a sample's context, how it is called, and the threads that run it.

A user's function may never return, and a thread cannot be killed, so closing threads waits only for a limited time. At
the end of the interpreter that time is short, but not zero: a daemon thread that returns from torch after the
interpreter has ended aborts the process, whatever its exit status was.
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
"""Function from a sample's place in a batch to its context."""
WithContext = Callable[[Any, SampleContext | None], Any]
"""Function of a value and its sample's context."""

_CONTEXT_PARAMETER = "context"


def takes_context(function: Callable[..., Any], label: str = "the function", *, is_of_batch: bool = False) -> bool:
    """Return whether a function has a parameter ``context``.

    Args:
        function: function of one value.
        label: name of the function in error messages.
        is_of_batch: whether the value is a batch, for which there is no context.

    Raises:
        ConfigError: the function cannot be called with one value (and a context, if it has that parameter).
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    asks = _CONTEXT_PARAMETER in signature.parameters and not is_of_batch
    try:
        signature.bind(None, **({_CONTEXT_PARAMETER: None} if asks else {}))
    except TypeError as error:
        remedy = (
            f"only decode and transform get a {_CONTEXT_PARAMETER!r}, since the samples of a batch depend on "
            "its size and on the ranks: draw random numbers there, and return them with the sample"
            if is_of_batch
            else (
                f"it is called with one value, and with the sample's SampleContext if it has a parameter "
                f"{_CONTEXT_PARAMETER!r}"
            )
        )
        raise ConfigError(f"{label} {function!r} cannot be called: {error}; {remedy}") from None
    return asks


def add_context_argument(function: Callable[..., Any]) -> WithContext:
    """Return a function of a value and a context, which passes the context to the user's function if it takes one."""
    if takes_context(function):
        return lambda value, context: function(value, context=context)
    return lambda value, _: function(value)


_CLOSE_SECONDS = 5.0
"""The time that a DataLoader waits for its worker processes."""
_EXIT_SECONDS = 2.0
"""More than a function needs for one sample, less than the grace time that a launcher gives a rank."""

Work = Callable[[], None]


class BackgroundExecutor(Protocol):
    """Runs functions in the background."""

    def submit(self, work: Work) -> None:
        """Queue a function, and return at once."""
        ...

    def close(self) -> object:
        """Drop queued functions, and wait a limited time for running ones. Idempotent."""
        ...


class ThreadPool:
    """Daemon threads, started by the first submission, and not restarted after :meth:`dismiss`.

    Unlike an executor of ``concurrent.futures``, it lets the interpreter exit without running all queued functions.

    Args:
        threads: number of threads.
        name: prefix of the threads' names.
        begin: function that each thread calls first; default none.

    Attributes:
        pid: process that made it, the only one that has its threads.
    """

    def __init__(self, threads: int, name: str, begin: Work | None = None) -> None:
        self._count, self._name, self._begin = threads, name, begin
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_dismissed = False

    def submit(self, work: Work) -> None:
        """Queue a function, which must not raise.

        Raises:
            StokerError: the threads were dismissed, or the interpreter is ending.
        """
        with self._lock:
            if self._is_dismissed or not threading.main_thread().is_alive():
                raise StokerError(f"the threads {self._name} were closed while work was being submitted")
            for number in range(len(self._threads), self._count):
                thread = threading.Thread(
                    target=_run_queue, args=(self._queue, self._begin), name=f"{self._name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._queue.put(work)

    def close(self) -> bool:
        """Drop queued functions, and wait for running ones up to 5 s, or 2 s if the interpreter is ending.

        Returns:
            Whether all threads have ended; the others end when their function returns.
        """
        deadline = monotonic() + (_CLOSE_SECONDS if threading.main_thread().is_alive() else _EXIT_SECONDS)
        threads = [each for each in self.dismiss() if each is not threading.current_thread()]  # a finalizer's is any
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def dismiss(self) -> list[threading.Thread]:
        """Drop queued functions, make each thread end after its current one, and return the threads at once."""
        if self.pid != os.getpid():  # a forked child has none of the threads, and their locks may be held
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


def _run_queue(queue: SimpleQueue[Work | None], begin: Work | None) -> None:
    if begin is not None:
        begin()
    while (work := queue.get()) is not None:
        work()
        del work  # or an idle thread would keep its last function alive
