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
from stoker_sim._experiments.infinicache import kept_hours
from stoker_sim._warm_fleet import (
    NodeCalls,
    NodeLife,
    Reclaim,
    Served,
    Strike,
    Struck,
    lived,
    lost_between_reads,
    placed,
    strikes,
)
from stoker_warm._code import Code
from stoker_warm._settings import WarmConfig
from stoker_warm._statistics import Used
from stoker_warm._upkeep import UpkeepConfig
from stoker_warm._wake import Task
from support.warm_platform import Tier, named
from support.warm_strikes import HOUR, Plan, lives_of, plan_of, take

CODE = Code(4, 2)
OBJECTS = [named(number, 3000) for number in range(40)]


@dataclass(slots=True)
class Played:
    """What a real proxy saw of a plan of strikes."""

    losses: Counter[int] = field(default_factory=Counter)
    places: dict[str, set[int]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    used: dict[Task, Used] = field(default_factory=dict)


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
        played.used = dict(tier.proxy.meter._used)
        played.kept = {name for name, data in OBJECTS if await tier.kept(name, data)}
    return played


@pytest.mark.parametrize(
    ("nodes", "hours", "life_minutes", "warm_seconds", "backup_seconds"),
    [(30, 2, 20, 60.0, 300.0), (12, 2, 20, 60.0, 60.0), (30, 4, 120, 60.0, None), (12, 4, 40, 300.0, 300.0)],
)
def test_the_model_and_the_real_proxy_agree_on_losses_and_on_calls(
    nodes: int, hours: float, life_minutes: float, warm_seconds: float, backup_seconds: float | None
) -> None:
    config = WarmConfig(nodes=nodes, code=CODE, keep_warm_seconds=warm_seconds, backup_seconds=backup_seconds)
    plan = plan_of(Reclaim(mean_life_seconds=60 * life_minutes, together=0.1), nodes, hours)
    real = run_virtual(really_played(plan, hours, config))
    lives = lives_of(plan, hours, config)

    lost = {node: len(life.losses) for node, life in enumerate(lives) if life.losses}
    assert sum(lost.values()) >= 5
    differing = sum(abs(real.losses[node] - lost.get(node, 0)) for node in range(nodes))
    assert differing <= 0.02 * sum(lost.values())  # strikes that fall into the second of a call
    kept = {name for name, places in real.places.items() if len(places & lost.keys()) <= CODE.parity}
    assert kept == real.kept

    assert real.calls["backup"] == pytest.approx(sum(life.checks for life in lives), rel=0.01)
    assert real.calls["warm"] == pytest.approx(sum(life.warm_calls for life in lives), rel=0.01, abs=nodes)
    calls = sum(life.checks + life.greetings for life in lives) + nodes  # and one to greet
    assert real.calls["serve"] == pytest.approx(calls, rel=0.02)
    # This platform starts an instance in 0.01 s, the first time in 0.3 s more; to say hello takes two round trips.
    calls_of = NodeCalls(memory_bytes=1 << 30, exchange_seconds=0.0145, linger_seconds=config.linger_seconds)
    greeted = nodes * (calls_of.exchange_seconds + calls_of.init_seconds + config.linger_seconds)
    warm = sum(life.warm_calls for life in lives) * 0.01
    billed = sum(used.billed_seconds for used in real.used.values())
    assert billed == pytest.approx(sum(calls_of.billed_seconds(lives, 0.0)) + greeted + warm, rel=0.05)
    cold = nodes + sum(len(life.losses) + life.copies for life in lives)
    assert sum(used.cold_starts for used in real.used.values()) == pytest.approx(cold, rel=0.02)


def alone(seconds: float, takes: Struck = Struck.FIRST) -> Strike:
    return Strike(seconds, takes)


def life_of(*struck_at: Strike, warm: float | None = 60.0, backup: float | None = 300.0) -> NodeLife:
    upkeep = UpkeepConfig(warm_seconds=warm, backup_seconds=backup, peer_seconds=backup)
    return lived(upkeep, struck_at, HOUR, offset=0.5, uses_per_second=0.0, rng=random.Random(1))


def test_what_the_first_instance_held_is_lost_if_there_is_no_second_one_and_shows_at_the_next_call() -> None:
    assert life_of(alone(100.0), backup=None).losses == ((100.0, 150.0),)
    assert life_of(alone(100.0)).losses == ((100.0, 150.0),)  # before the first turn
    assert life_of(alone(149.0), alone(149.5), backup=None).losses == ((149.0, 150.0),)


def test_the_second_instance_serves_and_is_replaced_at_the_next_turn() -> None:
    assert life_of(alone(200.0)).losses == ()
    assert life_of(alone(200.0), alone(449.0)).losses == ((449.0, 450.0),)
    assert life_of(alone(200.0), alone(451.0)).losses == ()
    assert life_of(alone(200.0), alone(451.0)).copies == 3


def test_a_second_instance_that_goes_is_missed_at_the_next_turn() -> None:
    assert life_of(alone(200.0, Struck.SECOND), alone(440.0)).losses == ((440.0, 450.0),)
    assert life_of(alone(200.0, Struck.SECOND), alone(460.0)).losses == ()


def test_both_that_go_at_once_are_lost_whatever_was_backed_up() -> None:
    assert life_of(alone(200.0, Struck.BOTH)).losses == ((200.0, 210.0),)
    assert life_of(alone(200.0), alone(205.0, Struck.SECOND)).losses == ((205.0, 210.0),)


def test_a_node_that_is_used_needs_fewer_calls_and_is_missed_sooner() -> None:
    upkeep, busy = UpkeepConfig(warm_seconds=60.0, backup_seconds=None), 0.1
    life = lived(upkeep, [alone(100.0)], HOUR, offset=0.5, uses_per_second=busy, rng=random.Random(1))
    rng, calls, since = random.Random(2), 0, 0.0
    for _ in range(200_000):
        gap = rng.expovariate(busy)
        calls += int(gap // 60.0)
        since += gap
    assert life.warm_calls == pytest.approx(HOUR * calls / since, rel=0.1)
    assert life.warm_calls < life_of(backup=None).warm_calls / 50
    assert life.losses[0][1] < 150.0


def test_strikes_come_as_often_as_lives_say_and_in_order() -> None:
    reclaim, rng = Reclaim(mean_life_seconds=HOUR, together=0.25), random.Random(1)
    found = [strike for _ in range(100) for strike in strikes(reclaim, 50 * HOUR, rng)]
    counts = Counter(strike.takes for strike in found)
    assert counts[Struck.FIRST] + counts[Struck.BOTH] == pytest.approx(5000, rel=0.05)
    assert counts[Struck.SECOND] + counts[Struck.BOTH] == pytest.approx(5000, rel=0.05)
    assert counts[Struck.BOTH] == pytest.approx(1250, rel=0.1)


@pytest.mark.parametrize(
    ("upkeep", "offset", "uses"),
    [
        (UpkeepConfig(), 1.5, 0.0),
        (UpkeepConfig(), 0.5, math.inf),
        (UpkeepConfig(warm_seconds=None, backup_seconds=None), 0.5, 0.0),
        (UpkeepConfig(backup_seconds=60.0, peer_seconds=300.0), 0.5, 0.0),
    ],
)
def test_a_node_that_cannot_be_is_refused(upkeep: UpkeepConfig, offset: float, uses: float) -> None:
    with pytest.raises(ConfigError):
        lived(upkeep, [], HOUR, offset=offset, uses_per_second=uses, rng=random.Random(1))


def test_what_part_is_lost_between_reads_is_what_drawn_objects_lose() -> None:
    code, rng, hours, functions = Code(4, 2), random.Random(1), 20, 60
    lost = [[rng.uniform(0, hours * HOUR) for _ in range(8)] for _ in range(functions)]
    places = placed(code, 5000, functions, np.random.default_rng(1))
    drawn = 1 - kept_hours(code, places, lost, hours).mean(axis=1)
    assert lost_between_reads(code, lost, hours, HOUR) == pytest.approx(drawn, abs=0.03)
    often = lost_between_reads(code, lost, hours, HOUR / 6)
    assert often.mean() < drawn.mean() / 5
    with pytest.raises(ConfigError, match="multiple"):
        lost_between_reads(code, lost, hours, 7.5 * HOUR)


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


def test_a_bill_has_every_call_and_every_byte_at_both_ends() -> None:
    life = NodeLife(losses=((1.0, 2.0),), greetings=2, copies=3, checks=5, warm_calls=10.0)
    bill = CALLS.bill([life], 800.0, PRICES, read=CALLS.moving(6.0, 50.0), repair=Served(2.0, 7.0), bucket_dollars=0.25)
    assert bill.warm_dollars == pytest.approx(10 * (1e-3 + 0.5e-2))
    served, copied = (5 + 2) * 3.0 + 3 * (4 + 8) + 4, 5 * 1.0 + 3 * (4 + 8)
    assert CALLS.billed_seconds([life], 800.0) == (served, copied)
    assert bill.backup_dollars == pytest.approx(12e-3 + (served + copied) * 1e-2)
    assert bill.repair_dollars == pytest.approx(2e-3 + (2 * 3.0 + 7) * 1e-2)
    assert bill.read_dollars == pytest.approx(6 * (1e-3 + 3.5e-2))
    parts = bill.warm_dollars, bill.backup_dollars, bill.repair_dollars, bill.bucket_dollars
    assert bill.upkeep_dollars == pytest.approx(sum(parts))
    assert bill.dollars == pytest.approx(bill.upkeep_dollars + bill.read_dollars)
    assert CALLS.moving_dollars(800.0, PRICES) == pytest.approx(8e-2)


@pytest.mark.parametrize("wrong", [{"linger_seconds": -1.0}, {"bytes_per_second": 0.0}, {"init_seconds": math.nan}])
def test_calls_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        NodeCalls(**{"memory_bytes": 1, "linger_seconds": 0.1, **wrong})  # type: ignore[arg-type]
