"""Groups of samples read by ranges, under random faults: every value right or a typed error, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from collections import Counter
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
from stoker.errors import CopiedBucketWarning, CredentialsError, FetchError, ObjectChangedError
from stoker.testing import run_virtual
from support.batching_store import BatchingStore
from support.fault_profiles import faulty_profile
from support.faulty_store import FAULTS, FaultyStore, StoreProfile
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


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
def test_random_faults_spoil_no_value_and_leave_nothing(kind: type[Run]) -> None:
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(60):
        run = kind(seed, faulty_profile(seed), attempt_seconds=1.0, checksum_attempts=10)
        run_virtual(run.play())
        assert sorted(run.delivered) == list(range(len(SAMPLES)))
        assert run.leaves_nothing()
        stats = run.fetcher.stats
        faults.update(run.store.faults)
        totals["hedges"] += stats.hedges
        totals["hedge wins"] += stats.hedge_wins
        totals["checksum failures"] += stats.checksum_failures
        totals["retries"] += sum(stats.retries.values())
    print(f"\n60 runs: {dict(faults)}, {dict(totals)}")
    assert set(FAULTS) <= faults.keys()
    assert all(totals[name] for name in ("hedges", "hedge wins", "checksum failures", "retries"))


def test_the_ring_full_of_groups_does_not_keep_small_ranges_from_being_hedged() -> None:
    run = Run(0, StoreProfile(tail_sigma=0.0, probability={"stall": 0.01}))
    run_virtual(run.play())
    assert run.ring.statistics().peak_used == 4
    stats = run.fetcher.stats
    assert stats.hedges == stats.hedge_wins == run.store.faults["stall"] > 0
    assert not stats.retries


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "reset", "throttle", "stall"])
def test_heads_are_read_again_until_they_are_right(fault: str) -> None:
    run = Run(0)
    run.store.script = lambda number, key: fault if number < len(COUNTS) else None
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.store.faults[fault] == len(COUNTS)


def spoil(run: Run, row: int, place: int) -> str:
    """Change a byte of an object for good; return its key."""
    key = MANIFEST.key(row)
    body = bytearray(OBJECTS[key])
    body[place] ^= 1
    run.store.objects[key] = bytes(body)
    return key


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
def test_a_value_spoilt_at_rest_is_an_error_that_names_object_column_and_row(kind: type[Run]) -> None:
    run = kind(0)
    key = spoil(run, 2, -1)
    with pytest.raises(FetchError, match=rf"{key} is corrupt: .* \(column 'sound' of row 43 is not what was packed\)"):
        run_virtual(run.play())
    assert run.leaves_nothing()


def test_a_head_spoilt_at_rest_is_an_error_before_anything_is_delivered_and_can_be_tried_again() -> None:
    run = Run(0)
    key = spoil(run, 3, 100)
    with pytest.raises(FetchError, match=f"{key}.*its head"):
        run_virtual(run.play())
    assert run.leaves_nothing()
    assert run.delivered == []
    run.store.objects[key] = OBJECTS[key]
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))


def test_an_item_spoilt_at_rest_can_be_read_by_the_next_run_in_the_same_memory() -> None:
    run = UnitRun(0)
    key = spoil(run, 3, 100)
    with pytest.raises(FetchError, match=f"{key}.*its head"):
        run_virtual(run.play())
    assert run.leaves_nothing()
    run.store.objects[key] = OBJECTS[key]
    run.items, run.delivered = [], []
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))


def test_a_unit_that_fails_ahead_of_the_consumer_is_fetched_again_in_its_own_memory() -> None:
    """Seeds with outages at other times: whichever units fail, with or without memory, the rest waits in turn."""
    again = 0
    for first in range(2, 60, 3):
        run = UnitRun(first, StoreProfile(tail_sigma=0.0), attempts=1, hedge=False)
        run.store.script = lambda number, key, first=first: "reset" if first <= number < first + 6 else None
        with contextlib.suppress(FetchError):  # of a unit that the consumer waited for
            run_virtual(run.play())
            assert sorted(run.delivered) == list(range(len(SAMPLES)))
            again += run.fetcher.stats.failed > 0
        assert run.leaves_nothing()
    assert again > 5


def test_a_replaced_object_is_reported_or_accepted_on_its_checksums() -> None:
    copied = Run(0)
    copied.store.tags = dict.fromkeys(OBJECTS, "v2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_virtual(copied.play())
    assert [warning.category for warning in caught] == [CopiedBucketWarning]
    assert sorted(copied.delivered) == list(range(len(SAMPLES)))
    replaced = Run(0)
    key = spoil(replaced, 1, 150)
    replaced.store.tags[key] = "v2"
    with pytest.raises(ObjectChangedError, match=key):
        run_virtual(replaced.play())


def test_an_error_that_no_retry_helps_ends_the_run_at_once() -> None:
    run = Run(0, StoreProfile(credentials_expire_at=0.25))
    with pytest.raises(CredentialsError):
        run_virtual(run.play())
    assert 0 < len(run.delivered) < len(SAMPLES)
    assert run.leaves_nothing()


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3])
def test_cancelling_at_any_time_leaves_nothing(kind: type[Run], seconds: float) -> None:
    run = kind(3, StoreProfile(closing_seconds=0.2, probability={"stall": 0.05}))

    async def main() -> None:
        playing = asyncio.create_task(run.play())
        await asyncio.sleep(seconds)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_virtual(main())
    assert run.leaves_nothing()
