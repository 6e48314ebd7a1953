"""Writing an object's shards to nodes that have none of it yet."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker.errors import StoreError, TransientError, WireError
from stoker_warm._code import Code, encode
from stoker_warm._directory import Directory, Held, Placement
from stoker_warm._doomed import Doomed
from stoker_warm._fleet import Node
from stoker_warm._life import State
from stoker_warm._reading import views_of
from stoker_warm._settings import WarmConfig
from stoker_warm._shard import ShardId
from stoker_warm._statistics import ProxyTally
from stoker_warm._wire import Head, Kind

__all__ = ["ShardWriter", "Shards", "Written", "encoded"]

_log = logging.getLogger("stoker.warm.writing")

Shards = Mapping[int, memoryview]
"""Payloads by position."""


class Written(NamedTuple):
    """What became of writing an object.

    Attributes:
        placed: shards that there was a place for.
        stored: of them, those that nodes took.
    """

    placed: int
    stored: int


class ShardWriter:
    """Puts objects away. Lives on the proxy's event loop.

    Args:
        config: of the tier.
        nodes: by number.
        directory: is asked for places, and told what came of it.
        tally: where objects that go for others are counted.
        rng: for choosing nodes.
        let_go: is told of objects that go for others.
    """

    def __init__(
        self,
        config: WarmConfig,
        nodes: Sequence[Node],
        directory: Directory,
        tally: ProxyTally,
        rng: random.Random,
        let_go: Callable[[Collection[str]], None],
    ) -> None:
        self._config, self._nodes, self._directory, self._tally = config, nodes, directory, tally
        self._rng, self._let_go = rng, let_go
        self.doomed = Doomed(config.nodes, write_seconds=config.write_seconds)
        """What is to be deleted."""
        self.under_way: set[str] = set()
        """Names of objects that somebody is about to write; who writes enters and removes them."""

    async def write(
        self, name: str, code: Code, shards_of: Callable[[Collection[int]], Awaitable[Shards]]
    ) -> Written | None:
        """Write the shards of an object that are nowhere, if there is a place for them.

        Args:
            name: of the object.
            code: how it is cut.
            shards_of: makes the shards at some positions, once they have a place; what it raises is raised.

        Returns:
            How many; None if there are too few nodes on which the object could be read.
        """
        await self.meet_nodes()
        placement = self._directory.place(name, code, self._rng)
        if placement is None:
            return None
        if placement.evicted:
            self.evict(placement.evicted)
        if not placement.nodes:
            return Written(0, 0)
        shards = await self._made(name, code, placement, shards_of)
        async with task_group() as group:
            tasks = [
                group.create_task(self._write_shard(node, ShardId(name, code.data, code.parity, at), shards[at]))
                for at, node in placement.nodes.items()
            ]
        return Written(len(tasks), sum(task.result() for task in tasks))

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
        names = {held.shard.object for held in evicted}
        self._tally.evicted += len(names)
        self._let_go(names)

    async def _made(
        self,
        name: str,
        code: Code,
        placement: Placement,
        shards_of: Callable[[Collection[int]], Awaitable[Shards]],
    ) -> Shards:
        """Return the shards that have a place; without them it is given back."""
        try:
            return await shards_of(placement.nodes)
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
