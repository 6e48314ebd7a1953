"""Values that are made ahead of their consumer by another thread, such as the next batches of a training loop."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from stoker.errors import StokerError
from stoker_torch._user_functions import ThreadPool

T = TypeVar("T")

_MIN_BUSY_SECONDS = 0.002
"""A loop that asks for the next batch sooner is not busy: a batch from another thread would come later, not sooner."""
_LEAVE_SECONDS = 0.0002
"""Time that a busy consumer has to return to its work before the next value is prepared."""
_POLL_SECONDS = 0.005
"""Time between checks whether the next value can be made without waiting, while the consumer is busy."""


_no_fork = threading.Lock()
"""Held by a thread that prepares a value, and by one that forks: what the former locks stays locked in the child."""
os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class Readahead(Generic[T]):
    """Makes values one after the other, and some of them ahead while the consumer is busy.

    The consumer's thread calls ``make``, or another thread does if ``is_ready`` returns true; never two at a time. An
    error of ``make`` is raised in place of its value, and ends the sequence. It must be ended before the
    objects that ``make`` uses are closed.

    Args:
        make: function that returns the next value, or None after the last one.
        count: maximum number of values.
        is_ready: function that returns whether ``make`` would return without waiting.
        threads: thread that makes values ahead; None makes nothing ahead.
        depth: number of values to make ahead.
    """

    def __init__(
        self,
        make: Callable[[], T | None],
        count: int,
        is_ready: Callable[[], bool],
        threads: ThreadPool | None,
        depth: int = 1,
    ) -> None:
        self._make, self._remaining, self._is_ready, self._threads = make, count, is_ready, threads
        self._depth = depth
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal's handler may close this in the thread that is in next()
        self._is_ended = False
        self._ready: deque[T | Exception] = deque()
        self._delivered_seconds: float | None = None
        self._calls = 0
        self._preparing: int | None = None
        self.is_waiting = False
        """Whether a thread is in :meth:`next` and makes the value itself, which may take long."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is making a value ahead; closing the threads waits for it."""
        return self._preparing == threading.get_ident()

    def next(self) -> T | None:
        """Return the next value, or None after the last one."""
        asked_seconds = time.perf_counter()
        self._calls += 1  # nothing more is prepared ahead of this call
        value = self._take_ready()
        if value is None:
            value = self._take_or_make()
        if isinstance(value, Exception):
            raise value
        delivered_seconds, self._delivered_seconds = self._delivered_seconds, time.perf_counter()
        is_first = delivered_seconds is None
        was_busy = delivered_seconds is not None and asked_seconds - delivered_seconds > _MIN_BUSY_SECONDS
        if (is_first or was_busy) and self._remaining and self._threads is not None:
            delay_seconds = _MIN_BUSY_SECONDS if is_first else _LEAVE_SECONDS
            with suppress(StokerError):  # closed meanwhile: there will be no more values
                self._threads.submit(partial(_prepare_later, weakref.ref(self), self._calls, delay_seconds))
        return value

    def _take_ready(self) -> T | Exception | None:
        """Return the oldest value that was made ahead, also while another one is being made."""
        with suppress(IndexError):
            return None if self._is_ended else self._ready.popleft()
        return None

    def _take_or_make(self) -> T | Exception | None:
        with self._lock:
            if (value := self._take_ready()) is not None or self._is_ended:
                return value
            self.is_waiting = True
            try:
                return self._make_next()
            finally:
                self.is_waiting = False

    def is_due(self, call: int) -> bool | None:
        """Return whether a value can be made ahead of the consumer, who has called :meth:`next` ``call`` times.

        None if it will not be: the consumer has called again, or enough or all values have been made.
        """
        if call != self._calls or self._is_ended or not self._remaining or len(self._ready) >= self._depth:
            return None
        with _no_fork:
            return self._is_ready()

    def prepare(self) -> None:
        """Make a value ahead, unless there are enough already or ``make`` would wait."""
        with self._lock, _no_fork:
            self._preparing = threading.get_ident()
            try:
                is_wanted = len(self._ready) < self._depth and self._remaining and not self._is_ended
                if is_wanted and self._is_ready() and (value := self._make_next()) is not None:
                    self._ready.append(value)
            except Exception as error:  # noqa: BLE001 - next() raises it in place of this value
                self._ready.append(error)
            finally:
                self._preparing = None

    def _make_next(self) -> T | None:
        left, self._remaining = self._remaining, 0
        value = self._make() if left else None
        if value is not None:
            self._remaining = left - 1
        return value

    def end(self) -> None:
        """Make no more values; does not wait for one that is being made."""
        self._is_ended = True

    def close(self) -> None:
        """Make no more values, and wait for one that is being made."""
        self.end()
        if self._pid == os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            with self._lock:
                self._ready.clear()


def _prepare_later(reference: weakref.ref[Readahead[T]], call: int, delay_seconds: float) -> None:
    """Prepare values after a delay, when each can be made without waiting, until the consumer asks for one.

    During the delay the consumer leaves its call, for which it needs the interpreter lock, too.
    """
    time.sleep(delay_seconds)
    while (ahead := reference()) is not None and (is_due := ahead.is_due(call)) is not None:
        if is_due:
            ahead.prepare()
        del ahead  # or this thread would keep it alive
        if not is_due:
            time.sleep(_POLL_SECONDS)
