from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest

from stoker._base.task_group import end_tasks, task_group
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


async def clean_up_slowly(seconds: float, error: Exception | None = None) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error


def test_ended_tasks_have_cleaned_up_and_their_errors_are_dropped() -> None:
    complaints: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        failed = asyncio.create_task(fail(LookupError("before")))
        tasks = [asyncio.create_task(clean_up_slowly(2)), asyncio.create_task(clean_up_slowly(5, KeyError("late")))]
        await asyncio.sleep(2)
        assert failed.done()
        await end_tasks(each for each in (failed, *tasks))
        assert loop.time() == 7
        assert tasks[0].cancelled()

    run_virtual(main())
    gc.collect()  # an error that nobody asked for is told when its task is collected
    assert complaints == []


def test_ending_no_tasks_does_nothing() -> None:
    run_virtual(end_tasks([]))


def test_an_end_that_is_cancelled_still_leaves_no_task_running() -> None:
    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await clean_up_slowly(3)

    async def main() -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        ending = asyncio.create_task(end_tasks([task]))
        await asyncio.sleep(1)
        ending.cancel()
        await asyncio.wait([ending])
        assert ending.cancelled()
        assert task.cancelled()
        assert asyncio.get_running_loop().time() == 5

    run_virtual(main())
