"""The function that is a node of the warm tier: shards in its memory, and a connection to the proxy that calls it."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.errors import ConfigError, ThrottledError
from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_warm._auth import Secret
from stoker_warm._events import Wake
from stoker_warm._node import NodeServer
from stoker_warm._shard import ShardStore

RESERVED_BYTES = 192 << 20
"""Of an instance's memory, not for shards: the interpreter and its libraries take 45 MiB, what the allocator cannot use
again has been up to 50 MiB with shards of 1 to 16 MB, and the rest is for what is on its way, there or back."""


async def warm_node(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Be a node for as long as the proxy that sent the event wants; see :class:`~stoker_warm._events.Wake`.

    What it holds and its connection stay from one invocation of an instance to the next.

    Returns:
        Which instance this is and what it holds: a :class:`~stoker_warm._events.Report`.

    Raises:
        ConfigError: the secret is missing or no secret, or there is no memory for shards.
        EventError: the event is none of a proxy's.
        ThrottledError: the instance serves already; a platform that gives one instance several requests at a time has
            to be told not to.
        StokerError: the proxy cannot be reached, or does not know the secret.
    """
    wake = Wake.parse(event)
    node, turn = _node(deployment)
    if turn.locked():
        raise ThrottledError(f"an instance of {wake.node} serves already; deploy it with a concurrency of 1")
    async with turn:
        return await node.run(wake, deadline.stop_at_seconds - asyncio.get_running_loop().time())


def shelf_bytes(settings: Settings) -> int:
    """Return how many bytes of shards an instance keeps: what was set, else its memory but for what else it needs.

    Raises:
        ConfigError: there is no memory for shards.
    """
    limit_bytes = settings.memory_bytes - RESERVED_BYTES
    if settings.warm_shelf_bytes is not None:
        limit_bytes = settings.warm_shelf_bytes
    if limit_bytes <= 0:
        raise ConfigError(
            f"a node with {format_bytes(settings.memory_bytes)} of memory has no room for shards, for "
            f"{format_bytes(RESERVED_BYTES)} of it are the program's; give the function more"
        )
    return limit_bytes


@cache
def _node(deployment: Deployment) -> tuple[NodeServer, asyncio.Lock]:
    """Return the node of a deployment, of which an instance has one, and whose turn it is."""
    settings = deployment.settings
    return NodeServer(ShardStore(shelf_bytes(settings)), Secret.parse(settings.warm_secret)), asyncio.Lock()
