"""One object at a time, in virtual time, against a store with scripted faults."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from stoker.checksum import crc32c
from stoker.clock import run_virtual
from stoker.errors import (
    BudgetError,
    ChecksumError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    FetchError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from stoker.fetch.fetcher import CopiedBucketWarning, FetchConfig, Fetcher, RangePart
from stoker.ring import Ring, RingStateError
from stoker.tier import ObjectRef, Tier
from support.faulty_store import FaultyStore, Weather, pin

SLOT_BYTES = 4 << 20
BODY = random.Random(0).randbytes(100_000)


class Bench:
    """A store with one object ``x``, a ring and a fetcher."""

    def __init__(
        self,
        *faults: str | None,
        weather: Weather | None = None,
        config: FetchConfig | None = None,
        slots: int = 4,
        tiers: Sequence[Tier] = (),
        body: bytes = BODY,
        small_hedge_bytes: int = 0,
    ) -> None:
        self.store = FaultyStore({"x": body}, weather=weather or Weather(tail_sigma=0.0))
        if faults:
            self.store.script = lambda number, key: faults[number] if number < len(faults) else None
        self.ref = pin({"x": body})[0]
        self.ring = Ring(slots, SLOT_BYTES)
        self.fetcher = Fetcher(
            self.store,
            ring=self.ring,
            rng=random.Random(1),
            config=config,
            tiers=tiers,
            small_hedge_bytes=small_hedge_bytes,
        )

    async def fetch(self, *, urgent: bool = False) -> bytes:
        slot = await self.fetcher.fetch(self.ref, urgent=urgent)
        assert self.ring.statistics().ready == 1
        data = bytes(self.ring.view(slot, self.ref.size_bytes))
        self.ring.release(slot)
        return data

    async def fails(self, error: type[Exception], match: str | None = None) -> float:
        """Fetch, which must fail; return the time it took."""
        begun = asyncio.get_running_loop().time()
        with pytest.raises(error, match=match) as caught:
            await self.fetcher.fetch(self.ref)
        self.error = caught.value
        return asyncio.get_running_loop().time() - begun

    def leaves_nothing(self) -> bool:
        return self.ring.statistics().free == self.ring.slots and self.store.active == 0

    @property
    def requests(self) -> int:
        return len(self.store.sent_seconds)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def seconds() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("size", [0, 1, 63, 100_000, SLOT_BYTES])
@pytest.mark.parametrize("urgent", [True, False])
def test_the_bytes_arrive_in_a_ready_slot(size: int, urgent: bool) -> None:
    body = random.Random(size).randbytes(size)

    async def main() -> None:
        bench = Bench(body=body)
        assert await bench.fetch(urgent=urgent) == body
        assert bench.leaves_nothing()
        assert bench.fetcher.stats.useful_bytes == size

    run(main)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("throttle", "ThrottledError"),
        ("error", "ServerError"),
        ("reset", "ConnectionLostError"),
        ("truncate", "TruncatedError"),
        ("corrupt", "ChecksumError"),
        ("stall", "DeadlineError"),
    ],
)
def test_every_transient_fault_is_tried_again_and_counted_by_type(fault: str, error: str) -> None:
    async def main() -> None:
        bench = Bench(fault, fault, config=FetchConfig(hedge=False))
        assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert dict(stats.retries) == dict(stats.failures) == {error: 2}
        assert (stats.requests, stats.objects, stats.failed) == (3, 1, 0)
        assert bench.leaves_nothing()

    run(main)


def test_an_object_spoilt_at_rest_is_a_fetch_error_that_names_it() -> None:
    async def main() -> None:
        bench = Bench(*["corrupt"] * 100)
        await bench.fails(FetchError, r"faulty://bucket/x .* checksum always differs")
        assert bench.requests == 3
        assert isinstance(bench.error.__cause__, ChecksumError)
        assert bench.fetcher.stats.checksum_failures == 3
        assert bench.leaves_nothing()

    run(main)


def test_attempts_are_bounded_and_the_last_cause_is_chained() -> None:
    async def main() -> None:
        bench = Bench(*["reset"] * 100, config=FetchConfig(attempts=5))
        await bench.fails(FetchError, r"x was not fetched with 5 requests.*reset by peer")
        assert isinstance(bench.error.__cause__, ConnectionLostError)
        assert bench.leaves_nothing()

    run(main)


@pytest.mark.parametrize("fault", ["stall", "reset", "drip"])
def test_the_deadline_ends_whatever_does_not_end_itself(fault: str) -> None:
    async def main() -> None:
        bench = Bench(*[fault] * 10_000, config=FetchConfig(attempts=10_000, deadline_seconds=30.0), body=BODY * 40)
        assert 20.0 <= await bench.fails(FetchError, "deadline") <= 30.0
        assert bench.error.__cause__ is not None
        assert bench.leaves_nothing()

    run(main)


def test_waiting_in_line_does_not_count_against_the_deadline() -> None:
    async def main() -> None:
        config = FetchConfig(
            concurrency_start=1, concurrency_least=1, concurrency_most=1, deadline_seconds=1.0, hedge=False
        )
        bench = Bench(config=config, slots=10, weather=Weather(first_byte_seconds=0.9, tail_sigma=0.0))
        slots = await asyncio.gather(*(bench.fetcher.fetch(bench.ref) for _ in range(10)))
        assert seconds() > 9.0
        assert len(set(slots)) == 10

    run(main)


@pytest.mark.parametrize(("fault_key", "error"), [("missing", NotFoundError), ("expired", CredentialsError)])
def test_what_cannot_succeed_is_raised_at_once_and_unchanged(fault_key: str, error: type[StoreError]) -> None:
    async def main() -> None:
        bench = Bench(weather=Weather(credentials_expire_at=0.0 if fault_key == "expired" else 1e9))
        if fault_key == "missing":
            del bench.store.objects["x"]
        await bench.fails(error)
        assert bench.requests == 1
        assert bench.fetcher.stats.failed == 1
        assert bench.leaves_nothing()

    run(main)


def test_what_the_store_asks_to_wait_is_waited() -> None:
    async def main() -> None:
        bench = Bench("throttle", weather=Weather(retry_after_seconds=7.0))
        assert await bench.fetch() == BODY
        assert 7.0 <= bench.store.sent_seconds[1] - bench.store.sent_seconds[0] <= 7.2

    run(main)


def test_a_wait_that_would_pass_the_deadline_is_not_begun() -> None:
    async def main() -> None:
        bench = Bench("throttle", weather=Weather(retry_after_seconds=3600.0))
        assert await bench.fails(FetchError, "deadline would pass before the next try") < 1.0

    run(main)


async def warm_up(bench: Bench, fetches: int = 16) -> None:
    for _ in range(fetches):
        assert await bench.fetch() == BODY


def scripted_after_warm_up(bench: Bench, *faults: str | None) -> None:
    begin = bench.requests
    bench.store.script = lambda number, key: faults[number - begin] if begin <= number < begin + len(faults) else None


def test_a_late_request_is_hedged_after_twice_the_expected_time() -> None:
    async def main() -> None:
        bench = Bench()
        await warm_up(bench)
        scripted_after_warm_up(bench, "stall")
        expected_seconds = 0.02 + len(BODY) / 90e6
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(2 * expected_seconds, rel=0.01)
        assert seconds() - begun == pytest.approx(3 * expected_seconds, rel=0.01)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, stats.hedged_bytes) == (1, 1, len(BODY))
        assert not stats.retries
        assert bench.leaves_nothing()

    run(main)


def test_a_loser_that_still_writes_while_it_closes_does_no_harm() -> None:
    async def main() -> None:
        bench = Bench(weather=Weather(tail_sigma=0.0, closing_seconds=2.0))
        await warm_up(bench)
        for _ in range(2):
            scripted_after_warm_up(bench, "drip")  # the first one loses
            assert await bench.fetch() == BODY
            await warm_up(bench)
            scripted_after_warm_up(bench, "drip", "stall")  # neither is quick, the first one wins
            assert await bench.fetch() == BODY
            await warm_up(bench)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins) == (4, 2)
        assert bench.leaves_nothing()

    run(main)


@pytest.mark.parametrize(
    ("faults", "hedge_wins", "retries"),
    [
        (("drip", "error"), 0, 0),  # the hedge fails, the late one arrives
        (("drip", "corrupt"), 1, 1),  # the hedge brings wrong bytes: read again
    ],
)
def test_a_hedge_that_fails_leaves_the_late_request_its_chance(
    faults: tuple[str, ...], hedge_wins: int, retries: int
) -> None:
    async def main() -> None:
        bench = Bench()
        await warm_up(bench)
        scripted_after_warm_up(bench, *faults)
        assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, sum(stats.retries.values())) == (1, hedge_wins, retries)
        assert bench.leaves_nothing()

    run(main)


def test_no_hedge_without_a_spare_slot_or_when_switched_off() -> None:
    async def main() -> None:
        for bench in (Bench(slots=1), Bench(config=FetchConfig(hedge=False))):
            await warm_up(bench)
            scripted_after_warm_up(bench, "stall")
            assert await bench.fetch() == BODY
            stats = bench.fetcher.stats
            assert (stats.hedges, dict(stats.retries)) == (0, {"DeadlineError": 1})

    run(main)


def test_small_ranges_are_hedged_in_a_few_buffers_when_no_slot_is_spare() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_burst=2, hedge_fraction=1.0), small_hedge_bytes=100)
        await warm_up(bench)
        while bench.ring.free:
            bench.ring.acquire()
        into = memoryview(bytearray(600))

        async def read(number: int, size_bytes: int = 100) -> int:
            part = RangePart(100 * number, 100 * number + size_bytes, 100 * number)
            await bench.fetcher.fetch_ranges(bench.ref, [part], into=into, verify=lambda data: None)
            return bench.fetcher.stats.hedges

        scripted_after_warm_up(bench, "stall")
        assert await read(0) == 1
        scripted_after_warm_up(bench, "stall")
        assert await read(1, 101) == 1, "larger than a buffer, and no slot is free"
        scripted_after_warm_up(bench, *["stall"] * 4)
        async with asyncio.TaskGroup() as tasks:
            for number in (2, 3):
                tasks.create_task(read(number))
            await asyncio.sleep(1.0)
            assert bench.fetcher.stats.hedges == 3
            scripted_after_warm_up(bench, None, None, "stall")
            assert [await read(number) for number in (4, 5, 0)] == [3, 3, 3], "both buffers are in use"
        assert bytes(into) == BODY[:600]
        assert bench.fetcher.stats.in_flight == 0

    run(main)


def test_when_everything_is_late_hedges_stay_within_their_budget() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_fraction=0.1, hedge_burst=2))
        await warm_up(bench, 20)
        bench.store.weather.bytes_per_second /= 1000
        await warm_up(bench, 8)  # slower and slower until it is what is expected
        bench.store.script = lambda number, key: "stall" if number % 2 else None
        for _ in range(100):
            assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert 2 <= stats.hedges <= 2 + 0.1 * stats.requests

    run(main)


def test_an_urgent_object_is_read_in_parallel_ranges() -> None:
    async def main() -> None:
        slow = Weather(tail_sigma=0.0, bytes_per_second=1e6)
        bench = Bench(body=BODY * 40, weather=slow, config=FetchConfig(hedge=False))
        assert await bench.fetch(urgent=True) == BODY * 40
        ranges = sorted((start, end) for _, start, end in bench.store.sent_ranges)
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert (len(ranges), ranges[-1][1]) == (3, len(BODY) * 40)
        assert seconds() < 1.5  # 4 s in one piece
        assert bench.store.peak_active == 3

    run(main)


def test_a_fault_in_one_of_the_parallel_ranges_repeats_only_that_one() -> None:
    async def main() -> None:
        bench = Bench(None, "reset", None, body=BODY * 40)
        assert await bench.fetch(urgent=True) == BODY * 40
        assert bench.requests == 4

    run(main)


def test_an_error_in_one_of_the_parallel_ranges_stops_the_others_and_stays_itself() -> None:
    async def main() -> None:
        bench = Bench(body=BODY * 40, config=FetchConfig(attempts=1))
        bench.store.script = lambda number, key: "reset" if number == 1 else "stall"
        with pytest.raises(FetchError, match="a range failed 1 times") as caught:
            await bench.fetcher.fetch(bench.ref, urgent=True)
        assert isinstance(caught.value.__cause__, ConnectionLostError)
        assert seconds() < 1.0
        assert bench.leaves_nothing()

    run(main)


def test_a_copied_bucket_is_accepted_by_checksum_with_one_warning() -> None:
    async def main() -> None:
        bench = Bench(slots=16)
        bench.store.tags["x"] = "another"
        with pytest.warns(CopiedBucketWarning) as caught:
            slots = await asyncio.gather(*(bench.fetcher.fetch(bench.ref) for _ in range(8)))
        assert len(caught) == 1
        assert all(bytes(bench.ring.view(slot, len(BODY))) == BODY for slot in slots)
        sent = bench.requests
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await bench.fetcher.fetch(bench.ref)
        assert bench.store.sent_tags[sent:] == [None]

    run(main)


@pytest.mark.parametrize("body", [BODY[:-1] + b"?", BODY + b"?", BODY[:-1]])
def test_an_overwritten_object_is_an_error_whatever_its_size(body: bytes) -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.objects["x"] = body
        bench.store.tags["x"] = "another"
        await bench.fails(ObjectChangedError, "another tag than v1|where the manifest says")
        assert bench.leaves_nothing()

    run(main)


def test_an_object_without_a_tag_is_told_by_its_size() -> None:
    async def main() -> None:
        bench = Bench()
        bench.ref = ObjectRef(key="x", size_bytes=len(BODY) - 1, crc32c=crc32c(BODY[:-1]))
        await bench.fails(ObjectChangedError, "has 100000 bytes where the manifest says 99999")
        assert bench.store.sent_tags == [None]

    run(main)


class ScriptedTier:
    def __init__(self, name: str, answer: Callable[[memoryview], Coroutine[Any, Any, bool]]) -> None:
        self.name = name
        self.offered: list[bytes] = []
        self._answer = answer

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        return await self._answer(into)

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        self.offered.append(bytes(data))

    async def close(self) -> None:
        pass


async def holds(into: memoryview) -> bool:
    into[:] = BODY
    return True


async def lacks(into: memoryview) -> bool:
    return False


async def spoils(into: memoryview) -> bool:
    into[:] = BODY[::-1]
    return True


async def breaks(into: memoryview) -> bool:
    raise ConnectionLostError("peer is gone")


async def hangs(into: memoryview) -> bool:
    await asyncio.sleep(1e9)
    return True


def test_a_tier_that_holds_the_object_saves_the_request() -> None:
    async def main() -> None:
        near, far = ScriptedTier("near", lacks), ScriptedTier("far", holds)
        bench = Bench(tiers=[near, far])
        assert await bench.fetch() == BODY
        assert bench.requests == 0
        assert dict(bench.fetcher.stats.tier_hits) == {"far": 1}

    run(main)


@pytest.mark.parametrize("answer", [lacks, spoils, breaks, hangs])
def test_a_tier_that_cannot_help_does_no_harm_and_is_offered_the_bytes(
    answer: Callable[[memoryview], Coroutine[Any, Any, bool]],
) -> None:
    async def main() -> None:
        tier = ScriptedTier("near", answer)
        bench = Bench(tiers=[tier])
        assert await bench.fetch() == BODY
        assert bench.requests == 1
        assert tier.offered == [BODY]
        stats = bench.fetcher.stats
        assert dict(stats.tier_errors) == ({} if answer is lacks else {"near": 1})
        assert stats.checksum_failures == (answer is spoils)

    run(main)


def test_ranges_land_where_the_caller_wants_them_in_a_slot_it_keeps() -> None:
    async def main() -> None:
        bench = Bench("corrupt")
        slot = bench.ring.acquire()
        assert slot is not None
        parts = [RangePart(10, 30, 100), RangePart(500, 600, 0)]
        seen: list[int] = []

        def verify(data: memoryview) -> None:
            seen.append(len(data))
            if bytes(data[100:120]) != BODY[10:30] or bytes(data[:100]) != BODY[500:600]:
                raise ChecksumError("sample 3 of x")

        await bench.fetcher.fetch_ranges(bench.ref, parts, into=bench.ring.view(slot, 120), verify=verify)
        assert seen == [120, 120]
        assert bench.ring.statistics().filling == 1
        bench.ring.abort(slot)

    run(main)


def test_a_full_ring_or_an_object_larger_than_a_slot_is_refused() -> None:
    async def main() -> None:
        bench = Bench(slots=1)
        slot = bench.ring.acquire()
        assert slot is not None
        await bench.fails(RingStateError, "no free slot for x")
        bench.ring.abort(slot)
        bench.ref = ObjectRef(key="x", size_bytes=SLOT_BYTES + 1, crc32c=0)
        await bench.fails(BudgetError, f"{SLOT_BYTES + 1} bytes")
        assert bench.requests == 0

    run(main)


def test_a_bug_in_an_adapter_comes_through_as_itself_and_frees_the_slot() -> None:
    def script(number: int, key: str) -> str | None:
        raise LookupError("a bug")

    async def main() -> None:
        bench = Bench()
        bench.store.script = script
        await bench.fails(LookupError, "a bug")
        assert bench.leaves_nothing()

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"deadline_seconds": -1.0},
        {"deadline_seconds": float("nan")},
        {"backoff_cap_seconds": 0.01},
        {"hedge_fraction": 1.5},
        {"hedge_burst": 0},
        {"hedge_after_factor": 0.5},
        {"concurrency_start": 100},
        {"concurrency_least": 20},
        {"split_parts": 0},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
        FetchConfig(**wrong)
