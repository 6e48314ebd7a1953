"""Writing an object's shards to nodes that have none of it yet, reading them back, and deleting them.

What nothing will be read from any more is deleted. Objects are written behind the back of whoever has them.

To read an object, all shards are asked for at once, the first that restore the object are taken, and the rest are
thrown away (A. Wang et al., "InfiniCache" (FAST 2020), section 3.2). A shard that is not what its name and checksum say
is a lost one.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker.errors import ServerError, StoreError, TransientError, WireError
from stoker_warm._code import Code, encode, restore
from stoker_warm._directory import Directory, Held, Placement
from stoker_warm._fleet import Node
from stoker_warm._life import State
from stoker_warm._node import LISTED_AT_ONCE
from stoker_warm._settings import WarmConfig
from stoker_warm._shard import ShardId
from stoker_warm._statistics import ProxyTally
from stoker_warm._wire import Head, Kind


class _Got(enum.Enum):
    """What became of asking for a shard: it is whole, or is not where it was believed to be, or cannot be had now."""

    WHOLE = enum.auto()
    LOST = enum.auto()
    NOTHING = enum.auto()


class ShardReader:
    """Reads objects from nodes. Lives on the proxy's event loop.

    Args:
        code: how objects are cut.
        nodes: by number.
        tally: where shards that are late, restored or corrupt are counted.
        read_seconds: for a shard, its node's waking included.
        lost: is told of a node, by number, that does not have a shard as it should be.
    """

    def __init__(
        self,
        code: Code,
        nodes: Sequence[Node],
        tally: ProxyTally,
        *,
        read_seconds: float,
        lost: Callable[[int, ShardId], None],
    ) -> None:
        self._code, self._nodes, self._tally = code, nodes, tally
        self._read_seconds, self._lost = read_seconds, lost

    async def read(self, name: str, nodes: Sequence[int], into: memoryview) -> list[int] | None:
        """Fill ``into`` with an object from the first shards that restore it.

        When the call ends, however it ends, nothing writes to ``into`` any more.

        Args:
            name: of the object.
            nodes: by position of a shard, the node that is believed to have it, -1 for none.
            into: memory of the object's size.

        Returns:
            The positions that nodes have lost; None if too few could be had.
        """
        code, views = self._code, views_of(self._code, into)
        parity = {at: memoryview(bytearray(len(views[0]))) for at in range(code.data, code.shards)}
        whole, lost = await self._read_first(name, nodes, [*views, *parity.values()])
        if len(whole) < code.data:
            return None
        missing = [at for at in range(code.data) if at not in whole]
        if missing:
            self._tally.restored += 1
            here = {at: view for at, view in parity.items() if at in whole}
            if code.parity == 1:  # which takes less time than handing it over
                restore(code, len(into), into, here, missing)
            else:
                await in_thread(lambda _: restore(code, len(into), into, here, missing))
        return lost

    async def _read_first(
        self, name: str, nodes: Sequence[int], targets: Sequence[memoryview]
    ) -> tuple[set[int], list[int]]:
        """Ask for all shards at once, until enough are whole or too many are not there, and leave the others.

        Returns:
            The positions of shards that are whole, and of those that nodes have lost.
        """
        code = self._code
        asked: dict[asyncio.Task[_Got], int] = {}
        whole = {at for at, view in enumerate(targets) if not len(view)}
        lost = [at for at, node in enumerate(nodes) if node < 0]
        async with task_group() as group:
            for at, node in enumerate(nodes):
                if node >= 0 and at not in whole:
                    shard = ShardId(name, code.data, code.parity, at)
                    asked[group.create_task(self._read_shard(self._nodes[node], shard, targets[at]))] = at
            waiting = set(asked)
            while len(whole) < code.data <= len(whole) + len(waiting):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                whole |= {asked[each] for each in done if each.result() is _Got.WHOLE}
                lost += [asked[each] for each in done if each.result() is _Got.LOST]
            for each in waiting:
                each.cancel()
        if len(whole) >= code.data:
            self._tally.late += len(waiting)
        return whole, lost

    async def _read_shard(self, node: Node, shard: ShardId, into: memoryview) -> _Got:
        """Fill ``into`` with a shard, if it can be had in time."""
        try:
            reply = await node.request(Kind.GET, {"shard": shard.to_text()}, into=into, seconds=self._read_seconds)
        except ServerError:
            pass  # it has answered: that it cannot
        except StoreError:
            return _Got.NOTHING
        else:
            if reply.kind is Kind.FOUND:
                if reply.body_bytes == len(into) and shard.checksum(into) == reply.head.get("crc32c"):
                    return _Got.WHOLE
                self._tally.corrupt += 1
        self._lost(node.number, shard)
        return _Got.LOST


def views_of(code: Code, data: memoryview) -> list[memoryview]:
    """Return an object's data shards, in its own memory."""
    return [data[start:end] for start, end in code.cuts(len(data))]


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


_log = logging.getLogger("stoker.warm.writing")

Shards = Mapping[int, memoryview]
"""Payloads by position."""


class ShardWriter:
    """Puts objects away. Lives on the proxy's event loop.

    Args:
        config: of the tier.
        nodes: by number.
        directory: is asked for places, and told what came of it.
        tally: where objects that go for others are counted.
        rng: for choosing nodes.
    """

    def __init__(
        self,
        config: WarmConfig,
        nodes: Sequence[Node],
        directory: Directory,
        tally: ProxyTally,
        rng: random.Random,
    ) -> None:
        self._config, self._nodes, self._directory, self._tally = config, nodes, directory, tally
        self._rng = rng
        self.doomed = Doomed(config.nodes, write_seconds=config.write_seconds)
        """What is to be deleted."""

    async def write(self, name: str, data: bytes | bytearray) -> int | None:
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
        """Wake nodes of which nobody knows how much they hold: none has said so yet."""
        unknown = [node for node in self._nodes if not node.limit_bytes and node.life.state is not State.GONE]
        if not unknown:
            return
        async with task_group() as group:
            for node in unknown:
                group.create_task(self._greet(node))

    def lost(self, node: int, shard: ShardId) -> None:
        """A node lacks a shard, or has a damaged one, which must not be found there again."""
        if self._directory.dropped(node, shard):
            self.doomed.add(node, shard)

    def evict(self, evicted: Collection[Held]) -> None:
        """Have the shards of objects deleted that went for others."""
        for held in evicted:
            self.doomed.add(held.node, held.shard)
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
            await self.doomed.delete(node)
            reply = await node.request(
                Kind.SET,
                {"shard": shard.to_text(), "crc32c": shard.checksum(payload)},
                body=(payload,),
                seconds=self._config.write_seconds,
            )
            if reply.kind is Kind.STORED:
                for evicted in _evicted(reply.head):
                    self._directory.dropped(number, evicted)
                if self._directory.stored(number, shard):
                    return True
                self.doomed.add(number, shard)
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
            await node.request(Kind.PING, {}, seconds=self._config.wake_seconds)
        except TransientError as error:
            _log.debug("%s does not say how much it holds: %s", node.name, error)


async def encoded(code: Code, data: bytes | bytearray, wanted: Collection[int]) -> Shards:
    """Return the shards of an object; parity only if it is wanted, data in its own memory."""
    whole = memoryview(data)
    shards = dict(enumerate(views_of(code, whole)))
    if any(at >= code.data for at in wanted):
        parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
        await in_thread(lambda _: encode(whole, code, parity))
        shards |= dict(enumerate(parity, code.data))
    return shards


def _evicted(head: Head) -> list[ShardId]:
    """Return what a node says has gone for a shard."""
    evicted = head.get("evicted")
    if not isinstance(evicted, list):
        raise WireError(f"a node says that {evicted!r:.40} went for a shard")
    return [ShardId.parse(each) for each in evicted]


class WriteBehind:
    """Copies of objects, up to so many bytes, until they are with nodes. Lives on the proxy's event loop.

    Args:
        config: of the tier.
        writer: puts them away.
        directory: knows which are away.
        tally: where they are counted.
        spawn: runs what it is given until it ends or the proxy does.
    """

    def __init__(
        self,
        config: WarmConfig,
        writer: ShardWriter,
        directory: Directory,
        tally: ProxyTally,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._config, self._writer, self._directory, self._tally, self._spawn = config, writer, directory, tally, spawn
        self._turns = asyncio.Semaphore(config.writes)
        self._is_closed = False
        self.under_way: set[str] = set()
        """Names of objects that are being written, or are about to be."""

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time, if there is room for a copy until then. Never blocks."""
        if not self._has(name) and self._has_room(len(data)):
            self._begin(name, bytes(data))

    def take(self, name: str, data: bytearray) -> bool:
        """Like :meth:`offer`, but without a copy: nobody changes ``data`` any more.

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
        """Put the lost shards of an object away again, of which the bytes are at hand; if there is room for a copy."""
        if self._fits(len(data)) and name not in self.under_way:
            self._begin(name, bytes(data))

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
        self.under_way.add(name)
        self._tally.pending_bytes += len(data)
        writing = self._spawn(self._write(name, data))
        writing.add_done_callback(lambda _: self._ended(name, len(data)))

    def _ended(self, name: str, size_bytes: int) -> None:
        self.under_way.discard(name)
        self._tally.pending_bytes -= size_bytes

    async def _write(self, name: str, data: bytes | bytearray) -> None:
        async with self._turns:
            is_new = self._directory.find(name, is_use=False) is None
            stored = await self._writer.write(name, data)
            if stored is None:
                self._tally.declined += 1
            elif not is_new:
                self._tally.rebuilt += stored
            elif self._directory.find(name, is_use=False) is not None:
                self._tally.stored += 1
            else:
                self._tally.declined += 1
