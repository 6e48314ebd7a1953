"""Work side by side, whose results are counted in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker._base.task_group import OrderedTasks
from stoker.errors import ServerError
from stoker.testing import run_virtual


class Pieces:
    """Pieces of work that take the seconds they are named by; those of negative seconds fail when these are over."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.counted: list[list[float]] = []

    def lasting(self, seconds: float) -> Callable[[], Awaitable[float]]:
        async def work() -> float:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await asyncio.sleep(abs(seconds))
            finally:
                self.running -= 1
            if seconds < 0:
                raise ServerError(f"piece {seconds}")
            return seconds

        return work

    def queue(self, concurrency: int = 3) -> OrderedTasks[float]:
        return OrderedTasks(concurrency, self.counted.append)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_results_are_counted_in_the_order_in_which_the_pieces_were_given_and_as_soon_as_none_is_missing() -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue()
        for seconds in (3, 1, 2, 5):
            await queue.add(pieces.lasting(seconds))
        assert pieces.counted == []
        await queue.finish()
        assert pieces.counted == [[3, 1, 2], [5]]
        assert now() == 1 + 5

    run_virtual(main())


def test_no_more_pieces_than_the_concurrency_run_and_one_more_waits() -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue(concurrency=2)
        given = []
        for _ in range(6):
            await queue.add(pieces.lasting(1))
            given.append(now())
        await queue.finish()
        assert given == [0, 0, 1, 1, 2, 2]
        assert pieces.most_running == 2

    run_virtual(main())


def test_a_failure_is_raised_at_the_next_call_though_pieces_before_it_still_run() -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue()
        for seconds in (100, -1, 2):
            await queue.add(pieces.lasting(seconds))
        with pytest.raises(ServerError, match="piece -1"):
            await queue.add(pieces.lasting(9))
        assert now() == 1
        await queue.cancel()
        assert (pieces.running, pieces.counted) == (0, [])

    run_virtual(main())


@pytest.mark.parametrize(
    ("lasting", "wait_seconds", "counted", "is_whole"),
    [
        ((1, 2), None, [[1, 2]], True),
        ((1, 50, 2), 10, [[1]], True),
        ((1, -2, 3), None, [[1]], False),
        ((50, -1), 10, [], False),
        ((), None, [], True),
    ],
)
def test_counts_are_kept_and_failures_are_reported(
    lasting: tuple[float, ...], wait_seconds: float | None, counted: list[list[float]], is_whole: bool
) -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue()
        for seconds in lasting:
            await queue.add(pieces.lasting(seconds))
        assert await queue.wait_all(wait_seconds) is is_whole
        assert pieces.counted == counted
        await queue.cancel()
        assert pieces.running == 0

    run_virtual(main())


def test_a_call_that_is_cancelled_while_it_waits_has_taken_its_piece() -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue(concurrency=1)
        await queue.add(pieces.lasting(5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await queue.add(pieces.lasting(2))
        await queue.finish()
        assert pieces.counted == [[5], [2]]

    run_virtual(main())


def test_cancelling_ends_what_runs_and_what_waits() -> None:
    async def main() -> None:
        pieces = Pieces()
        queue = pieces.queue(concurrency=1)
        adding = [asyncio.create_task(queue.add(pieces.lasting(5))) for _ in range(2)]
        await asyncio.sleep(1)
        for each in adding:
            each.cancel()
        await queue.cancel()
        await asyncio.gather(*adding, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert (pieces.running, pieces.counted, now()) == (0, [], 1)

    run_virtual(main())
