"""Calling nodes that nobody uses, and backing them up, whenever that is due.

A backed-up node has a second instance of the same function, which gets what the first one holds, and misses.

The platform starts it, since the first is busy. It dials out like any other, and what it lacks is copied through the
proxy, so neither needs to reach the other (A. Wang et al., "InfiniCache" (FAST 2020), section 4.3, where a relay
joins both). When the platform takes the first instance back, the next call goes to the second.

Should it go to a third one, which is empty, the second one is the only one that still has what was lost. So what it
has more than the first is deleted only if the first is the instance of the last back-up: then it has let that go
since. Another instance is given it back instead, and says what it holds then; what is elsewhere by now goes the
usual way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from stoker._base.task_group import task_group
from stoker_warm._connection import Reply
from stoker_warm._fleet import Node, deletions, list_all
from stoker_warm._settings import WarmConfig
from stoker_warm._shard import OVERHEAD_BYTES, ShardId
from stoker_warm._statistics import ProxyTally
from stoker_warm._upkeep import Errand, Upkeep
from stoker_warm._wake import Task
from stoker_warm._wire import Head, Kind

_COPIES_AT_ONCE = 2

_Ask = Callable[..., Awaitable[Reply]]
"""Asks one of both instances, as :meth:`stoker_warm._connection.Connection.request` does."""


async def back_up(node: Node, config: WarmConfig) -> int:
    """Bring a node's second instance up to date, or the first one if that is another than before.

    Returns:
        How many shards were copied.

    Raises:
        StokerError: the node or its second instance could not be had, or went away.
    """
    async with node.accompanied() as peer:
        first: _Ask = partial(node.request, seconds=config.write_seconds)
        second: _Ask = partial(peer.request, timeout=config.write_seconds)

        async def page(after: Head) -> Reply:
            return await second(Kind.INDEX, after)

        wanted, instance = await node.listed(), node.life.instance
        held = await list_all("a second instance", page, config.most_objects)
        if wanted is None or held is None:
            return 0
        more = sorted(set(held) - set(wanted))
        lost = [] if node.saved_instance == instance else _fitting(more, wanted, node.limit_bytes)
        copied = 0
        if lost:
            try:
                copied = await _copy(lost, second, first)
            finally:
                node.doubt()  # so that it says what it holds
        for head in deletions(sorted(set(more) - set(lost))):
            await second(Kind.DELETE, head)
        copied += await _copy(sorted(set(wanted) - set(held)), first, second)
        node.saved_instance = instance
        return copied


def _fitting(more: Iterable[ShardId], held: Iterable[ShardId], limit_bytes: int) -> list[ShardId]:
    """Return the shards for which there is room beside those that are held."""
    fitting, left_bytes = list[ShardId](), limit_bytes - sum(each.size_bytes + OVERHEAD_BYTES for each in held)
    for shard in more:
        left_bytes -= shard.size_bytes + OVERHEAD_BYTES
        if left_bytes < 0:
            break
        fitting.append(shard)
    return fitting


async def _copy(shards: Iterable[ShardId], source: _Ask, target: _Ask) -> int:
    """Copy shards, a few at a time; return how many were there and are now there, too."""
    left = iter(shards)
    async with task_group() as group:
        copies = [group.create_task(_copy_one_by_one(left, source, target)) for _ in range(_COPIES_AT_ONCE)]
    return sum(copy.result() for copy in copies)


async def _copy_one_by_one(left: Iterator[ShardId], source: _Ask, target: _Ask) -> int:
    copied = 0
    for shard in left:
        payload, name = bytearray(shard.size_bytes), shard.to_text()
        found = await source(Kind.GET, {"shard": name}, into=memoryview(payload))
        if found.kind is Kind.FOUND and found.body_bytes == len(payload):
            head = {"shard": name, "crc32c": found.head.get("crc32c")}
            copied += (await target(Kind.SET, head, body=(payload,))).kind is Kind.STORED
    return copied


_LOOK_SECONDS = 0.1
"""The least time between two looks at what is due."""


async def run_errands(
    nodes: Sequence[Node],
    config: WarmConfig,
    tally: ProxyTally,
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
) -> None:
    """Run what is due, for ever.

    Args:
        nodes: by number.
        config: how often they are called.
        tally: where copied shards are counted.
        spawn: runs an errand until it ends or the proxy does.
    """
    loop = asyncio.get_running_loop()
    upkeep = Upkeep(config.nodes, config.upkeep, loop.time())
    known = [(node.life.instance, node.life.expected) for node in nodes]
    while True:
        due_seconds = upkeep.next_due()
        await asyncio.sleep(_LOOK_SECONDS if due_seconds is None else max(_LOOK_SECONDS, due_seconds - loop.time()))
        for node in nodes:
            upkeep.contacted(node.number, node.contact_seconds)
            before, known[node.number] = known[node.number], (node.life.instance, node.life.expected)
            if before[0] != node.life.instance:
                upkeep.lost_peer(node.number)
            elif before[1] != node.life.expected:
                upkeep.changed(node.number)
        for errand in upkeep.due(loop.time()):
            spawn(_run(upkeep, errand, nodes[errand.node], config, tally))


async def _run(upkeep: Upkeep, errand: Errand, node: Node, config: WarmConfig, tally: ProxyTally) -> None:
    is_well = False
    try:
        if errand.task is Task.WARM:
            await node.keep_warm()
        else:
            copied = await back_up(node, config)
            tally.backed_up += copied  # read after the wait, during which others have counted
        is_well = True
    finally:
        upkeep.done(errand.node, asyncio.get_running_loop().time(), is_well=is_well)
