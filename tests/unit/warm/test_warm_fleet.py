"""Nodes as a proxy uses them: which calls are made and which are not, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.clock import run_virtual
from stoker.errors import ConnectionLostError, DeadlineError, StokerError, WireError
from stoker.warm.code import Code
from stoker.warm.fleet import Node
from stoker.warm.life import State
from stoker.warm.listing import listed_page
from stoker.warm.node import NodeServer
from stoker.warm.settings import WarmConfig
from stoker.warm.shard import ShardId
from stoker.warm.wire import Kind
from support.warm_platform import Instance, Mood, Tier, named

NAME, DATA = named(1, 3000)
SHARD = ShardId(NAME, 1, 0, 0)


def tier(**settings: Any) -> Tier:
    """Return a tier of one node."""
    return Tier(WarmConfig(nodes=1, code=Code(1, 0), **{"wake_seconds": 5.0, **settings}))


def check(test: Callable[[Tier, Node], Awaitable[None]], **settings: Any) -> None:
    """Run a test when the node has greeted and sleeps, in virtual time."""

    async def main() -> None:
        async with tier(**settings) as made:
            await asyncio.sleep(2.0)
            made.platform.calls.clear()
            await test(made, made.proxy._nodes[0])

    run_virtual(main())


def tasks(made: Tier) -> list[str]:
    return [call.task for call in made.platform.calls]


def the_instance(made: Tier) -> Instance:
    (instance,) = made.platform.all_instances()
    return instance


def die_in_silence(made: Tier) -> None:
    """Take all instances as a machine that is switched off does: no connection is told."""
    for link in made.network.links:
        link.split()
    made.platform.reclaim("warm-0")


async def ping(node: Node, seconds: float = 20.0) -> None:
    assert (await node.request(Kind.PING, {}, seconds=seconds)).kind is Kind.PONG


def test_a_node_that_sleeps_is_called_once_for_all_who_wait() -> None:
    async def test(made: Tier, node: Node) -> None:
        assert node.life.state is State.SLEEPING
        await asyncio.gather(*[ping(node) for _ in range(5)])
        assert tasks(made) == ["serve"]

    check(test)


def test_a_wake_outlives_the_one_who_began_it_if_others_wait_too() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(warm_seconds=1.0)
        first, second = (asyncio.ensure_future(ping(node)) for _ in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        await second
        assert first.cancelled()
        assert tasks(made) == ["serve"]

    check(test)


def test_a_node_that_does_not_come_is_not_called_again_if_nobody_waits() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(warm_seconds=100.0)
        with pytest.raises(ConnectionLostError, match="not awake in time"):
            await ping(node, seconds=1.0)
        await asyncio.sleep(50.0)
        assert tasks(made) == ["serve"]

    check(test, keep_warm_seconds=1000.0)


def test_a_request_for_which_there_is_no_time_calls_nobody_at_its_end() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(failed=1.0)
        with pytest.raises(ConnectionLostError, match="not awake"):
            await ping(node, seconds=0.9)
        calls = made.platform.counts.failed
        await asyncio.sleep(30.0)
        assert made.platform.counts.failed == calls

    check(test, keep_warm_seconds=1000.0)


def test_a_node_that_is_taken_back_while_it_is_awake_is_called_and_asked_again() -> None:
    async def test(made: Tier, node: Node) -> None:
        await ping(node)
        made.platform.reclaim("warm-0")
        await ping(node)
        assert tasks(made) == ["serve", "serve"]

    check(test)


def test_a_request_whose_time_goes_by_in_the_wake_is_no_silence() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(warm_seconds=2.0)
        with pytest.raises(ConnectionLostError, match="not awake"):
            await ping(node, seconds=2.0)
        await ping(node)
        assert (node.life.state, node.life.tries) == (State.AWAKE, 0)
        assert tasks(made) == ["serve"]

    check(test)


def test_three_tries_and_a_node_is_gone_and_what_it_held_is_lost() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        made.platform.is_split, made.platform.dial_seconds = True, 100.0
        for link in made.network.links:
            link.split()
        with pytest.raises(ConnectionLostError, match="called 3 times and does not come"):
            await ping(node)
        assert node.life.state is State.GONE
        assert tasks(made) == ["serve"] * 3
        assert made.believed() == {}
        with pytest.raises(ConnectionLostError, match="does not come"):  # at once, and for nothing
            await ping(node)
        assert tasks(made) == ["serve"] * 3

    check(test)


def test_a_node_that_was_given_up_comes_back_by_the_call_that_keeps_it_warm() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(failed=1.0)
        with pytest.raises(ConnectionLostError, match="does not come"):
            await ping(node)
        made.platform.mood = Mood()
        await asyncio.sleep(70.0)
        assert node.life.state is State.SLEEPING
        await ping(node)

    check(test)


def test_calls_that_fail_are_repeated_with_pauses() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(failed=1.0)
        begun_seconds = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionLostError, match="does not come"):
            await ping(node)
        assert made.platform.counts.failed == 3
        assert 1.5 < asyncio.get_running_loop().time() - begun_seconds < 5.0
        assert made.proxy.meter.unanswered == 3

    check(test)


def test_a_platform_that_has_no_room_is_asked_ever_less_and_the_node_is_not_given_up() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(throttled=1.0)
        waiting = asyncio.ensure_future(ping(node, seconds=200.0))
        await asyncio.sleep(60.0)
        assert node.life.state is State.SLEEPING
        assert 5 < made.platform.counts.throttled < 20
        made.platform.mood = Mood()
        await waiting
        assert made.proxy.meter.unanswered == 0

    check(test, keep_warm_seconds=1000.0)


def test_a_node_whose_call_was_lost_is_asked_whether_it_still_runs_before_it_is_called_again() -> None:
    """The call that hangs on the open line is lost; another one would start an empty instance beside the node."""

    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(unanswered=1.0)
        for _ in range(40):
            await ping(node)
            await asyncio.sleep(0.1)
        assert made.platform.counts.unanswered == 1
        assert tasks(made) == ["serve"]

    check(test, linger_seconds=0.25)


def test_what_crosses_the_bye_of_a_node_is_answered_by_calling_it_again_once_it_has_returned() -> None:
    async def test(made: Tier, node: Node) -> None:
        await ping(node)
        instance = the_instance(made)
        await asyncio.sleep(made.config.linger_seconds - 0.0008)  # what is asked here arrives 0.2 ms too late
        assert (node.life.state, instance.running is None) == (State.AWAKE, False)
        begun_seconds = asyncio.get_running_loop().time()
        await ping(node)
        assert asyncio.get_running_loop().time() - begun_seconds < 0.1
        assert tasks(made) == ["serve", "serve"]
        assert made.platform.all_instances() == [instance]

    check(test)


def test_a_node_without_a_connection_is_told_to_dial_anew() -> None:
    """It cannot know that the proxy has lost it: it slept."""

    async def test(made: Tier, node: Node) -> None:
        for link in made.network.links:
            link.split()
        assert node._standing.connection is not None
        node._standing.connection.abort()
        await asyncio.sleep(0.1)
        begun_seconds = asyncio.get_running_loop().time()
        await ping(node)
        assert asyncio.get_running_loop().time() - begun_seconds < 0.1
        assert tasks(made) == ["serve"]

    check(test)


def test_a_silent_connection_costs_a_ping_and_one_call() -> None:
    """The other end is gone, and nobody has said so."""

    async def test(made: Tier, node: Node) -> None:
        await ping(node)
        (link,) = made.network.links
        link.split()
        await asyncio.sleep(0.1)
        await ping(node)
        assert len(made.platform.all_instances()) <= 2
        assert node.life.state is State.AWAKE

    check(test, fresh_seconds=0.0)


def test_a_node_that_is_never_fresh_is_pinged_once_for_each_request() -> None:
    async def test(made: Tier, node: Node) -> None:
        for _ in range(10):
            await ping(node)
            await asyncio.sleep(0.001)
        assert tasks(made) == ["serve"]

    check(test, fresh_seconds=0.0)


def test_traffic_makes_calls_that_keep_a_node_warm_needless() -> None:
    async def test(made: Tier, node: Node) -> None:
        for _ in range(20):
            await asyncio.sleep(7.0)
            await ping(node)
        assert tasks(made) == ["serve"] * 20
        await asyncio.sleep(35.0)
        assert tasks(made)[20:] == ["warm"] * 3

    check(test, keep_warm_seconds=10.0)


def test_a_call_that_keeps_warm_finds_a_node_that_has_lost_its_memory() -> None:
    async def test(made: Tier, node: Node) -> None:
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


def test_a_call_that_goes_astray_loses_nothing_and_costs_one_more() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        made.platform.mood = Mood(stray=1.0)
        reading = asyncio.ensure_future(made.kept(NAME, DATA))
        await asyncio.sleep(0.2)
        made.platform.mood = Mood()
        assert await reading
        assert [(call.task, call.is_cold) for call in made.platform.calls] == [("serve", True), ("serve", False)]
        await asyncio.sleep(2.0)
        assert made.believed() == {"warm-0": {SHARD}} == made.held()
        assert [instance.running for instance in made.platform.all_instances()] == [None, None]
        assert len(made.proxy._reception._connections) == 1, "nothing is left of the stranger"

    check(test)


def test_calls_that_keep_going_astray_to_an_empty_instance_lose_nothing() -> None:
    """Of two instances that have nothing to do, this platform takes the wrong one every time."""

    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.mood, made.platform.most = Mood(stray=1.0), 2
        made.platform.calls.clear()
        for _ in range(20):
            assert await made.kept(NAME, DATA)
            await asyncio.sleep(100.0)
        assert len(made.platform.all_instances()) == 2
        assert not made.proxy.statistics().losses
        assert tasks(made).count("serve") <= 2 * 20 + 2 * tasks(made).count("warm")

    check(test)


def test_a_node_that_was_taken_back_in_silence_is_believed_to_be_empty_after_one_call_more() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.calls.clear()
        die_in_silence(made)
        begun_seconds = asyncio.get_running_loop().time()
        assert not await made.kept(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds < 1.0
        assert [(call.task, call.is_cold) for call in made.platform.calls] == [("serve", True), ("serve", True)]
        assert made.believed() == {}
        await asyncio.sleep(2.0)
        await ping(node)
        assert tasks(made) == ["serve"] * 3, "the node is known again"

    check(test)


def test_the_second_call_is_made_although_nobody_waits_any_more() -> None:
    """Otherwise the stranger would be the one with nothing to do at the next call, and believed."""

    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        made.platform.mood = Mood(stray=1.0)
        reading = asyncio.ensure_future(made.kept(NAME, DATA))
        await asyncio.sleep(0.2)
        made.platform.mood = Mood()
        reading.cancel()
        await asyncio.sleep(5.0)
        assert node.life.expected.term == 1
        assert await made.kept(NAME, DATA)

    check(test)


def test_readers_of_a_node_in_doubt_wait_no_longer_than_they_would() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        die_in_silence(made)
        made.platform.mood = Mood(cold_seconds=1.2)
        begun_seconds = asyncio.get_running_loop().time()
        assert not await made.kept(NAME, DATA)
        assert asyncio.get_running_loop().time() - begun_seconds == pytest.approx(2.0, abs=0.01)
        await asyncio.sleep(5.0)
        assert made.believed() == {}

    check(test, read_seconds=2.0)


def test_a_platform_that_runs_one_instance_at_a_time_is_not_called_for_ever() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.most = 1
        await made.put((NAME, DATA))
        await asyncio.sleep(2.0)
        die_in_silence(made)
        assert not await made.kept(NAME, DATA)
        assert made.platform.counts.throttled == 1
        assert made.believed() == {}
        await ping(node)

    check(test)


class Mute(NodeServer):
    """Answers everything but requests for shards, of which it takes note."""

    is_mute = False
    asked = 0

    def _answer(self, kind: Kind, head: Any, body: bytearray) -> Any:
        if kind is Kind.GET:
            self.asked += 1
            if self.is_mute:
                return asyncio.sleep(1e6)
        return super()._answer(kind, head, body)


def check_mute(test: Callable[[Tier, Node, Mute], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = WarmConfig(nodes=1, code=Code(1, 0), **{"read_seconds": 2.0, "fresh_seconds": 0.5, **settings})
        async with Tier(config, node_type=Mute) as made:
            await made.put((NAME, DATA))
            mute = the_instance(made).node
            assert isinstance(mute, Mute)
            mute.is_mute = True
            await test(made, made.proxy._nodes[0], mute)

    run_virtual(main())


def test_a_node_that_answers_pings_and_delivers_nothing_is_given_up_after_three_reads_in_vain() -> None:
    async def test(made: Tier, node: Node, mute: Mute) -> None:
        for _ in range(3):
            assert made.believed() == {"warm-0": {SHARD}}
            assert not await made.kept(NAME, DATA)
        assert node.life.state is State.GONE
        assert made.believed() == {}
        assert not await made.kept(NAME, DATA)
        assert mute.asked == 3, "nobody waits for it any more"

    check_mute(test)


def test_many_reads_at_once_that_are_in_vain_are_one() -> None:
    async def test(made: Tier, node: Node, mute: Mute) -> None:
        assert not any(await asyncio.gather(*[made.kept(NAME, DATA) for _ in range(5)]))
        assert node.life.state is not State.GONE
        mute.is_mute = False
        assert await made.kept(NAME, DATA)

    check_mute(test)


def test_a_node_that_was_given_up_for_what_it_did_not_deliver_is_tried_once_each_time_it_greets() -> None:
    async def test(made: Tier, node: Node, mute: Mute) -> None:
        for _ in range(3):
            assert not await made.kept(NAME, DATA)
        for turn in range(1, 4):
            await asyncio.sleep(65.0)
            assert made.believed() == {"warm-0": {SHARD}}
            assert not await made.kept(NAME, DATA)
            assert mute.asked == 3 + turn
            assert node.life.state is State.GONE
        mute.is_mute = False
        await asyncio.sleep(65.0)
        assert await made.kept(NAME, DATA)

    check_mute(test)


def test_reads_for_which_the_wake_left_no_time_are_not_held_against_a_node() -> None:
    async def test(made: Tier, node: Node, mute: Mute) -> None:
        for _ in range(6):
            await asyncio.sleep(5.0)
            made.platform.mood = Mood(warm_seconds=1.5)
            assert not await made.kept(NAME, DATA)
        assert made.believed() == {"warm-0": {SHARD}}

    check_mute(test)


def test_a_second_instance_that_comes_too_late_to_be_one_is_told_to_go_and_nothing_else() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        made.platform.mood = Mood(cold_seconds=6.0)
        with pytest.raises(DeadlineError, match="no second instance"):
            async with node.accompanied():
                raise AssertionError
        await asyncio.sleep(5.0)
        assert tasks(made).count("backup") == 1
        assert [instance.running for instance in made.platform.all_instances()] == [None, None]
        assert made.believed() == {"warm-0": {SHARD}}
        await ping(node)

    check(test)


def test_a_node_that_answers_pings_with_failures_is_silent() -> None:
    async def test(made: Tier, node: Node) -> None:
        instance = the_instance(made)

        async def failing(*_: object) -> Any:
            raise StokerError("broken")

        instance.node._answer = failing  # type: ignore[method-assign, assignment]
        node._standing.connection = None
        with pytest.raises(StokerError):
            await ping(node)
        await asyncio.sleep(2.0)
        with pytest.raises(StokerError):
            await ping(node, seconds=3.0)
        assert len(made.platform.calls) < 10

    check(test, fresh_seconds=0.0)


def test_nobody_is_called_once_a_node_is_closed() -> None:
    async def test(made: Tier, node: Node) -> None:
        made.platform.mood = Mood(warm_seconds=5.0)
        waiting = asyncio.ensure_future(ping(node))
        await asyncio.sleep(1.0)
        await node.close()
        with pytest.raises(ConnectionLostError, match="let go"):
            await waiting
        with pytest.raises(ConnectionLostError, match="let go"):
            await ping(node)
        assert tasks(made) == ["serve"]

    check(test)


def test_closing_while_requests_are_made_ends_them() -> None:
    async def test(made: Tier, node: Node) -> None:
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


def test_a_listing_during_which_something_came_is_made_again() -> None:
    async def test(made: Tier, node: Node) -> None:
        await made.put((NAME, DATA))
        listing = asyncio.ensure_future(node.listed())
        await asyncio.sleep(0.0011)  # the answer is on its way
        node._standing.changes += 1
        assert await listing == [SHARD]
        assert node.life.is_listed

    check(test)


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"shards": 7},
        {"shards": ["x"]},
        {"shards": [], "more": 1},
        {"shards": [SHARD.to_text(), SHARD.to_text()]},
        {"shards": [ShardId(NAME, 1, 1, 1).to_text(), ShardId(NAME, 1, 1, 0).to_text()]},
    ],
)
def test_lists_that_cannot_be_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        listed_page("warm-0", head, [], 10)


def test_a_list_that_has_no_end_is_refused() -> None:
    page = {"shards": [ShardId(NAME, 1, 20, at).to_text() for at in range(10, 20)], "more": 1}
    before = [ShardId(NAME, 1, 20, at) for at in range(10)]
    assert len(listed_page("warm-0", page, before, 20)) == 10
    with pytest.raises(WireError, match="more than 19"):
        listed_page("warm-0", page, before, 19)
    with pytest.raises(WireError, match="order"):
        listed_page("warm-0", page, [ShardId(NAME, 1, 20, 15)], 20)
