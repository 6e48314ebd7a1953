"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing is ready.

Code that takes its time from the loop (``loop.time()``, ``asyncio.sleep``, ``asyncio.timeout``) runs on it unchanged:
hours pass in milliseconds, the same way every time. There is no waiting and no outside world: sockets are refused, and
work for a thread pool runs inline.
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
    """Virtual time cannot go on: every task waits for something that no timer will bring, or tasks were left over."""


_Timer = tuple[float, int, asyncio.TimerHandle]
"""When it is due, a number that no other timer has, and what is called: compared without asking the handle."""

_SWEPT_TIMERS = 1000
"""So many that were cancelled are worth looking for: most timers of a fetcher are deadlines that nobody missed."""


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would sleep, the clock jumps instead; it never asks the operating system for events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0
        self.timers: list[_Timer] = []
        self._numbers = count()
        self._cancelled = 0

    def add(self, timer: asyncio.TimerHandle) -> None:
        """Wake the loop for a timer; of those that are due at one time, the first to be added comes first."""
        heapq.heappush(self.timers, (timer.when(), next(self._numbers), timer))

    def cancelled(self) -> None:
        """A timer will not be needed. Once half of them are not, they go."""
        self._cancelled += 1
        if self._cancelled > max(_SWEPT_TIMERS, len(self.timers) // 2):
            self.timers = [each for each in self.timers if not each[2].cancelled()]
            heapq.heapify(self.timers)
            self._cancelled = 0

    def take_due(self) -> list[asyncio.TimerHandle]:
        """Return the timers whose time has come."""
        due = []
        while self.timers and self.timers[0][0] <= self.now_seconds:
            due.append(heapq.heappop(self.timers)[2])
        return due

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # nothing is ready
            while self.timers and self.timers[0][2].cancelled():
                heapq.heappop(self.timers)
            if not self.timers:
                self._deadlocked()
            self.now_seconds = max(self.now_seconds, self.timers[0][0])
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.get_map():  # the loop's own wake-up pipe is the first, and the only one
            raise VirtualClockError("a socket was opened under a virtual clock: real I/O has no virtual time")
        return super().register(fileobj, events, data)

    def _deadlocked(self) -> NoReturn:
        stuck = sorted(task.get_name() for task in asyncio.all_tasks())
        raise VirtualClockError(
            f"deadlock at {self.now_seconds:.6f} virtual seconds: nothing is ready, no timer is set, "
            f"and {len(stuck)} tasks wait: {', '.join(stuck[:20])}"
        )


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0. The same coroutine takes the same course on every run.

    Timers are kept beside the loop's own, which compares them in Python: a simulation sets millions.
    """

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock.now_seconds

    @property
    def timers(self) -> int:
        """How many are set, with some of those that were cancelled."""
        return len(self._clock.timers)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it at a time."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.add(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._clock.cancelled()

    def _process_events(self, event_list: object) -> None:
        """Let run what is due; the loop asks for the events of each turn here."""
        for timer in self._clock.take_due():
            self._add_callback(timer)  # type: ignore[attr-defined]  # as a selector's loop does with its readers

    def jump(self, seconds: float) -> None:
        """Let so much time pass at once, as when the process is stopped: every timer that is due then fires late."""
        self._clock.now_seconds += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call ``func`` at once on this thread: a thread of its own would run in real time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - carried to whoever awaits, as an executor does
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh virtual-clock loop and return its result.

    Raises:
        VirtualClockError: all tasks wait with no timer set (a deadlock), or ``main`` left tasks running.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(_leaving_nothing(main))


async def _leaving_nothing(main: Coroutine[Any, Any, T]) -> T:
    result = await main
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        names = ", ".join(sorted(task.get_name() for task in left if task))
        raise VirtualClockError(f"{len(left)} tasks were left running: {names}")
    return result
