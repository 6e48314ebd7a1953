"""The next batch is gathered while the training loop is busy, so that it need not wait for the copying either."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from stoker._base.threads import LoopThread

__all__ = ["OneAhead"]

T = TypeVar("T")

_BUSY_SECONDS = 0.002
"""A loop that comes back sooner does nothing meanwhile: to hand it a batch from another thread would cost it time."""


class OneAhead(Generic[T]):
    """Makes values one after the other, and one ahead while whoever asks for them is busy.

    ``make`` is called by who asks, or by a thread of the loop's executor if :meth:`is_ready` says that it would not
    wait; never by two at a time. A value that could not be made is an error where it would have come, and the last one.
    Whoever closes what ``make`` works with ends this first.

    Args:
        make: returns the next value, None where there is no more.
        count: of values at most.
        is_ready: whether ``make`` would not wait for anything.
        thread: whose event loop has the executor; None makes nothing ahead.
    """

    def __init__(
        self, make: Callable[[], T | None], count: int, is_ready: Callable[[], bool], thread: LoopThread | None
    ) -> None:
        self._make, self._left, self._is_ready, self._thread = make, count, is_ready, thread
        self._pid = os.getpid()
        self._turn = threading.RLock()  # a signal's handler may close this in the thread that is in next()
        self._is_ended = False
        self._made: T | Exception | None = None
        self._handed_seconds: float | None = None
        self._preparing: int | None = None
        self.is_asked = False
        """Whether a thread is in :meth:`next` and nothing was made ahead: it may wait for long."""

    @property
    def is_current(self) -> bool:
        """Whether the caller is the executor's thread at work, which whoever closes the loop waits for."""
        return self._preparing == threading.get_ident()

    def next(self) -> T | None:
        """Return the next value, or None where there is no more."""
        asked_seconds = time.perf_counter()
        with self._turn:
            made, self._made = self._made, None
            if self._is_ended:
                return None
            if made is None:
                self.is_asked = True
                try:
                    made = self._next_made()
                finally:
                    self.is_asked = False
        if isinstance(made, Exception):
            raise made
        was_busy = self._handed_seconds is not None and asked_seconds - self._handed_seconds > _BUSY_SECONDS
        self._handed_seconds = time.perf_counter()
        if was_busy and self._left and self._thread is not None:
            self._thread.call_soon(_prepare_in_executor, weakref.ref(self))
        return made

    def prepare(self) -> None:
        """Make a value ahead, unless there is one, or it would have to be waited for."""
        with self._turn:
            self._preparing = threading.get_ident()
            try:
                if self._made is None and self._left and not self._is_ended and self._is_ready():
                    self._made = self._next_made()
            except Exception as error:  # noqa: BLE001 - raised again to whoever asks for this value
                self._made = error
            finally:
                self._preparing = None

    def _next_made(self) -> T | None:
        left, self._left = self._left, 0
        made = self._make() if left else None
        if made is not None:
            self._left = left - 1
        return made

    def end(self) -> None:
        """Make nothing more, and do not wait for what is being made."""
        self._is_ended = True

    def close(self) -> None:
        """Make nothing more; when this returns, nothing is being made."""
        self.end()
        if self._pid == os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            with self._turn:
                self._made = None


def _prepare_in_executor(reference: weakref.ref[OneAhead[T]]) -> None:
    with suppress(RuntimeError):  # where the interpreter is ending, nobody will ask for another
        asyncio.get_running_loop().run_in_executor(None, _prepare, reference)


def _prepare(reference: weakref.ref[OneAhead[T]]) -> None:
    ahead = reference()
    if ahead is not None:
        ahead.prepare()
