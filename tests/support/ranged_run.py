"""One epoch of groups of samples or of units, read by ranges from a store that a test spoils."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Continuous, FetchConfig, OrderConfig, Schema
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.gather import gather
from stoker._fetch.groups import SampleGroupReader
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._fetch.range_plan import ReadLimits
from stoker._fetch.units import UnitReader
from stoker._memory.ring import Ring
from stoker._memory.unit_ring import UnitRing
from stoker._order.sharding import RankSharding
from stoker._order.steps import PlannedStep, PositionRange
from stoker._order.units import Units
from stoker.abc import Tier
from support.batching_store import BatchingStore
from support.faulty_store import FaultyStore, StoreProfile
from support.packed_objects import packed_objects, value_at

SCHEMA = Schema({"number": Array("int64"), "image": Array("uint8", (20, 10)), "sound": Bytes()})
COUNTS = [30, 1, 44, 25, 50]
RNG = np.random.default_rng(0)
SAMPLES: list[dict[str, Any]] = [
    {"number": i, "image": RNG.integers(0, 256, (20, 10), np.uint8), "sound": RNG.bytes(i % 9 * 40)}
    for i in range(sum(COUNTS))
]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)
SLOT_BYTES = 12_000
FIRSTS = np.cumsum([0, *COUNTS])


UNIT_BYTES = 2000
UNITS = Units.of(MANIFEST.rows, UNIT_BYTES)


class Run:
    """One epoch of groups, from a store that the test spoils, into a ring of four slots."""

    order = OrderConfig(shuffle="full", seed=1)

    def __init__(self, seed: int, profile: StoreProfile | None = None, **config: Any) -> None:
        self.store = self.create_store(profile or StoreProfile(), seed)
        self.ring = self.create_ring()
        self.fetcher = Fetcher(
            self.store,
            ring=self.ring,
            tiers=self.create_tiers(seed),
            rng=random.Random(seed),
            config=FetchConfig(hedge_first_seconds=0.2, **config),
            small_hedge_bytes=SLOT_BYTES // 16,
        )
        self.columns = dict(SCHEMA)
        limits = ReadLimits(slot_bytes=SLOT_BYTES, gap_bytes=2000, range_bytes=SLOT_BYTES // 32)
        self.reading = self.create_reader(limits)
        self.items: list[Item[Any]] = []
        self.delivered: list[int] = []

    def create_store(self, profile: StoreProfile, seed: int) -> FaultyStore:
        return FaultyStore(OBJECTS, profile=profile, seed=seed)

    def create_ring(self) -> Ring:
        return Ring(4, SLOT_BYTES)

    def create_tiers(self, seed: int) -> Sequence[Tier]:
        return ()

    def create_reader(self, limits: ReadLimits) -> Any:
        return SampleGroupReader(MANIFEST, self.columns, self.fetcher, self.ring, limits)

    async def play(self) -> None:
        """Deliver the epoch; the first error ends it."""
        await self.reading.prepare()
        partition = RankSharding(samples=len(SAMPLES), batch_size=16)
        steps = self.reading.steps(PositionRange(order=self.order, sharding=partition, end_epoch=1))
        planned: list[PlannedStep[Any]] = []
        while (step := steps.next()) is not None:
            planned.append(step)
            self.items += [Item(index, group, step.number) for index, group in step.first_uses]
        items = iter(self.items)
        prefetcher = Prefetcher(self.reading, self.ring, Continuous(), lambda: next(items, None), hedge_slots=0)
        running = asyncio.create_task(prefetcher.run())
        try:
            for step in planned:
                prefetcher.advance(step.number, 0)
                for segment in step.segments:
                    for item in segment.released_before:
                        prefetcher.release(item)
                    slots = [await prefetcher.wait(item) for item in segment.items]
                    await asyncio.sleep(0.01)
                    self._use(slots, *segment.row_indices())
                    for item in segment.released_after:
                        prefetcher.release(item)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            prefetcher.release_all()

    def _use(self, slots: list[int], which: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        picked = self.reading.locate(slots, which, rows)
        values = gather(picked, self.columns)
        for place, number in enumerate((FIRSTS[picked.super_samples] + picked.rows).tolist()):
            found = {name: value_at(column, place) for name, column in values.items()}
            wanted = SAMPLES[number] | {"image": SAMPLES[number]["image"].tolist()}
            assert found == wanted, "wrong bytes were delivered"
            self.delivered.append(number)

    def leaves_nothing(self) -> bool:
        now = self.ring.statistics()
        return (now.free, self.store.active, self.fetcher._reader._limiter.held) == (self.ring.slots, 0, 0)


class BatchRun(Run):
    """One epoch of groups, each read by one request."""

    store: BatchingStore

    def create_store(self, profile: StoreProfile, seed: int) -> BatchingStore:
        return BatchingStore(OBJECTS, profile=profile, seed=seed)


class UnitRun(Run):
    """One epoch of units in a window of 8, in memory for about ten units."""

    order = OrderConfig(window=8, seed=1, unit_bytes=UNIT_BYTES)

    def create_ring(self) -> Ring:
        return UnitRing(40, 14 * UNIT_BYTES, 64)

    def create_reader(self, limits: ReadLimits) -> Any:
        assert isinstance(self.ring, UnitRing)
        return UnitReader(MANIFEST, self.columns, self.fetcher, self.ring, limits, UNITS)


async def cancel_after(seconds: float, work: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine, cancel it after a time, and check that it ends as cancelled."""
    running = asyncio.create_task(work)
    await asyncio.sleep(seconds)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
