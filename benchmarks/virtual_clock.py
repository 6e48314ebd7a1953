"""The cost of a simulated fetch on the virtual clock: `python -m benchmarks.virtual_clock`.

One fetch is one object of 1,000 bytes through prefetcher, fetcher (permit, hedge timer, checksum) and ring, from a
store that only sleeps 20 ms. So this is the overhead per request, which limits the number of fetches in a test of many
virtual hours.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from statistics import median
from typing import Any

from stoker import Continuous, FetchConfig
from stoker._base.checksum import crc32c
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.abc import ObjectInfo, ObjectRef
from stoker.testing import run_virtual

FETCHES = 2000
ROUNDS = 7
BODY = bytes(1000)
REF = ObjectRef(key="x", size_bytes=len(BODY), crc32c=crc32c(BODY))
INFO = ObjectInfo(key="x", size_bytes=len(BODY), tag="")


class SleepingStore:
    url = "sleeping://"

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        await asyncio.sleep(0.02)
        into[:] = BODY[start:end]
        return INFO

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        return BODY, INFO

    async def head(self, key: str) -> ObjectInfo:
        return INFO

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        yield INFO


async def sleep_only() -> float:
    """The lower bound: the same number of tasks that sleep for the same time, 16 at a time."""
    for _ in range(FETCHES // 16):
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(asyncio.sleep(0.02))
    return asyncio.get_running_loop().time()


async def prefetch(*, hedge: bool) -> float:
    ring = Ring(32, len(BODY))
    fetcher = Fetcher(SleepingStore(), ring=ring, rng=random.Random(0), config=FetchConfig(hedge=hedge))
    items = (Item(index, REF, index) for index in range(FETCHES))
    prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=4)
    async with asyncio.TaskGroup() as group:
        group.create_task(prefetcher.run())
        for index in range(FETCHES):
            await prefetcher.wait(index)
            prefetcher.release(index)
    return asyncio.get_running_loop().time()


def main() -> None:
    cases: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
        "a task that sleeps (floor)": sleep_only,
        "a fetch, hedging off": partial(prefetch, hedge=False),
        "a fetch, hedging on": partial(prefetch, hedge=True),
    }
    print(f"median of {ROUNDS} rounds of {FETCHES} fetches, in turn")
    microseconds: dict[str, list[float]] = {name: [] for name in cases}
    virtual_seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            begun = time.perf_counter()
            virtual_seconds[name] = run_virtual(case())
            microseconds[name].append((time.perf_counter() - begun) / FETCHES * 1e6)
    for name, figures in microseconds.items():
        spread = f"{min(figures):.0f} to {max(figures):.0f}"
        print(f"{name:28} {median(figures):6.0f} µs ({spread}), {virtual_seconds[name]:.1f} virtual seconds in all")


if __name__ == "__main__":
    main()
