"""Starts from a bucket of which one request in ten is two seconds late, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest

from stoker import Array, Continuous, FetchConfig, OrderConfig, Schema
from stoker._base.retry import RetryingReader
from stoker._base.task_group import task_group
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.config import FetchCounters
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Prefetcher
from stoker._fetch.super_samples import SuperSampleReader
from stoker._format.manifest import POINTER_KEY
from stoker._format.versions import read_manifest
from stoker._memory.ring import Ring
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange
from stoker.abc import ObjectInfo
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects

SCHEMA = Schema({"image": Array("uint8", (1000,))})
PACKED, OBJECTS = packed_objects(SCHEMA, [{"image": np.full(1000, n % 251, np.uint8)} for n in range(400)], [20] * 20)
CONFIG = FetchConfig(split_min_bytes=5000)
"""Objects of 20 KB, in four ranges each as those of 8 MiB are."""


class LateStore(FaultyStore):
    """A store of which whole reads and heads are late, too."""

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        await self._answered()
        return await super().get(key)

    async def head(self, key: str) -> ObjectInfo:
        await self._answered()
        return (await super().get(key))[1]

    async def _answered(self) -> None:
        late = self._rng.random() < self.profile.late_fraction
        self.sent_seconds.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.profile.first_byte_seconds + self.profile.late_seconds * late)


@dataclass(frozen=True)
class Start:
    """A start: how long it took, and what was sent."""

    seconds: float
    manifest_hedges: int
    requests: int
    fetch: FetchCounters


def start(seed: int, late_fraction: float = 0.1, *, slots: int = 24, objects: int = 4) -> Start:
    """Open a data set and fetch the first batch, which needs a number of objects."""
    profile = StoreProfile(late_fraction=late_fraction, first_byte_seconds=0.025, bytes_per_second=1e6)
    store = LateStore({**OBJECTS, POINTER_KEY: PACKED.to_bytes()}, profile=profile, seed=seed)

    async def main() -> Start:
        reader = RetryingReader(store)
        manifest = await read_manifest(reader)
        ring = Ring(slots, manifest.largest_bytes)
        fetcher = Fetcher(store, ring=ring, rng=random.Random(seed), config=CONFIG, is_start=True)
        reading = SuperSampleReader(manifest, SCHEMA, fetcher, ring)
        partition = RankSharding(samples=manifest.samples, batch_size=40)
        order = OrderConfig(seed=seed, window=objects)
        steps = StepQueue(reading.steps(PositionRange(order=order, sharding=partition)), None)
        prefetcher = Prefetcher(reading, ring, Continuous(), steps.next_item, hedge_slots=2)
        async with task_group() as group:
            running = group.create_task(prefetcher.run())
            step = steps.next_step()
            assert step is not None
            for item in [item for segment in step.segments for item in segment.items]:
                await prefetcher.wait(item)
            seconds = asyncio.get_running_loop().time()
            found = fetcher.stats
            running.cancel()
        return Start(seconds, reader.hedges, len(store.sent_seconds), found)

    return run_virtual(main())


def test_ninety_nine_of_a_hundred_starts_take_a_third_of_a_second_where_one_request_in_ten_is_late() -> None:
    starts = [start(seed) for seed in range(300)]
    seconds = sorted(each.seconds for each in starts)
    assert seconds[len(seconds) * 99 // 100 - 1] <= 0.35, seconds[-10:]
    assert any(each.manifest_hedges for each in starts)
    assert any(each.fetch.start_hedges for each in starts)


def test_hedges_of_a_start_are_two_for_each_request_at_most() -> None:
    for seed in range(20):
        found = start(seed, late_fraction=1.0).fetch
        asked = found.requests - found.hedges
        assert 0 < found.start_hedges <= 2 * asked
        assert found.hedges - found.start_hedges <= CONFIG.hedge_burst + CONFIG.hedge_fraction * asked


def test_a_start_without_late_requests_hedges_nothing() -> None:
    found = start(1, late_fraction=0.0)
    assert (found.manifest_hedges, found.fetch.hedges) == (0, 0)
    assert found.seconds == pytest.approx(0.09, abs=0.06)


def test_a_ring_without_a_spare_slot_starts_all_the_same() -> None:
    assert start(3, slots=6).seconds < 10.0
