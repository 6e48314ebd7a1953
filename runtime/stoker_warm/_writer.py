"""Writing objects to nodes, behind the back of their reader, and deleting what nothing will be read from any more."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker.errors import StoreError, TransientError
from stoker_warm._billing import ProxyTally
from stoker_warm._config import WarmConfig
from stoker_warm._directory import Directory, Held, Placement
from stoker_warm._erasure import Code, encode
from stoker_warm._membership import State
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._node_connection import Node
from stoker_warm._shard import ShardId


class Tombstones:
    """What is to be deleted, by node: when the node is written to next. That is soon enough, and wakes no node.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._shards: dict[int, set[ShardId]] = {}
        self._deleting = [asyncio.Lock() for _ in range(nodes)]

    def add(self, node: int, shard: ShardId) -> None:
        """Have a shard deleted."""
        self._shards.setdefault(node, set()).add(shard)

    def forget(self, node: int) -> set[ShardId]:
        """Return what was to be deleted, which is not any more."""
        return self._shards.pop(node, set())

    async def delete(self, node: Node) -> None:
        """Delete what is to be deleted at a node.

        Raises:
            StoreError: the node cannot be had; what was not sent stays to be deleted.
        """
        async with self._deleting[node.number]:  # lest a shard is put there again before a second order to delete it
            while tombstones := self._shards.get(node.number):
                page = list(islice(tombstones, LISTED_AT_ONCE))
                await node.delete(page)
                tombstones.difference_update(page)


_log = logging.getLogger("stoker.warm.writing")

Shards = Mapping[int, memoryview]
"""Payloads by position."""


class ShardWriter:
    """Writes objects to nodes, and holds a bounded amount of copies until then. Lives on the proxy's event loop.

    Args:
        config: of the tier.
        nodes: by number.
        directory: reserves places, and gets the outcome.
        tally: where objects are counted.
        rng: for choosing nodes.
        spawn: runs a coroutine until it ends or the proxy does.
    """

    def __init__(
        self,
        config: WarmConfig,
        nodes: Sequence[Node],
        directory: Directory,
        tally: ProxyTally,
        rng: random.Random,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._config, self._nodes, self._directory, self._tally = config, nodes, directory, tally
        self._rng, self._spawn = rng, spawn
        self._turns = asyncio.Semaphore(config.writes)
        self._is_closed = False
        self.tombstones = Tombstones(config.nodes)
        """What is to be deleted."""
        self.under_way: dict[str, asyncio.Task[None]] = {}
        """What writes an object, or is about to, by the object's name."""

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time, if there is room for a copy until then. Never blocks."""
        if not self._has(name) and self._has_room(len(data)):
            self._begin(name, bytes(data))

    def take(self, name: str, data: bytearray) -> bool:
        """Like :meth:`offer`, but without a copy: ``data`` is not changed any more.

        Returns:
            Whether it is here, or will be if nothing comes between.
        """
        if self._has(name):
            return True
        if not self._has_room(len(data)):
            return False
        self._begin(name, data)
        return True

    def rebuild(self, name: str, data: memoryview) -> None:
        """Put the lost shards of an object that is here away again; if there is room for a copy."""
        is_here = self._directory.find(name, is_use=False) is not None
        if is_here and name not in self.under_way and self._fits(len(data)):
            self._begin(name, bytes(data))

    def drop(self, name: str) -> None:
        """Forget an object, also one that is being written. Its shards are deleted when their nodes are written to."""
        if name in self.under_way:
            self.under_way[name].cancel()
        for held in self._directory.forget(name):
            self.tombstones.add(held.node, held.shard)

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True

    def _has(self, name: str) -> bool:
        return self._directory.find(name) is not None or name in self.under_way

    def _has_room(self, size_bytes: int) -> bool:
        has_room = self._fits(size_bytes)
        self._tally.declined += not has_room
        return has_room

    def _fits(self, size_bytes: int) -> bool:
        limit_bytes = min(self._config.max_object_bytes, self._config.pending_bytes - self._tally.pending_bytes)
        return not self._is_closed and size_bytes <= limit_bytes

    def _begin(self, name: str, data: bytes | bytearray) -> None:
        self._tally.pending_bytes += len(data)
        writing = self.under_way[name] = self._spawn(self._write(name, data))
        writing.add_done_callback(lambda _: self._ended(name, len(data)))

    def _ended(self, name: str, size_bytes: int) -> None:
        del self.under_way[name]
        self._tally.pending_bytes -= size_bytes

    async def _write(self, name: str, data: bytes | bytearray) -> None:
        async with self._turns:
            is_new = self._directory.find(name, is_use=False) is None
            stored = await self._write_shards(name, data)
            if stored is None:
                self._tally.declined += 1
            elif not is_new:
                self._tally.rebuilt += stored
            elif self._directory.find(name, is_use=False) is not None:
                self._tally.stored += 1
            else:
                self._tally.declined += 1

    async def _write_shards(self, name: str, data: bytes | bytearray) -> int | None:
        """Write the shards of an object that are nowhere, if there is a place for them.

        Returns:
            How many nodes took; None if there are too few nodes on which the object could be read.
        """
        await self.meet_nodes()
        code, placement = self._config.code, self._directory.place(name, self._rng)
        if placement is None:
            return None
        if placement.evicted:
            self.evict(placement.evicted)
        if not placement.nodes:
            return 0
        shards = await self._encoded(name, placement, data)
        async with task_group() as group:
            tasks = [
                group.create_task(self._write_shard(node, ShardId(name, code.data, code.parity, at), shards[at]))
                for at, node in placement.nodes.items()
            ]
        return sum(task.result() for task in tasks)

    async def meet_nodes(self) -> None:
        """Wake nodes whose limit is not known yet."""
        unknown = [node for node in self._nodes if not node.limit_bytes and node.membership.state is not State.GONE]
        if not unknown:
            return
        async with task_group() as group:
            for node in unknown:
                group.create_task(self._greet(node))

    def lost(self, node: int, shard: ShardId) -> None:
        """A node lacks a shard, or has a wrong one, which must not be found there again."""
        if self._directory.dropped(node, shard):
            self.tombstones.add(node, shard)

    def evict(self, evicted: Collection[Held]) -> None:
        """Have the shards of objects deleted that went for others."""
        for held in evicted:
            self.tombstones.add(held.node, held.shard)
        self._tally.evicted += len({held.shard.object for held in evicted})

    async def _encoded(self, name: str, placement: Placement, data: bytes | bytearray) -> Shards:
        """Return the shards that have a place; without them it is given back."""
        code = self._config.code
        try:
            return await encoded(code, data, placement.nodes)
        except BaseException:
            for at, node in placement.nodes.items():
                self._directory.dropped(node, ShardId(name, code.data, code.parity, at))
            raise

    async def _write_shard(self, number: int, shard: ShardId, payload: memoryview) -> bool:
        node = self._nodes[number]
        try:
            await self.tombstones.delete(node)
            evicted = await node.set(shard, payload)
            if evicted is not None:
                for each in evicted:
                    self._directory.dropped(number, each)
                if self._directory.stored(number, shard):
                    return True
                self.tombstones.add(number, shard)
                return False
        except StoreError as error:
            _log.debug("%s does not take a shard: %s", node.name, error)
        except BaseException:
            self._directory.dropped(number, shard)
            raise
        self._directory.dropped(number, shard)
        return False

    async def _greet(self, node: Node) -> None:
        try:
            await node.ping()
        except TransientError as error:
            _log.debug("%s does not say how much it holds: %s", node.name, error)


async def encoded(code: Code, data: bytes | bytearray, wanted: Collection[int]) -> Shards:
    """Return the shards of an object; parity only if it is wanted, data in its own memory."""
    whole = memoryview(data)
    shards = dict(enumerate(code.views(whole)))
    if any(at >= code.data for at in wanted):
        parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
        await in_thread(lambda _: encode(whole, code, parity))
        shards |= dict(enumerate(parity, code.data))
    return shards
