"""A bound on bytes a second, in virtual time: alone, and in a fetcher whose requests are late and fail."""

from __future__ import annotations

import asyncio
import random

import pytest

from stoker import FetchConfig
from stoker._fetch.concurrency import RateLimit
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.errors import ConfigError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.fetching import seconds

RATE = 1e6
OBJECTS = {f"{number}": random.Random(number).randbytes(50_000) for number in range(40)}


def test_without_a_limit_there_is_no_wait() -> None:
    async def main() -> None:
        limit = RateLimit(None)
        for _ in range(100):
            await limit.wait(1 << 30)
        assert seconds() == 0.0

    run_virtual(main())


def test_permits_are_granted_in_order_of_arrival() -> None:
    async def main() -> None:
        limit, order = RateLimit(RATE), list[int]()

        async def take(number: int) -> None:
            await limit.wait(100_000 if number % 3 else 1000)
            order.append(number)

        await asyncio.gather(*(take(number) for number in range(30)))
        assert order == list(range(30))
        assert seconds() == pytest.approx((19 * 100_000 + 10 * 1000) / RATE - 0.1, abs=0.01)

    run_virtual(main())


def test_a_wait_that_is_cancelled_takes_nothing() -> None:
    async def main() -> None:
        limit = RateLimit(RATE)
        await limit.wait(1_000_000)
        waiting = [asyncio.ensure_future(limit.wait(1_000_000)) for _ in range(5)]
        await asyncio.sleep(0.1)
        for each in waiting[:4]:
            each.cancel()
        await waiting[4]
        assert seconds() == pytest.approx(0.9)

    run_virtual(main())


def test_what_is_charged_delays_those_that_come_after_it() -> None:
    async def main() -> None:
        limit = RateLimit(RATE)
        limit.charge(2_000_000)
        await limit.wait(1)
        assert seconds() == pytest.approx(1.9)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_fetcher_requests_no_more_than_its_rate_hedges_and_retries_included(seed: int) -> None:
    async def main() -> None:
        profile = StoreProfile(late_fraction=0.1, late_seconds=0.5, probability={"reset": 0.1, "throttle_bare": 0.05})
        store = FaultyStore(OBJECTS, profile=profile, seed=seed)
        ring = Ring(50, 50_000)
        config = FetchConfig(max_bytes_per_second=RATE, deadline_seconds=1.0)
        fetcher = Fetcher(store, ring=ring, rng=random.Random(seed), config=config)
        await asyncio.gather(*(fetcher.fetch(ref) for ref in pin(OBJECTS)))
        asked = [(at, end - start) for at, (_, start, end) in zip(store.sent_seconds, store.sent_ranges, strict=True)]
        assert fetcher.stats.hedges
        assert fetcher.stats.retries
        for first in range(len(asked)):
            sent = 0
            for at, size_bytes in asked[first:]:
                sent += size_bytes
                burst = 0.1 * RATE + 50_000 * (1 + fetcher.stats.hedges + sum(fetcher.stats.retries.values()))
                assert sent <= RATE * (at - asked[first][0]) + burst
        assert seconds() >= sum(size for _, size in asked[:-1]) / RATE - 0.1 - 0.5
        assert seconds() < 2 * len(asked) * 50_000 / RATE

    run_virtual(main())


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="max_bytes_per_second must be more than 0 and less than inf, or None"):
        FetchConfig(max_bytes_per_second=rate)
