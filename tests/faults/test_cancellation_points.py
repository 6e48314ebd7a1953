"""Cancelled at every single await, one after the other: the ring is consistent, nothing is left, it can begin again.

The run is a small one with something of everything: split urgent objects, a hedge, a corrupt reading, a retry, a slow
transport that goes on writing while it closes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from stoker import Continuous, FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.errors import StokerError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.suspensions import Suspensions

OBJECTS = {f"data/{number:02}": random.Random(number).randbytes(4000) for number in range(12)}
FAULTS = {1: "corrupt", 5: "stall", 12: "reset", 15: "drip", 16: "error", 18: "throttle"}
STOPPED = "the prefetcher was stopped"


class Small:
    """The small run: fetches twelve objects into six slots."""

    def __init__(self) -> None:
        profile = StoreProfile(bytes_per_second=1e6, tail_sigma=0.2, closing_seconds=0.1)
        self.store = FaultyStore(OBJECTS, profile=profile, seed=1)
        self.store.script = lambda number, key: FAULTS.get(number)
        self.ring = Ring(6, 4096)
        config = FetchConfig(split_min_bytes=1000, hedge_first_seconds=0.05, start_concurrency=4, attempt_seconds=0.5)
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(1), config=config)
        self.refs = pin(OBJECTS)
        self.used: list[int] = []

    def prefetcher(self, first: int = 0) -> Prefetcher[Any]:
        items = iter([Item(index, ref, index // 3) for index, ref in enumerate(self.refs[first:])])
        return Prefetcher(self.fetcher, self.ring, Continuous(), lambda: next(items, None), hedge_slots=1)

    async def consume(self, prefetcher: Prefetcher[Any], first: int = 0) -> None:
        for index, ref in enumerate(self.refs[first:]):
            try:
                slot = await prefetcher.wait(index)
            except StokerError as error:
                if STOPPED in str(error):
                    return
                raise
            await asyncio.sleep(0.001)
            assert bytes(self.ring.view(slot, ref.size_bytes)) == OBJECTS[ref.key], "wrong bytes were delivered"
            prefetcher.release(index)
            self.used.append(first + index)

    def assert_nothing_is_left(self, prefetcher: Prefetcher[Any]) -> None:
        assert self.store.active == 0, "a transport goes on"
        assert self.fetcher._reader._limiter.held == 0, "a permit was not given back"
        now = self.ring.statistics()
        assert now.filling == 0
        assert now.ready == now.committed - len(self.used), "a slot is accounted for twice, or not at all"
        prefetcher.release_all()
        assert self.ring.statistics().free == self.ring.slots

    async def begin_again(self) -> None:
        """Fetch what is missing with the same fetcher and ring."""
        self.store.script = lambda number, key: None
        first = len(self.used)
        prefetcher = self.prefetcher(first)
        async with asyncio.TaskGroup() as group:
            group.create_task(prefetcher.run())
            await self.consume(prefetcher, first)
        assert self.used == list(range(len(OBJECTS)))
        assert self.ring.statistics().free == self.ring.slots


def counted(name: str) -> bool:
    return not name.startswith(("Small.", "whole_run", "Event.", "lone_fetch"))


async def whole_run(points: Suspensions, cancel: Callable[[asyncio.Task[None]], object] | None = None) -> None:
    """Run to the end, or until the run is cancelled; either way nothing is left, and it can go on."""
    small = Small()
    points.watch()
    prefetcher = small.prefetcher()
    running = asyncio.create_task(prefetcher.run())
    if cancel is not None:
        cancel(running)
    consuming = asyncio.create_task(small.consume(prefetcher))
    outcomes = await asyncio.gather(running, consuming, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError | None)
    assert outcomes[1] is None
    # What a cancelled consumer had not used yet is released with the rest.
    small.assert_nothing_is_left(prefetcher)
    asyncio.get_running_loop().set_task_factory(None)
    await small.begin_again()


def suspensions() -> list[str]:
    points = Suspensions(counted)
    run_virtual(whole_run(points))
    return points.seen


def test_the_small_run_suspends_in_every_part_of_the_machinery() -> None:
    seen = Counter(suspensions())
    print(f"\n{seen.total()} suspensions: {dict(seen)}")
    assert {name.rpartition(".")[2] for name in seen} >= {"run", "_fetch_item", "read", "_attempt"}
    assert seen.total() > 150


@pytest.mark.parametrize(("again", "first", "step"), [(None, 0, 1), (0.0, 0, 2), (0.03, 1, 2)])
def test_a_run_cancelled_at_any_suspension_is_consistent_and_can_begin_again(
    again: float | None, first: int, step: int
) -> None:
    """``again``: seconds until it is cancelled a second time, in the middle of its clean-up."""
    cancelled, points = 0, range(first, len(suspensions()), step)
    for point in points:
        target: list[asyncio.Task[None]] = []

        def cancel(_: asyncio.Task[Any], target: list[asyncio.Task[None]] = target) -> None:
            nonlocal cancelled
            cancelled += target[0].cancel()
            if again is not None:
                asyncio.get_running_loop().call_later(again, target[0].cancel)

        run_virtual(whole_run(Suspensions(counted, {point: cancel}), target.append))
    assert cancelled > 0.95 * len(points)


async def lone_fetch(points: Suspensions, *, urgent: bool) -> None:
    """One fetch task, cancelled by what ``points`` does, then the same again."""
    small = Small()
    small.store.script = lambda number, key: {0: "corrupt", 1: "stall", 2: "stall", 4: "error"}.get(number)
    points.watch()
    fetching = asyncio.create_task(small.fetcher.fetch(small.refs[3], urgent=urgent), name="the fetch")
    await asyncio.wait([fetching])
    asyncio.get_running_loop().set_task_factory(None)
    assert small.store.active == 0
    assert small.fetcher._reader._limiter.held == 0
    now = small.ring.statistics()
    assert (now.filling, now.ready) == (0, 0 if fetching.cancelled() else 1)
    if not fetching.cancelled():
        small.ring.release(fetching.result())
    slot = await small.fetcher.fetch(small.refs[3])
    assert bytes(small.ring.view(slot, 4000)) == OBJECTS[small.refs[3].key]


def cancel_the_fetch(_: asyncio.Task[Any]) -> None:
    (fetching,) = [task for task in asyncio.all_tasks() if task.get_name() == "the fetch"]
    fetching.cancel()


@pytest.mark.parametrize("urgent", [False, True])
def test_a_fetch_cancelled_at_any_suspension_frees_its_slots_and_its_permits(urgent: bool) -> None:
    points = Suspensions(counted)
    run_virtual(lone_fetch(points, urgent=urgent))
    assert len(points.seen) > 12
    for point in range(len(points.seen)):
        for second in (None, point + 1, point + 3):
            at = {place: cancel_the_fetch for place in (point, second) if place is not None}
            run_virtual(lone_fetch(Suspensions(counted, at), urgent=urgent))
