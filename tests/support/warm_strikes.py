"""Instances of a tier's functions that are taken as a platform would take them: from a real proxy, and in the model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from operator import itemgetter

from stoker_sim._warm_fleet import NodeLife, Reclaim, Strike, Struck, lived, strikes
from stoker_warm._settings import WarmConfig
from stoker_warm._upkeep import UpkeepConfig
from support.warm_platform import Tier

__all__ = ["HOUR", "Plan", "lives_of", "plan_of", "take"]

HOUR = 3600.0
Plan = list[list[Strike]]
"""Of each node, in the order of time."""
_IN_STEP = 0.05
"""Of the interval between calls that keep nodes warm: they fall into this part of it, if they began together."""


def plan_of(reclaim: Reclaim, nodes: int, hours: float) -> Plan:
    """Draw strikes."""
    rng = random.Random(7)
    return [list(strikes(reclaim, hours * HOUR, rng)) for _ in range(nodes)]


async def take(tier: Tier, plan: Plan, hours: float) -> Counter[int]:
    """Take instances by a plan that begins now; return how often each node lost its memory."""
    loop, losses = asyncio.get_running_loop(), Counter[int]()
    begun_seconds = loop.time()
    every = [(strike.seconds, number, strike.takes) for number, each in enumerate(plan) for strike in each]
    for seconds, number, takes in sorted(every, key=itemgetter(0)):
        await asyncio.sleep(max(0.0, begun_seconds + seconds - loop.time()))
        losses[number] += _strike(tier, number, takes)
    await asyncio.sleep(max(0.0, begun_seconds + hours * HOUR - loop.time()))
    return losses


def lives_of(plan: Plan, hours: float, config: WarmConfig) -> list[NodeLife]:
    """Return what the model makes of a plan for nodes that were filled when it began, and that nobody reads.

    All were written to at the same time, so without turns to be backed up they are called nearly in step.
    """
    upkeep = UpkeepConfig(
        warm_seconds=config.keep_warm_seconds, backup_seconds=config.backup_seconds, peer_seconds=config.backup_seconds
    )
    rng, first = random.Random(1), 1.0 - _IN_STEP if config.backup_seconds is None else 0.0
    offsets = [first + (1.0 - first) * (node + 1) / len(plan) for node in range(len(plan))]
    return [
        lived(upkeep, each, hours * HOUR, offset=offset, uses_per_second=0.0, rng=rng)
        for each, offset in zip(plan, offsets, strict=True)
    ]


def _strike(tier: Tier, number: int, takes: Struck) -> bool:
    """Take instances of a node; return whether the last one went."""
    node = tier.proxy._nodes[number]
    instances = list(tier.platform.instances.get(node.name, []))
    for instance in instances:
        is_first = instance.instance == node.life.instance
        if takes is Struck.BOTH or is_first == (takes is Struck.FIRST):
            tier.platform.kill(instance)
    return bool(instances) and not tier.platform.instances[node.name]
