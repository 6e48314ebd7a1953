"""One object at a time, in virtual time, against a store with scripted faults."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from stoker import FetchConfig
from stoker._base.batch_read import RangePart
from stoker._base.checksum import crc32c
from stoker._memory.ring import RingStateError
from stoker.abc import ObjectRef
from stoker.errors import (
    ChecksumError,
    ConfigError,
    ConnectionLostError,
    CopiedBucketWarning,
    FetchError,
    MemoryBudgetError,
    NotFoundError,
    ObjectChangedError,
    ObjectTruncatedError,
)
from stoker.testing import run_virtual
from support.cases import for_each
from support.faulty_store import StoreProfile
from support.fetching import BODY, SLOT_BYTES, Bench, seconds


@pytest.mark.parametrize("size", [0, 1, 63, 100_000, SLOT_BYTES])
@pytest.mark.parametrize("urgent", [True, False])
def test_the_bytes_arrive_in_a_ready_slot(size: int, urgent: bool) -> None:
    body = random.Random(size).randbytes(size)

    async def main() -> None:
        bench = Bench(body=body)
        assert await bench.fetch(urgent=urgent) == body
        assert bench.leaves_nothing()
        assert bench.fetcher.stats.useful_bytes == size

    run_virtual(main())


def test_an_urgent_object_is_read_in_parallel_ranges() -> None:
    async def main() -> None:
        slow = StoreProfile(tail_sigma=0.0, bytes_per_second=1e6)
        bench = Bench(body=BODY * 40, profile=slow, config=FetchConfig(hedge=False))
        assert await bench.fetch(urgent=True) == BODY * 40
        ranges = sorted((start, end) for _, start, end in bench.store.sent_ranges)
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert (len(ranges), ranges[-1][1]) == (3, len(BODY) * 40)
        assert seconds() < 1.5  # 4 s in one piece
        assert bench.store.peak_active == 3

    run_virtual(main())


def test_a_fault_in_one_of_the_parallel_ranges_repeats_only_that_one() -> None:
    async def main() -> None:
        bench = Bench(None, "reset", None, body=BODY * 40)
        assert await bench.fetch(urgent=True) == BODY * 40
        assert bench.requests == 4

    run_virtual(main())


def test_an_error_in_one_of_the_parallel_ranges_stops_the_others_and_stays_itself() -> None:
    async def main() -> None:
        bench = Bench(body=BODY * 40, config=FetchConfig(attempts=1))
        bench.store.script = lambda number, key: "reset" if number == 1 else "stall"
        with pytest.raises(FetchError, match="a range failed 1 times") as caught:
            await bench.fetcher.fetch(bench.ref, urgent=True)
        assert isinstance(caught.value.__cause__, ConnectionLostError)
        assert seconds() < 1.0
        assert bench.leaves_nothing()

    run_virtual(main())


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

    run_virtual(main())


@pytest.mark.parametrize("body", [BODY[:-1] + b"?", BODY + b"?", BODY[:-1]])
def test_an_overwritten_object_is_an_error_whatever_its_size(body: bytes) -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.objects["x"] = body
        bench.store.tags["x"] = "another"
        await bench.fails(ObjectChangedError, "checksum always differs|where the manifest says")
        assert bench.leaves_nothing()

    run_virtual(main())


def test_an_object_without_a_tag_is_identified_by_its_size() -> None:
    async def main() -> None:
        bench = Bench()
        bench.ref = ObjectRef(key="x", size_bytes=len(BODY) - 1, crc32c=crc32c(BODY[:-1]))
        await bench.fails(ObjectChangedError, "has 100000 bytes where the manifest says 99999")
        assert bench.store.sent_tags == [None, None]  # the second confirms the first

    run_virtual(main())


@pytest.mark.parametrize("tag", ["v1", ""])
def test_an_object_that_became_shorter_is_final_after_one_confirmation(tag: str) -> None:
    async def main() -> None:
        bench = Bench()
        bench.store.objects["x"] = BODY[:500]
        bench.ref = replace(bench.ref, tag=tag)
        assert await bench.fails(ObjectTruncatedError, "has 500 bytes.*stoker verify faulty://bucket") < 1.0
        assert bench.requests == 2
        assert bench.error.__suppress_context__
        assert bench.leaves_nothing()

    run_virtual(main())


def test_an_answer_that_says_too_soon_that_the_object_ends_is_not_believed_alone() -> None:
    async def main() -> None:
        bench = Bench("short")
        assert await bench.fetch() == BODY
        assert bench.requests == 2

    run_virtual(main())


def test_a_missing_object_is_one_error_that_says_what_to_do() -> None:
    async def main() -> None:
        bench = Bench()
        del bench.store.objects["x"]
        await bench.fails(NotFoundError, "faulty://bucket/x does not exist.*'stoker verify faulty://bucket'")
        assert bench.requests == 1
        assert bench.error.__cause__ is None
        assert bench.error.__suppress_context__

    run_virtual(main())


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

    run_virtual(main())


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
        assert dict(stats.tier_errors) == ({"near": 1} if answer in (spoils, breaks) else {})
        assert dict(stats.tier_late) == ({"near": 1} if answer is hangs else {})
        assert stats.checksum_failures == (answer is spoils)

    run_virtual(main())


def test_ranges_are_read_to_the_caller_s_offsets_in_its_slot() -> None:
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

    run_virtual(main())


def test_a_full_ring_or_an_object_larger_than_a_slot_is_refused() -> None:
    async def main() -> None:
        bench = Bench(slots=1)
        slot = bench.ring.acquire()
        assert slot is not None
        await bench.fails(RingStateError, "no free slot for x")
        bench.ring.abort(slot)
        bench.ref = ObjectRef(key="x", size_bytes=SLOT_BYTES + 1, crc32c=0)
        await bench.fails(MemoryBudgetError, f"{SLOT_BYTES + 1} bytes")
        assert bench.requests == 0

    run_virtual(main())


def test_a_bug_in_an_adapter_comes_through_as_itself_and_frees_the_slot() -> None:
    def script(number: int, key: str) -> str | None:
        raise LookupError("a bug")

    async def main() -> None:
        bench = Bench()
        bench.store.script = script
        await bench.fails(LookupError, "a bug")
        assert bench.leaves_nothing()

    run_virtual(main())


@for_each(
    "wrong",
    [
        {"attempts": 0},
        {"deadline_seconds": -1.0},
        {"deadline_seconds": float("nan")},
        {"backoff_cap_seconds": 0.01},
        {"hedge_fraction": 1.5},
        {"hedge_burst": 0},
        {"hedge_after_factor": 0.5},
        {"start_concurrency": 100},
        {"min_concurrency": 100},
        {"start_concurrency": 16, "min_concurrency": 20},
        {"split_parts": 0},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
        FetchConfig(**wrong)


def test_small_requests_start_with_more_of_them_in_flight_within_the_bounds() -> None:
    config = FetchConfig()
    assert config.start_limit(64 << 20) == config.start_limit(8 << 20) == 16
    assert config.start_limit(4 << 20) == 32
    assert config.start_limit(100_000) == config.start_limit(0) == config.max_concurrency
    assert FetchConfig(max_concurrency=5).start_limit(1) == 5
    assert FetchConfig(min_concurrency=20).start_limit(8 << 20) == 20
    assert FetchConfig(start_concurrency=9).start_limit(1) == 9
