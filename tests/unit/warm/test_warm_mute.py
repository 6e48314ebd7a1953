"""Nodes that are there, and deliver nothing; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from stoker.errors import ConnectionLostError
from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._frames import Kind
from stoker_warm._node import NodeServer
from stoker_warm._node_client import NodeClient
from stoker_warm._node_state import NodeState
from stoker_warm._peer_connections import ReplyParts
from support.warm_one_node import DATA, NAME, SHARD, the_instance
from support.warm_platform import CallFaults, Tier
from support.warm_wires import Link, LinkConfig

READ_SECONDS = 2.0
TRICKLE = LinkConfig(bytes_per_second=1400.0, segment_bytes=100)
"""A shard takes a little longer than it may."""


class Mute(NodeServer):
    """Answers everything in time but requests for shards, of which it takes note: their bytes trickle."""

    is_mute = False
    asked = 0
    links: Sequence[Link]

    def _handle_request(self, kind: Kind, head: Any, body: bytearray) -> ReplyParts:
        if kind is Kind.GET:
            self.asked += 1
            if self.is_mute:
                self.links[-1].config = TRICKLE
        return super()._handle_request(kind, head, body)


def check_mute(test: Callable[[Tier, NodeClient, Mute], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = WarmConfig(
            nodes=1,
            code=ErasureCode(1, 0),
            **{"read_seconds": READ_SECONDS, "fresh_seconds": 0.5, "linger_seconds": 30.0, **settings},
        )
        async with Tier(config, node_type=Mute) as made:
            await made.put((NAME, DATA))
            mute = the_instance(made).node
            assert isinstance(mute, Mute)
            mute.is_mute, mute.links = True, made.network.links
            await test(made, made.proxy._nodes[0], mute)

    run_virtual(main())


def test_a_node_that_only_answers_pings_is_given_up_after_three_failed_reads() -> None:
    async def test(made: Tier, node: NodeClient, mute: Mute) -> None:
        for _ in range(3):
            assert made.believed() == {"warm-0": {SHARD}}
            assert not await made.can_read(NAME, DATA)
        assert node.state_machine.state is NodeState.GONE
        assert made.believed() == {}
        assert not await made.can_read(NAME, DATA)
        assert mute.asked == 3, "nobody waits for it any more"

    check_mute(test)


def test_waiters_for_a_node_that_is_given_up_fail_at_once() -> None:
    async def test(made: Tier, node: NodeClient, mute: Mute) -> None:
        for _ in range(2):
            assert not await made.can_read(NAME, DATA)
        begun_seconds = asyncio.get_running_loop().time()
        reading = asyncio.ensure_future(made.can_read(NAME, DATA))
        await asyncio.sleep(1.0)
        for instance in made.platform.all_instances():
            instance.freeze()  # so that the node may be awake when the third read fails
        waiting = asyncio.ensure_future(node.ping(60.0))
        assert not await reading
        with pytest.raises(ConnectionLostError, match="does not connect"):
            await waiting
        assert asyncio.get_running_loop().time() - begun_seconds == pytest.approx(2.0, abs=0.1)

    check_mute(test, ping_seconds=0.5, wake_seconds=30.0)


def test_concurrent_failed_reads_count_once() -> None:
    async def test(made: Tier, node: NodeClient, mute: Mute) -> None:
        assert not any(await asyncio.gather(*[made.can_read(NAME, DATA) for _ in range(5)]))
        assert node.state_machine.state is not NodeState.GONE
        mute.is_mute, made.network.links[-1].config = False, made.network.config
        await asyncio.sleep(15.0)  # until what trickles is over
        assert await made.can_read(NAME, DATA)

    check_mute(test)


def test_a_node_that_was_given_up_for_what_it_did_not_deliver_is_tried_once_each_time_it_greets() -> None:
    async def test(made: Tier, node: NodeClient, mute: Mute) -> None:
        for _ in range(3):
            assert not await made.can_read(NAME, DATA)
        for turn in range(1, 4):
            await asyncio.sleep(65.0)
            assert made.believed() == {"warm-0": {SHARD}}
            assert not await made.can_read(NAME, DATA)
            assert mute.asked == 3 + turn
            assert node.state_machine.state is NodeState.GONE
        mute.is_mute = False
        await asyncio.sleep(65.0)
        assert await made.can_read(NAME, DATA)

    check_mute(test)


def test_reads_for_which_the_wake_left_no_time_are_not_held_against_a_node() -> None:
    async def test(made: Tier, node: NodeClient, mute: Mute) -> None:
        for _ in range(6):
            await asyncio.sleep(5.0)
            made.platform.call_faults = CallFaults(warm_seconds=1.5)
            assert not await made.can_read(NAME, DATA)
        assert made.believed() == {"warm-0": {SHARD}}

    check_mute(test, linger_seconds=0.25)
