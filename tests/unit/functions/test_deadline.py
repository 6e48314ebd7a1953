"""When an invocation must have ended, and when it stops taking on work."""

from __future__ import annotations

import asyncio

import pytest

from stoker.errors import ConnectionLostError, DeadlineError
from stoker.testing import run_virtual
from stoker_functions._deployment import InvocationDeadline


@pytest.mark.parametrize(
    ("seconds", "reserved_seconds"), [(900, 30), (300, 30), (100, 10), (20, 2), (5, 2), (3, 1.5), (0.2, 0.1), (0, 0)]
)
def test_a_tenth_of_the_time_is_reserved_within_bounds_and_never_more_than_half(
    seconds: float, reserved_seconds: float
) -> None:
    async def main() -> None:
        await asyncio.sleep(100)
        deadline = InvocationDeadline.after(seconds)
        assert deadline.remaining_seconds() == pytest.approx(seconds)
        assert deadline.at_seconds - deadline.stop_at_seconds == pytest.approx(reserved_seconds)

    run_virtual(main())


def test_it_comes_nearer() -> None:
    async def main() -> None:
        deadline, near = InvocationDeadline.after(20), []
        for _ in range(2):
            await asyncio.sleep(9)
            near.append(deadline.is_near)
        assert near == [False, True]
        await asyncio.sleep(5)
        assert deadline.remaining_seconds() == pytest.approx(-3)

    run_virtual(main())


def test_an_invocation_that_begins_behind_its_end_has_no_time() -> None:
    async def main() -> None:
        deadline = InvocationDeadline.after(-5)
        assert deadline.is_near
        assert deadline.remaining_seconds() == 0

    run_virtual(main())


def test_what_is_not_done_when_it_is_time_to_stop_is_cancelled_with_an_error_that_says_what() -> None:
    async def main() -> None:
        deadline = InvocationDeadline.after(20)
        ended: list[float] = []

        async def work() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(deadline.remaining_seconds())

        with pytest.raises(DeadlineError, match="the commit to s3://b did not come to its end"):
            async with deadline.limit("the commit to s3://b"):
                await work()
        assert ended == pytest.approx([2])
        assert deadline.remaining_seconds() == pytest.approx(2)

    run_virtual(main())


def test_what_is_done_in_time_and_what_fails_by_itself_is_left_alone() -> None:
    async def main() -> None:
        async with InvocationDeadline.after(20).limit("this"):
            await asyncio.sleep(17)
        for error in (TimeoutError, ConnectionLostError, DeadlineError, asyncio.CancelledError):
            with pytest.raises(error, match="its own"):
                async with InvocationDeadline.after(20).limit("this"):
                    raise error("its own")

    run_virtual(main())
