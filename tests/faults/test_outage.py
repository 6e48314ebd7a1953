"""When the store is gone: nothing is lost that need not be, and its return is not met by a storm."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import nullcontext

import pytest

from stoker import Continuous, FetchConfig
from stoker._fetch.config import LARGE_REQUEST_BYTES
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.errors import FetchError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin

OBJECTS = {f"data/{number:03}": bytes([number]) * 500 for number in range(200)}


class Training:
    """Uses an object every 50 ms, with 64 slots of look-ahead."""

    def __init__(
        self,
        profile: StoreProfile,
        *,
        config: FetchConfig | None = None,
        seed: int = 0,
        slots: int = 64,
        count: int = 200,
    ) -> None:
        self.store = FaultyStore(OBJECTS, profile=profile, seed=seed)
        self.ring = Ring(slots, 500)
        self.count = count
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(seed), config=config)
        items = iter([Item(index, ref, index) for index, ref in enumerate(pin(OBJECTS)[:count])])
        self.prefetcher = Prefetcher(self.fetcher, self.ring, Continuous(), lambda: next(items, None), hedge_slots=4)
        self.failed: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.prefetcher.run())
            for index in range(self.count):
                self.prefetcher.advance(index, index)
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
    training = Training(StoreProfile(outages=[(1.0, 31.0)]), seed=seed)
    run_virtual(training.run())
    assert training.store.faults["outage"] > 0
    assert training.failed == []


def test_in_a_long_outage_the_request_rate_is_bounded_and_every_item_gets_its_error() -> None:
    training = Training(StoreProfile(outages=[(0.5, 1e9)]), slots=16, count=50)
    run_virtual(training.run())
    config = FetchConfig()
    assert len(training.failed) > 20
    per_minute = training.requests_by_period(60.0)
    assert len(per_minute) > 2
    # Without back-off a refused request takes 20 ms: 50 a second and permit instead of 1.5 at most.
    assert max(per_minute.values()) <= 1.5 * 60.0 * config.start_limit(LARGE_REQUEST_BYTES)
    stats = training.fetcher.stats
    assert stats.hedges <= config.hedge_burst + config.hedge_fraction * stats.requests
    assert training.ring.statistics().free == 16


def test_the_end_of_an_outage_brings_no_burst_beyond_the_concurrency() -> None:
    training = Training(StoreProfile(outages=[(1.0, 20.0)]))
    run_virtual(training.run())
    assert training.store.peak_active <= FetchConfig().max_concurrency + 2


def test_a_store_that_throttles_what_is_too_much_finds_its_client_slowing_down() -> None:
    training = Training(StoreProfile(first_byte_seconds=0.5))
    store = training.store
    store.script = lambda number, key: "throttle" if store.active > 8 else None
    run_virtual(training.run())
    stats = training.fetcher.stats
    assert training.failed == []
    assert stats.failures["ThrottledError"] > 0
    assert training.fetcher._reader._limiter.limit <= 16
    assert stats.failures["ThrottledError"] < 0.5 * stats.requests


def test_when_everything_turns_slow_at_once_the_load_does_not_double() -> None:
    training = Training(StoreProfile())
    profile = training.store.profile

    async def main() -> None:
        async def slow_down() -> None:
            await asyncio.sleep(2.0)
            profile.first_byte_seconds = 5.0

        async with asyncio.TaskGroup() as group:
            group.create_task(slow_down())
            await training.run()

    run_virtual(main())
    stats = training.fetcher.stats
    assert 0 < stats.hedges <= 2 + 0.1 * len(OBJECTS)
    assert stats.requests <= 1.1 * len(OBJECTS) + 2
    assert training.failed == []


class Pausing(Training):
    """Stops for a while before some object, as for a validation."""

    def __init__(self, profile: StoreProfile, pauses: dict[int, float], *, config: FetchConfig | None = None) -> None:
        super().__init__(profile, config=config)
        self.pauses = pauses
        self.failed_at: list[int] = []
        self.waited: dict[int, float] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(self.prefetcher.run())
            for index in range(len(OBJECTS)):
                await asyncio.sleep(self.pauses.get(index, 0.05))
                self.prefetcher.advance(index, index)
                begun = loop.time()
                try:
                    await self.prefetcher.wait(index)
                except FetchError:
                    self.failed.append(loop.time())
                    self.failed_at.append(index)
                    fetching.cancel()
                    return
                finally:
                    self.waited[index] = loop.time() - begun
                self.prefetcher.release(index)


FEW_ATTEMPTS = FetchConfig(attempts=2)


@pytest.mark.parametrize("config", [None, FEW_ATTEMPTS], ids=["deadline", "attempts"])
@pytest.mark.parametrize("pause_seconds", [70.0, 600.0])
def test_an_outage_that_is_over_when_the_loop_comes_back_fails_nothing(
    config: FetchConfig | None, pause_seconds: float
) -> None:
    training = Pausing(StoreProfile(outages=[(0.1, 65.1)]), {1: pause_seconds}, config=config)
    run_virtual(training.run())
    assert training.store.faults["outage"] > 0
    assert training.failed == []
    assert max(training.waited.values()) < 1.0
    assert training.ring.statistics().free == 64


def test_what_failed_ahead_is_fetched_anew_side_by_side_when_the_loop_continues() -> None:
    training = Pausing(StoreProfile(outages=[(0.1, 69.1)]), {1: 70.0})
    run_virtual(training.run())
    assert training.failed == []
    late = [index for index, seconds in training.waited.items() if seconds > 0.001]
    assert len(late) < 8, "the others arrive while the first is waited for"


@pytest.mark.parametrize("config", [None, FEW_ATTEMPTS], ids=["deadline", "attempts"])
def test_a_long_outage_fails_each_fetch_within_one_and_a_half_deadlines(
    config: FetchConfig | None,
) -> None:
    training = Pausing(StoreProfile(outages=[(3.0, 1e9)]), {50: 100.0}, config=config)
    run_virtual(training.run())
    (failed,) = training.failed_at
    assert training.waited[failed] <= 1.5 * FetchConfig().deadline_seconds + 1.0


def test_an_object_that_is_gone_or_spoilt_is_not_fetched_anew() -> None:
    for harm in ("missing", "corrupt"):
        training = Pausing(StoreProfile(), {20: 30.0})
        if harm == "missing":
            del training.store.objects["data/030"]
        else:
            training.store.script = lambda number, key: "corrupt" if key == "data/030" else None
        with pytest.raises(ExceptionGroup) if harm == "missing" else nullcontext():
            run_virtual(training.run())
        assert max(training.waited) == 30
        readings = sum(key == "data/030" for key, _, _ in training.store.sent_ranges)
        assert readings == (1 if harm == "missing" else FetchConfig().checksum_attempts)
