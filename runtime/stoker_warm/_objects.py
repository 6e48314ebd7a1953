"""Objects as shards on nodes: reads, and writes in the background.

A read requests all shards of an object at once, and uses the first ones that suffice; late shards are received and
discarded (A. Wang et al., "InfiniCache" (FAST 2020), section 3.2). A shard with a wrong MAC counts as lost. Lost shards
are written again from the bytes of a successful read, and tombstones are deleted when their node is written to.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from stoker._base.task_group import task_group
from stoker._base.threads import run_in_thread
from stoker.errors import StokerError, StoreError
from stoker_warm._billing import ProxyCounters, WarmBill
from stoker_warm._config import WarmConfig
from stoker_warm._directory import ShardDirectory
from stoker_warm._erasure import encode, restore
from stoker_warm._node_client import GetOutcome, NodeClient
from stoker_warm._node_state import NodeState
from stoker_warm._shard import MAX_SHARDS_PER_FRAME, ShardId

_log = logging.getLogger("stoker.warm.writing")


class ShardedObjects:
    """Objects on nodes, and a bounded queue of copies to write. Used by the proxy's event loop only.

    Args:
        config: Settings of the proxy.
        nodes: Nodes by number.
        bill: Bill that counts the delivered objects.
        rng: Random generator for choosing nodes.
        spawn: Function that runs a coroutine as a task, which is cancelled when the proxy closes.

    Attributes:
        directory: Index of objects and shards.
        counters: Counters.
        write_tasks: Name of an object → task that writes it, or waits to write it.
    """

    def __init__(
        self,
        config: WarmConfig,
        nodes: Sequence[NodeClient],
        bill: WarmBill,
        rng: random.Random,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._config, self._nodes, self._bill, self._rng, self._spawn = config, nodes, bill, rng, spawn
        self.directory = ShardDirectory(config.nodes, config.code, limit_bytes=0, max_objects=config.max_objects)
        self.counters = ProxyCounters()
        self.write_tasks: dict[str, asyncio.Task[None]] = {}
        self._write_slots = asyncio.Semaphore(config.writes)
        self._is_closed = False
        self._delete_locks = [asyncio.Lock() for _ in range(config.nodes)]

    def find(self, name: str) -> list[int] | None:
        """Return the node of each shard of an object, as :meth:`ShardDirectory.find`; None counts as a miss."""
        nodes = self.directory.find(name)
        self.counters.misses += nodes is None
        return nodes

    async def read(self, name: str, into: memoryview) -> bool:
        """Read an object into ``into``, and verify each shard.

        Once this returns or raises, even if cancelled, nothing writes to ``into`` any more.

        Args:
            name: Name of the object.
            into: Memory of the object's size.

        Returns:
            True if the object was read; False if it is not here, or too few shards arrived within ``read_seconds``.
        """
        nodes = self.find(name)
        if nodes is None:
            return False
        code, views = self._config.code, self._config.code.data_views(into)
        parity = {at: memoryview(bytearray(len(views[0]))) for at in range(code.data, code.shards)}
        right, lost = await self._read_shards(name, nodes, [*views, *parity.values()])
        if len(right) < code.data:
            self.counters.losses += 1
            return False
        missing = [at for at in range(code.data) if at not in right]
        if missing:
            self.counters.restored += 1
            here = {at: view for at, view in parity.items() if at in right}
            if code.parity == 1:  # faster than passing the work to a thread
                restore(code, len(into), into, here, missing)
            else:
                await run_in_thread(lambda _: restore(code, len(into), into, here, missing))
        self.count_hit(len(into))
        if lost:
            self._start_repair(name, into)
        return True

    def count_hit(self, size_bytes: int) -> None:
        """Count a read of an object, including one that was served by another read's bytes."""
        self.counters.hits += 1
        self._bill.count_read(size_bytes)

    async def _read_shards(
        self, name: str, nodes: Sequence[int], targets: Sequence[memoryview]
    ) -> tuple[set[int], list[int]]:
        """Request all shards at once, and wait until enough are valid or too many have failed; cancel the others.

        Returns:
            Positions of the valid shards, and of the lost ones.
        """
        code = self._config.code
        requests: dict[asyncio.Task[GetOutcome], ShardId] = {}
        right = {at for at, view in enumerate(targets) if not len(view)}
        lost = [at for at, node in enumerate(nodes) if node < 0]
        async with task_group() as group:
            for at, node in enumerate(nodes):
                if node >= 0 and at not in right:
                    shard = ShardId(name, code.data, code.parity, at)
                    requests[group.create_task(self._nodes[node].get(shard, targets[at]))] = shard
            waiting = set(requests)
            while len(right) < code.data <= len(right) + len(waiting):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    shard, got = requests[each], each.result()
                    if got is GetOutcome.VALID:
                        right.add(shard.position)
                    elif got is not GetOutcome.UNAVAILABLE:
                        lost.append(shard.position)
                        self.counters.corrupt += got is GetOutcome.CORRUPT
                        self.directory.mark_missing(nodes[shard.position], shard)
            for each in waiting:
                each.cancel()
        if len(right) >= code.data:
            self.counters.late += len(waiting)
        return right, lost

    def offer(self, name: str, data: memoryview, *, must_copy: bool = True) -> None:
        """Queue an object for writing, if the queue has room. Never blocks.

        Args:
            name: Name of the object.
            data: Bytes of the object.
            must_copy: Whether to copy the bytes; otherwise they must not change until they are written.
        """
        if not self.has(name) and self.has_room(len(data)):
            self._start_write(name, bytes(data) if must_copy else data)

    def has(self, name: str) -> bool:
        """Return whether an object is here or queued for writing."""
        return self.directory.find(name) is not None or name in self.write_tasks

    def has_room(self, size_bytes: int) -> bool:
        """Return whether the queue has room for a copy of an object; if not, count it as declined."""
        has_room = self._has_pending_room(size_bytes)
        self.counters.declined += not has_room
        return has_room

    def _start_repair(self, name: str, data: memoryview) -> None:
        """Queue the lost shards of an object for writing, if the queue has room for a copy of the object."""
        is_here = self.directory.find(name, is_use=False) is not None
        if is_here and name not in self.write_tasks and self._has_pending_room(len(data)):
            self._start_write(name, bytes(data))

    def remove(self, name: str) -> None:
        """Remove an object, even while it is being written. Its shards are deleted when their nodes are written to."""
        if name in self.write_tasks:
            self.write_tasks[name].cancel()
        self.directory.remove_object(name)

    def close(self) -> None:
        """Decline all further offers."""
        self._is_closed = True

    def _has_pending_room(self, size_bytes: int) -> bool:
        limit_bytes = min(self._config.max_object_bytes, self._config.pending_bytes - self.counters.pending_bytes)
        return not self._is_closed and size_bytes <= limit_bytes

    def _start_write(self, name: str, data: bytes | memoryview) -> None:
        self.counters.pending_bytes += len(data)
        writing = self.write_tasks[name] = self._spawn(self._write(name, data))
        writing.add_done_callback(lambda _: self._finish_write(name, len(data)))

    def _finish_write(self, name: str, size_bytes: int) -> None:
        del self.write_tasks[name]
        self.counters.pending_bytes -= size_bytes

    async def _write(self, name: str, data: bytes | memoryview) -> None:
        async with self._write_slots:
            is_repair = self.directory.find(name, is_use=False) is not None
            await self.learn_limits()
            placement = self.directory.place(name, self._rng)
            stored = 0
            if placement is not None:
                self.counters.evicted += placement.evicted
                stored = await self._write_shards(name, data, placement.nodes)
            if is_repair:
                self.counters.rebuilt += stored
            elif self.directory.find(name, is_use=False) is not None:
                self.counters.stored += 1
            else:
                self.counters.declined += 1

    async def _write_shards(self, name: str, data: bytes | memoryview, nodes: Mapping[int, int]) -> int:
        """Write shards of an object to their reserved nodes, by position; return the number of stored shards."""
        code = self._config.code
        ids = {at: ShardId(name, code.data, code.parity, at) for at in nodes}
        try:
            shards = code.data_views(memoryview(data))
            if max(nodes, default=0) >= code.data:
                parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
                await run_in_thread(lambda _: encode(memoryview(data), code, parity))
                shards += parity
            async with task_group() as group:
                tasks = [group.create_task(self._write_shard(nodes[at], ids[at], shards[at])) for at in nodes]
            return sum(task.result() for task in tasks)
        finally:
            for at, node in nodes.items():
                self.directory.cancel_reservation(node, ids[at])

    async def _write_shard(self, number: int, shard: ShardId, payload: memoryview) -> bool:
        node = self._nodes[number]
        try:
            await self._delete_tombstones(node)
            evicted = await node.set(shard, payload)
        except StoreError as error:
            _log.debug("a shard could not be written to %s: %s", node.name, error)
            return False
        for each in evicted or ():
            self.directory.remove_shard(number, each)
        return evicted is not None and self.directory.commit_shard(number, shard)

    async def _delete_tombstones(self, node: NodeClient) -> None:
        """Delete a node's tombstones; after an error, those that were not deleted remain."""
        async with self._delete_locks[node.number]:  # so that no second deletion follows a new write of the same shard
            while page := self.directory.list_tombstones(node.number, MAX_SHARDS_PER_FRAME):
                await node.delete(page)
                self.directory.clear_tombstones(node.number, page)

    async def learn_limits(self) -> None:
        """Wake the nodes whose limit is not known yet."""
        unknown = [
            each for each in self._nodes if not each.limit_bytes and each.state_machine.state is not NodeState.GONE
        ]
        for name, reason in (await for_each_node(unknown, NodeClient.ping)).items():
            _log.debug("the limit of %s is unknown: %s", name, reason)


async def for_each_node(nodes: Sequence[NodeClient], action: Callable[[NodeClient], Awaitable[None]]) -> dict[str, str]:
    """Run ``action`` for all nodes concurrently; return node name → error message for the failed ones."""

    async def problem_of(node: NodeClient) -> str:
        try:
            await action(node)
        except StokerError as error:
            return str(node.call_error or error)
        return ""

    async with task_group() as group:
        tasks = {node.name: group.create_task(problem_of(node)) for node in nodes}
    return {name: reason for name, task in tasks.items() if (reason := task.result())}
