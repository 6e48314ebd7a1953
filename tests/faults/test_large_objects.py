"""An object larger than one request: parallel ranges, each with retries and hedges of its own, verified together."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from stoker import FetchConfig
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.errors import FetchError, ObjectChangedError
from stoker.testing import run_virtual
from support.fault_profiles import faulty_profile
from support.faulty_store import FAULTS, FaultyStore, StoreProfile, pin

BODY = random.Random(0).randbytes(100_001)
PART_BYTES = 10_000
PARTS = 11


class Bench:
    """A store with large objects, a ring of slots smaller than each, and a fetcher."""

    def __init__(
        self, *, profile: StoreProfile | None = None, seed: int = 0, objects: int = 1, slots: int = 40, **config: Any
    ) -> None:
        bodies = {f"x{number}": BODY for number in range(objects)}
        self.store = FaultyStore(bodies, profile=profile or StoreProfile(tail_sigma=0.0), seed=seed)
        self.refs = pin(bodies)
        self.ring = Ring(slots, 9000)
        settings = {"max_request_bytes": PART_BYTES, "hedge_first_seconds": 0.2} | config
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(seed), config=FetchConfig(**settings))

    async def fetch(self, number: int = 0, *, urgent: bool = False) -> float:
        """Fetch an object, check its bytes, and return how long it took, in seconds."""
        begun = asyncio.get_running_loop().time()
        slot = await self.fetcher.fetch(self.refs[number], urgent=urgent)
        assert bytes(self.ring.view(slot, len(BODY))) == BODY
        self.ring.release(slot)
        return asyncio.get_running_loop().time() - begun

    def spoil(self, ordinal: int, fault: str) -> None:
        self.store.script = lambda number, key: fault if number == ordinal else None

    @property
    def requests(self) -> Counter[int]:
        """Number of requests by the start of their range."""
        return Counter(start for _, start, _ in self.store.sent_ranges)

    def leaves_nothing(self) -> bool:
        held = self.fetcher._reader._limiter.held
        return (self.ring.free, self.store.active, held) == (self.ring.slots, 0, 0)


@pytest.mark.parametrize("urgent", [False, True])
def test_a_large_object_is_read_in_parallel_ranges_of_nearly_equal_size(urgent: bool) -> None:
    bench = Bench()
    run_virtual(bench.fetch(urgent=urgent))
    sizes = [end - start for _, start, end in bench.store.sent_ranges]
    assert (len(sizes), sum(sizes)) == (PARTS, len(BODY))
    assert max(sizes) <= PART_BYTES
    assert max(sizes) - min(sizes) <= 1
    assert bench.store.peak_active == PARTS
    assert bench.leaves_nothing()


def test_an_object_of_one_request_is_read_whole() -> None:
    bench = Bench(max_request_bytes=len(BODY))
    run_virtual(bench.fetch())
    assert bench.store.sent_ranges == [("x0", 0, len(BODY))]


def test_concurrency_counts_ranges_and_the_first_object_goes_first() -> None:
    limits: dict[str, Any] = {"start_concurrency": 4, "min_concurrency": 4, "max_concurrency": 4}
    bench = Bench(objects=3, hedge=False, **limits)

    async def main() -> None:
        await asyncio.gather(*(bench.fetch(number) for number in range(3)))

    run_virtual(main())
    assert bench.store.peak_active == 4
    assert [key for key, _, _ in bench.store.sent_ranges] == ["x0"] * PARTS + ["x1"] * PARTS + ["x2"] * PARTS


@pytest.mark.parametrize("fault", ["reset", "truncate", "error", "throttle_bare"])
def test_a_lost_connection_costs_only_its_range(fault: str) -> None:
    bench = Bench()
    bench.spoil(4, fault)
    run_virtual(bench.fetch())
    assert sorted(bench.requests.values()) == [1] * (PARTS - 1) + [2]
    assert bench.leaves_nothing()


def test_a_late_range_is_hedged_by_itself_in_memory_of_its_size() -> None:
    bench = Bench(slots=14)  # the object takes 12: a hedge of the whole would not fit
    bench.store.late[PARTS + 4] = 5.0

    async def main() -> float:
        await bench.fetch()  # measures how long responses take
        return await bench.fetch()

    assert run_virtual(main()) < 0.5
    assert (bench.fetcher.stats.hedges, bench.fetcher.stats.hedge_wins) == (1, 1)
    assert bench.requests.total() == 2 * PARTS + 1
    assert bench.leaves_nothing()


def test_a_range_that_stalls_is_hedged_before_there_are_measurements() -> None:
    bench = Bench(slots=14)
    bench.spoil(4, "stall")
    assert run_virtual(bench.fetch()) < 0.5
    assert bench.fetcher.stats.hedged_bytes <= PART_BYTES
    assert bench.leaves_nothing()


def test_a_damaged_range_never_becomes_visible_and_damage_at_rest_is_an_error() -> None:
    bench = Bench()
    bench.spoil(4, "corrupt")
    run_virtual(bench.fetch())
    assert bench.fetcher.stats.checksum_failures == 1
    assert bench.leaves_nothing()
    spoilt = Bench()
    spoilt.store.objects["x0"] = BODY[:50_000] + b"?" + BODY[50_001:]
    with pytest.raises(ObjectChangedError, match="its checksum always differs"):
        run_virtual(spoilt.fetch())
    assert spoilt.leaves_nothing()


def test_the_deadline_counts_from_the_last_range_that_began() -> None:
    """Eleven ranges of 1 s, one after the other; the last one fails once, long after the first began."""
    limits: dict[str, Any] = {"start_concurrency": 1, "min_concurrency": 1, "max_concurrency": 1}
    profile = StoreProfile(tail_sigma=0.0, bytes_per_second=PART_BYTES)
    bench = Bench(profile=profile, hedge=False, deadline_seconds=3.0, **limits)
    bench.spoil(PARTS - 1, "reset")
    assert run_virtual(bench.fetch()) > 10.0
    lost = Bench(profile=profile, hedge=False, deadline_seconds=3.0, **limits)
    lost.store.script = lambda number, key: "error" if number >= 5 else None

    async def fails() -> float:
        with pytest.raises(FetchError, match="deadline"):
            await lost.fetch()
        return asyncio.get_running_loop().time()

    assert 5.0 < run_virtual(fails()) < 10.0
    assert lost.leaves_nothing()


def test_a_cancelled_fetch_ends_every_range_and_frees_the_slots() -> None:
    bench = Bench(profile=StoreProfile(closing_seconds=0.2))

    async def main() -> None:
        running = asyncio.create_task(bench.fetch())
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        assert bench.leaves_nothing()

    run_virtual(main())


def test_random_faults_spoil_no_object_and_leave_nothing() -> None:
    faults: Counter[str] = Counter()
    hedges = 0
    for seed in range(60):
        profile = faulty_profile(seed)
        profile.probability["corrupt"] /= 10  # a damaged range costs another read of all ranges
        bench = Bench(profile=profile, seed=seed, objects=4, slots=60, attempt_seconds=1.0, checksum_attempts=20)

        async def main(bench: Bench = bench) -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(4):
                    group.create_task(bench.fetch(number, urgent=number == 0))

        run_virtual(main())
        assert bench.leaves_nothing()
        faults.update(bench.store.faults)
        hedges += bench.fetcher.stats.hedge_wins
    assert set(FAULTS) <= faults.keys()
    assert hedges
