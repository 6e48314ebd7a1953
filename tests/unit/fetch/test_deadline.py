from __future__ import annotations

import asyncio

import pytest

from stoker._base.retry import SuspensionAwareDeadline
from stoker.testing import VirtualClockLoop, run_virtual
from support.fetching import seconds


def jump(by_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    loop.jump(by_seconds)


async def sleep_under(deadline: SuspensionAwareDeadline, seconds_to_begin: float, grace_seconds: float) -> None:
    async with deadline:
        deadline.start(seconds_to_begin, grace_seconds)
        await asyncio.sleep(1e6)


async def ended_after(seconds_to_begin: float, grace_seconds: float) -> float:
    deadline = SuspensionAwareDeadline()
    with pytest.raises(TimeoutError):
        await sleep_under(deadline, seconds_to_begin, grace_seconds)
    assert deadline.is_expired
    return seconds()


def test_it_ends_its_block_after_the_time_and_the_grace() -> None:
    assert run_virtual(ended_after(30.0, 12.0)) == pytest.approx(42.0)


def test_it_does_not_count_before_it_is_started_nor_from_anew() -> None:
    async def start_twice() -> None:
        deadline = SuspensionAwareDeadline()
        async with deadline:
            assert not deadline.expires_within(1e9)
            await asyncio.sleep(1000.0)
            deadline.start(5.0, 0.0)
            await asyncio.sleep(4.0)
            deadline.start(5.0, 0.0)
            await asyncio.sleep(4.0)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await start_twice()
        assert seconds() == pytest.approx(1005.0)

    run_virtual(main())


def test_a_wait_beyond_the_time_is_forbidden_although_there_is_grace() -> None:
    async def main() -> None:
        deadline = SuspensionAwareDeadline()
        async with deadline:
            deadline.start(5.0, 60.0)
            assert not deadline.expires_within(4.9)
            assert deadline.expires_within(5.0)
        assert not deadline.is_expired

    run_virtual(main())


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(29.0, jump, 600.0)
        ended_seconds = await ended_after(30.0, 5.0)
        assert ended_seconds == pytest.approx(29.0 + 600.0 + 30.0 + 5.0)

    run_virtual(main())


def test_a_timer_that_is_late_by_a_little_is_late_by_other_work() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(29.0, jump, 3.0)
        assert await ended_after(30.0, 0.0) == pytest.approx(32.0)

    run_virtual(main())


def test_errors_of_the_block_come_through_and_nothing_counts_behind_it() -> None:
    async def fail(deadline: SuspensionAwareDeadline) -> None:
        async with deadline:
            deadline.start(5.0, 0.0)
            raise KeyError("mine")

    async def main() -> None:
        deadline = SuspensionAwareDeadline()
        with pytest.raises(KeyError, match="mine"):
            await fail(deadline)
        await asyncio.sleep(10.0)
        assert not deadline.is_expired

    run_virtual(main())
