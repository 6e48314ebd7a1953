"""Threads: an event loop for callers that are not asynchronous themselves, and work that a coroutine awaits.

A :class:`LoopThread` works beside an event loop in the calling thread (a notebook), in any number of instances, and
across ``fork``: the child forgets the thread it never had, leaves the inherited loop untouched (closing it would
disturb the poller that parent and child share), and starts its own at the next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stoker._base.task_group import end_tasks
from stoker.errors import StokerError

T = TypeVar("T")

Last = Callable[[], Coroutine[Any, Any, object]]

in_children: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects of which a forked child calls the method ``forget_parent``."""


def _forget_parent() -> None:
    for each in list(in_children):
        each.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


@dataclass(slots=True, eq=False)
class _Running:
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    finalizer: weakref.finalize[..., Any]
    is_closing: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_closing and self.finalizer.alive


class LoopThread:
    """Runs coroutines on a daemon thread that starts at the first call. Thread-safe.

    While it is being closed it starts nothing, so that what was at work when it was closed cannot start it again.

    Args:
        name: of the thread.
        last: awaited on the thread, behind everything else, before it ends, however it ends: to close what belongs to
            its loop. Must not refer to the LoopThread, or to what owns it: these would never be garbage. Its error is
            raised to whoever closes.
    """

    def __init__(self, name: str = "stoker-loop", *, last: Last | None = None) -> None:
        self._name = name
        self._last = last
        self._lock = threading.Lock()
        self._running: _Running | None = None
        in_children.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started, in this process, and not closed."""
        return self.life is not None

    @property
    def life(self) -> object | None:
        """What tells one start of the thread from the next; None while it does not run, or is being closed."""
        running = self._running
        return running if running is not None and running.is_open else None

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the thread, where nothing that it does may be waited for."""
        running = self._running
        return running is not None and running.thread is threading.current_thread()

    def start(self) -> object:
        """Start the thread unless it runs, and return :attr:`life`.

        Raises:
            StokerError: the thread is being closed.
        """
        with self._lock:
            return self._started()

    def _started(self, life: object | None = None) -> _Running:
        if self._running is None and life is None:
            self._running = self._start()
        if self._running is None or not self._running.is_open or life not in (None, self._running):
            raise StokerError(f"the thread {self._name} was closed: what belonged to it does not start again")
        return self._running

    def call(self, coroutine: Coroutine[Any, Any, T], life: object | None = None) -> concurrent.futures.Future[T]:
        """Start a coroutine on the thread; cancelling the future cancels it.

        Args:
            coroutine: what to run.
            life: in which it must run; the thread is not started for it again.

        Raises:
            StokerError: the thread is being closed, or has another :attr:`life`.
        """
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coroutine, self._started(life).loop)
        except StokerError:
            coroutine.close()
            raise

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Have the thread call a function and forget the result; does nothing when the thread is not running."""
        with self._lock:
            if self._running is not None:
                self._running.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], life: object | None = None) -> T:
        """Run a coroutine on the thread and return its result; an interrupt (Ctrl-C) cancels it.

        Raises:
            RuntimeError: called on the thread itself, which would wait for itself.
            StokerError: the thread was closed meanwhile; or as for :meth:`call`.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"LoopThread.run called on its own thread {self._name}; await the coroutine instead")
        future = self.call(coroutine, life)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise StokerError(f"the thread {self._name} was closed before this had ended") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, wait for it to end, and end the thread. Idempotent; the next call starts a new one."""
        with self._lock:
            running = self._running
            if running is None:
                return
            running.is_closing = True  # under the lock: what was called before it is called before the loop stops
        try:
            running.finalizer()
            if not self.is_current:
                running.thread.join()  # another thread may have been the first to close it
        finally:
            with self._lock:
                if self._running is running:
                    self._running = None

    def _start(self) -> _Running:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        started, ended = concurrent.futures.Future(), concurrent.futures.Future[None]()
        thread = threading.Thread(target=_serve, args=(started, ended, self._last), name=self._name, daemon=True)
        thread.start()
        loop, stop = started.result()
        # Also runs when the LoopThread is garbage or the interpreter exits, while the thread can still be joined.
        return _Running(thread, loop, weakref.finalize(self, _stop, thread, loop, stop, ended))

    def forget_parent(self) -> None:
        """In a forked child: drop the parent's thread without touching it."""
        self._lock = threading.Lock()  # the parent may have held it at the fork
        if self._running is not None:
            self._running.finalizer.detach()
            _inherited.append((self._running, asyncio.all_tasks(self._running.loop)))
            self._running = None


_inherited: list[object] = []
"""Kept for ever: collecting an inherited loop would close it, and with it watches that the parent needs; collecting a
task that waits there would run its clean-up, and complain; and closing what belongs to a loop would say goodbye on the
parent's TLS connections, and take its sockets out of the epoll set that the two processes share."""


def _serve(
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
    ended: concurrent.futures.Future[None],
    last: Last | None,
) -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        if last is not None:
            await last()

    try:
        with asyncio.Runner() as runner:  # on leaving, it cancels and awaits every task that is left
            runner.run(until_stopped())
    except BaseException as error:  # noqa: BLE001 - a task boundary: raised again to whoever starts or closes
        (ended if started.done() else started).set_exception(error)  # no loop could be made (out of files)
    else:
        ended.set_result(None)


def _stop(
    thread: threading.Thread,
    loop: asyncio.AbstractEventLoop,
    stop: asyncio.Event,
    ended: concurrent.futures.Future[None],
) -> None:
    loop.call_soon_threadsafe(stop.set)
    if thread is not threading.current_thread():
        thread.join()
        ended.result()


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


class PerLoop(Generic[T]):
    """One value per event loop, made on first use in it; loops in several threads may use the same one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pid = os.getpid()
        # No lock: each entry is written only by its own loop's thread, and a lock may be held while forking.
        self._made: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        self._drop_dead()
        if (value := self._made.get(loop)) is None:
            value = self._made[loop] = self._make()
        return value

    def any(self) -> T | None:
        """Return a value that is there, of whatever loop; None if there is none."""
        return next(iter(tuple(self._made.values())), None)

    def take(self) -> T | None:
        """Remove and return the running loop's value, for its end; None if there is none."""
        self._drop_dead()
        return self._made.pop(asyncio.get_running_loop(), None)

    def _drop_dead(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._made)
            self._made, self._pid = {}, os.getpid()
        for loop in [loop for loop in tuple(self._made) if loop.is_closed()]:
            self._made.pop(loop, None)
