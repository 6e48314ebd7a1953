"""Cancellation at a numbered suspension: counts every suspension of tasks over a whole run.

A coroutine suspends each time it is stepped and yields to the loop; those points are numbered in the order in which a
run reaches them, which under the virtual clock is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import CoroutineType
from typing import Any

__all__ = ["Suspensions"]


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that reports each of its suspensions."""

    def __init__(self, inner: Coroutine[Any, Any, Any], suspended: Callable[[], None]) -> None:
        self._inner, self._suspended = inner, suspended

    def send(self, value: Any) -> Any:
        yielded = self._inner.send(value)
        self._suspended()
        return yielded

    def throw(self, *error: Any) -> Any:
        yielded = self._inner.throw(*error)
        self._suspended()
        return yielded

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("only tasks step it")


class Suspensions:
    """Counts the suspensions of selected tasks, and calls functions at some of them.

    Args:
        counts: function from a coroutine's qualified name to whether its suspensions count.
        at: number of a suspension, from 0 → function to call with the suspended task.
    """

    def __init__(
        self, counts: Callable[[str], bool], at: Mapping[int, Callable[[asyncio.Task[Any]], object]] | None = None
    ) -> None:
        self._counts = counts
        self._at = at or {}
        self.seen: list[str] = []

    def watch(self) -> None:
        """Watch every task that the running loop creates from now on."""
        asyncio.get_running_loop().set_task_factory(self._make)

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **kwargs: Any,
    ) -> asyncio.Task[Any]:
        assert isinstance(coroutine, CoroutineType), "a task runs a coroutine function's coroutine"
        name = coroutine.__qualname__
        if not self._counts(name):
            return asyncio.Task(coroutine, loop=loop, **kwargs)
        return asyncio.Task(_Counted(coroutine, lambda: self._suspended(name)), loop=loop, **kwargs)

    def _suspended(self, name: str) -> None:
        number = len(self.seen)
        self.seen.append(name)
        action = self._at.get(number)
        if action is not None:
            task = asyncio.current_task()
            assert task is not None
            # A direct call would be inside the step; the loop's next iteration is before anything can wake the task.
            asyncio.get_running_loop().call_soon(action, task)
