"""A cache in virtual time: it keeps what its policy wants, and its reads take what its device does."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from operator import attrgetter

import pytest

from stoker import OrderConfig
from stoker._cache.eviction import CacheEntries, Lru, NoEviction
from stoker._diagnostics.latency import Constant
from stoker._fetch.config import PipelineConfig
from stoker.abc import ObjectRef, Tier
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._caches import CacheModel, SimulatedCache
from stoker_sim._scenario import Scenario, simulate

NOTHING = memoryview(bytearray())
SMALL = ObjectRef(key="small", size_bytes=100, crc32c=0)
LARGE = ObjectRef(key="large", size_bytes=900, crc32c=0)


def tier(capacity: int = 1000, *, uniform: bool = False, latency: float = 0.5) -> SimulatedCache[str]:
    residents = CacheEntries[str](NoEviction() if uniform else Lru(), capacity)
    model = CacheModel(limit_bytes=capacity, bytes_per_second=100.0, latency=Constant(latency))
    return SimulatedCache(residents, attrgetter("key"), model, random.Random(0))


def timed(cache: Tier, *refs: ObjectRef) -> tuple[list[bool], float]:
    async def main() -> tuple[list[bool], float]:
        found = await asyncio.gather(*(cache.read(ref, NOTHING) for ref in refs))
        return list(found), asyncio.get_running_loop().time()

    return run_virtual(main())


def test_a_missing_program_is_reported_at_once() -> None:
    assert timed(tier(), SMALL) == ([False], 0.0)


def test_a_read_takes_its_latency_and_then_its_bytes() -> None:
    cache = tier()
    cache.offer(SMALL, NOTHING)
    found, seconds = timed(cache, SMALL)
    assert found == [True]
    assert seconds == pytest.approx(1.5)


def test_reads_share_the_device() -> None:
    cache = tier(latency=0.0)
    cache.offer(SMALL, NOTHING)
    found, seconds = timed(cache, SMALL, SMALL, SMALL)
    assert found == [True] * 3
    assert seconds == pytest.approx(3.0)


def test_the_policy_decides_evictions_and_a_read_counts_as_a_use() -> None:
    cache, other = tier(), replace(SMALL, key="other")
    for ref in (SMALL, other):
        cache.offer(ref, NOTHING)
    assert timed(cache, SMALL)[0] == [True]
    cache.offer(replace(LARGE, size_bytes=850), NOTHING)
    assert list(cache.entries) == ["small", "large"]


def test_what_has_no_room_under_the_policy_is_not_kept() -> None:
    cache = tier(uniform=True)
    for ref in (LARGE, replace(SMALL, size_bytes=101)):
        cache.offer(ref, NOTHING)
    assert list(cache.entries) == ["large"]


@pytest.mark.parametrize("cached", [0, 10, 30, 60])
def test_a_cache_that_never_evicts_serves_its_share_of_every_later_epoch(cached: int) -> None:
    manifest = synthetic_manifest(super_samples=60, samples=100, super_sample_bytes=1 << 20)
    model = CacheModel(name="cache", limit_bytes=cached << 20)
    scenario = Scenario(
        manifest=manifest,
        feed=PipelineConfig(
            order=OrderConfig(seed=1, window=4),
            batch_size=100,
            memory_bytes=manifest.file_bytes + 16 * manifest.largest_bytes,
        ),
        bucket=BucketModel(first_byte=Constant(0.01)),
        compute=Constant(0.1),
        epochs=3,
        tiers=lambda feed, manifest: [
            SimulatedCache(CacheEntries(NoEviction(), cached << 20), attrgetter("key"), model, random.Random(0))
        ],
    )
    run = simulate(scenario)
    assert sum(each.tier_hits["cache"] for each in run.epochs) == 2 * cached
    assert run.read_bytes >= (3 * 60 - 2 * cached) << 20
