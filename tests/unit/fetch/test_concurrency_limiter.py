from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stoker._base.task_group import Limiter
from stoker._fetch.concurrency import AimdLimit
from stoker.testing import run_virtual


@asynccontextmanager
async def permit(gate: Limiter, *, urgent: bool) -> AsyncIterator[None]:
    await gate.acquire(urgent=urgent)
    try:
        yield
    finally:
        gate.release()


def test_urgent_requests_pass_others_that_keep_their_order() -> None:
    async def main() -> list[str]:
        gate = Limiter(1)
        order: list[str] = []

        async def request(name: str, *, urgent: bool) -> None:
            async with permit(gate, urgent=urgent):
                order.append(name)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for name in ("first", "a", "b", "A", "B"):
                group.create_task(request(name, urgent=name.isupper()))
        assert gate.held == 0
        return order

    assert run_virtual(main()) == ["first", "A", "B", "a", "b"]


def test_an_extra_permit_goes_over_the_limit_and_holds_back_the_next() -> None:
    async def main() -> None:
        gate = Limiter(1)
        async with permit(gate, urgent=False):
            gate.held += 1
            assert gate.held == 2
            waiter = asyncio.create_task(_hold(gate))
            await asyncio.sleep(1)
            assert gate.has_waiters
            gate.release()
        await waiter
        assert gate.held == 0

    run_virtual(main())


@pytest.mark.parametrize("cancel_before_grant", [True, False])
def test_a_cancelled_wait_holds_no_permit(cancel_before_grant: bool) -> None:
    async def main() -> None:
        gate = Limiter(1)
        async with permit(gate, urgent=False):
            waiter = asyncio.create_task(_hold(gate))
            behind = asyncio.create_task(_hold(gate))
            await asyncio.sleep(1)
            if cancel_before_grant:
                waiter.cancel()
        waiter.cancel()  # otherwise: granted on leaving the block above, not yet resumed
        await behind
        assert gate.held == 0
        assert waiter.cancelled()

    run_virtual(main())


def test_a_lower_limit_admits_no_waiter_until_enough_have_left() -> None:
    async def main() -> None:
        aimd = AimdLimit(start=4, min_limit=1, max_limit=4)
        gate = Limiter(aimd.limit)
        holders = [asyncio.create_task(_hold(gate, seconds=1.0 + number)) for number in range(4)]
        late = asyncio.create_task(_hold(gate))
        await asyncio.sleep(0.5)
        aimd.record_throttle(0.5, 0.5)
        gate.limit = aimd.limit
        assert gate.limit == 2
        await asyncio.sleep(2.0)
        assert not late.done()
        assert gate.held == 2
        await asyncio.gather(late, *holders)

    run_virtual(main())


async def _hold(gate: Limiter, seconds: float = 0.1) -> None:
    async with permit(gate, urgent=False):
        await asyncio.sleep(seconds)
