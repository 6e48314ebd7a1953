"""Requests that come at the same time are worked on together, and each gets what became of its own item."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from stoker.testing import run_virtual
from stoker_functions._ingest import Batcher


class Work:
    """Notes the batches and when they began; odd items fail, and everything does from number 100 on."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self.began: list[float] = []
        self._seconds = seconds

    async def __call__(self, items: Sequence[int]) -> list[Exception | None]:
        self.batches.append(list(items))
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._seconds)
        if any(item >= 100 for item in items):
            raise OSError("everything fails")
        return [ValueError(f"{item} is odd") if item % 2 else None for item in items]


async def added(batcher: Batcher[int], items: Sequence[int]) -> list[BaseException | None]:
    return await asyncio.gather(*map(batcher.add, items), return_exceptions=True)


def test_items_of_a_second_are_one_batch_and_those_behind_it_another() -> None:
    async def main() -> None:
        work = Work()
        batcher = Batcher(work, max_items=10, wait_seconds=1.0)
        start = asyncio.get_running_loop().time()
        first = asyncio.ensure_future(added(batcher, [0, 2]))
        await asyncio.sleep(0.9)
        second = asyncio.ensure_future(added(batcher, [4]))
        await asyncio.sleep(0.2)
        third = asyncio.ensure_future(added(batcher, [6]))
        await asyncio.gather(first, second, third)
        assert work.batches == [[0, 2, 4], [6]]
        assert [began - start for began in work.began] == pytest.approx([1.0, 2.1])

    run_virtual(main())


def test_a_full_batch_does_not_wait() -> None:
    async def main() -> None:
        work = Work()
        batcher = Batcher(work, max_items=3, wait_seconds=1.0)
        start = asyncio.get_running_loop().time()
        await added(batcher, [0, 2, 4, 6, 8, 10, 12])
        assert work.batches == [[0, 2, 4], [6, 8, 10], [12]]
        assert [began - start for began in work.began] == pytest.approx([0.0, 0.0, 1.0])

    run_virtual(main())


def test_a_batch_that_is_full_just_as_its_time_is_up_leaves_the_next_one_its_own_time() -> None:
    async def main() -> None:
        work = Work()
        batcher = Batcher(work, max_items=2, wait_seconds=1.0)
        start = asyncio.get_running_loop().time()

        async def add_late(item: int) -> None:
            await asyncio.sleep(1.0)
            await batcher.add(item)

        await asyncio.gather(add_late(2), add_late(4), batcher.add(0))
        assert work.batches == [[0, 2], [4]]
        assert [began - start for began in work.began] == pytest.approx([1.0, 2.0])

    run_virtual(main())


def test_each_request_ends_as_its_item_does() -> None:
    async def main() -> None:
        ends = await added(Batcher(Work(), max_items=10, wait_seconds=1.0), [0, 1, 2, 3])
        assert [str(end) if end else None for end in ends] == [None, "1 is odd", None, "3 is odd"]

    run_virtual(main())


def test_where_the_work_fails_every_request_of_the_batch_does_and_none_of_the_next() -> None:
    async def main() -> None:
        batcher = Batcher(Work(), max_items=2, wait_seconds=1.0)
        ends = await added(batcher, [0, 100, 2, 4])
        assert [type(end) for end in ends] == [OSError, OSError, type(None), type(None)]

    run_virtual(main())


def test_a_request_that_is_cancelled_leaves_its_item_in_the_batch_and_the_others_alone() -> None:
    async def main() -> None:
        work = Work(seconds=5.0)
        batcher = Batcher(work, max_items=10, wait_seconds=1.0)
        requests = [asyncio.create_task(batcher.add(item)) for item in (0, 2, 4)]
        await asyncio.sleep(0.5)
        requests[0].cancel()
        await asyncio.sleep(3)
        requests[1].cancel()
        await requests[2]
        assert work.batches == [[0, 2, 4]]

    run_virtual(main())


def test_while_a_batch_is_worked_on_the_next_one_collects() -> None:
    async def main() -> None:
        work = Work(seconds=10.0)
        batcher = Batcher(work, max_items=4, wait_seconds=1.0)
        start = asyncio.get_running_loop().time()
        requests = []
        for item in range(0, 16, 2):
            requests.append(asyncio.create_task(batcher.add(item)))
            await asyncio.sleep(2)
        await asyncio.gather(*requests)
        assert work.batches == [[0], [2, 4, 6, 8], [10, 12, 14]]
        assert [began - start for began in work.began] == pytest.approx([1, 11, 21])

    run_virtual(main())
