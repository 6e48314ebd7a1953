"""Reading objects from nodes: all shards are asked for at once, and the first that restore the object are taken.

A late shard is read and thrown away (A. Wang et al., "InfiniCache" (FAST 2020), section 3.2). A wrong shard, which
its MAC tells, is a lost one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker._base.task_group import task_group
from stoker._base.threads import in_thread
from stoker_warm._billing import ProxyTally
from stoker_warm._directory import Directory
from stoker_warm._erasure import Code, restore
from stoker_warm._node_connection import Got, Node
from stoker_warm._shard import ShardId


class ShardReader:
    """Reads objects from nodes. Lives on the proxy's event loop.

    Args:
        code: how objects are cut.
        nodes: by number.
        directory: is told which node lacks a shard, or has a wrong one.
        tally: where shards that are late, restored or corrupt are counted.
    """

    def __init__(self, code: Code, nodes: Sequence[Node], directory: Directory, tally: ProxyTally) -> None:
        self._code, self._nodes, self._directory, self._tally = code, nodes, directory, tally

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
        right, lost = await self._read_first(name, nodes, [*views, *parity.values()])
        if len(right) < code.data:
            return None
        missing = [at for at in range(code.data) if at not in right]
        if missing:
            self._tally.restored += 1
            here = {at: view for at, view in parity.items() if at in right}
            if code.parity == 1:  # which takes less time than handing it over
                restore(code, len(into), into, here, missing)
            else:
                await in_thread(lambda _: restore(code, len(into), into, here, missing))
        return lost

    async def _read_first(
        self, name: str, nodes: Sequence[int], targets: Sequence[memoryview]
    ) -> tuple[set[int], list[int]]:
        """Ask for all shards at once, until enough are right or too many are not there, and leave the others.

        Returns:
            The positions of shards that are right, and of those that nodes have lost.
        """
        code = self._code
        asked: dict[asyncio.Task[Got], ShardId] = {}
        right = {at for at, view in enumerate(targets) if not len(view)}
        lost = [at for at, node in enumerate(nodes) if node < 0]
        async with task_group() as group:
            for at, node in enumerate(nodes):
                if node >= 0 and at not in right:
                    shard = ShardId(name, code.data, code.parity, at)
                    asked[group.create_task(self._nodes[node].get(shard, targets[at]))] = shard
            waiting = set(asked)
            while len(right) < code.data <= len(right) + len(waiting):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    shard, got = asked[each], each.result()
                    if got is Got.RIGHT:
                        right.add(shard.position)
                    elif got is not Got.NOTHING:
                        lost.append(shard.position)
                        self._tally.corrupt += got is Got.WRONG
                        self._directory.missing(nodes[shard.position], shard)
            for each in waiting:
                each.cancel()
        if len(right) >= code.data:
            self._tally.late += len(waiting)
        return right, lost
