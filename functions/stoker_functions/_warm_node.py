"""The handler of a warm-tier node: it holds shards in memory, and connects to the proxy that invokes it."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.errors import ConfigError, ThrottledError
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_warm._auth import WarmSecret
from stoker_warm._events import WakeEvent
from stoker_warm._node import NodeServer
from stoker_warm._shard import ShardStore

RESERVED_BYTES = 192 << 20
"""Part of an instance's memory that is not for shards: the interpreter and its libraries take 45 MiB, fragmentation was
up to 50 MiB with shards of 1 to 16 MB, and the rest is for shards in transfer."""


async def warm_node(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Serve as a node until the proxy that sent the event ends it; see :class:`~stoker_warm._events.WakeEvent`.

    The instance keeps its shards and its connection between invocations.

    Returns:
        The id and the contents of the instance: a :class:`~stoker_warm._events.NodeReport`.

    Raises:
        ConfigError: the secret is missing or not valid, or there is no memory for shards.
        EventError: the event is not one of a proxy.
        ThrottledError: the instance serves already; set the platform's concurrency per instance to 1.
        StokerError: the proxy cannot be reached, or has another secret.
    """
    wake = WakeEvent.parse(event)
    node, turn = _create_node(deployment)
    if turn.locked():
        raise ThrottledError(f"an instance of {wake.node} serves already; deploy it with a concurrency of 1")
    async with turn:
        return await node.run(wake, deadline.stop_at_seconds - asyncio.get_running_loop().time())


def shard_limit_bytes(settings: DeploymentSettings) -> int:
    """Return the limit of the shards of an instance in bytes: the setting, else its memory without the reserved part.

    Raises:
        ConfigError: there is no memory for shards.
    """
    limit_bytes = settings.memory_bytes - RESERVED_BYTES
    if settings.warm_shard_bytes is not None:
        limit_bytes = settings.warm_shard_bytes
    if limit_bytes <= 0:
        raise ConfigError(
            f"a node with {format_bytes(settings.memory_bytes)} of memory has no room for shards, since the program "
            f"takes {format_bytes(RESERVED_BYTES)}; give the function more memory"
        )
    return limit_bytes


@cache
def _create_node(deployment: Deployment) -> tuple[NodeServer, asyncio.Lock]:
    """Return the node of a deployment, of which an instance has one, and the lock of its current invocation."""
    settings = deployment.settings
    return NodeServer(ShardStore(shard_limit_bytes(settings)), WarmSecret.parse(settings.warm_secret)), asyncio.Lock()
