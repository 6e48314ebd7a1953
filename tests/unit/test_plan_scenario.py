"""Whole runs in virtual time: what they take follows from what they are made of."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from stoker import FetchConfig, NextBatch, OrderConfig
from stoker._cache.index import AccessForecast
from stoker._diagnostics.latency import Constant, LateTail, LogNormal
from stoker._fetch.config import PipelineConfig
from stoker._order.steps import PositionRange
from stoker.errors import ConfigError, MemoryBudgetError
from stoker_sim import BucketModel
from stoker_sim._bucket import create_size_lookup, synthetic_manifest
from stoker_sim._caches import CacheModel
from stoker_sim._scenario import Scenario, SimulationResult, simulate

MANIFEST = synthetic_manifest(super_samples=60, samples=100, super_sample_bytes=4 << 20)
FAST = BucketModel(first_byte=Constant(0.02), connection_bytes_per_second=90e6)


def scenario(
    *, world: int = 1, slots: int = 24, bucket: BucketModel = FAST, compute: float = 0.1, **feed: object
) -> Scenario:
    return Scenario(
        manifest=MANIFEST,
        feed=PipelineConfig(
            order=OrderConfig(seed=1, window=4, lanes=world),
            batch_size=100,
            world_size=world,
            memory_bytes=MANIFEST.file_bytes + slots * MANIFEST.largest_bytes,
            **feed,  # type: ignore[arg-type]
        ),
        bucket=bucket,
        compute=Constant(compute),
    )


def test_a_run_that_computes_longer_than_it_reads_waits_for_its_first_batch_only() -> None:
    run = simulate(scenario())
    epoch = run.epochs[0]
    assert epoch.first_batch_seconds == epoch.wait_seconds > 0
    assert epoch.steps == 60
    assert epoch.lookups == 60
    assert epoch.seconds == pytest.approx(epoch.wait_seconds + epoch.compute_seconds)
    assert run.read_bytes == 60 * (4 << 20)


def test_a_run_that_reads_longer_than_it_computes_takes_as_long_as_its_bytes() -> None:
    run = simulate(replace(scenario(compute=0.001), node_bytes_per_second=50e6))
    assert run.seconds == pytest.approx(60 * (4 << 20) / 50e6, rel=0.05)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_link_stays_full_though_first_bytes_take_as_long_as_transfers(seed: int) -> None:
    bucket = BucketModel(first_byte=LogNormal(0.1, 0.5), total_bytes_per_second=200e6)
    manifest = synthetic_manifest(super_samples=500, samples=64, super_sample_bytes=8 << 20)
    feed = PipelineConfig(order=OrderConfig(seed=seed), batch_size=64, memory_bytes=manifest.file_bytes + (1 << 30))
    run = simulate(Scenario(manifest=manifest, feed=feed, bucket=bucket, epochs=4, seed=seed))
    assert run.seconds < 1.05 * 4 * manifest.size_bytes / 200e6


def test_an_epochs_border_costs_nothing() -> None:
    run = simulate(replace(scenario(), epochs=3))
    assert [epoch.wait_seconds > 0 for epoch in run.epochs] == [True, False, False]


def test_every_super_sample_is_read_once_an_epoch_by_all_nodes_together() -> None:
    run = simulate(replace(scenario(world=3), epochs=2))
    assert sum(epoch.lookups for epoch in run.of_epoch(1)) == 60
    assert run.read_bytes == 2 * 60 * (4 << 20)


def test_the_same_scenario_gives_the_same_run() -> None:
    late = replace(FAST, first_byte=LateTail(Constant(0.02), 0.05, 2.0), error_fraction=0.05)
    first, second, other = (simulate(replace(scenario(world=2, bucket=late), seed=seed)) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_late_requests_are_hedged() -> None:
    late = replace(FAST, first_byte=LateTail(Constant(0.02), 0.05, 2.0))
    hedged = simulate(scenario(bucket=late, compute=0.02))
    alone = simulate(scenario(bucket=late, compute=0.02, fetch=FetchConfig(hedge=False)))
    assert hedged.epochs[0].hedges > 0
    assert hedged.wait_seconds < alone.wait_seconds / 2


def test_a_schedule_that_looks_less_far_ahead_waits_more() -> None:
    slow = replace(FAST, connection_bytes_per_second=30e6)
    assert simulate(scenario(bucket=slow)).stall < simulate(scenario(bucket=slow, schedule=NextBatch(1))).stall


def test_nodes_that_go_in_step_wait_for_the_slowest() -> None:
    late = replace(FAST, first_byte=LateTail(Constant(0.02), 0.2, 1.0))
    free = scenario(world=4, bucket=late, compute=0.02, fetch=FetchConfig(hedge=False))
    assert simulate(replace(free, in_step=True)).seconds >= simulate(free).seconds


def test_memory_that_is_too_small_is_refused_as_a_loader_would() -> None:
    with pytest.raises(MemoryBudgetError, match="give memory="):
        simulate(scenario(slots=3))


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"node_bytes_per_second": 0.0}])
def test_a_scenario_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        replace(scenario(), **settings)  # type: ignore[arg-type]


def test_sizes_are_found_by_key() -> None:
    find = create_size_lookup(MANIFEST)
    assert find(MANIFEST.key(59)) == 4 << 20
    for key in ("data/0000000000000000/00000060", "data/other/00000001", "x"):
        with pytest.raises(KeyError):
            find(key)


@pytest.mark.parametrize("name", ["super_samples", "samples", "super_sample_bytes"])
def test_a_data_set_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        synthetic_manifest(**{"super_samples": 1, "samples": 1, "super_sample_bytes": 1, name: 0})


def with_cache(policy: str, world: int) -> SimulationResult:
    caches = [CacheModel(limit_bytes=30 * (4 << 20), policy=policy)]
    return simulate(replace(scenario(world=world), epochs=6, caches=caches))


def test_replica_aware_eviction_is_lru_on_one_node_and_another_policy_on_several() -> None:
    assert with_cache("replica-aware", 1).epochs == with_cache("lru", 1).epochs
    assert with_cache("replica-aware", 3).epochs != with_cache("lru", 3).epochs


def test_nodes_with_replica_aware_eviction_let_go_of_what_others_hold() -> None:
    copies = Counter[int]()
    manifest = synthetic_manifest(super_samples=4, samples=4, super_sample_bytes=1 << 20)
    stretch = PositionRange(order=OrderConfig(), sharding=PipelineConfig(batch_size=4).sharding(manifest.samples))
    model = CacheModel(limit_bytes=2 * manifest.largest_bytes, policy="replica-aware")
    one, two, three = (
        model.create_tier(AccessForecast(manifest.rows.samples, stretch), random.Random(0), copies) for _ in range(3)
    )
    for tier, rows in ((one, (0, 1)), (two, (1, 2)), (three, (1,))):
        for row in rows:
            tier.offer(manifest.ref(row), memoryview(b""))
    one.offer(manifest.ref(3), memoryview(b""))
    assert sorted(one.entries) == [0, 3]  # 1 is used last, but two others hold it, too
    two.offer(manifest.ref(0), memoryview(b""))
    assert sorted(two.entries) == [0, 2]  # one other holds 1, which was used before 2
    assert copies == Counter({0: 2, 1: 1, 2: 1, 3: 1})
