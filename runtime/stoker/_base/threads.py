"""Threads: an event loop thread for synchronous callers, and blocking work in threads for coroutines.

A :class:`LoopThread` works beside an event loop in the calling thread (a notebook), in any number of instances, and
across ``fork``: the child drops the reference to the parent's thread, leaves the inherited loop open (closing it would
disturb the poller that parent and child share), and starts a thread of its own at the next call.
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

CloseHook = Callable[[], Coroutine[Any, Any, object]]

fork_aware_objects: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects whose method ``reset_after_fork`` is called in a forked child."""


def _reset_after_fork() -> None:
    for each in list(fork_aware_objects):
        each.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)


@dataclass(slots=True, eq=False)
class _RunningThread:
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    finalizer: weakref.finalize[..., Any]
    is_closing: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_closing and self.finalizer.alive


class LoopThread:
    """Runs coroutines on a daemon thread that starts at the first call. Thread-safe.

    During :meth:`close`, calls raise an error, so that concurrent work cannot restart the thread.

    Args:
        name: name of the thread; default ``stoker-loop``.
        on_close: coroutine function that the thread awaits before it ends, after all other tasks, to close resources of
            its loop. It must not refer to the LoopThread or its owner, which could then never be garbage-collected.
            :meth:`close` raises its exception. Default: none.
    """

    def __init__(self, name: str = "stoker-loop", *, on_close: CloseHook | None = None) -> None:
        self._name = name
        self._last = on_close
        self._lock = threading.Lock()
        self._running: _RunningThread | None = None
        fork_aware_objects.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the thread was started in this process, and not closed."""
        return self.generation is not None

    @property
    def generation(self) -> object | None:
        """An object that identifies the current start of the thread; None if it does not run, or is being closed."""
        running = self._running
        return running if running is not None and running.is_open else None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the thread, where waiting for the thread would deadlock."""
        running = self._running
        return running is not None and running.thread is threading.current_thread()

    def start(self) -> object:
        """Start the thread unless it runs, and return :attr:`generation`.

        Raises:
            StokerError: the thread is being closed.
        """
        with self._lock:
            return self._ensure_started()

    def _ensure_started(self, generation: object | None = None) -> _RunningThread:
        if self._running is None and generation is None:
            self._running = self._start()
        if self._running is None or not self._running.is_open or generation not in (None, self._running):
            raise StokerError(f"the thread {self._name} was closed: its objects cannot be used any more; open new ones")
        return self._running

    def call(self, coroutine: Coroutine[Any, Any, T], generation: object | None = None) -> concurrent.futures.Future[T]:
        """Start a coroutine on the thread; cancelling the future cancels it.

        Args:
            coroutine: coroutine to run.
            generation: required value of :attr:`generation`, so that the thread is not restarted; default None: any.

        Raises:
            StokerError: the thread is being closed, or has another :attr:`generation`.
        """
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coroutine, self._ensure_started(generation).loop)
        except StokerError:
            coroutine.close()
            raise

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the thread and discard the result; does nothing if the thread does not run."""
        with self._lock:
            if self._running is not None:
                self._running.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T], generation: object | None = None) -> T:
        """Run a coroutine on the thread and return its result; an interrupt (Ctrl-C) cancels it.

        Raises:
            RuntimeError: the caller runs on the thread, which would wait for itself.
            StokerError: the thread was closed in the meantime; or as for :meth:`call`.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError(f"LoopThread.run called on its own thread {self._name}; await the coroutine instead")
        future = self.call(coroutine, generation)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise StokerError(f"the thread {self._name} was closed before the call ended") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks, wait for them to end, and end the thread. Idempotent; the next call starts a new thread."""
        with self._lock:
            running = self._running
            if running is None:
                return
            running.is_closing = True  # under the lock, so that earlier calls are scheduled before the loop stops
        try:
            running.finalizer()
            if not self.is_current:
                running.thread.join()  # another thread may have been the first to close it
        finally:
            with self._lock:
                if self._running is running:
                    self._running = None

    def _start(self) -> _RunningThread:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        started, ended = concurrent.futures.Future(), concurrent.futures.Future[None]()
        thread = threading.Thread(target=_run_loop, args=(started, ended, self._last), name=self._name, daemon=True)
        thread.start()
        loop, stop = started.result()
        # Also runs when the LoopThread is garbage-collected, or at interpreter exit while threads can be joined.
        return _RunningThread(thread, loop, weakref.finalize(self, _stop, thread, loop, stop, ended))

    def reset_after_fork(self) -> None:
        """In a forked child, drop the references to the parent's thread and loop without closing them."""
        self._lock = threading.Lock()  # the parent may have held it at the fork
        if self._running is not None:
            self._running.finalizer.detach()
            _inherited_objects.append((self._running, asyncio.all_tasks(self._running.loop)))
            self._running = None


_inherited_objects: list[object] = []
"""Objects that are never garbage-collected. Collecting an inherited loop would close it, and remove watches that the
parent needs; collecting a waiting task would run its clean-up and log an error; closing connections of the loop would
send a TLS close on the parent's connections, and remove its sockets from the epoll set that both processes share."""


def _run_loop(
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
    ended: concurrent.futures.Future[None],
    last: CloseHook | None,
) -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        if last is not None:
            await last()

    try:
        with asyncio.Runner() as runner:  # its exit cancels and awaits all remaining tasks
            runner.run(until_stopped())
    except BaseException as error:  # noqa: BLE001 - a task boundary: start() or close() raises it again
        (ended if started.done() else started).set_exception(error)  # for instance out of file descriptors
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


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def compute_in_thread(work: Callable[[], T]) -> T:
    """Run a function that writes nothing in a thread; a cancelled call returns at once, and nobody gets the result.

    Raises:
        Exception: an exception of ``work``.
    """
    try:
        thread = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:  # at interpreter exit no thread starts
        return work()
    return await thread


async def run_in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run ``work(cancelled)`` in a thread, and return only after it has ended, even if the call is cancelled.

    At interpreter exit, when no thread can be started, the work runs on the event loop's thread.

    Args:
        work: function that checks the event ``cancelled`` at intervals if it takes long.

    Raises:
        Exception: an exception of ``work``.
    """
    cancelled = threading.Event()
    try:
        # A future instead of a task, because a loop that shuts down cancels tasks, but must not cancel this.
        thread = asyncio.get_running_loop().run_in_executor(None, work, cancelled)
    except RuntimeError:  # at interpreter exit no thread starts: run clean-up work here
        return work(cancelled)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        cancelled.set()
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:  # the first cancellation is raised below
                continue
        thread.exception()  # mark as retrieved: the caller was cancelled
        raise


class RevocableBuffer:
    """A buffer that a thread fills, and that its owner can revoke: after that, nothing writes to it any more.

    Args:
        into: the buffer; kept by reference until :meth:`revoke`.
    """

    def __init__(self, into: memoryview) -> None:
        self.nbytes = into.nbytes
        self._into: memoryview | None = into
        self._lock = threading.Lock()

    def fill(self, start: int, data: memoryview) -> bool:
        """Copy ``data`` to offset ``start`` of the buffer; return False if the buffer was withdrawn.

        Holds a lock during the copy, so ``data`` should have at most a few MiB.
        """
        with self._lock:
            if self._into is None:
                return False
            self._into[start : start + data.nbytes] = data
            return True

    def revoke(self) -> None:
        """Revoke the buffer. Waits for at most one concurrent :meth:`fill`."""
        with self._lock:
            self._into = None


async def run_in_thread_until_cancelled(
    work: Callable[[], T], executor: Executor, abandoned: set[threading.Event]
) -> T:
    """Run ``work()`` in a thread. A cancelled call returns at once, and abandons the thread.

    Args:
        work: function to run; it is not started if the call is cancelled before.
        executor: executor that provides the thread.
        abandoned: events of abandoned threads that still run; each is set and removed when its thread ends.

    Raises:
        Exception: an exception of ``work``.
    """
    begun, ended = threading.Event(), threading.Event()

    def run() -> T:
        begun.set()
        try:
            return work()
        finally:
            ended.set()
            abandoned.discard(ended)

    try:
        thread = asyncio.get_running_loop().run_in_executor(executor, run)
    except RuntimeError:  # at interpreter exit no thread starts
        return work()
    try:
        return await thread
    except asyncio.CancelledError:
        if begun.is_set():
            abandoned.add(ended)
            if ended.is_set():
                abandoned.discard(ended)
        raise


class PerLoop(Generic[T]):
    """One value per event loop, created at its first use. Loops in several threads may share a PerLoop.

    Args:
        create: function that creates a value.
    """

    def __init__(self, create: Callable[[], T]) -> None:
        self._make = create
        self._pid = os.getpid()
        # No lock: only the thread of its loop writes an entry, and a lock could be held during a fork.
        self._made: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """Return the running loop's value."""
        loop = asyncio.get_running_loop()
        self._drop_dead()
        if (value := self._made.get(loop)) is None:
            value = self._made[loop] = self._make()
        return value

    def any(self) -> T | None:
        """Return the existing value of any loop, or None."""
        return next(iter(tuple(self._made.values())), None)

    def pop(self) -> T | None:
        """Remove and return the running loop's value, to close it; None if there is none."""
        self._drop_dead()
        return self._made.pop(asyncio.get_running_loop(), None)

    def _drop_dead(self) -> None:
        if self._pid != os.getpid():
            _inherited_objects.append(self._made)
            self._made, self._pid = {}, os.getpid()
        for loop in [loop for loop in tuple(self._made) if loop.is_closed()]:
            self._made.pop(loop, None)
