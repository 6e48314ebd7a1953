"""Background executors that run their work when a test demands it."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Delayed", "Immediate"]


class Immediate:
    """Runs work in the call of ``submit``."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        pass


class Delayed:
    """Runs work ``delay`` ticks later, in order; never, if ``delay`` is infinite."""

    def __init__(self, delay: float = math.inf) -> None:
        self._delay = delay
        self._now = 0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self._due.append((self._now + self._delay, work))
        self._do()

    def tick(self) -> None:
        """Let one tick pass."""
        self._now += 1
        self._do()

    def do_all(self) -> None:
        """Run all pending work now."""
        while self._due:
            self._due.pop(0)[1]()

    def close(self) -> None:
        self._due.clear()

    def _do(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            self._due.pop(0)[1]()
