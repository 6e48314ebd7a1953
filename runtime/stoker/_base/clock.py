"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing is ready.

Code that takes its time from the loop (``loop.time()``, ``asyncio.sleep``, ``asyncio.timeout``) runs on it unchanged
and deterministically, hours in milliseconds. Real I/O is impossible: opening a socket raises an error, and work for a
thread pool runs inline.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from itertools import count
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from stoker.errors import StokerError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualClockError(StokerError, RuntimeError):
    """Virtual time cannot continue: all tasks wait and no timer is set, or tasks were left running."""


_Timer = tuple[float, int, asyncio.TimerHandle]
"""Due time, unique number, and handle of a timer: the first two decide comparisons, without the handle."""

_MIN_CANCELLED_TIMERS = 1000
"""Minimum number of cancelled timers to remove: most timers of a fetcher are deadlines, and cancelled."""


class _VirtualSelector(selectors.SelectSelector):
    """Lets the clock jump when the loop would sleep, and never polls the operating system for events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0
        self.timers: list[_Timer] = []
        self._numbers = count()
        self._cancelled = 0

    def add(self, timer: asyncio.TimerHandle) -> None:
        """Add a timer. Timers with the same due time fire in the order of their addition."""
        heapq.heappush(self.timers, (timer.when(), next(self._numbers), timer))

    def count_cancelled(self) -> None:
        """Count a cancelled timer; when half of the timers are cancelled, remove them."""
        self._cancelled += 1
        if self._cancelled > max(_MIN_CANCELLED_TIMERS, len(self.timers) // 2):
            self.timers = [each for each in self.timers if not each[2].cancelled()]
            heapq.heapify(self.timers)
            self._cancelled = 0

    def pop_due(self) -> list[asyncio.TimerHandle]:
        """Remove and return the timers that are due."""
        due = []
        while self.timers and self.timers[0][0] <= self.now_seconds:
            due.append(heapq.heappop(self.timers)[2])
        return due

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # nothing is ready
            while self.timers and self.timers[0][2].cancelled():
                heapq.heappop(self.timers)
            if not self.timers:
                self._raise_deadlock()
            self.now_seconds = max(self.now_seconds, self.timers[0][0])
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.get_map():  # the loop's own wake-up pipe is the first, and the only one
            raise VirtualClockError("a socket was opened under a virtual clock, which does not support real I/O")
        return super().register(fileobj, events, data)

    def _raise_deadlock(self) -> NoReturn:
        stuck = sorted(task.get_name() for task in asyncio.all_tasks())
        raise VirtualClockError(
            f"deadlock at {self.now_seconds:.6f} virtual seconds: nothing is ready, no timer is set, "
            f"and {len(stuck)} tasks wait: {', '.join(stuck[:20])}"
        )


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0. A coroutine runs in the same way every time.

    The loop has a timer heap of its own, since asyncio's compares handles in Python and a simulation sets millions.

    Example:
        >>> import asyncio
        >>> with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        ...     runner.run(asyncio.sleep(3600))
        ...     runner.get_loop().time()
        3600.0
    """

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock.now_seconds

    @property
    def timers(self) -> int:
        """Number of timers, including some that were cancelled."""
        return len(self._clock.timers)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback for a virtual time, in seconds."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.add(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._clock.count_cancelled()

    def _process_events(self, event_list: object) -> None:
        """Run the timers that are due; the loop calls this in every iteration."""
        for timer in self._clock.pop_due():
            self._add_callback(timer)  # type: ignore[attr-defined]  # as a selector's loop does with its readers

    def jump(self, seconds: float) -> None:
        """Advance the time at once, as if the process had been suspended: timers that are due then fire late."""
        self._clock.now_seconds += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call ``func`` immediately on this thread, because another thread would run in real time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the future raises it, as with any executor
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh virtual-clock loop and return its result.

    Example:
        >>> import asyncio
        >>> async def wait_for_a_day():
        ...     await asyncio.sleep(86_400)
        ...     return asyncio.get_running_loop().time()
        >>> run_virtual(wait_for_a_day())  # returns at once
        86400.0

    Args:
        main: coroutine to run.

    Raises:
        VirtualClockError: all tasks wait with no timer set (a deadlock), or ``main`` left tasks running.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(_run_without_leftovers(main))


async def _run_without_leftovers(main: Coroutine[Any, Any, T]) -> T:
    result = await main
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        names = ", ".join(sorted(task.get_name() for task in left if task))
        raise VirtualClockError(f"{len(left)} tasks were left running: {names}")
    return result
