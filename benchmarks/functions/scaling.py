"""Rate at which one to eight functions pack together on this machine."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.document import table
from benchmarks.functions.quiet import Patience
from benchmarks.functions.stage import Stage, function, pack_event, stage
from stoker_local import NetworkShape

__all__ = ["scaling"]

ROUNDS = 3
FUNCTIONS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The packed data, and the latency of its bucket.

    Attributes:
        first_byte_seconds: time to the bucket's first byte; it sends 90 MB/s per connection.
        parts: number of parts.
        samples: number of samples per part.
        size_bytes: size of a sample.
    """

    title: str
    first_byte_seconds: float
    parts: int
    samples: int
    size_bytes: int


SETTINGS = (
    Setting(title="3 KB, 20 ms", first_byte_seconds=0.02, parts=16, samples=1000, size_bytes=3_000),
    Setting(title="110 KB, 20 ms", first_byte_seconds=0.02, parts=16, samples=200, size_bytes=110_000),
    Setting(title="3 KB, 200 ms", first_byte_seconds=0.2, parts=8, samples=640, size_bytes=3_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One packing of all parts.

    Attributes:
        seconds: time until the last function has answered.
        samples_per_second: rate of all functions together.
        mb_per_second: rate in MB of raw data per second.
        function_processors: average number of processors that the functions used.
        other_processors: average number of processors that the bucket and the function cloud used.
    """

    seconds: float
    samples_per_second: float
    mb_per_second: float
    function_processors: float
    other_processors: float


async def scaling(patience: Patience) -> str:
    """Measure, and return the table."""
    found: dict[tuple[str, int], list[Figure]] = defaultdict(list)
    async with stage(function("pack", concurrency=max(FUNCTIONS)), shape=NetworkShape()) as place:
        for number in range(ROUNDS):
            for setting in SETTINGS:
                place.bucket.reshape(
                    NetworkShape(first_byte_seconds=setting.first_byte_seconds, connection_bytes_per_second=90e6)
                )
                events = _events(place, setting)
                for functions in FUNCTIONS:
                    figure = await patience.measure(partial(measure, place, setting, events, functions))
                    found[setting.title, functions].append(figure)
                    print(f"round {number}, {setting.title}, {functions} functions: {figure}", flush=True)
    return text(found)


def _events(place: Stage, setting: Setting) -> list[dict[str, Any]]:
    """Return a small event to warm up each function, and the parts."""
    objects = place.put_raw("raw", setting.parts * setting.samples, setting.size_bytes)
    warming = [pack_event("raw", objects[first : first + 5], "warming") for first in range(max(FUNCTIONS))]
    starts = range(0, len(objects), setting.samples)
    return warming + [pack_event("raw", objects[start : start + setting.samples], "packed") for start in starts]


async def measure(place: Stage, setting: Setting, events: Sequence[Any], functions: int) -> Figure:
    """Pack all parts with ``functions`` warm functions."""
    place.cloud.reclaim()
    place.bucket.objects["data"].clear()
    warming, parts = events[: max(FUNCTIONS)], iter(events[max(FUNCTIONS) :])
    await asyncio.gather(*(place.invoke("pack", event) for event in warming[:functions]))

    async def work() -> None:
        for event in parts:
            await place.invoke("pack", event)

    with place.measure() as usage:
        async with asyncio.TaskGroup() as group:
            for _ in range(functions):
                group.create_task(work())
    samples = setting.parts * setting.samples
    return Figure(
        seconds=usage.seconds,
        samples_per_second=samples / usage.seconds,
        mb_per_second=samples * setting.size_bytes / usage.seconds / 1e6,
        function_processors=usage.function_cpu_seconds / usage.seconds,
        other_processors=usage.other_cpu_seconds / usage.seconds,
    )


def text(found: Mapping[tuple[str, int], Sequence[Figure]]) -> str:
    """Return the table of medians."""
    cores = os.cpu_count()
    head = ["samples, first byte", "functions", "samples/s", "MB/s", "times one function's"]
    head += ["processors: functions", "bucket", f"of {cores}"]
    rows = []
    for (setting, functions), figures in found.items():
        speed = median(each.samples_per_second for each in figures)
        alone = median(each.samples_per_second for each in found[setting, 1])
        of_functions = median(each.function_processors for each in figures)
        of_others = median(each.other_processors for each in figures)
        rows.append(
            [
                setting,
                str(functions),
                f"{speed:,.0f}",
                f"{median(each.mb_per_second for each in figures):.1f}",
                f"{speed / alone:.2f}",
                f"{of_functions:.2f}",
                f"{of_others:.2f}",
                f"{(of_functions + of_others) / (cores or 1):.0%}",
            ]
        )
    return table(head, rows)
