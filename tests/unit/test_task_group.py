from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest

from stoker._base.task_group import Limiter, end_tasks, for_each_in_turn, task_group
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


def test_calls_share_a_limit_and_earlier_ones_go_first_without_cycles_that_keep_their_items() -> None:
    started: list[tuple[str, int]] = []
    running: list[int] = []

    async def main() -> None:
        limiter = Limiter(3)

        async def read(name: str, items: int, *, urgent: bool = False) -> None:
            async def work(item: int) -> None:
                started.append((name, item))
                running.append(limiter.held)
                await asyncio.sleep(1)

            await for_each_in_turn(range(items), work, limiter, urgent=urgent)

        async with asyncio.TaskGroup() as group:
            group.create_task(read("a", 4))
            group.create_task(read("b", 3))
            await asyncio.sleep(0.5)
            group.create_task(read("urgent", 1, urgent=True))
        assert limiter.held == 0
        assert not limiter.has_waiters

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
        assert gc.collect() < 50
    finally:
        gc.enable()
    assert started == [
        *(("a", item) for item in range(3)),
        ("urgent", 0),
        ("a", 3),
        *(("b", item) for item in range(3)),
    ]
    assert max(running) == 3


def test_a_lower_limit_is_kept_by_calls_that_have_begun() -> None:
    running: list[int] = []

    async def main() -> None:
        limiter = Limiter(4)

        async def work(item: int) -> None:
            running.append(limiter.held)
            await asyncio.sleep(1)
            limiter.limit = 2

        await for_each_in_turn(range(12), work, limiter)
        assert limiter.held == 0

    run_virtual(main())
    assert max(running[4:]) == 2


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_an_error_or_a_cancellation_ends_all_work_in_turn(is_cancelled: bool) -> None:
    async def main() -> None:
        limiter, active = Limiter(3), set[int]()

        async def work(item: int) -> None:
            active.add(item)
            try:
                await asyncio.sleep(1 + item)
                if not is_cancelled:
                    raise LookupError(f"item {item}")
            finally:
                active.discard(item)

        calls = asyncio.create_task(for_each_in_turn(range(9), work, limiter))
        waiting = asyncio.create_task(for_each_in_turn(range(2), work, limiter))
        await asyncio.sleep(0.5)
        assert len(active) == 3
        waiting.cancel()
        if is_cancelled:
            calls.cancel()
        await asyncio.wait([calls, waiting])
        assert waiting.cancelled()
        assert calls.cancelled() if is_cancelled else isinstance(calls.exception(), LookupError)
        await asyncio.sleep(0)
        assert not active
        assert limiter.held == 0
        assert not limiter.has_waiters

    run_virtual(main())


def test_no_items_need_no_turn() -> None:
    async def main() -> None:
        limiter = Limiter(1)
        await limiter.acquire()

        async def work(item: int) -> None:
            raise AssertionError(item)

        await for_each_in_turn([], work, limiter)

    run_virtual(main())
