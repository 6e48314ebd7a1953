"""Writing objects to nodes, behind the back of their reader, and deleting what nothing will be read from any more."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker.errors import StoreError, TransientError
from stoker_warm._billing import ProxyTally
from stoker_warm._config import WarmConfig
from stoker_warm._directory import Directory
from stoker_warm._erasure import encode
from stoker_warm._membership import State
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._node_connection import Node
from stoker_warm._shard import ShardId

_log = logging.getLogger("stoker.warm.writing")


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
        self._deleting = [asyncio.Lock() for _ in range(config.nodes)]
        self.under_way: dict[str, asyncio.Task[None]] = {}
        """What writes an object, or is about to, by the object's name."""

    def offer(self, name: str, data: memoryview, *, copies: bool = True) -> None:
        """Put an object away some time, if there is room for it until then. Never blocks.

        Args:
            name: of the object.
            data: its bytes.
            copies: whether to copy them, lest they change until then.
        """
        if not self.has(name) and self.has_room(len(data)):
            self._begin(name, bytes(data) if copies else data)

    def has(self, name: str) -> bool:
        """Return whether an object is here, or on its way."""
        return self._directory.find(name) is not None or name in self.under_way

    def has_room(self, size_bytes: int, *, reserved_bytes: int = 0) -> bool:
        """Return whether a copy of an object may wait; if not, that counts as declined.

        Args:
            size_bytes: of the object.
            reserved_bytes: of copies that are announced and not here.
        """
        has_room = self._fits(size_bytes, reserved_bytes)
        self._tally.declined += not has_room
        return has_room

    def rebuild(self, name: str, data: memoryview) -> None:
        """Put the lost shards of an object that is here away again; if there is room for a copy."""
        is_here = self._directory.find(name, is_use=False) is not None
        if is_here and name not in self.under_way and self._fits(len(data)):
            self._begin(name, bytes(data))

    def drop(self, name: str) -> None:
        """Forget an object, also one that is being written. Its shards are deleted when their nodes are written to."""
        if name in self.under_way:
            self.under_way[name].cancel()
        self._directory.forget(name)

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True

    def _fits(self, size_bytes: int, reserved_bytes: int = 0) -> bool:
        pending_bytes = self._tally.pending_bytes + reserved_bytes
        limit_bytes = min(self._config.max_object_bytes, self._config.pending_bytes - pending_bytes)
        return not self._is_closed and size_bytes <= limit_bytes

    def _begin(self, name: str, data: bytes | memoryview) -> None:
        self._tally.pending_bytes += len(data)
        writing = self.under_way[name] = self._spawn(self._write(name, data))
        writing.add_done_callback(lambda _: self._ended(name, len(data)))

    def _ended(self, name: str, size_bytes: int) -> None:
        del self.under_way[name]
        self._tally.pending_bytes -= size_bytes

    async def _write(self, name: str, data: bytes | memoryview) -> None:
        async with self._turns:
            is_repair = self._directory.find(name, is_use=False) is not None
            await self.meet_nodes()
            placement = self._directory.place(name, self._rng)
            stored = 0
            if placement is not None:
                self._tally.evicted += placement.evicted
                stored = await self._write_shards(name, data, placement.nodes)
            if is_repair:
                self._tally.rebuilt += stored
            elif self._directory.find(name, is_use=False) is not None:
                self._tally.stored += 1
            else:
                self._tally.declined += 1

    async def _write_shards(self, name: str, data: bytes | memoryview, nodes: Mapping[int, int]) -> int:
        """Write shards of an object to the nodes that are reserved, by position; return how many took theirs."""
        code = self._config.code
        ids = {at: ShardId(name, code.data, code.parity, at) for at in nodes}
        try:
            shards = code.views(memoryview(data))
            if max(nodes, default=0) >= code.data:
                parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
                await in_thread(lambda _: encode(memoryview(data), code, parity))
                shards += parity
            async with task_group() as group:
                tasks = [group.create_task(self._write_shard(nodes[at], ids[at], shards[at])) for at in nodes]
            return sum(task.result() for task in tasks)
        finally:
            for at, node in nodes.items():
                self._directory.release(node, ids[at])

    async def _write_shard(self, number: int, shard: ShardId, payload: memoryview) -> bool:
        node = self._nodes[number]
        try:
            await self._delete(node)
            evicted = await node.set(shard, payload)
        except StoreError as error:
            _log.debug("%s does not take a shard: %s", node.name, error)
            return False
        for each in evicted or ():
            self._directory.dropped(number, each)
        return evicted is not None and self._directory.stored(number, shard)

    async def _delete(self, node: Node) -> None:
        """Delete what is to be deleted at a node; after an error, what was not deleted remains to be."""
        async with self._deleting[node.number]:  # lest a shard is put there again before a second order to delete it
            while page := self._directory.tombstones(node.number, LISTED_AT_ONCE):
                await node.delete(page)
                self._directory.deleted(node.number, page)

    async def meet_nodes(self) -> None:
        """Wake nodes whose limit is not known yet."""
        async with task_group() as group:
            for node in self._nodes:
                if not node.limit_bytes and node.membership.state is not State.GONE:
                    group.create_task(self._greet(node))

    async def _greet(self, node: Node) -> None:
        try:
            await node.ping()
        except TransientError as error:
            _log.debug("%s does not say how much it holds: %s", node.name, error)
