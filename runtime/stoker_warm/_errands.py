"""Calling nodes that nobody uses, and backing them up, whenever that is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from stoker_warm._backup import back_up
from stoker_warm._fleet import Node
from stoker_warm._settings import WarmConfig
from stoker_warm._statistics import ProxyTally
from stoker_warm._upkeep import Errand, Upkeep
from stoker_warm._wake import Task

__all__ = ["run_errands"]

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
