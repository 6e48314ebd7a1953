"""Measurements on a shared machine: wait for an idle moment, and record the other load."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

import psutil

__all__ = ["MeasurementWithLoad", "Patience", "Watch", "functions_cpu_seconds"]

T = TypeVar("T")

_LOOK_SECONDS = 0.5
_QUIET_PROCESSORS = 0.1
_BEARABLE_PROCESSORS = 0.15
_TRIES = 4


class Watch:
    """Measures how many processors other programs use during its block.

    Attributes:
        foreign_processors: average number of processors, after the block.
    """

    foreign_processors = 0.0

    def __enter__(self) -> Watch:
        self._before = _foreign_cpu_seconds(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        foreign, at = self._before
        used = _foreign_cpu_seconds() - foreign
        self.foreign_processors = max(0.0, used) / (time.perf_counter() - at)


@dataclass(frozen=True, slots=True)
class MeasurementWithLoad(Generic[T]):
    """A measurement, and the number of processors that other programs used meanwhile."""

    figure: T
    foreign_processors: float


@dataclass(slots=True)
class Patience:
    """Waits for idle moments, and repeats disturbed measurements, within a time budget.

    Attributes:
        seconds: time left for waits and repetitions, in seconds.
        foreign_processors: processors that other programs used during each accepted measurement.
    """

    seconds: float = 200.0
    foreign_processors: list[float] = field(default_factory=list)

    async def measure(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the least disturbed of a few measurements, or the first if it was hardly disturbed."""
        kept: list[MeasurementWithLoad[T]] = []
        while not kept or (len(kept) < _TRIES and self.seconds > 0):
            await self._quiet()
            started = time.perf_counter()
            with Watch() as watch:
                figure = await work()
            self.seconds -= time.perf_counter() - started if kept else 0.0
            kept.append(MeasurementWithLoad(figure, watch.foreign_processors))
            if watch.foreign_processors <= _BEARABLE_PROCESSORS:
                break
        best = min(kept, key=lambda each: each.foreign_processors)
        self.foreign_processors.append(best.foreign_processors)
        return best.figure

    async def _quiet(self) -> None:
        while self.seconds > 0:
            with Watch() as watch:
                await asyncio.sleep(_LOOK_SECONDS)
            if watch.foreign_processors <= _QUIET_PROCESSORS:
                return
            self.seconds -= _LOOK_SECONDS


def functions_cpu_seconds() -> float:
    """Return the processor time of the running instances, in seconds."""
    seconds = 0.0
    for instance in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since the listing
            seconds += sum(instance.cpu_times()[:2])
    return seconds


def _foreign_cpu_seconds() -> float:
    """Return the machine's processor time outside this process and its descendants, in seconds."""
    machine = psutil.cpu_times()
    idle_seconds = machine.idle + getattr(machine, "iowait", 0.0)
    times = os.times()
    ours = times.user + times.system + times.children_user + times.children_system + functions_cpu_seconds()
    return float(sum(machine) - idle_seconds - ours)
