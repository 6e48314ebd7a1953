"""Instances that a platform starts or takes in the place of a node, or beside it; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from stoker_warm._node_client import NodeClient
from support.warm_one_node import DATA, NAME, SHARD, check, die_in_silence, ping, tasks
from support.warm_platform import CallFaults, Tier


def test_a_call_that_goes_astray_loses_nothing_and_costs_one_more() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        made.platform.call_faults = CallFaults(stray=1.0)
        reading = asyncio.ensure_future(made.can_read(NAME, DATA))
        await asyncio.sleep(0.2)
        made.platform.call_faults = CallFaults()
        assert await reading
        assert [(call.task, call.is_cold) for call in made.platform.calls] == [("serve", True), ("serve", False)]
        await asyncio.sleep(2.0)
        assert made.believed() == {"warm-0": {SHARD}} == made.held()
        assert [instance.running for instance in made.platform.all_instances()] == [None, None]
        assert len(made.proxy._peer_server._connections) == 1, "nothing is left of the unauthenticated peer"

    check(test)


def test_calls_that_keep_going_astray_to_an_empty_instance_lose_nothing() -> None:
    """Of two instances that have nothing to do, this platform takes the wrong one every time."""

    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.call_faults, made.platform.most = CallFaults(stray=1.0), 2
        made.platform.calls.clear()
        for _ in range(20):
            assert await made.can_read(NAME, DATA)
            await asyncio.sleep(100.0)
        assert len(made.platform.all_instances()) == 2
        assert not made.proxy.statistics().losses
        assert tasks(made).count("serve") <= 2 * 20 + 2 * tasks(made).count("warm")

    check(test)


def test_a_node_that_was_taken_back_in_silence_is_believed_to_be_empty_after_one_call_more() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        die_in_silence(made)
        begun_seconds = asyncio.get_running_loop().time()
        assert not await made.can_read(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds < 1.0
        assert [(call.task, call.is_cold) for call in made.platform.calls] == [("serve", True), ("serve", True)]
        assert made.believed() == {}
        await asyncio.sleep(2.0)
        await ping(node)
        assert tasks(made) == ["serve"] * 3, "the node is known again"

    check(test)


def test_the_second_call_is_made_although_the_waiters_have_left() -> None:
    """Otherwise the unauthenticated peer would be idle at the next call, and trusted."""

    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.call_faults = CallFaults(stray=1.0)
        reading = asyncio.ensure_future(made.can_read(NAME, DATA))
        await asyncio.sleep(0.2)
        made.platform.call_faults = CallFaults()
        reading.cancel()
        await asyncio.sleep(5.0)
        assert node.state_machine.expected_version.change_count == 1
        assert await made.can_read(NAME, DATA)

    check(test)


def test_readers_of_a_node_in_doubt_wait_no_longer_than_they_would() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        die_in_silence(made)
        made.platform.call_faults = CallFaults(cold_seconds=1.2)
        begun_seconds = asyncio.get_running_loop().time()
        assert not await made.can_read(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds == pytest.approx(2.0, abs=0.01)
        await asyncio.sleep(5.0)
        assert made.believed() == {}

    check(test, read_seconds=2.0)


def test_a_platform_that_runs_one_instance_at_a_time_is_not_called_for_ever() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.most = 1
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        die_in_silence(made)
        assert not await made.can_read(NAME, DATA)
        assert made.platform.counts.throttled == 1
        assert made.believed() == {}
        await ping(node)

    check(test)
