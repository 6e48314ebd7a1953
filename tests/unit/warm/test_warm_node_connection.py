"""Nodes as a proxy uses them: which calls are made and which are not, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.abc import Answer
from stoker.errors import ConnectionLostError, NotFoundError, StokerError
from stoker_warm._node_client import NodeClient
from stoker_warm._node_state import NodeState
from support.warm_one_node import DATA, NAME, SHARD, check, ping, tasks, the_instance
from support.warm_platform import CallFaults, Platform, Tier


def test_a_sleeping_node_is_called_once_for_all_waiters() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        assert node.state_machine.state is NodeState.SLEEPING
        await asyncio.gather(*[ping(node) for _ in range(5)])
        assert tasks(made) == ["serve"]

    check(test)


def test_a_wake_up_outlives_its_first_waiter_if_others_wait() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(warm_seconds=1.0)
        first, second = (asyncio.ensure_future(ping(node)) for _ in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        await second
        assert first.cancelled()
        assert tasks(made) == ["serve"]

    check(test)


def test_a_node_that_does_not_connect_is_not_called_again_without_waiters() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(warm_seconds=100.0)
        with pytest.raises(ConnectionLostError, match="not awake in time"):
            await ping(node, seconds=1.0)
        await asyncio.sleep(50.0)
        assert tasks(made) == ["serve"]

    check(test, keep_warm_seconds=1000.0)


def test_a_request_without_time_left_makes_no_call_at_its_end() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(failed=1.0)
        with pytest.raises(ConnectionLostError, match="not awake"):
            await ping(node, seconds=0.9)
        calls = made.platform.counts.failed
        await asyncio.sleep(30.0)
        assert made.platform.counts.failed == calls

    check(test, keep_warm_seconds=1000.0)


def test_a_node_that_is_taken_back_while_it_is_awake_is_called_and_asked_again() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await ping(node)
        made.platform.reclaim("warm-0")
        await ping(node)
        assert tasks(made) == ["serve", "serve"]

    check(test)


def test_a_request_whose_time_goes_by_in_the_wake_is_no_silence() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(warm_seconds=2.0)
        with pytest.raises(ConnectionLostError, match="not awake"):
            await ping(node, seconds=2.0)
        await ping(node)
        assert (node.state_machine.state, node.state_machine.failed_attempts) == (NodeState.AWAKE, 0)
        assert tasks(made) == ["serve"]

    check(test)


def test_three_tries_and_a_node_is_gone_and_what_it_held_is_lost() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        made.platform.is_split, made.platform.dial_seconds = True, 100.0
        for link in made.network.links:
            link.split()
        with pytest.raises(ConnectionLostError, match="called 3 times and does not connect"):
            await ping(node)
        assert node.state_machine.state is NodeState.GONE
        assert tasks(made) == ["serve"] * 3
        assert made.believed() == {}
        with pytest.raises(ConnectionLostError, match="does not connect"):  # at once, and for nothing
            await ping(node)
        assert tasks(made) == ["serve"] * 3

    check(test)


def test_a_node_that_was_given_up_comes_back_by_the_call_that_keeps_it_warm() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(failed=1.0)
        with pytest.raises(ConnectionLostError, match="does not connect"):
            await ping(node)
        made.platform.call_faults = CallFaults()
        await asyncio.sleep(70.0)
        assert node.state_machine.state is NodeState.SLEEPING
        await ping(node)

    check(test)


def test_calls_that_fail_are_repeated_with_pauses() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(failed=1.0)
        begun_seconds = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionLostError, match="does not connect"):
            await ping(node)
        assert made.platform.counts.failed == 3
        assert 1.5 < asyncio.get_running_loop().time() - begun_seconds < 5.0
        assert made.proxy.bill.unanswered_calls == 3

    check(test)


def test_calls_that_a_platform_refuses_are_on_nobodys_bill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(platform: Platform, name: str, event: object) -> Answer:
        raise NotFoundError(f"there is no function {name}")

    async def test(made: Tier, node: NodeClient) -> None:
        with pytest.raises(ConnectionLostError, match="does not connect"):
            await ping(node)
        assert made.proxy.bill.unanswered_calls == 0

    monkeypatch.setattr(Platform, "invoke", refuse)
    check(test)


def test_a_platform_that_has_no_room_is_asked_ever_less_and_the_node_is_not_given_up() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(throttled=1.0)
        waiting = asyncio.ensure_future(ping(node, seconds=200.0))
        await asyncio.sleep(60.0)
        assert node.state_machine.state is NodeState.SLEEPING
        assert 5 < made.platform.counts.throttled < 20
        made.platform.call_faults = CallFaults()
        await waiting
        assert made.proxy.bill.unanswered_calls == 0

    check(test, keep_warm_seconds=1000.0)


def test_a_node_whose_call_was_lost_is_asked_whether_it_still_runs_before_it_is_called_again() -> None:
    """The call that hangs on the open line is lost; another one would start an empty instance beside the node."""

    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(unanswered=1.0)
        for _ in range(40):
            await ping(node)
            await asyncio.sleep(0.1)
        assert made.platform.counts.unanswered == 1
        assert tasks(made) == ["serve"]

    check(test, linger_seconds=0.25)


def test_what_crosses_the_bye_of_a_node_is_answered_by_calling_it_again_once_it_has_returned() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await ping(node)
        instance = the_instance(made)
        await asyncio.sleep(made.config.linger_seconds - 0.0008)  # what is asked here arrives 0.2 ms too late
        assert (node.state_machine.state, instance.running is None) == (NodeState.AWAKE, False)
        begun_seconds = asyncio.get_running_loop().time()
        await ping(node)
        assert asyncio.get_running_loop().time() - begun_seconds < 0.1
        assert tasks(made) == ["serve", "serve"]
        assert made.platform.all_instances() == [instance]

    check(test)


def test_a_node_without_a_connection_is_asked_to_reconnect() -> None:
    """It cannot know that the proxy has lost it: it slept."""

    async def test(made: Tier, node: NodeClient) -> None:
        for link in made.network.links:
            link.split()
        assert node._connection is not None
        node._connection.abort()
        await asyncio.sleep(0.1)
        begun_seconds = asyncio.get_running_loop().time()
        await ping(node)
        assert asyncio.get_running_loop().time() - begun_seconds < 0.1
        assert tasks(made) == ["serve"]

    check(test)


def test_a_silent_connection_costs_a_ping_and_one_call() -> None:
    """The other end is gone, and nobody has said so."""

    async def test(made: Tier, node: NodeClient) -> None:
        await ping(node)
        (link,) = made.network.links
        link.split()
        await asyncio.sleep(0.1)
        await ping(node)
        assert len(made.platform.all_instances()) <= 2
        assert node.state_machine.state is NodeState.AWAKE

    check(test, fresh_seconds=0.0)


def test_a_node_that_is_never_fresh_is_pinged_once_for_each_request() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        for _ in range(10):
            await ping(node)
            await asyncio.sleep(0.001)
        assert tasks(made) == ["serve"]

    check(test, fresh_seconds=0.0)


def test_traffic_makes_calls_that_keep_a_node_warm_needless() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        for _ in range(20):
            await asyncio.sleep(7.0)
            await ping(node)
        assert tasks(made) == ["serve"] * 20
        await asyncio.sleep(35.0)
        assert tasks(made)[20:] == ["warm"] * 3

    check(test, keep_warm_seconds=10.0)


def test_a_call_that_keeps_warm_finds_a_node_that_has_lost_its_memory() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(1.0)
        assert made.believed() == {"warm-0": {SHARD}}
        made.platform.reclaim("warm-0")
        await asyncio.sleep(70.0)
        assert made.believed() == {}
        assert tasks(made)[-2:] == ["warm", "serve"]
        await asyncio.sleep(60.0)
        assert tasks(made)[-1] == "warm"

    check(test)


def test_a_node_that_answers_pings_with_failures_is_silent() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        instance = the_instance(made)

        def failing(*_: object) -> Any:
            raise StokerError("broken")

        instance.node._handle_request = failing  # type: ignore[method-assign, assignment]
        node._connection = None
        with pytest.raises(StokerError):
            await ping(node)
        await asyncio.sleep(2.0)
        with pytest.raises(StokerError):
            await ping(node, seconds=3.0)
        assert len(made.platform.calls) < 10

    check(test, fresh_seconds=0.0)


def test_no_call_is_made_after_a_node_is_closed() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        made.platform.call_faults = CallFaults(warm_seconds=5.0)
        waiting = asyncio.ensure_future(ping(node))
        await asyncio.sleep(1.0)
        await node.close()
        with pytest.raises(ConnectionLostError, match="not needed any more"):
            await waiting
        with pytest.raises(ConnectionLostError, match="not needed any more"):
            await ping(node)
        assert tasks(made) == ["serve"]

    check(test)


def test_closing_while_requests_are_made_ends_them() -> None:
    async def test(made: Tier, node: NodeClient) -> None:
        async def ask() -> None:
            while True:
                await ping(node)
                await asyncio.sleep(0.01)

        asking = [asyncio.ensure_future(ask()) for _ in range(3)]
        await asyncio.sleep(0.5)
        await node.close()
        await asyncio.wait(asking)
        assert all(isinstance(each.exception(), ConnectionLostError) for each in asking)

    check(test, fresh_seconds=0.0)
