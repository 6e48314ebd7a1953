from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from stoker._files import blocks
from stoker._files.blocks import BlockCache, Stream
from stoker.errors import StokerError
from support.waiting import until

LENGTH = 500


class Reads:
    """A source of positions, each of ten bytes, that records what is read."""

    def __init__(self, bad: Sequence[int] = (), max_positions: int = LENGTH) -> None:
        self.found: list[tuple[int, int]] = []
        self.bad, self.max_positions = set(bad), max_positions

    def read(self, stream: Stream, start: int, end: int) -> list[bytes]:
        self.found.append((start, end))
        if self.bad & set(range(start, end)):
            raise StokerError(f"bad position in {start} to {end}")
        return [value_of(stream, position) for position in range(start, min(end, start + self.max_positions))]

    @property
    def positions(self) -> list[int]:
        return sorted(position for start, end in self.found for position in range(start, end))


def value_of(stream: Stream, position: int) -> bytes:
    return f"{stream}:{position}".rjust(10).encode()


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def cache(reads: Reads) -> Iterator[BlockCache]:
    cache = BlockCache(reads.read, lambda _: LENGTH, 1 << 20)
    yield cache
    cache.close()


def test_a_sequential_reader_gets_every_position_once_in_blocks_that_grow(cache: BlockCache, reads: Reads) -> None:
    assert [cache.get("a", position) for position in range(LENGTH)] == [value_of("a", n) for n in range(LENGTH)]
    assert reads.positions == list(range(LENGTH))
    assert len(reads.found) < 15
    assert sorted(reads.found)[:4] == [(0, 1), (1, 3), (3, 7), (7, 15)]


def test_other_readers_read_one_position_each(cache: BlockCache, reads: Reads) -> None:
    for position in (400, 30, 7, 200):
        assert cache.get("a", position) == value_of("a", position)
    assert [end - start for start, end in reads.found] == [1, 1, 1, 1]


def test_behind_three_positions_blocks_are_read_in_other_threads(cache: BlockCache, reads: Reads) -> None:
    for position in range(3):
        cache.get(7, position)
    assert reads.found == [(0, 1), (1, 3)]
    cache.get(7, 3)
    asyncio.run(until(lambda: len(reads.found) == 3 + blocks._BLOCKS_AHEAD))
    assert sorted(reads.found)[2:] == [(3, 7), (7, 15), (15, 31), (31, 63), (63, 127)]


def test_large_positions_are_read_ahead_too(monkeypatch: pytest.MonkeyPatch, cache: BlockCache, reads: Reads) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    for position in range(4):
        cache.get("a", position)
    asyncio.run(until(lambda: len(reads.found) == 4 + blocks._BLOCKS_AHEAD))
    assert reads.positions == list(range(8))


def test_a_random_reader_that_meets_blocks_of_before_reads_little_else(cache: BlockCache, reads: Reads) -> None:
    for position in random.Random(0).sample(range(LENGTH), LENGTH):
        cache.get("a", position)
    assert len(reads.positions) < 1.3 * LENGTH


def test_streams_do_not_mix(cache: BlockCache, reads: Reads) -> None:
    for position in range(10):
        for stream in ("a", "b", 3):
            assert cache.get(stream, position) == value_of(stream, position)
    asyncio.run(until(lambda: sum(start == 63 for start, _ in reads.found) == 3))


def test_a_source_may_return_fewer_positions_than_a_block_has() -> None:
    reads = Reads(max_positions=3)
    cache = BlockCache(reads.read, lambda _: LENGTH, 1 << 20)
    assert [cache.get(0, position) for position in range(LENGTH)] == [value_of(0, n) for n in range(LENGTH)]
    cache.close()


def test_a_position_that_cannot_be_read_does_not_hide_the_others_in_its_block() -> None:
    reads = Reads(bad=[20, 21, 333])
    cache = BlockCache(reads.read, lambda _: LENGTH, 1 << 20)
    for position in range(LENGTH):
        if position in reads.bad:
            with pytest.raises(StokerError, match=f"^bad position in {position} to {position + 1}$"):
                cache.get("a", position)
        else:
            assert cache.get("a", position) == value_of("a", position)
    reads.bad = set()
    assert cache.get("a", 333) == value_of("a", 333)
    cache.close()


def test_memory_is_bounded_and_the_last_block_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_OVERHEAD_BYTES", 0)
    reads = Reads()
    cache = BlockCache(reads.read, lambda _: LENGTH, 25)
    for position in (5, 100, 5, 300):
        cache.get("a", position)
    assert (cache._used_bytes, cache.is_evicted("a", 100), cache.is_evicted("a", 5)) == (20, True, False)
    cache.get("a", 5)
    assert len(reads.found) == 3
    cache.get("a", 100)
    assert (len(reads.found), cache.is_evicted("a", 100)) == (4, False)
    small = BlockCache(reads.read, lambda _: LENGTH, 1)
    assert small.get("a", 1) == small.get("a", 1) == value_of("a", 1)
    assert len(reads.found) == 5
    cache.close()
    small.close()


def test_blocks_stay_within_their_size(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 110)
    cache = BlockCache(reads.read, lambda _: LENGTH, 1 << 20)
    for position in range(LENGTH):
        cache.get("a", position)
    assert max(end - start for start, end in reads.found) == 10
    cache.close()


def test_readers_that_come_at_the_same_time_share_one_read() -> None:
    begun, gate = threading.Event(), threading.Event()
    calls = []

    def read(stream: Stream, start: int, end: int) -> list[bytes]:
        calls.append(start)
        begun.set()
        assert gate.wait(30)
        return [value_of(stream, position) for position in range(start, end)]

    cache = BlockCache(read, lambda _: LENGTH, 1 << 20)
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(cache.get, "a", 9) for _ in range(4)]
        assert begun.wait(30)
        time.sleep(0.05)
        gate.set()
        assert {each.result(30) for each in found} == {value_of("a", 9)}
    assert calls == [9]
    cache.close()


def test_many_threads_read_what_they_ask_for() -> None:
    reads = Reads(bad=[77], max_positions=9)
    cache = BlockCache(reads.read, lambda _: LENGTH, 40_000)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            stream: Stream = rng.choice(("a", "b"))
            first = rng.randrange(LENGTH)
            for position in range(first, min(LENGTH, first + rng.randrange(1, 60))):
                if position == 77:
                    with pytest.raises(StokerError):
                        cache.get(stream, position)
                else:
                    assert cache.get(stream, position) == value_of(stream, position)

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(work, seed) for seed in range(8)]:
            each.result(60)
    cache.close()


def test_a_closed_cache_reads_nothing(cache: BlockCache, reads: Reads) -> None:
    cache.get("a", 0)
    cache.close()
    cache.close()
    for position in (0, 5):
        with pytest.raises(StokerError, match="the files are closed"):
            cache.get("a", position)
    assert len(reads.found) == 1
