"""When the store is gone: nothing is lost that need not be, and its return is not met by a storm."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from stoker.clock import run_virtual
from stoker.errors import FetchError
from stoker.fetch.fetcher import FetchConfig, Fetcher
from stoker.fetch.prefetcher import Item, Prefetcher
from stoker.ring import Ring
from stoker.schedule import Continuous
from support.faulty_store import FaultyStore, Weather, pin

OBJECTS = {f"data/{number:03}": bytes([number]) * 500 for number in range(200)}


class Training:
    """Uses an object every 50 ms, with 64 slots of look-ahead."""

    def __init__(self, weather: Weather, *, config: FetchConfig | None = None, seed: int = 0) -> None:
        self.store = FaultyStore(OBJECTS, weather=weather, seed=seed)
        self.ring = Ring(64, 500)
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(seed), config=config)
        items = iter([Item(index, ref, index) for index, ref in enumerate(pin(OBJECTS))])
        self.prefetcher = Prefetcher(self.fetcher, self.ring, Continuous(), lambda: next(items, None), hedge_slots=4)
        self.failed: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.prefetcher.run())
            for index in range(len(OBJECTS)):
                self.prefetcher.reached(index, index)
                try:
                    await self.prefetcher.wait(index)
                except FetchError:
                    self.failed.append(asyncio.get_running_loop().time())
                await asyncio.sleep(0.05)
                self.prefetcher.release(index)

    def requests_by_period(self, seconds: float) -> Counter[int]:
        return Counter(int(sent / seconds) for sent in self.store.sent_seconds)


@pytest.mark.parametrize("seed", range(5))
def test_an_outage_of_half_the_deadline_fails_nothing(seed: int) -> None:
    training = Training(Weather(outages=[(1.0, 31.0)]), seed=seed)
    run_virtual(training.run())
    assert training.store.faults["outage"] > 0
    assert training.failed == []


def test_in_a_long_outage_the_request_rate_is_bounded_and_every_item_gets_its_error() -> None:
    training = Training(Weather(outages=[(1.0, 1e9)]))
    run_virtual(training.run())
    config = FetchConfig()
    assert len(training.failed) > 100
    per_minute = training.requests_by_period(60.0)
    assert len(per_minute) > 2
    # Without back-off a refused request takes 20 ms: 50 a second and permit instead of 1.5 at most.
    assert max(per_minute.values()) <= 1.5 * 60.0 * config.concurrency_start
    stats = training.fetcher.stats
    assert stats.hedges <= config.hedge_burst + config.hedge_fraction * stats.requests
    assert training.ring.statistics().free == 64


def test_the_end_of_an_outage_brings_no_burst_beyond_the_concurrency() -> None:
    training = Training(Weather(outages=[(1.0, 20.0)]))
    run_virtual(training.run())
    assert training.store.peak_active <= FetchConfig().concurrency_most + 2


def test_a_store_that_throttles_what_is_too_much_finds_its_client_slowing_down() -> None:
    training = Training(Weather(first_byte_seconds=0.5))
    store = training.store
    store.script = lambda number, key: "throttle" if store.active > 8 else None
    run_virtual(training.run())
    stats = training.fetcher.stats
    assert training.failed == []
    assert stats.throttled > 0
    assert stats.concurrency <= 16
    assert stats.throttled < 0.5 * stats.requests


def test_when_everything_turns_slow_at_once_the_load_does_not_double() -> None:
    training = Training(Weather())
    weather = training.store.weather

    async def main() -> None:
        async def slow_down() -> None:
            await asyncio.sleep(2.0)
            weather.first_byte_seconds = 5.0

        async with asyncio.TaskGroup() as group:
            group.create_task(slow_down())
            await training.run()

    run_virtual(main())
    stats = training.fetcher.stats
    assert 0 < stats.hedges <= 2 + 0.1 * len(OBJECTS)
    assert stats.requests <= 1.1 * len(OBJECTS) + 2
    assert training.failed == []
