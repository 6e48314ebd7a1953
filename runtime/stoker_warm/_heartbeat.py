"""Heartbeat schedule: calls nodes that had no other contact for some time.

A platform takes back an instance that is not called for some time, so every node is called at an interval unless a
request was (A. Wang et al., "InfiniCache" (FAST 2020), section 4.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stoker_warm._node_connection import Node

MAX_CALLS = 16
"""Heartbeats under way at a time, of all nodes."""

Spawn = Callable[[Coroutine[Any, Any, object]], asyncio.Task[None]]
"""Runs a coroutine until it ends or the proxy does."""


def start_heartbeats(nodes: Sequence[Node], interval_seconds: float, spawn: Spawn) -> None:
    """Call each node whenever it had no contact for an interval, until the proxy ends.

    Args:
        nodes: to be kept warm.
        interval_seconds: from the last contact with a node to its call.
        spawn: runs each node's schedule, and each call.
    """
    calls = asyncio.Semaphore(MAX_CALLS)
    for node in nodes:
        spawn(_keep_warm(node, interval_seconds, calls, spawn))


async def _keep_warm(node: Node, interval_seconds: float, calls: asyncio.Semaphore, spawn: Spawn) -> None:
    while True:
        await asyncio.sleep(_rest_seconds(node, interval_seconds))
        async with calls:
            if _rest_seconds(node, interval_seconds) <= 0.0:
                await asyncio.wait([spawn(node.keep_warm())])


def _rest_seconds(node: Node, interval_seconds: float) -> float:
    return max(0.0, node.contact_seconds + interval_seconds - asyncio.get_running_loop().time())
