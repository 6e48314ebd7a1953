from __future__ import annotations

import asyncio
import random

import pytest

from stoker._memory.budget import ByteBudget
from stoker.errors import MemoryBudgetError
from stoker.testing import run_virtual


async def holding(budget: ByteBudget, size_bytes: int, log: list[int], seconds: float = 1.0) -> None:
    async with budget.reserve(size_bytes):
        log.append(size_bytes)
        await asyncio.sleep(seconds)


def test_buffers_are_borrowed_in_order_of_arrival_within_the_limit() -> None:
    async def main() -> list[int]:
        budget, log = ByteBudget(10), list[int]()
        tasks = [asyncio.create_task(holding(budget, size, log)) for size in (6, 8, 1, 3)]
        await asyncio.sleep(0.5)
        assert log == [6], "the small ones do not pass the large one"
        assert budget.held == 6
        await asyncio.sleep(1.0)
        assert log == [6, 8, 1]
        await asyncio.gather(*tasks)
        assert budget.held == 0
        return log

    assert run_virtual(main()) == [6, 8, 1, 3]


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    async def main() -> None:
        budget, log = ByteBudget(10), list[int]()
        first = asyncio.create_task(holding(budget, 6, log))
        large = asyncio.create_task(holding(budget, 10, log))
        small = asyncio.create_task(holding(budget, 4, log))
        await asyncio.sleep(0.5)
        assert log == [6]
        large.cancel()
        await asyncio.sleep(0.1)
        assert log == [6, 4]
        await asyncio.gather(first, small)
        assert budget.held == 0

    run_virtual(main())


def test_a_waiter_cancelled_while_it_gets_bytes_returns_them() -> None:
    async def main() -> None:
        budget, log = ByteBudget(10), list[int]()
        await budget.acquire(10)
        waiting = asyncio.create_task(holding(budget, 5, log))
        await asyncio.sleep(0)
        budget.release(10)
        assert budget.held == 5
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (budget.held, log) == (0, [])

    run_virtual(main())


def test_more_than_there_are_is_refused_at_once() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        with pytest.raises(MemoryBudgetError, match="11 bytes"):
            await budget.acquire(11)
        await budget.acquire(10)

    run_virtual(main())


def test_the_limit_holds_under_random_cancellations_and_every_waiter_proceeds() -> None:
    async def main(seed: int) -> None:
        rng = random.Random(seed)
        budget, log = ByteBudget(20), list[int]()
        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(holding(budget, rng.randrange(21), log, rng.random())))
            await asyncio.sleep(rng.random() / 4)
            assert 0 <= budget.held <= 20
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(log) >= sum(result is None for result in results) > 20
        assert budget.held == 0

    for seed in range(20):
        run_virtual(main(seed))
