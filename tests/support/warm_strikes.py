"""Loss of instances at random times, as a platform reclaims them: with a real proxy, and in the model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from stoker_sim._warm_fleet import NodeLife, draw_reclaims, simulate_life
from stoker_warm._config import WarmConfig
from support.warm_platform import Tier

__all__ = ["HOUR", "Plan", "lives_of", "plan_of", "take"]

HOUR = 3600.0
Plan = list[list[float]]
"""Times at which the instance of each node is killed, ascending."""
_IN_STEP = 0.05
"""Fraction of the keep-warm interval in which all keep-warm calls fall, if they began together."""


def plan_of(mean_life_seconds: float, nodes: int, hours: float) -> Plan:
    """Draw the times at which instances are killed."""
    rng = random.Random(7)
    return [list(draw_reclaims(mean_life_seconds, hours * HOUR, rng)) for _ in range(nodes)]


async def take(tier: Tier, plan: Plan, hours: float) -> Counter[int]:
    """Kill instances by a plan that begins now; return the number of losses of each node."""
    loop, losses = asyncio.get_running_loop(), Counter[int]()
    begun_seconds = loop.time()
    every = [(seconds, number) for number, each in enumerate(plan) for seconds in each]
    for seconds, number in sorted(every):
        await asyncio.sleep(max(0.0, begun_seconds + seconds - loop.time()))
        losses[number] += _strike(tier, number)
    await asyncio.sleep(max(0.0, begun_seconds + hours * HOUR - loop.time()))
    return losses


def lives_of(plan: Plan, hours: float, config: WarmConfig) -> list[NodeLife]:
    """Return the model's result for a plan, for nodes that were filled at its begin and are never read.

    All were written at the same time, so their keep-warm calls nearly coincide.
    """
    rng = random.Random(1)
    offsets = [1.0 - _IN_STEP + _IN_STEP * (node + 1) / len(plan) for node in range(len(plan))]
    return [
        simulate_life(config.keep_warm_seconds, each, hours * HOUR, offset=offset, uses_per_second=0.0, rng=rng)
        for each, offset in zip(plan, offsets, strict=True)
    ]


def _strike(tier: Tier, number: int) -> bool:
    """Kill the instances of a node; return whether there was one."""
    name = tier.proxy._nodes[number].name
    had_any = bool(tier.platform.instances.get(name))
    tier.platform.reclaim(name)
    return had_any
