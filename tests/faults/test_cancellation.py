"""Cancelled at a random moment, once or twice, the prefetcher leaves no task, no transfer and no slot in use."""

from __future__ import annotations

import asyncio
import random

from stoker import Continuous, FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.testing import run_virtual
from support.faulty_store import FAULTS, FaultyStore, StoreProfile, pin

OBJECTS = {f"data/{number:02}": bytes([number]) * 4000 for number in range(30)}
WEATHER = dict.fromkeys(FAULTS, 0.05)


async def cancelled_at_random(seed: int) -> str:
    """Return where the run stood when it was cancelled."""
    rng = random.Random(seed)
    profile = StoreProfile(bytes_per_second=1e6, tail_sigma=1.0, probability=WEATHER, closing_seconds=0.1)
    store = FaultyStore(OBJECTS, profile=profile, seed=seed)
    ring = Ring(8, 4096)
    config = FetchConfig(split_min_bytes=1000, hedge_first_seconds=0.05, start_concurrency=4, min_concurrency=2)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(seed), config=config)
    items = iter([Item(index, ref, index) for index, ref in enumerate(pin(OBJECTS))])
    prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=2)

    async def consume() -> None:
        for index in range(len(OBJECTS)):
            await prefetcher.wait(index)
            await asyncio.sleep(0.01)
            prefetcher.release(index)

    running = asyncio.create_task(prefetcher.run())
    consuming = asyncio.create_task(consume())
    await asyncio.sleep(rng.choice([0.0, 0.02, rng.uniform(0.0, 1.5)]))
    for _ in range(rng.randrange(30)):  # any of the awaits that share an instant
        await asyncio.sleep(0)
    stood = "hedging" if max(store.reading.values(), default=0) > 1 else "reading" if store.active else "idle"
    running.cancel()
    if rng.random() < 0.5:
        await asyncio.sleep(rng.choice([0.0, 0.03]))
        running.cancel()
        consuming.cancel()
    outcomes = await asyncio.gather(running, consuming, return_exceptions=True)
    assert store.active == 0
    assert ring.statistics().filling == 0
    assert fetcher._reader._limiter.held == 0
    assert not any(isinstance(outcome, AssertionError) for outcome in outcomes)
    prefetcher.release_all()
    assert ring.statistics().free == ring.slots
    return stood


def test_a_run_cancelled_anywhere_leaves_nothing() -> None:
    stood = {run_virtual(cancelled_at_random(seed)) for seed in range(300)}
    assert stood == {"idle", "reading", "hedging"}


async def fetch_cancelled_at_every_await(seed: int, turns: int, *, urgent: bool) -> bool:
    """Cancel a lone fetch after ``turns`` turns of the loop; return whether it was still running then."""
    profile = StoreProfile(bytes_per_second=1e5, tail_sigma=0.0, probability=WEATHER, closing_seconds=0.1)
    store = FaultyStore(OBJECTS, profile=profile, seed=seed)
    store.script = lambda number, key: "corrupt" if number == 0 else "stall" if number == 1 else None
    ring = Ring(4, 4096)
    config = FetchConfig(split_min_bytes=1000, hedge_first_seconds=0.05)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(seed), config=config)
    fetching = asyncio.create_task(fetcher.fetch(pin(OBJECTS)[3], urgent=urgent))
    for turn in range(turns):
        await asyncio.sleep(0 if turn < 30 else 0.001)
    running = fetching.cancel()
    await asyncio.wait([fetching])
    assert store.active == 0
    assert fetcher._reader._limiter.held == 0
    now = ring.statistics()
    assert now.filling == 0
    assert now.ready == (0 if fetching.cancelled() else 1)
    return running


def test_a_fetch_cancelled_at_any_turn_frees_its_slots_and_its_permits() -> None:
    for urgent in (False, True):
        still_running = [
            run_virtual(fetch_cancelled_at_every_await(1, turns, urgent=urgent)) for turns in range(0, 600, 3)
        ]
        assert still_running[0]
        assert not still_running[-1], "the last ones had the time to end by themselves"
