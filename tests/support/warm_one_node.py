"""A warm tier of one node in virtual time, and its common operations in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stoker.testing import run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._node_client import NodeClient
from stoker_warm._shard import ShardId
from support.warm_platform import Instance, Tier, named

__all__ = ["DATA", "NAME", "SHARD", "check", "die_in_silence", "ping", "tasks", "the_instance"]

NAME, DATA = named(1, 3000)
SHARD = ShardId(NAME, 1, 0, 0)


def check(test: Callable[[Tier, NodeClient], Awaitable[None]], **settings: Any) -> None:
    """Run a test in virtual time, once the node has connected and its invocation has ended."""

    async def main() -> None:
        config = WarmConfig(nodes=1, code=ErasureCode(1, 0), **{"wake_seconds": 5.0, **settings})
        async with Tier(config) as made:
            await asyncio.sleep(2.0)
            made.platform.calls.clear()
            await test(made, made.proxy._nodes[0])

    run_virtual(main())


def tasks(made: Tier) -> list[str]:
    """Return the purposes of the calls."""
    return [call.task for call in made.platform.calls]


def the_instance(made: Tier) -> Instance:
    """Return the only instance."""
    (instance,) = made.platform.all_instances()
    return instance


def die_in_silence(made: Tier) -> None:
    """Kill all instances like a machine that is switched off: no connection is closed."""
    for link in made.network.links:
        link.split()
    made.platform.reclaim("warm-0")


async def ping(node: NodeClient, seconds: float = 20.0) -> None:
    """Ping a node."""
    await node.ping(seconds)
