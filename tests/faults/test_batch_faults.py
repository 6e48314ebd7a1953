"""Ranges of several objects by one request, under faults in virtual time: what failed is read again, nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stoker import FetchConfig
from stoker._base.batch_read import BatchLimits, ObjectPart, ObjectRange, RangePart
from stoker._base.checksum import crc32c
from stoker._fetch.fetcher import Fetcher
from stoker._memory.ring import Ring
from stoker.errors import ChecksumError, CredentialsError, FetchError, NotFoundError, ObjectDamagedError, TruncatedError
from stoker.testing import run_virtual
from support.batching_store import BatchingStore
from support.faulty_store import StoreProfile, pin
from support.ranged_run import cancel_after

PARTS = 8
SIZE = 1000
RNG = random.Random(0)
OBJECTS = {f"data/{number}": RNG.randbytes(3 * SIZE) for number in range(PARTS)}
RANGES = [ObjectRange(f"data/{number}", SIZE, 2 * SIZE) for number in range(PARTS)]
CALM = StoreProfile(tail_sigma=0.0)


class Read:
    """One read of a range of each object, in a memory without room for hedges."""

    def __init__(self, profile: StoreProfile = CALM, **config: Any) -> None:
        self.store = BatchingStore(OBJECTS, profile=profile)
        self.limits = BatchLimits(1 << 30, 1 << 20)
        self.ring = Ring(1, PARTS * SIZE)
        self.fetcher = Fetcher(
            self.store, ring=self.ring, rng=random.Random(0), config=FetchConfig(hedge_first_seconds=0.2, **config)
        )
        self.into = memoryview(bytearray(PARTS * SIZE))
        refs = pin(OBJECTS)
        self.parts = [ObjectPart(ref, RangePart(SIZE, 2 * SIZE, number * SIZE)) for number, ref in enumerate(refs)]
        slot = self.ring.acquire(PARTS * SIZE)
        assert slot is not None

    def verify(self, number: int) -> None:
        ref, part = self.parts[number]
        data = self.into[part.offset : part.offset + SIZE]
        if crc32c(data) != crc32c(OBJECTS[ref.key][part.start : part.end]):
            raise ChecksumError(f"{ref.key}: wrong")

    async def run(self) -> None:
        await self.fetcher.fetch_parts(self.parts, into=self.into, verify=self.verify, limits=self.limits)

    def play(self) -> None:
        run_virtual(self.run())
        assert self.into == b"".join(OBJECTS[key][start:end] for key, start, end in RANGES)
        self.check_end()

    def check_end(self) -> None:
        assert (self.store.active, self.fetcher._reader._limiter.held) == (0, 0)


def at(*numbers: int, fault: str) -> Callable[[int, str], str | None]:
    return lambda number, _key: fault if number in numbers else None


def test_one_request_reads_ranges_of_all_objects_into_their_places() -> None:
    read = Read()
    read.play()
    assert read.store.sent_batches == [RANGES]
    stats = read.fetcher.stats
    assert (stats.requests, stats.objects, stats.useful_bytes) == (1, 1, PARTS * SIZE)
    assert not stats.retries


@pytest.mark.parametrize("fault", ["truncate", "reset"])
def test_after_a_stream_that_ended_early_only_the_rest_is_requested(fault: str) -> None:
    read = Read()
    read.store.script = at(0, 1, fault=fault)
    read.play()
    assert read.store.sent_batches == [RANGES, RANGES[4:], RANGES[6:]]
    assert sum(read.fetcher.stats.retries.values()) == 2


@pytest.mark.parametrize("fault", ["error", "throttle", "dns"])
def test_a_request_that_failed_is_sent_again_whole(fault: str) -> None:
    read = Read()
    read.store.script = at(0, 1, 2, fault=fault)
    read.play()
    assert read.store.sent_batches == [RANGES] * 4


def test_a_stream_that_broke_after_the_last_byte_needs_no_other_request() -> None:
    read = Read()
    sent: list[int] = []

    async def break_at_end(ranges: Sequence[ObjectRange], *, into: memoryview, begun: Callable[[], None]) -> None:
        sent.append(len(ranges))
        begun()
        into[:] = b"".join(OBJECTS[key][start:end] for key, start, end in ranges)
        raise TruncatedError("the connection ended")

    read.store.get_ranges = break_at_end  # type: ignore[assignment, method-assign]
    read.play()
    assert sent == [PARTS]


def test_a_corrupt_value_is_read_alone() -> None:
    read = Read()
    read.store.script = at(0, fault="corrupt")
    read.play()
    assert len(read.store.sent_batches) == 1
    ((key, start, end),) = read.store.sent_ranges
    assert (start, end) == (SIZE, 2 * SIZE)
    assert key in OBJECTS
    assert read.fetcher.stats.checksum_failures == 1


def test_a_value_corrupt_at_rest_is_an_error_after_as_many_reads_of_it_as_allowed() -> None:
    read = Read(checksum_attempts=3)
    body = bytearray(OBJECTS["data/5"])
    body[SIZE + 1] ^= 1
    read.store.objects["data/5"] = bytes(body)
    with pytest.raises(ObjectDamagedError, match="data/5 is corrupt"):
        run_virtual(read.run())
    assert len(read.store.sent_batches) == 1
    assert read.store.sent_ranges == [("data/5", SIZE, 2 * SIZE)] * 3
    read.check_end()


def test_a_refused_batch_is_read_range_by_range_and_a_missing_object_named() -> None:
    read = Read()
    read.store.refuses = True
    read.play()
    assert sorted(read.store.sent_ranges) == RANGES
    gone = Read()
    gone.store.refuses = True
    del gone.store.objects["data/3"]
    with pytest.raises(NotFoundError, match="data/3"):
        run_virtual(gone.run())


def test_a_late_batch_is_hedged_in_the_same_memory_and_the_first_response_wins() -> None:
    """The ring has no free slot, and the batch is larger than any other memory for hedges."""
    read = Read()
    read.store.late = {0: 30.0}

    async def main() -> float:
        await read.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 1.0
    assert read.store.sent_batches == [RANGES] * 2
    stats = read.fetcher.stats
    assert (stats.hedges, sum(stats.retries.values())) == (1, 0)
    read.play()


def test_two_responses_that_begin_at_the_same_time_write_one_after_the_other() -> None:
    """The store asserts that no two responses have begun in the same memory."""
    for late_seconds in (0.19, 0.2, 0.21):
        read = Read()
        read.store.late = {0: late_seconds}
        read.play()
        assert len(read.store.sent_batches) == 2


def test_a_batch_that_stalls_is_cut_off_and_its_rest_requested() -> None:
    read = Read(attempt_seconds=1.0)
    read.store.script = at(0, fault="stall")
    read.play()
    assert read.store.sent_batches[0] == RANGES
    assert len(read.store.sent_batches) == 2


@pytest.mark.parametrize("fault", ["error", "truncate"])
def test_attempts_are_limited(fault: str) -> None:
    read = Read(attempts=3)
    read.store.script = lambda _number, _key: fault
    with pytest.raises(FetchError, match="a range failed 3 times"):
        run_virtual(read.run())
    assert len(read.store.sent_batches) == 3
    read.check_end()


def test_an_error_that_no_retry_helps_is_raised_at_once() -> None:
    read = Read(StoreProfile(credentials_expire_at=0.0))
    with pytest.raises(CredentialsError):
        run_virtual(read.run())
    assert len(read.store.sent_batches) == 1


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (BatchLimits(3 * SIZE, 100), [3, 3, 2]),
        (BatchLimits(3 * SIZE - 1, 100), [2, 2, 2, 2]),
        (BatchLimits(1 << 30, 5), [5, 3]),
        (BatchLimits(1, 100), []),
    ],
)
def test_batches_are_within_the_limits_and_a_larger_part_is_a_request_of_its_own(
    limits: BatchLimits, sizes: list[int]
) -> None:
    read = Read()
    read.limits = limits
    read.play()
    assert sorted(map(len, read.store.sent_batches), reverse=True) == sizes
    assert len(read.store.sent_ranges) == PARTS - sum(sizes)


def test_parts_that_are_not_contiguous_in_memory_are_requests_of_their_own() -> None:
    read = Read()
    read.parts = [*read.parts[:3], *read.parts[4:]]
    run_virtual(read.run())
    assert sorted(read.store.sent_batches) == [RANGES[:3], RANGES[4:]]


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.02, 0.0200005, 0.03, 0.5])
def test_a_cancelled_read_leaves_nothing(seconds: float) -> None:
    read = Read(StoreProfile(tail_sigma=0.0, closing_seconds=0.2, bytes_per_second=1e4))
    read.store.late = {0: 0.3}
    run_virtual(cancel_after(seconds, read.run()))
    read.check_end()
