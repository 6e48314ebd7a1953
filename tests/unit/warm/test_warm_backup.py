"""Second instances of nodes: brought up to date by what they lack, and there when the first one goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.errors import StokerError
from stoker.testing import run_virtual
from stoker_warm._code import Code
from stoker_warm._errands import back_up
from stoker_warm._settings import WarmConfig
from stoker_warm._shard import OVERHEAD_BYTES
from support.warm_platform import Instance, Mood, Tier, named

OBJECTS = [named(number, 3000 + number) for number in range(6)]


def check(test: Callable[[Tier], Awaitable[None]], **settings: Any) -> None:
    """Run a test with a tier of two nodes, in virtual time."""

    async def main() -> None:
        async with Tier(WarmConfig(nodes=2, code=Code(2, 0), **settings)) as tier:
            await asyncio.sleep(2.0)
            await test(tier)

    run_virtual(main())


def pair(tier: Tier) -> tuple[Instance, Instance]:
    first, second = tier.platform.instances["warm-0"]
    return first, second


async def backed_up(tier: Tier) -> int:
    copied = await back_up(tier.proxy._nodes[0], tier.config)
    await asyncio.sleep(1.0)
    return copied


def test_a_second_instance_gets_what_it_lacks_and_loses_what_the_first_has_not() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS[:3])
        assert await backed_up(tier) == 3
        first, second = pair(tier)
        assert first.shelf.ids() == second.shelf.ids()
        tier.proxy._writer.evict(tier.proxy._directory.forget(OBJECTS[0][0]))
        await tier.put(*OBJECTS[3:])
        assert await backed_up(tier) == 3, "the delta only"
        assert first.shelf.ids() == second.shelf.ids()
        assert first.shelf.digest.hash == second.shelf.digest.hash
        assert await backed_up(tier) == 0
        assert [instance.running for instance in pair(tier)] == [None, None], "both are told to go"

    check(test)


def test_the_second_instance_serves_when_the_first_one_is_taken_back() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        for node in tier.proxy._nodes:
            await back_up(node, tier.config)
        await asyncio.sleep(1.0)
        for instances in list(tier.platform.instances.values()):
            tier.platform.kill(instances[0])
        await asyncio.sleep(1.0)
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6
        assert tier.proxy.statistics().losses == 0
        assert tier.platform.counts.cold == 4
        await asyncio.sleep(1.0)
        assert tier.believed() == tier.held()

    check(test)


async def replaced(tier: Tier) -> Instance:
    """Take the first instance of a node and have another, empty one in its place, before the second; return that."""
    first, second = pair(tier)
    tier.platform.kill(first)
    tier.platform.mood = Mood(stray=1.0)
    await tier.proxy._nodes[0].keep_warm()
    await asyncio.sleep(5.0)
    tier.platform.mood = Mood()
    tier.platform.instances["warm-0"].reverse()  # it takes the first that has nothing to do
    third, _ = pair(tier)
    assert (tier.proxy._nodes[0].life.instance, len(third.shelf), len(second.shelf) > 0) == (third.instance, 0, True)
    return third


def test_a_back_up_of_an_empty_instance_in_the_place_of_the_first_brings_back_what_the_second_one_has() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        assert await backed_up(tier) == 6
        third = await replaced(tier)
        assert tier.believed().keys() == {"warm-1"}
        assert not await tier.kept(*OBJECTS[0])
        assert await backed_up(tier) == 6
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6
        _, second = pair(tier)
        assert second.shelf.ids() == third.shelf.ids() != []
        assert tier.believed() == tier.held()
        assert await backed_up(tier) == 0

    check(test)


def test_what_is_elsewhere_by_now_is_not_brought_back_for_long() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        assert await backed_up(tier) == 6
        third = await replaced(tier)
        for name, data in OBJECTS[:3]:  # written again, on whichever nodes
            await tier.put((name, data))
        for _ in range(2):
            await backed_up(tier)
            await tier.put(named(77, 5000))  # what is to go from a node goes when it is written to
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6
        await backed_up(tier)
        _, second = pair(tier)
        assert second.shelf.ids() == third.shelf.ids()
        assert tier.believed() == tier.held()

    check(test)


def test_no_more_is_brought_back_than_there_is_room_for() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        await backed_up(tier)
        third = await replaced(tier)
        node = tier.proxy._nodes[0]
        node.limit_bytes = third.shelf.limit_bytes = 3 * (1503 + OVERHEAD_BYTES)
        assert await backed_up(tier) == 3
        _, second = pair(tier)
        assert second.shelf.ids() == third.shelf.ids()
        assert len(third.shelf) == 3

    check(test)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.012, 0.02, 0.022, *(0.024 + 0.0005 * step for step in range(14))])
def test_an_instance_that_dies_while_it_is_given_back_what_was_lost_leaves_it_with_the_second(
    delay_seconds: float,
) -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        await backed_up(tier)
        _, second = pair(tier)
        before = second.shelf.ids()
        third = await replaced(tier)
        saving = asyncio.ensure_future(back_up(tier.proxy._nodes[0], tier.config))
        await asyncio.sleep(delay_seconds)
        tier.platform.kill(third)
        await asyncio.wait([saving])
        await asyncio.sleep(3.0)
        assert second.shelf.ids() == before
        tier.platform.instances["warm-0"].sort(key=lambda each: each is not second)
        await tier.proxy.wake()
        await asyncio.sleep(1.0)
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6
        assert tier.believed() == tier.held()

    check(test)


def test_back_ups_are_made_of_what_has_changed_and_of_nothing_else() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        await asyncio.sleep(300.0)
        assert tier.proxy.statistics().backed_up == 12
        tier.platform.calls.clear()
        await asyncio.sleep(1000.0)
        assert tier.proxy.statistics().backed_up == 12

    check(test, backup_seconds=100.0)


def test_a_platform_that_starts_no_second_instance_costs_one_call_a_turn() -> None:
    async def test(tier: Tier) -> None:
        tier.platform.most = 1
        await tier.put(*OBJECTS)
        await asyncio.sleep(1000.0)
        assert tier.proxy.statistics().backed_up == 0
        assert tier.platform.counts.throttled <= 2 * 11
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6

    check(test, backup_seconds=100.0)


def test_a_node_that_dies_in_its_back_up_leaves_nothing_behind() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        for delay_seconds in (0.0, 0.01, 0.3, 0.305, 0.31, 0.315, 0.32, 0.33):
            saving = asyncio.ensure_future(back_up(tier.proxy._nodes[0], tier.config))
            await asyncio.sleep(delay_seconds)
            tier.platform.reclaim("warm-0")
            await asyncio.wait([saving])
            error = saving.exception()
            assert error is None or isinstance(error, StokerError)
            await asyncio.sleep(3.0)
        for _ in range(2):
            for name, data in OBJECTS:
                await tier.kept(name, data)
                await tier.put((name, data))
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6

    check(test)


def test_a_second_instance_that_is_slow_to_start_is_had_at_the_next_turn() -> None:
    async def test(tier: Tier) -> None:
        await tier.put(*OBJECTS)
        tier.platform.mood = Mood(cold_seconds=20.0)
        await asyncio.sleep(140.0)
        assert tier.proxy.statistics().backed_up == 0
        await asyncio.sleep(100.0)
        assert tier.proxy.statistics().backed_up == 12
        assert tier.platform.counts.cold == 4
        assert [await tier.kept(*each) for each in OBJECTS] == [True] * 6

    check(test, backup_seconds=100.0)
