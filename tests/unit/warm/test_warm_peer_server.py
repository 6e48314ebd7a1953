"""What a proxy says of those who dial it and are turned away."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from stoker.errors import StokerError
from stoker_warm._auth import NodeHandshake, WarmSecret
from stoker_warm._config import WarmConfig
from stoker_warm._events import NodeReport
from stoker_warm._frames import Head
from stoker_warm._peer_connections import NodeConnection
from stoker_warm._shard import StoreVersion
from support.warm_connections import INSTANCE, refuse, run
from support.warm_platform import ADDRESS, SECRET, Tier

CONFIG = WarmConfig(keep_warm_seconds=1e6)
GREETING = NodeReport(instance=INSTANCE, version=StoreVersion(), held_bytes=0, limit_bytes=0).to_json()


async def dialled(tier: Tier, node: str, secret: WarmSecret, greeting: Head = GREETING) -> NodeConnection:
    """Return the connection of a node that has dialled, when it has ended."""
    _, end = await tier.network.dial(ADDRESS, lambda: NodeConnection(NodeHandshake(secret, node, greeting), refuse))
    with suppress(StokerError):
        await end.wait_authenticated()
    await end.wait_closed()
    return end


def test_a_crowd_that_does_not_know_the_secret_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    def logged_messages() -> list[str]:
        records = [each.getMessage() for each in caplog.records if each.name == "stoker.warm.reception"]
        caplog.clear()
        return records

    async def test() -> None:
        async with Tier(CONFIG) as tier:
            await asyncio.gather(*(dialled(tier, "warm-0", WarmSecret.generate()) for _ in range(40)))
            (first,) = logged_messages()
            assert "STOKER_WARM_SECRET" in first
            await asyncio.sleep(11.0)
            await dialled(tier, "warm-0", WarmSecret.generate())
            (later,) = logged_messages()
            assert "39 more" in later

    run(test)


@pytest.mark.parametrize("node", ["warm-12", "0", "warm-00", "warm--1", "trainer"])
def test_a_peer_that_is_no_node_of_this_proxy_is_turned_away(node: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            await asyncio.sleep(2.0)
            end = await dialled(tier, node, SECRET)
            assert not end.is_open
            assert len(tier.proxy._peer_server._connections) == CONFIG.nodes

    with caplog.at_level(logging.WARNING):
        run(test)
    assert f"there is no node {node}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"instance": "g" * 16}, "'instance'"),
        ({"instance": 3}, "'instance'"),
        ({"hash": ["0" * 16]}, "'hash'"),
        ({"held_bytes": -1}, "'held_bytes'"),
        ({"more": 1}, "'more'"),
    ],
)
def test_a_node_that_says_nonsense_of_itself_is_turned_away(
    changes: Head, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Tier(CONFIG) as tier:
            await asyncio.sleep(2.0)
            known = tier.proxy._nodes[0].state_machine.instance
            end = await dialled(tier, "warm-0", SECRET, {**GREETING, **changes})
            assert not end.is_open
            assert tier.proxy._nodes[0].state_machine.instance == known

    with caplog.at_level(logging.WARNING):
        run(test)
    assert "report of a warm node" in caplog.text
    assert says in caplog.text
