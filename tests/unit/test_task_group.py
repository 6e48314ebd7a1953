from __future__ import annotations

import asyncio

import pytest
from stoker.clock import run_virtual
from stoker.task_group import task_group


async def fail(error: Exception, after_seconds: float = 1.0) -> None:
    await asyncio.sleep(after_seconds)
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        raise error from cause


def test_the_first_failure_is_raised_itself_with_its_cause_once_all_tasks_have_ended() -> None:
    async def main() -> None:
        with pytest.raises(LookupError, match="first") as caught:
            async with task_group() as group, task_group() as inner:
                other = group.create_task(asyncio.sleep(3600))
                inner.create_task(fail(LookupError("first")))
                inner.create_task(fail(ValueError("second"), after_seconds=2.0))
        assert isinstance(caught.value.__cause__, KeyError)
        assert other.cancelled()
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_an_error_of_the_block_is_raised_itself_too() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with task_group() as group:
                other = group.create_task(asyncio.sleep(3600))
                await asyncio.sleep(0)
                raise ZeroDivisionError
        assert other.cancelled()

    run_virtual(main())


def test_cancelling_the_block_cancels_its_tasks_and_stays_a_cancellation() -> None:
    async def block() -> None:
        async with task_group() as group:
            group.create_task(asyncio.sleep(3600))

    async def main() -> None:
        running = asyncio.create_task(block())
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    run_virtual(main())
