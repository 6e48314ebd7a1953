"""The next batch is gathered while the training loop is busy, so that it need not wait for the copying either."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from stoker.loop_thread import LoopThread

__all__ = ["OneAhead"]

T = TypeVar("T")

_BUSY_SECONDS = 0.002
"""A loop that comes back sooner does nothing meanwhile: to hand it a batch from another thread would cost it time."""


class OneAhead(Generic[T]):
    """Makes values one after the other, and one ahead while whoever asks for them is busy.

    One thread asks; ``make`` is called by it or by a thread of the loop's executor, never by two at a time. A value
    that could not be made is an error where it would have come.

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
        self._lock = threading.Lock()
        self._made: T | Exception | None = None
        self._handed_seconds: float | None = None

    def next(self) -> T | None:
        """Return the next value, or None where there is no more."""
        asked_seconds = time.perf_counter()
        with self._lock:
            made, self._made = self._made, None
            if made is None:
                if not self._left:
                    return None
                self._left -= 1
                made = self._make()
        if isinstance(made, Exception):
            raise made
        was_busy = self._handed_seconds is not None and asked_seconds - self._handed_seconds > _BUSY_SECONDS
        self._handed_seconds = time.perf_counter()
        if was_busy and self._left and self._thread is not None:
            self._thread.call_soon(_prepare_in_executor, weakref.ref(self))
        return made

    def prepare(self) -> None:
        """Make a value ahead, unless there is one, or it would have to be waited for."""
        with self._lock:
            if self._made is not None or not self._left or not self._is_ready():
                return
            self._left -= 1
            try:
                self._made = self._make()
            except Exception as error:  # noqa: BLE001 - raised again to whoever asks for this value
                self._made = error
            if self._made is None:
                self._left = 0

    def close(self) -> None:
        """Make nothing more; when this returns, nothing is being made."""
        with self._lock:
            self._left, self._made = 0, None


def _prepare_in_executor(reference: weakref.ref[OneAhead[T]]) -> None:
    with suppress(RuntimeError):  # where the interpreter is ending, nobody will ask for another
        asyncio.get_running_loop().run_in_executor(None, _prepare, reference)


def _prepare(reference: weakref.ref[OneAhead[T]]) -> None:
    ahead = reference()
    if ahead is not None:
        ahead.prepare()
