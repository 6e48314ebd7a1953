"""A store in which 5% of requests are late by 2 s, on a link that is full without them: hedges keep it full.

20 ms to the first byte, 90 MB/s per connection and 600 MB/s in all, objects of 8 MiB; everything that has a size is 64
times smaller here, which changes no time.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from statistics import harmonic_mean, median

import pytest

from stoker import Continuous, FetchConfig
from stoker._fetch.config import FetchCounters
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin

SMALLER = 64
BODY = random.Random(0).randbytes((8 << 20) // SMALLER)
GETS = 1000
SLOTS = 61
"""What 512 MB, the default, has room for."""
WINDOW_ITEMS = 8


@dataclass(frozen=True)
class Reading:
    bytes_per_second: float
    stats: FetchCounters
    concurrency: int


async def read(seed: int, late_fraction: float, *, hedge: bool = True) -> Reading:
    """Take items in order as fast as they come, with a window of them held."""
    profile = StoreProfile(
        bytes_per_second=90e6 / SMALLER, total_bytes_per_second=600e6 / SMALLER, late_fraction=late_fraction
    )
    store = FaultyStore({"x": BODY}, profile=profile, seed=seed)
    ring = Ring(SLOTS, len(BODY))
    config = FetchConfig(split_min_bytes=(1 << 20) // SMALLER, hedge=hedge)
    fetcher = Fetcher(store, ring=ring, rng=random.Random(seed), config=config)
    (ref,) = pin(store.objects)
    items = iter([Item(index, ref, index // 4) for index in range(GETS)])
    prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=3)
    running = asyncio.create_task(prefetcher.run())
    for index in range(GETS):
        prefetcher.advance(index // 4, index)
        await prefetcher.wait(index)
        if index >= WINDOW_ITEMS:
            prefetcher.release(index - WINDOW_ITEMS)
    rate = GETS * len(BODY) * SMALLER / asyncio.get_running_loop().time()
    await running
    prefetcher.release_all()
    assert ring.statistics().free == SLOTS
    return Reading(rate, fetcher.stats, fetcher._reader._limiter.limit)


def test_late_requests_cost_less_than_a_tenth_of_the_rate() -> None:
    calm_rates, late_rates = [], []
    for seed in range(6):
        calm, late = run_virtual(read(seed, 0.0)), run_virtual(read(seed, 0.05))
        calm_rates.append(calm.bytes_per_second)
        late_rates.append(late.bytes_per_second)
        assert calm.bytes_per_second >= 0.9 * 600e6
        assert calm.stats.hedges <= 0.01 * GETS, "nothing was late"
        first_tries = late.stats.requests - late.stats.hedges
        assert late.stats.hedges <= 0.10 * first_tries + FetchConfig().hedge_burst
        assert late.stats.hedge_wins > 0.02 * GETS
        assert not late.stats.retries
    ratios = [late_rate / calm_rate for late_rate, calm_rate in zip(late_rates, calm_rates, strict=True)]
    print("\nrate with 5% of requests late by 2 s, of the rate without:", *(f"{ratio:.3f}" for ratio in sorted(ratios)))
    # One run may be out of luck: with more of the first 16 late than there are hedges yet, some wait for the 2 s.
    assert harmonic_mean(late_rates) >= 0.95 * harmonic_mean(calm_rates), "over all runs"
    assert median(ratios) >= 0.98


def test_without_hedges_they_cost_most_of_it() -> None:
    assert run_virtual(read(0, 0.05, hedge=False)).bytes_per_second < 0.5 * 600e6


@pytest.mark.parametrize("late_fraction", [0.0, 0.05])
def test_the_limit_settles_where_more_requests_bring_nothing(late_fraction: float) -> None:
    """Seven connections fill the link."""
    for seed in range(3):
        assert 7 <= run_virtual(read(seed, late_fraction)).concurrency <= 25
