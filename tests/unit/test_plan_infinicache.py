"""Objects in functions that are reclaimed: what lasts, what it costs, and what parity does to latency."""

from __future__ import annotations

import math
import random
from math import comb

import numpy as np
import pytest

from stoker._cost.prices import FunctionPrices
from stoker.errors import ConfigError
from stoker_sim._experiments import infinicache, load_paper
from stoker_sim._experiments.infinicache import Billing, Upkeep, WarmFleet, object_hours, read_seconds, simulate_losses
from stoker_sim._warm_fleet import ReclaimModel, place_shards
from stoker_warm._erasure import ErasureCode
from support.cases import for_each

HOUR = 3600.0
NEVER = Upkeep(warm_seconds=60.0, backup_seconds=None)
PRICES = FunctionPrices(
    name="f",
    region="r",
    source="",
    dollars_per_request=1e-3,
    dollars_per_gb_second=1e-2,
    dollars_per_vcpu_second=0.0,
)
BILLING = Billing(tick_seconds=0.1, warm_call_seconds=0.005, backup_call_seconds=1.0, shard_call_seconds=0.15)


def count(reclaim: ReclaimModel, upkeep: Upkeep, hours: float, functions: int = 100, seed: int = 1) -> float:
    """Return the losses of a function in an hour."""
    rng = random.Random(seed)
    return (
        sum(len(list(simulate_losses(reclaim, upkeep, hours * HOUR, rng))) for _ in range(functions))
        / functions
        / hours
    )


def test_without_back_ups_memory_is_lost_as_often_as_instances_are_taken() -> None:
    assert count(ReclaimModel(mean_life_seconds=HOUR / 2), NEVER, 50) == pytest.approx(2.0, rel=0.05)
    assert count(ReclaimModel(mean_life_seconds=HOUR / 2, whole_function_fraction=0.7), NEVER, 50) == pytest.approx(
        2.0, rel=0.05
    )


def test_with_back_ups_it_is_lost_when_both_instances_go_between_two_of_them() -> None:
    upkeep, life = Upkeep(backup_seconds=300.0), HOUR / 2
    both = (1 - math.exp(-300.0 / life)) ** 2
    assert count(ReclaimModel(mean_life_seconds=life), upkeep, 200) == pytest.approx(12 * both, rel=0.05)


def test_back_ups_do_not_help_against_losing_both_at_once() -> None:
    together = ReclaimModel(mean_life_seconds=HOUR, whole_function_fraction=1.0)
    assert count(together, Upkeep(backup_seconds=300.0), 50) == pytest.approx(1.0, rel=0.05)


def test_a_function_that_rests_too_long_is_taken() -> None:
    forever = ReclaimModel(mean_life_seconds=1e12, idle_seconds=1620.0)
    rest = Upkeep(warm_seconds=None, backup_seconds=None)
    assert list(simulate_losses(forever, rest, 2 * HOUR, random.Random(1))) == [1620.0, 3240.0, 4860.0, 6480.0]
    assert count(forever, NEVER, 50) == 0


def test_uses_keep_a_function_as_far_as_they_come_often_enough() -> None:
    forever, rate = ReclaimModel(mean_life_seconds=1e12, idle_seconds=600.0), 1 / 300.0
    used = Upkeep(warm_seconds=None, backup_seconds=None, uses_per_second=rate)
    mean_seconds = (math.exp(rate * 600.0) - 1) / rate  # until the first gap that is too long
    assert count(forever, used, 200) == pytest.approx(HOUR / mean_seconds, rel=0.05)


def test_the_same_seed_gives_the_same_losses() -> None:
    reclaim = ReclaimModel(mean_life_seconds=HOUR)
    first, second, other = (
        list(simulate_losses(reclaim, Upkeep(), 500 * HOUR, random.Random(seed))) for seed in (1, 1, 2)
    )
    assert first == second != other
    assert first == sorted(first)


def test_objects_last_an_hour_as_often_as_the_binomial_says() -> None:
    code, rng, hours = ErasureCode(10, 2), random.Random(1), 100
    lost = [
        list(simulate_losses(ReclaimModel(mean_life_seconds=8 * HOUR), NEVER, hours * HOUR, rng)) for _ in range(400)
    ]
    kept = object_hours(code, place_shards(code, 1000, 400, np.random.default_rng(1)), lost, hours)
    gone = 1 - math.exp(-1 / 8)
    expected = sum(comb(12, n) * gone**n * (1 - gone) ** (12 - n) for n in range(3))
    assert kept.shape == (100, 1000)
    assert kept.mean() == pytest.approx(expected, abs=0.01)


def test_an_object_lasts_while_no_more_shards_are_lost_in_an_hour_than_it_has_parity() -> None:
    code, places = ErasureCode(2, 1), np.array([[0, 1, 2]])
    lost = [[10.0, 20.0], [3500.0, 3700.0], [3650.0]]
    assert object_hours(code, places, lost[:1] + [[]] * 2, 2).tolist() == [[True], [True]]
    assert object_hours(code, places, lost, 2).tolist() == [[False], [False]]
    assert object_hours(code, places, [[], *lost[1:]], 1).tolist() == [[True]]


def test_the_shards_of_an_object_are_in_functions_of_their_own() -> None:
    places = place_shards(ErasureCode(4, 2), 50, 6, np.random.default_rng(1))
    assert np.sort(places, axis=1).tolist() == [[0, 1, 2, 3, 4, 5]] * 50
    with pytest.raises(ConfigError, match="needs 6 functions, there are 5"):
        place_shards(ErasureCode(4, 2), 1, 5, np.random.default_rng(1))


@pytest.mark.parametrize(("parity", "mean", "p99"), [(0, 2.93, 6.9), (1, 2.02, 4.3), (2, 1.60, 3.2)])
def test_the_first_ten_of_more_arrive_sooner(parity: int, mean: float, p99: float) -> None:
    code = ErasureCode(10, parity)
    seconds = read_seconds(code, np.random.default_rng(1).exponential(size=(200_000, code.shards)))
    exact = sum(1 / left for left in range(parity + 1, code.shards + 1))
    assert exact == pytest.approx(mean, abs=0.01)
    assert seconds.mean() == pytest.approx(exact, rel=0.01)
    assert np.quantile(seconds, 0.99) == pytest.approx(p99, abs=0.06)


def test_a_bill_is_calls_and_what_they_take_in_whole_ticks() -> None:
    fleet = WarmFleet(
        functions=2,
        memory_bytes=1 << 30,
        code=ErasureCode(1, 1),
        upkeep=Upkeep(backup_seconds=600.0),
        reads_per_hour=10,
    )
    bill = fleet.cost(3.0, PRICES, BILLING)
    assert bill.warm_dollars == pytest.approx(2 * 180 * (1e-3 + 0.1 * 1e-2))
    assert bill.backup_dollars == pytest.approx(2 * 18 * 2 * (1e-3 + 1.0 * 1e-2))
    assert bill.read_dollars == pytest.approx(30 * 2 * (1e-3 + 0.2 * 1e-2))
    assert bill.dollars == pytest.approx(bill.warm_dollars + bill.backup_dollars + bill.read_dollars)


def test_what_is_not_done_costs_nothing() -> None:
    fleet = WarmFleet(functions=2, memory_bytes=1 << 30, upkeep=Upkeep(warm_seconds=None, backup_seconds=None))
    assert fleet.cost(50.0, PRICES, BILLING).dollars == 0


def test_the_papers_availability_and_bills_are_met() -> None:
    outcome = infinicache.run(True)
    kept, bills = outcome.tables[0], outcome.tables[1]
    known = [row for row in kept.rows if row[4] is not None]
    assert [row[4] for row in known] == list(load_paper("infinicache")["availability"].values())
    assert [row[3] for row in known] == pytest.approx([row[4] for row in known], abs=0.03)
    paid = [row for row in bills.rows if row[7] is not None]
    assert len(paid) == 3
    assert [row[6] for row in paid] == pytest.approx([row[7] for row in paid], rel=0.03)
    assert [table.to_csv() for table in infinicache.run(True).tables] == [table.to_csv() for table in outcome.tables]


@for_each(
    "make",
    [
        lambda: ReclaimModel(mean_life_seconds=0.0),
        lambda: ReclaimModel(mean_life_seconds=1.0, whole_function_fraction=1.5),
        lambda: ReclaimModel(mean_life_seconds=1.0, idle_seconds=0.0),
        lambda: Upkeep(warm_seconds=0.0),
        lambda: Upkeep(backup_seconds=-1.0),
        lambda: Upkeep(uses_per_second=math.inf),
        lambda: ErasureCode(0, 2),
        lambda: ErasureCode(1, -1),
        lambda: Billing(tick_seconds=0.0, backup_call_seconds=1.0, shard_call_seconds=1.0),
        lambda: Billing(backup_call_seconds=math.nan, shard_call_seconds=1.0),
    ],
)
def test_what_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
