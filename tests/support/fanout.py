"""An executor whose calls follow a test's script in virtual time, and tasks for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from stoker.abc import Answer, Executor
from stoker.fanout import Task

__all__ = ["Behaviour", "ScriptedExecutor", "answer", "numbered_tasks"]

Behaviour = Callable[[int, int], Awaitable[Answer]]
"""Behaviour of a call, from the number in its event and the number of earlier calls with that number."""


def answer(result: Mapping[str, Any] | None = None, *, seconds: float = 1.0, is_cold: bool | None = False) -> Answer:
    """Return the answer of a function with 1 GiB of memory."""
    return Answer(result=result or {}, billed_seconds=seconds, memory_bytes=1 << 30, is_cold=is_cold)


def numbered_tasks(count: int, *, size_bytes: int = 10) -> list[Task]:
    return [
        Task(name=f"part {number}", function="work", event={"number": number}, size_bytes=size_bytes)
        for number in range(count)
    ]


class ScriptedExecutor(Executor):
    """Counts its calls, and those that run concurrently."""

    name = "scripted"
    platform = "lambda"

    def __init__(self, behave: Behaviour, *, concurrency: int = 1000) -> None:
        self.concurrency = concurrency
        self._behave = behave
        self.calls: Counter[int] = Counter()
        self.started: list[tuple[float, int]] = []
        self.in_flight = self.most_in_flight = self.cancelled = 0

    async def __aenter__(self) -> ScriptedExecutor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        assert function == "work"
        number = event["number"]
        before = self.calls[number]
        self.calls[number] += 1
        self.started.append((asyncio.get_running_loop().time(), number))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._behave(number, before)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
