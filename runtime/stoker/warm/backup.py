"""Backing up a node: a second instance of the same function gets what the first one holds, and misses.

The platform starts it, since the first is busy. It dials out like any other, and what it lacks is copied through the
proxy, so neither needs to reach the other (A. Wang et al., "InfiniCache" (FAST 2020), section 4.3, where a relay joins
both). When the platform takes the first instance back, the next call goes to the second.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.task_group import task_group
from stoker.warm.connection import Connection, Reply
from stoker.warm.fleet import Node, deletions, list_all
from stoker.warm.settings import WarmConfig
from stoker.warm.shard import ShardId
from stoker.warm.wire import Head, Kind

__all__ = ["back_up"]

_COPIES_AT_ONCE = 2


async def back_up(node: Node, config: WarmConfig) -> int:
    """Bring a node's second instance up to date; return how many shards were copied.

    Raises:
        StokerError: the node or its second instance could not be had, or went away.
    """
    async with node.accompanied() as peer:

        async def ask(after: Head) -> Reply:
            return await peer.request(Kind.INDEX, after, timeout=config.write_seconds)

        wanted, held = await node.listed(), await list_all("a second instance", ask, config.most_objects)
        if wanted is None or held is None:
            return 0
        for head in deletions(sorted(set(held) - set(wanted))):
            await peer.request(Kind.DELETE, head, timeout=config.write_seconds)
        missing = sorted(set(wanted) - set(held))
        left = iter(missing)
        async with task_group() as group:
            copies = [group.create_task(_copy_all(node, peer, left, config)) for _ in range(_COPIES_AT_ONCE)]
        return sum(copy.result() for copy in copies)


async def _copy_all(node: Node, peer: Connection, left: Iterator[ShardId], config: WarmConfig) -> int:
    copied = 0
    for shard in left:
        payload, name = bytearray(shard.size_bytes), shard.to_text()
        found = await node.request(Kind.GET, {"shard": name}, into=memoryview(payload), seconds=config.write_seconds)
        if found.kind is Kind.FOUND and found.body_bytes == len(payload):
            head = {"shard": name, "crc32c": found.head.get("crc32c")}
            stored = await peer.request(Kind.SET, head, body=(payload,), timeout=config.write_seconds)
            copied += stored.kind is Kind.STORED
    return copied
