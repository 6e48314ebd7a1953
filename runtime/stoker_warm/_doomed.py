"""Shards that nothing will be read from any more, and when they are deleted."""

from __future__ import annotations

import asyncio
from itertools import islice

from stoker_warm._fleet import Node
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._shard import ShardId
from stoker_warm._wire import Kind

__all__ = ["Doomed"]


class Doomed:
    """What is to be deleted, by node: when the node is written to next. That is soon enough, and wakes nobody.

    Args:
        nodes: how many there are.
        write_seconds: for an order to delete, its node's wake included.
    """

    def __init__(self, nodes: int, *, write_seconds: float) -> None:
        self._shards: dict[int, set[ShardId]] = {}
        self._deleting = [asyncio.Lock() for _ in range(nodes)]
        self._write_seconds = write_seconds

    def add(self, node: int, shard: ShardId) -> None:
        """Have a shard deleted."""
        self._shards.setdefault(node, set()).add(shard)

    def forget(self, node: int) -> set[ShardId]:
        """Return what was to be deleted, which is not any more."""
        return self._shards.pop(node, set())

    async def delete(self, node: Node) -> None:
        """Delete what is to be deleted at a node.

        Raises:
            StoreError: the node cannot be had; what it was not told stays to be deleted.
        """
        async with self._deleting[node.number]:  # lest a shard is put there again before a second order to delete it
            while doomed := self._shards.get(node.number):
                page = list(islice(doomed, LISTED_AT_ONCE))
                head = {"shards": [shard.to_text() for shard in page]}
                await node.request(Kind.DELETE, head, seconds=self._write_seconds)
                doomed.difference_update(page)
