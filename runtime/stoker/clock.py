"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing is ready.

Code that takes its time from the loop (``loop.time()``, ``asyncio.sleep``, ``asyncio.timeout``) runs on it unchanged:
hours pass in milliseconds, the same way every time. There is no waiting and no outside world: sockets are refused, and
work for a thread pool runs inline.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from stoker.errors import StokerError

__all__ = ["VirtualClockError", "VirtualClockLoop", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LOOP_RESOLUTION_SECONDS = time.get_clock_info("monotonic").resolution
"""The loop runs timers that are due within this."""


class VirtualClockError(StokerError, RuntimeError):
    """Virtual time cannot go on: every task waits for something that no timer will bring, or tasks were left over."""


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would sleep, the clock jumps instead; it never asks the operating system for events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self._deadlocked()
        if timeout > 0:
            self.now_seconds += timeout
            if self.now_seconds + _LOOP_RESOLUTION_SECONDS == self.now_seconds:
                # Beyond some months a float is too coarse for the loop's "due within the resolution": go past.
                self.now_seconds = math.nextafter(self.now_seconds, math.inf)
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
    """An event loop in virtual time, which starts at 0. The same coroutine takes the same course on every run."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock.now_seconds

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
