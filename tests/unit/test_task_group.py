from __future__ import annotations

import asyncio

import pytest

from stoker._base.task_group import task_group
from stoker.testing import run_virtual


async def fail(error: Exception, after_seconds: float = 1.0) -> None:
    await asyncio.sleep(after_seconds)
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        raise error from cause


async def leave_with(error: Exception, *, from_task: bool) -> None:
    """Leave a block with an error beside a long task, of which nothing may be left."""
    other: asyncio.Task[None] | None = None
    try:
        async with task_group() as group, task_group() as inner:
            other = group.create_task(asyncio.sleep(3600))
            inner.create_task(fail(ValueError("second"), after_seconds=2.0))
            if from_task:
                inner.create_task(fail(error))
            else:
                await fail(error)
    finally:
        assert other is not None
        assert other.cancelled()
        assert asyncio.get_running_loop().time() == 1.0


@pytest.mark.parametrize("from_task", [True, False])
def test_the_first_failure_is_raised_itself_with_its_cause_once_all_tasks_have_ended(from_task: bool) -> None:
    with pytest.raises(LookupError, match="first") as caught:
        run_virtual(leave_with(LookupError("first"), from_task=from_task))
    assert isinstance(caught.value.__cause__, KeyError)


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


def test_a_timeout_around_a_group_that_failed_while_it_waited_still_ends_as_a_timeout() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    async def fail_and_go_on() -> None:
        try:
            async with task_group() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(2))
        except KeyError:
            await asyncio.sleep(1e6)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await fail_and_go_on()

    run_virtual(main())
