"""A background thread with an event loop, for callers that are not asynchronous themselves.

Works beside an event loop in the calling thread (a notebook), in any number of instances, and across ``fork``: the
child forgets the thread it never had, leaves the inherited loop untouched (closing it would disturb the parent's
poller, which both share), and starts its own at the next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Running:
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    finalizer: weakref.finalize[..., Any]


class LoopThread:
    """Runs coroutines on a daemon thread that starts at the first call. Thread-safe.

    Args:
        name: of the thread.
        last: awaited on the thread, behind everything else, before it ends, however it ends: to close what belongs to
            its loop. Must not refer to the LoopThread, or to what owns it: these would never be garbage.
    """

    def __init__(
        self, name: str = "stoker-loop", *, last: Callable[[], Coroutine[Any, Any, object]] | None = None
    ) -> None:
        self._name = name
        self._last = last
        self._lock = threading.Lock()
        self._running: _Running | None = None
        _instances.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started, in this process, and not closed."""
        return self._running is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the thread, where nothing that it does may be waited for."""
        running = self._running
        return running is not None and running.thread is threading.current_thread()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the thread; cancelling the future cancels it."""
        with self._lock:
            if self._running is None:
                self._running = self._start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._running.loop)

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have the thread call a function and forget the result; does nothing when the thread is not running."""
        with self._lock:
            if self._running is not None:
                self._running.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread and return its result; an interrupt (Ctrl-C) cancels it.

        Raises:
            RuntimeError: called on the thread itself, which would wait for itself.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"LoopThread.run called on its own thread {self._name}; await the coroutine instead")
        future = self.call(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, wait for it to end, and end the thread. Idempotent; the next call starts a new one."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.finalizer()

    def _start(self) -> _Running:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        started = concurrent.futures.Future()
        thread = threading.Thread(target=_serve, args=(started, self._last), name=self._name, daemon=True)
        thread.start()
        loop, stop = started.result()
        # Also runs when the LoopThread is garbage or the interpreter exits, while the thread can still be joined.
        return _Running(thread, loop, weakref.finalize(self, _stop, thread, loop, stop))

    def _forget(self) -> None:
        """In a forked child: drop the parent's thread without touching it."""
        self._lock = threading.Lock()  # the parent may have held it at the fork
        if self._running is not None:
            self._running.finalizer.detach()
            _inherited.append((self._running, asyncio.all_tasks(self._running.loop)))
            self._running = None


_instances: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_inherited: list[tuple[_Running, set[asyncio.Task[Any]]]] = []
"""Kept for ever: collecting an inherited loop would close it, and with it watches that the parent needs; and collecting
a task that waits there would run its clean-up, and complain."""


def _serve(
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
    last: Callable[[], Coroutine[Any, Any, object]] | None,
) -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        if last is not None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()

    try:
        with asyncio.Runner() as runner:  # on leaving, it cancels and awaits every task that is left
            runner.run(until_stopped())
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)  # no loop could be made (out of files): for the caller to see


def _stop(thread: threading.Thread, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    loop.call_soon_threadsafe(stop.set)
    if thread is not threading.current_thread():
        thread.join()


def _forget_all() -> None:
    for instance in list(_instances):
        instance._forget()  # noqa: SLF001 - this module's own class


os.register_at_fork(after_in_child=_forget_all)
