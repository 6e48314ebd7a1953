"""When nodes are called to keep them warm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

import pytest

from stoker.testing import run_virtual
from stoker_warm._node_client import NodeClient
from stoker_warm._proxy import MAX_HEARTBEATS, start_heartbeats

INTERVAL = 60.0


class Called:
    """A node as its schedule sees it; a call takes some time.

    Attributes:
        calls: when it was called.
    """

    under_way = 0
    most_under_way = 0

    def __init__(self, seconds: float = 0.0, failure: Exception | None = None) -> None:
        self.seconds, self.failure = seconds, failure
        self.last_contact_seconds = asyncio.get_running_loop().time()
        self.calls: list[float] = []
        self.is_called = False

    async def keep_warm(self) -> None:
        assert not self.is_called
        self.is_called = True
        Called.under_way += 1
        Called.most_under_way = max(Called.most_under_way, Called.under_way)
        self.last_contact_seconds = asyncio.get_running_loop().time()
        self.calls.append(self.last_contact_seconds)
        try:
            await asyncio.sleep(self.seconds)
            if self.failure is not None:
                raise self.failure
        finally:
            self.is_called = False
            Called.under_way -= 1


def play(
    make: Callable[[], list[Called]], work: Callable[[list[Called]], Awaitable[None]], seconds: float
) -> list[Called]:
    """Run the schedule of some nodes for some time; return them."""
    Called.most_under_way = 0

    async def main() -> list[Called]:
        tasks, nodes = set[asyncio.Task[None]](), make()

        def spawn(coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
            async def run() -> None:
                with suppress(ZeroDivisionError):
                    await coroutine

            task = asyncio.get_running_loop().create_task(run())
            tasks.add(task)
            task.add_done_callback(lambda _: coroutine.close())
            return task

        start_heartbeats(cast("list[NodeClient]", nodes), INTERVAL, spawn)
        async with asyncio.timeout(seconds + 1.0):
            await work(nodes)
            await asyncio.sleep(seconds - asyncio.get_running_loop().time())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return nodes

    return run_virtual(main())


async def nothing(_: list[Called]) -> None:
    await asyncio.sleep(0)


def test_every_node_is_called_once_an_interval() -> None:
    for node in play(lambda: [Called() for _ in range(4)], nothing, 190.0):
        assert node.calls == [60.0, 120.0, 180.0]


def test_the_interval_begins_with_a_call_however_long_that_takes() -> None:
    (node,) = play(lambda: [Called(seconds=25.0)], nothing, 190.0)
    assert node.calls == [60.0, 120.0, 180.0]
    (slow,) = play(lambda: [Called(seconds=100.0)], nothing, 290.0)
    assert slow.calls == [60.0, 160.0, 260.0]


def test_traffic_puts_off_a_call_for_a_whole_interval() -> None:
    async def work(nodes: list[Called]) -> None:
        await asyncio.sleep(59.0)
        nodes[0].last_contact_seconds = 59.0

    (node,) = play(lambda: [Called()], work, 150.0)
    assert node.calls == [119.0]


def test_a_node_under_steady_traffic_is_never_called() -> None:
    async def work(nodes: list[Called]) -> None:
        for second in range(0, 3600, 30):
            nodes[0].last_contact_seconds = float(second)
            await asyncio.sleep(30.0)

    (node,) = play(lambda: [Called()], work, 3601.0)
    assert node.calls == []


def test_a_call_that_fails_ends_no_schedule() -> None:
    first, second = play(lambda: [Called(failure=ZeroDivisionError()), Called()], nothing, 190.0)
    assert first.calls == second.calls == [60.0, 120.0, 180.0]


def test_concurrent_calls_are_limited_and_recently_contacted_nodes_are_skipped() -> None:
    async def work(nodes: list[Called]) -> None:
        await asyncio.sleep(65.0)
        nodes[-1].last_contact_seconds = 65.0

    nodes = play(lambda: [Called(seconds=10.0) for _ in range(MAX_HEARTBEATS + 2)], work, 100.0)
    assert Called.most_under_way == MAX_HEARTBEATS
    assert [node.calls for node in nodes[:MAX_HEARTBEATS]] == [[60.0]] * MAX_HEARTBEATS
    assert nodes[MAX_HEARTBEATS].calls == [70.0]
    assert nodes[-1].calls == []


@pytest.mark.parametrize("count", [0, 1])
def test_a_schedule_ends_with_its_tasks(count: int) -> None:
    assert len(play(lambda: [Called() for _ in range(count + 1)], nothing, 5.0)) == count + 1
