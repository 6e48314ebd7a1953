"""The model of our warm tier: against the real proxy in virtual time, and against what can be reckoned by hand."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from stoker._cost.prices import FunctionPrices
from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_sim._experiments.infinicache import object_hours
from stoker_sim._warm_fleet import (
    NodeCalls,
    NodeLife,
    ShardCalls,
    draw_reclaims,
    loss_by_hour,
    loss_by_read,
    place_shards,
    simulate_life,
)
from stoker_warm._billing import TaskUsage
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._events import NodeTask
from support.warm_platform import Tier, named
from support.warm_strikes import HOUR, Plan, lives_of, plan_of, take

CODE = ErasureCode(4, 2)
OBJECTS = [named(number, 3000) for number in range(40)]


@dataclass(slots=True)
class Played:
    """What a real proxy saw of a plan of strikes."""

    losses: Counter[int] = field(default_factory=Counter)
    places: dict[str, set[int]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    used: dict[NodeTask, TaskUsage] = field(default_factory=dict)


async def really_played(plan: Plan, hours: float, config: WarmConfig) -> Played:
    """Fill a tier, take its instances by the plan, and read everything at the end."""
    played = Played()
    async with Tier(config, seed=1) as tier:
        await tier.put(*OBJECTS)
        for node, shards in tier.believed().items():
            for shard in shards:
                played.places.setdefault(shard.object, set()).add(int(node.removeprefix("warm-")))
        played.losses = await take(tier, plan, hours)
        played.calls = Counter(call.task for call in tier.platform.calls)
        played.used = dict(tier.proxy.bill.usage)
        played.kept = {name for name, data in OBJECTS if await tier.can_read(name, data)}
    return played


@pytest.mark.parametrize(
    ("nodes", "hours", "life_minutes", "warm_seconds"), [(30, 4, 120, 60.0), (12, 4, 60, 60.0), (12, 4, 40, 300.0)]
)
def test_the_model_and_the_real_proxy_agree_on_losses_and_on_calls(
    nodes: int, hours: float, life_minutes: float, warm_seconds: float
) -> None:
    config = WarmConfig(nodes=nodes, code=CODE, keep_warm_seconds=warm_seconds)
    plan = plan_of(60.0 * life_minutes, nodes, hours)
    real = run_virtual(really_played(plan, hours, config))
    lives = lives_of(plan, hours, config)

    lost = {node: len(life.losses) for node, life in enumerate(lives) if life.losses}
    assert sum(lost.values()) >= 5
    differing = sum(abs(real.losses[node] - lost.get(node, 0)) for node in range(nodes))
    assert differing <= 0.02 * sum(lost.values())  # reclaims that fall into the second of a call
    kept = {name for name, places in real.places.items() if len(places & lost.keys()) <= CODE.parity}
    assert kept == real.kept

    assert real.calls["warm"] == pytest.approx(sum(life.warm_calls for life in lives), rel=0.01, abs=nodes)
    calls = sum(life.inventory_calls for life in lives) + nodes  # and one to greet
    assert real.calls["serve"] == pytest.approx(calls, rel=0.02)
    # This platform starts an instance in 0.01 s, the first time in 0.3 s more; to say hello takes two round trips.
    calls_of = NodeCalls(memory_bytes=1 << 30, exchange_seconds=0.0145, linger_seconds=config.linger_seconds)
    greeted = nodes * (calls_of.exchange_seconds + calls_of.init_seconds + config.linger_seconds)
    warm = sum(life.warm_calls for life in lives) * 0.01
    billed = sum(used.billed_seconds for used in real.used.values())
    assert billed == pytest.approx(calls_of.inventory_seconds(lives) + greeted + warm, rel=0.05)
    cold = nodes + sum(len(life.losses) for life in lives)
    assert sum(used.cold_starts for used in real.used.values()) == pytest.approx(cold, rel=0.02)


def life_of(*reclaimed: float, warm: float = 60.0, uses_per_second: float = 0.0) -> NodeLife:
    return simulate_life(warm, reclaimed, HOUR, offset=0.5, uses_per_second=uses_per_second, rng=random.Random(1))


def test_what_an_instance_held_is_lost_and_shows_at_the_next_call() -> None:
    assert life_of(100.0).losses == ((100.0, 150.0),)
    assert life_of(149.0, 149.5).losses == ((149.0, 150.0),)
    assert life_of(100.0, 170.0).losses == ((100.0, 150.0), (170.0, 210.0))
    assert life_of(100.0, 170.0).inventory_calls == 2
    assert life_of(HOUR - 1.0).inventory_calls == 0


def test_a_node_that_is_used_needs_fewer_calls_and_is_missed_sooner() -> None:
    busy = 0.1
    life = life_of(100.0, uses_per_second=busy)
    rng, calls, since = random.Random(2), 0, 0.0
    for _ in range(200_000):
        gap = rng.expovariate(busy)
        calls += int(gap // 60.0)
        since += gap
    assert life.warm_calls == pytest.approx(HOUR * calls / since, rel=0.1)
    assert life.warm_calls < life_of().warm_calls / 50
    assert life.losses[0][1] < 150.0


def test_reclaims_come_as_often_as_lives_say_and_in_order() -> None:
    rng = random.Random(1)
    found = [list(draw_reclaims(HOUR, 50 * HOUR, rng)) for _ in range(100)]
    assert sum(map(len, found)) == pytest.approx(5000, rel=0.05)
    assert all(each == sorted(each) for each in found)


@pytest.mark.parametrize(
    ("warm", "offset", "uses"), [(60.0, 1.5, 0.0), (60.0, 0.5, math.inf), (0.0, 0.5, 0.0), (math.inf, 0.5, 0.0)]
)
def test_a_node_that_cannot_be_is_refused(warm: float, offset: float, uses: float) -> None:
    with pytest.raises(ConfigError):
        simulate_life(warm, [], HOUR, offset=offset, uses_per_second=uses, rng=random.Random(1))


def test_what_part_is_lost_between_reads_is_what_drawn_objects_lose() -> None:
    code, rng, hours, functions = ErasureCode(4, 2), random.Random(1), 20, 60
    lost = [[rng.uniform(0, hours * HOUR) for _ in range(8)] for _ in range(functions)]
    places = place_shards(code, 5000, functions, np.random.default_rng(1))
    drawn = 1 - object_hours(code, places, lost, hours).mean(axis=1)
    assert loss_by_hour(code, lost, hours, HOUR) == pytest.approx(drawn, abs=0.03)
    often = loss_by_hour(code, lost, hours, HOUR / 6)
    assert often.mean() < drawn.mean() / 5
    at_reads = loss_by_read(code, lost, hours * 6, HOUR / 6)
    assert 1 - (1 - at_reads[:6]).prod() == pytest.approx(often[0])
    with pytest.raises(ConfigError, match="multiple"):
        loss_by_hour(code, lost, hours, 7.5 * HOUR)


PRICES = FunctionPrices(
    name="f",
    region="r",
    source="",
    dollars_per_request=1e-3,
    dollars_per_gb_second=1e-2,
    dollars_per_vcpu_second=0.0,
)
CALLS = NodeCalls(
    memory_bytes=1 << 30, warm_call_seconds=0.5, exchange_seconds=1.0, linger_seconds=2.0, init_seconds=4.0,
    bytes_per_second=100.0,
)  # fmt: skip


def test_a_bill_has_every_call_and_every_byte() -> None:
    life = NodeLife(losses=((1.0, 2.0),), inventory_calls=2, warm_calls=10.0)
    bill = CALLS.cost(
        [life], PRICES, read=CALLS.shard_calls(6.0, 50.0), rebuild=ShardCalls(2.0, 7.0), bucket_dollars=0.25
    )
    assert bill.warm_dollars == pytest.approx(10 * (1e-3 + 0.5e-2))
    greeted = 2 * 3.0 + 4
    assert CALLS.inventory_seconds([life]) == greeted
    assert bill.inventory_dollars == pytest.approx(2e-3 + greeted * 1e-2)
    assert bill.rebuild_dollars == pytest.approx(2e-3 + (2 * 3.0 + 7) * 1e-2)
    assert bill.read_dollars == pytest.approx(6 * (1e-3 + 3.5e-2))
    parts = bill.warm_dollars, bill.inventory_dollars, bill.rebuild_dollars, bill.bucket_dollars
    assert bill.upkeep_dollars == pytest.approx(sum(parts))
    assert bill.dollars == pytest.approx(bill.upkeep_dollars + bill.read_dollars)


@pytest.mark.parametrize("wrong", [{"linger_seconds": -1.0}, {"bytes_per_second": 0.0}, {"init_seconds": math.nan}])
def test_calls_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        NodeCalls(**{"memory_bytes": 1, "linger_seconds": 0.1, **wrong})  # type: ignore[arg-type]
