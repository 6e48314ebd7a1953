"""Reading objects from nodes: all shards are asked for at once, and the first that restore the object are taken.

A late shard is read and thrown away (A. Wang et al., "InfiniCache" (FAST 2020), section 3.2). A wrong shard, which
its MAC tells, is a lost one.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker.errors import ServerError, StoreError
from stoker_warm._billing import ProxyTally
from stoker_warm._erasure import Code, restore
from stoker_warm._frames import Kind
from stoker_warm._node_connection import Node
from stoker_warm._shard import ShardId, ShardMac


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
        mac: checks shards.
        tally: where shards that are late, restored or corrupt are counted.
        read_seconds: for a shard, its node's waking included.
        lost: is called with the number of a node that lacks a shard, or has a wrong one, and the shard.
    """

    def __init__(
        self,
        code: Code,
        nodes: Sequence[Node],
        mac: ShardMac,
        tally: ProxyTally,
        *,
        read_seconds: float,
        lost: Callable[[int, ShardId], None],
    ) -> None:
        self._code, self._nodes, self._mac, self._tally = code, nodes, mac, tally
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
        code, views = self._code, self._code.views(into)
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
                if reply.body_bytes == len(into) and self._mac.verify(shard, into, reply.head.get("mac")):
                    return _Got.WHOLE
                self._tally.corrupt += 1
        self._lost(node.number, shard)
        return _Got.LOST
