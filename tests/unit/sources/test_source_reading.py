from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker._base.task_group import MAX_AHEAD_BYTES, MAX_READS, run_in_order
from stoker._sources.listing import ByteStream, split_range
from stoker._stores.location import parse_url
from stoker._stores.object_store import MemoryStore
from stoker.errors import TruncatedError


class Jobs:
    """Jobs that end on demand, and count the running ones."""

    def __init__(self, count: int, size_bytes: int = 1) -> None:
        self.ends = [asyncio.Event() for _ in range(count)]
        self.size_bytes, self.running, self.most, self.cancelled = size_bytes, 0, 0, 0

    def job(self, number: int) -> Callable[[], Awaitable[int]]:
        async def run() -> int:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.ends[number].wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.running -= 1
            return number

        return run

    def all(self) -> list[tuple[int, Callable[[], Awaitable[int]]]]:
        return [(self.size_bytes, self.job(number)) for number in range(len(self.ends))]


def test_results_come_in_order_although_the_last_job_ends_first() -> None:
    async def check() -> list[int]:
        jobs = Jobs(5)
        for end in reversed(jobs.ends):
            end.set()
        return [result async for result in run_in_order(jobs.all())]

    assert asyncio.run(check()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size_bytes", "expected"), [(1, MAX_READS), (MAX_AHEAD_BYTES // 4, 4), (1 << 40, 1)])
def test_jobs_run_ahead_within_a_number_and_a_sum_of_bytes(size_bytes: int, expected: int) -> None:
    async def check() -> int:
        jobs = Jobs(100, size_bytes)
        results = run_in_order(jobs.all())
        first = asyncio.ensure_future(anext(results))
        for _ in range(10):
            await asyncio.sleep(0)
        running = jobs.running
        for end in jobs.ends:
            end.set()
        assert await first == 0
        assert [result async for result in results] == list(range(1, 100))
        assert jobs.most == expected
        return running

    assert asyncio.run(check()) == expected


def test_closing_early_cancels_and_awaits_what_runs() -> None:
    async def check() -> None:
        jobs = Jobs(100)
        jobs.ends[0].set()
        results = run_in_order(jobs.all())
        assert await anext(results) == 0
        await asyncio.sleep(0)
        await results.aclose()
        assert jobs.running == 0
        assert jobs.cancelled > 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


def test_an_error_comes_at_its_place_and_ends_the_rest() -> None:
    async def fail() -> int:
        raise TruncatedError("short")

    async def check() -> None:
        jobs = Jobs(3)
        jobs.ends[0].set()
        results = run_in_order([jobs.all()[0], (1, fail), *jobs.all()[1:]])
        assert await anext(results) == 0
        with pytest.raises(TruncatedError):
            await anext(results)
        assert jobs.running == 0

    asyncio.run(check())


def test_spans_tile_the_range() -> None:
    assert list(split_range(3, 12, 4)) == [(3, 7), (7, 11), (11, 12)]
    assert list(split_range(5, 5, 4)) == []


def test_a_stream_reads_and_skips_across_its_spans() -> None:
    async def check() -> None:
        store, content = MemoryStore(parse_url("memory://stream")), bytes(range(100))
        stream = ByteStream(store, await store.put("x", content), 10, 90, span_bytes=7)
        assert await stream.read(20) == content[10:30]
        await stream.skip(15)
        assert (stream.position, stream.remaining_bytes) == (45, 45)
        assert await stream.read(0) == b""
        assert await stream.read(45) == content[45:90]
        assert bytes(await stream.read_some()) == b""
        with pytest.raises(TruncatedError):
            await stream.read(1)
        await stream.aclose()

    asyncio.run(check())
