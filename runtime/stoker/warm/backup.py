"""Backing up a node: a second instance of the same function gets what the first one holds, and misses.

The platform starts it, since the first is busy. It dials out like any other, and what it lacks is copied through the
proxy, so neither needs to reach the other (A. Wang et al., "InfiniCache" (FAST 2020), section 4.3, where a relay joins
both). When the platform takes the first instance back, the next call goes to the second.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.task_group import task_group
from stoker.warm.connection import Connection
from stoker.warm.fleet import Node, listed_page
from stoker.warm.node import LISTED_AT_ONCE
from stoker.warm.settings import WarmConfig
from stoker.warm.shard import ShardId
from stoker.warm.wire import Kind

__all__ = ["back_up"]

_COPIES_AT_ONCE = 2


async def back_up(node: Node, config: WarmConfig) -> int:
    """Bring a node's second instance up to date; return how many shards were copied.

    Raises:
        StokerError: the node or its second instance could not be had, or went away.
    """
    async with node.accompanied() as peer:
        wanted, held = await node.listed(), await _listed(peer, config)
        if wanted is None:
            return 0
        await _delete(peer, sorted(set(held) - set(wanted)), config)
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


async def _delete(peer: Connection, shards: list[ShardId], config: WarmConfig) -> None:
    for start in range(0, len(shards), LISTED_AT_ONCE):
        page = [shard.to_text() for shard in shards[start : start + LISTED_AT_ONCE]]
        await peer.request(Kind.DELETE, {"shards": page}, timeout=config.write_seconds)


async def _listed(peer: Connection, config: WarmConfig) -> list[ShardId]:
    shards, after = list[ShardId](), dict[str, str]()
    while True:
        reply = await peer.request(Kind.INDEX, after, timeout=config.write_seconds)
        shards += listed_page("a second instance", reply.head, shards, config.most_objects)
        if not reply.head.get("more"):
            return shards
        after = {"after": shards[-1].to_text()}
