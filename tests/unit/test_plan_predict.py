"""Predictions: their exact consequences, how they change with what they are made of, and what advice is worth."""

from __future__ import annotations

import asyncio
import datetime
import math
import random
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from stoker import FetchConfig, NextBatch, Operation, OrderConfig, Prices
from stoker._base.sizes import parse_bytes
from stoker._cache.tiers import CacheSharing, CacheSpec, create_tiers
from stoker._diagnostics.latency import Constant, LateTail, LogNormal
from stoker._fetch.config import PipelineConfig
from stoker.errors import ConfigError, MemoryBudgetError
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._advice import Advice, Resources, Suggestion, advise
from stoker_sim._bucket import BucketView, SimulatedBucket, synthetic_manifest
from stoker_sim._caches import PlannedCache, settled_hit_rate
from stoker_sim._predict import Prediction, predict, predict_later_seconds
from stoker_sim._scenario import Scenario, SimulationResult, simulate, simulate_start
from stoker_sim._training import PlannedTraining

MIB = 1 << 20
_SOME = LogNormal(0.02, 0.04)

dataset = cache(synthetic_manifest)
"""Trainings of one data set that are otherwise equal are simulated once."""


def workload(
    *,
    super_samples: int = 120,
    samples: int = 100,
    size: int = MIB,
    rate: float = 2000.0,
    nodes: int = 1,
    window: int = 4,
    memory: int = 40 * MIB,
    node: float = 50e6,
    first_byte: float = 0.02,
    cache: PlannedCache | None = None,
    hedge: bool = False,
) -> PlannedTraining:
    return PlannedTraining(
        manifest=dataset(super_samples=super_samples, samples=samples, super_sample_bytes=size),
        feed=PipelineConfig(
            order=OrderConfig(seed=1, window=window, lanes=nodes),
            batch_size=100,
            world_size=nodes,
            memory_bytes=memory,
            fetch=FetchConfig(hedge=hedge),
        ),
        samples_per_second=rate,
        bucket=BucketModel(first_byte=Constant(first_byte), connection_bytes_per_second=20e6),
        node_bytes_per_second=node,
        start_seconds=0.5,
        cache=cache,
    )


def test_an_epoch_takes_every_super_sample_once() -> None:
    found = predict(workload())
    assert found.simulated == 1.0
    assert found.later.requests == found.first.requests == 120
    assert found.later.read_bytes == found.first.read_bytes == 120 * MIB


def test_where_training_is_the_limit_an_epoch_takes_as_long_as_it() -> None:
    found = predict(workload())
    assert found.bound.limit == "compute"
    assert found.later.seconds == pytest.approx(found.bound.seconds) == pytest.approx(12_000 / 2000)
    assert found.later.stall == 0.0


def test_where_the_network_is_the_limit_an_epoch_takes_as_long_as_its_bytes() -> None:
    steady = workload(rate=50_000)
    # Answers that all take the same time keep transfers in lockstep: the link idles for all of them together.
    found = predict(replace(steady, bucket=replace(steady.bucket, first_byte=LogNormal(0.02, 0.08))))
    assert found.bound.limit == "bandwidth"
    assert found.bound.seconds == pytest.approx(120 * MIB / 50e6)
    assert found.later.seconds == pytest.approx(found.bound.seconds, rel=0.1)
    assert found.later.stall == pytest.approx(1 - found.bound.compute_seconds / found.bound.seconds, abs=0.05)


@pytest.mark.parametrize("rate", [500.0, 5000.0, 50_000.0])
@pytest.mark.parametrize("first_byte", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("nodes", [1, 3])
def test_nothing_is_faster_than_the_bound(rate: float, first_byte: float, nodes: int) -> None:
    found = predict(workload(rate=rate, first_byte=first_byte, nodes=nodes))
    assert found.later.seconds >= found.bound.seconds
    assert found.first.seconds >= found.bound.seconds


def test_the_first_batch_waits_for_the_manifest_and_then_for_its_bytes() -> None:
    found = predict(workload())
    assert found.first_batch_seconds > 0.5 + 0.02 + MIB / 20e6
    later = predict(replace(workload(), start_seconds=1.5))
    assert later.first_batch_seconds == pytest.approx(found.first_batch_seconds + 1.0)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_start_that_is_simulated_alone_takes_as_long_as_in_a_whole_run(nodes: int) -> None:
    given = replace(workload(nodes=nodes, first_byte=0.1), in_step=nodes > 1)
    whole = simulate(given)
    assert simulate_start(given) == max(each.first_batch_seconds or 0.0 for each in whole.of_epoch(0)) > 0.1


@pytest.mark.parametrize("cache", [None, PlannedCache(size_bytes=60 * MIB)])
def test_a_later_epoch_takes_as_long_with_and_without_a_prediction_of_the_first(cache: PlannedCache | None) -> None:
    given = workload(rate=50_000, cache=cache)
    assert predict_later_seconds(given) == predict(given).later.seconds


def test_memory_that_is_not_used_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def counted(scenario: Scenario) -> SimulationResult:
        simulated.append(scenario)
        return simulate(scenario)

    monkeypatch.setattr("stoker_sim._predict.simulate", counted)
    manifest = synthetic_manifest(super_samples=60, samples=100, super_sample_bytes=MIB)
    found = [predict(replace(workload(memory=memory), manifest=manifest)) for memory in (1 << 30, 2 << 30, 40 * MIB)]
    assert len(simulated) == 2
    assert found[0] == found[1] != found[2]


def test_predictions_are_monotonic() -> None:
    def seconds(**change: float) -> float:
        return predict(workload(**{"rate": 8000.0, **change})).later.seconds  # type: ignore[arg-type]

    for name, values in {
        "node": (10e6, 20e6, 40e6, 80e6),
        "rate": (1000.0, 4000.0, 16_000.0),
        "memory": (8 * MIB, 16 * MIB, 48 * MIB),
    }.items():
        found = [seconds(**{name: value}) for value in values]
        assert all(more < 1.05 * less for less, more in pairwise(found)), (name, found)
        assert found[-1] < 0.9 * found[0], (name, found)
    assert seconds(first_byte=0.5) > seconds(first_byte=0.01)


def test_a_prediction_of_the_same_is_the_same() -> None:
    scattered = replace(
        workload(), bucket=BucketModel(first_byte=LogNormal(0.05, 0.5), connection_bytes_per_second=20e6)
    )
    assert predict(scattered) == predict(scattered)


@pytest.mark.parametrize("rate", [2000.0, 50_000.0])
def test_a_large_data_set_is_extrapolated(rate: float) -> None:
    large, small = (predict(workload(super_samples=count, rate=rate)) for count in (6000, 400))
    assert (large.simulated, small.simulated) == pytest.approx((1 / 15, 1.0))
    assert large.later.seconds == pytest.approx(15 * small.later.seconds, rel=0.02)
    assert large.later.requests == pytest.approx(6000, rel=0.01)
    assert large.first.seconds == pytest.approx(14 * small.later.seconds + small.first.seconds, rel=0.02)


def test_many_nodes_stand_for_more() -> None:
    found = predict(workload(super_samples=6400, nodes=64))
    assert found.simulated < 1.0
    assert found.later.requests == pytest.approx(6400, rel=0.02)
    assert found.later.seconds == pytest.approx(6400 * 100 / 64 / 2000, rel=0.02)


def test_dollars_are_those_of_requests_and_bytes() -> None:
    epoch, prices = predict(workload()).later, Prices.load()
    s3 = prices.store("s3")
    assert epoch.dollars(s3) == pytest.approx(120 * s3.request_dollars(Operation.GET))
    away = 120 * MIB / (1 << 30) * s3.egress_dollars_per_gb["internet"]
    assert epoch.dollars(s3, "internet") == pytest.approx(epoch.dollars(s3) + away)
    assert epoch.dollars(prices.store("/folder")) == 0.0
    assert prices.date > datetime.date(2020, 1, 1)


def test_a_cache_serves_its_share_in_later_epochs_only() -> None:
    found = predict(workload(rate=50_000, cache=PlannedCache(size_bytes=60 * MIB)))
    assert found.hit_rate == pytest.approx(0.5, abs=0.01)
    assert found.first.requests == 120
    assert found.later.requests == pytest.approx(60, abs=2)
    assert found.later.seconds == pytest.approx((found.first.seconds - 0.5) / 2, rel=0.1)  # the start counts, too


def test_hit_rates_are_those_of_the_policies() -> None:
    assert settled_hit_rate(0.5, 1, "no-evict") == pytest.approx(0.5, abs=0.01)
    assert settled_hit_rate(0.5, 3, "no-evict") == pytest.approx(0.5 / 3, abs=0.03)
    assert settled_hit_rate(0.5, 3, "next-use") > 2 * settled_hit_rate(0.5, 3, "no-evict")
    assert settled_hit_rate(5.0, 3, "next-use") == 1.0
    assert settled_hit_rate(0.0, 1, "lru") == 0.0


def test_too_little_memory_is_an_error_that_names_the_figure() -> None:
    with pytest.raises(MemoryBudgetError, match="give memory="):
        predict(workload(memory=3 * MIB))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError):
        workload(rate=rate)


# Advice


RESOURCES = Resources(memory_bytes=512 * MIB, median_seconds=0.05, slowest_seconds=0.08)


def advised(given: PlannedTraining, resources: Resources = RESOURCES) -> tuple[Advice, dict[str, Suggestion]]:
    found = advise(given, resources)
    return found, {each.name: each for each in found.suggestions}


def improves(found: Advice) -> Prediction:
    assert found.given is not None
    assert found.advised.later.seconds < 0.7 * found.given.later.seconds
    assert found.advised.later.stall < found.given.later.stall
    return found.given


def test_following_the_advice_improves_a_bad_configuration() -> None:
    bad = workload(super_samples=4000, samples=4, size=40_000, rate=4000, window=1, first_byte=0.05, memory=MIB)
    bad = replace(bad, feed=replace(bad.feed, schedule=NextBatch()))
    found, by_name = advised(bad)
    given = improves(found)
    assert found.advised.later.requests < given.later.requests / 10
    assert all(by_name[name].is_change for name in ("super-sample size", "window", "schedule", "memory"))
    assert "stoker compact URL" in by_name["super-sample size"].command
    again, _ = advised(found.workload)
    assert [each.name for each in again.suggestions if each.is_change] == []


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("super-sample size", workload(super_samples=4000, samples=4, size=40_000, rate=30_000, first_byte=0.3)),
        ("memory", workload(super_samples=600, rate=4000, first_byte=0.4, memory=8 * MIB)),
    ],
)
def test_each_kind_of_bad_setting_is_found_and_mended(name: str, bad: PlannedTraining) -> None:
    found, by_name = advised(bad)
    improves(found)
    assert by_name[name].is_change
    assert by_name[name].command


LARGE = workload(super_samples=60, samples=1, size=100 * MIB, rate=0.3, memory=900 * MIB, first_byte=0.01)


def test_an_epoch_of_large_objects_takes_a_request_for_each_of_their_ranges() -> None:
    found = predict(LARGE)
    assert found.later.requests == found.first.requests == 60 * 7
    assert found.bound.request_seconds > 0.0


def test_samples_as_large_as_super_samples_are_not_advised_to_be_packed_in_smaller_ones() -> None:
    found, by_name = advised(LARGE, replace(RESOURCES, memory_bytes=900 * MIB))
    assert not by_name["super-sample size"].is_change
    assert "divide them" in by_name["super-sample size"].reason
    assert found.given is not None


def test_an_impossible_plan_is_reported_with_a_sufficient_memory() -> None:
    found, by_name = advised(workload(memory=2 * MIB, window=8))
    assert found.given is None
    assert "give memory=" in found.refused
    assert by_name["memory"].is_change
    assert found.advised.later.stall == 0.0


@pytest.mark.parametrize("there_is", [MIB, 20 * MIB + 4097, 96 * MIB])
def test_more_memory_than_there_is_is_made_less(there_is: int) -> None:
    small = workload(super_samples=40, size=40_000, memory=512 * MIB)
    found, by_name = advised(small, replace(RESOURCES, memory_bytes=there_is))
    assert by_name["memory"].is_change
    chosen = found.workload.feed.memory_bytes
    assert chosen <= there_is
    (given,) = re.findall(r'^Loader\(memory="?(.*?)"?\)$', by_name["memory"].command)
    assert parse_bytes(given) == chosen


def test_a_good_configuration_is_left_alone() -> None:
    good = workload(super_samples=160, samples=100, size=8 * MIB, rate=200, window=8, memory=256 * MIB)
    found, by_name = advised(good)
    assert not any(each.is_change for each in by_name.values())
    assert found.given == found.advised


def test_a_window_that_does_not_fit_is_made_smaller() -> None:
    found, by_name = advised(
        workload(super_samples=160, size=4 * MIB, window=32, memory=512 * MIB),
        replace(RESOURCES, memory_bytes=96 * MIB),
    )
    assert by_name["window"].advised == "8"
    assert found.workload.feed.memory_bytes >= found.workload.feed.order.window * 4 * MIB


def test_a_cache_is_advised_where_it_helps_and_there_is_room() -> None:
    slow = workload(super_samples=160, size=8 * MIB, samples=100, rate=2500, window=8, memory=256 * MIB)
    without, none = advised(slow)
    assert without.workload.cache is None
    assert "--disk" in none["cache"].reason
    found, by_name = advised(slow, replace(RESOURCES, disk_bytes=4 << 30, disk_folder="/mnt/x"))
    assert by_name["cache"].advised.startswith("disk")
    assert by_name["cache"].command.startswith('Loader(cache="disk:/mnt/x?limit=')
    assert found.advised.later.seconds < 0.5 * without.advised.later.seconds
    assert not advised(slow, replace(RESOURCES, disk_bytes=4 << 30, epochs=1))[1]["cache"].is_change


def test_the_warm_tier_stays_off_unless_late_answers_are_the_only_trouble() -> None:
    full = advised(workload(super_samples=160, size=8 * MIB, samples=100, rate=2500, nodes=4, memory=128 * MIB))[1][
        "warm tier"
    ]
    assert not full.is_change
    assert "network is full" in full.reason
    fine = advised(workload(nodes=4))[1]["warm tier"]
    assert not fine.is_change


def test_the_warm_tier_is_advised_where_answers_are_late_and_read_again_without_a_cache() -> None:
    given = workload(super_samples=120, size=2 * MIB, rate=10_000, nodes=2, memory=200 * MIB, node=2e9)
    late = replace(given, bucket=replace(given.bucket, first_byte=LateTail(Constant(0.02), 0.1, 2.0)))
    tail = Resources(memory_bytes=200 * MIB, median_seconds=0.02, slowest_seconds=2.02)
    warm = advised(late, tail)[1]["warm tier"]
    assert warm.advised == "on"
    assert "more money" in warm.reason
    assert "Loader(tier=" in warm.command
    assert "stoker warm" in warm.command
    assert "docs/tiers.md" in warm.command
    assert (Path(__file__).parents[2] / "docs" / "tiers.md").exists()
    assert not advised(late, replace(tail, epochs=1))[1]["warm tier"].is_change
    assert not advised(late, replace(tail, disk_bytes=4 << 30))[1]["warm tier"].is_change


# Several ranks on a node


def ranked(ranks_per_node: int, nodes: int = 1, **settings: Any) -> PlannedTraining:
    return replace(workload(nodes=nodes * ranks_per_node, **settings), ranks_per_node=ranks_per_node)


def test_ranks_of_a_node_share_its_network_and_those_of_several_do_not() -> None:
    slow: dict[str, Any] = {"rate": 50_000.0, "super_samples": 240}
    together, apart = (predict(ranked(*each, **slow)) for each in ((4, 1), (1, 4)))
    assert together.bound.limit == "bandwidth"
    assert together.bound.seconds == pytest.approx(240 * MIB / 50e6)
    assert together.bound.seconds == pytest.approx(4 * apart.bound.transfer_seconds)
    assert together.later.seconds == pytest.approx(together.bound.seconds, rel=0.1)
    assert apart.later.seconds < 0.5 * together.later.seconds
    assert together.later.requests == apart.later.requests == 240


def test_ranks_of_a_node_compute_side_by_side() -> None:
    found = predict(ranked(4, super_samples=240, node=500e6))
    assert found.bound.limit == "compute"
    assert found.later.seconds == pytest.approx(240 * 100 / 4 / 2000)


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(2, 1), (2, 3), (12, 1)])
def test_a_prediction_for_ranks_is_what_the_simulator_has_for_all_of_them(ranks_per_node: int, nodes: int) -> None:
    given = ranked(ranks_per_node, nodes, rate=4000.0, super_samples=240)
    run = simulate(
        Scenario(
            manifest=given.manifest,
            feed=given.feed,
            bucket=given.bucket,
            compute=Constant(given.step_seconds),
            node_bytes_per_second=given.node_bytes_per_second,
            ranks_per_node=ranks_per_node,
            epochs=5,
            in_step=True,
            draws_by_object=True,
        )
    )
    found = predict(given)
    whole = mean(run.of_epoch(epoch)[0].seconds for epoch in (1, 2, 3))
    assert found.later.seconds == pytest.approx(max(whole, found.bound.seconds), rel=0.02)
    assert found.later.requests == 240


def test_many_nodes_of_many_ranks_stand_for_more() -> None:
    found = predict(ranked(8, 16, super_samples=12_800, node=1e9))
    assert found.simulated < 1.0
    assert found.later.requests == pytest.approx(12_800, rel=0.02)
    assert found.later.seconds == pytest.approx(12_800 * 100 / 128 / 2000, rel=0.02)


def test_ranks_share_a_disk_and_none_shares_another_ones_memory() -> None:
    size_bytes = 40 * MIB
    disk = ranked(3, memory=8 * MIB, cache=PlannedCache(size_bytes=size_bytes))
    assert disk.hit_rate == settled_hit_rate(1 / 3, 1, "next-use")
    memory = replace(disk, cache=PlannedCache(size_bytes=size_bytes, is_per_rank=True))
    assert memory.hit_rate == settled_hit_rate(1.0, 3, "next-use") != disk.hit_rate


def test_a_disk_that_is_slower_than_the_bucket_is_left_alone() -> None:
    bucket = ranked(3, memory=8 * MIB)
    slow = predict(replace(bucket, cache=PlannedCache(size_bytes=120 * MIB, bytes_per_second=5e6))).later
    assert slow.seconds <= 1.1 * predict(bucket).later.seconds


@pytest.mark.parametrize(
    ("ranks_per_node", "message"),
    [
        (0, "ranks_per_node must be at least 1, not 0"),
        (-1, "ranks_per_node must be at least 1, not -1"),
        (2, "3 ranks cannot be divided into nodes of 2 each"),
    ],
)
def test_ranks_that_fill_no_whole_nodes_are_refused(ranks_per_node: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(workload(nodes=3), ranks_per_node=ranks_per_node)


# What cannot be planned


def test_a_step_of_more_than_a_day_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch of 100 takes 100,000 s at 0\.001 samples a second"):
        workload(rate=0.001)


def test_full_is_refused_with_the_command_that_plans_it() -> None:
    given = workload()
    with pytest.raises(ConfigError, match=r"shuffle 'full' is not planned.*max_dollars_per_epoch"):
        replace(given, feed=replace(given.feed, order=OrderConfig(shuffle="full")))


def test_a_link_that_brings_nothing_in_time_is_an_error_with_its_figures() -> None:
    with pytest.raises(ConfigError, match=r"a loader cannot have its data.*node_bytes_per_second=1000"):
        predict(workload(node=1000.0))


@pytest.mark.parametrize("there_is", [0, 1, 5000])
def test_memory_for_no_window_at_all_is_an_error_that_says_how_much_one_takes(there_is: int) -> None:
    with pytest.raises(MemoryBudgetError, match=r"available to a rank: window 2 with super-samples of .* takes"):
        advise(workload(super_samples=40, size=40_000), replace(RESOURCES, memory_bytes=there_is))


@pytest.mark.parametrize("super_samples", [1, 4, 64, 640])
def test_ranks_that_share_super_samples_each_read_them(super_samples: int) -> None:
    ranks = 64
    found = predict(workload(super_samples=super_samples, samples=6400 // super_samples, nodes=ranks, rate=100.0))
    cuts = ranks - 1
    assert 0 < found.simulated <= 1.0
    assert super_samples <= found.later.requests <= 1.15 * (super_samples + cuts)
    assert found.later.requests >= 0.8 * max(ranks, super_samples)


@pytest.mark.parametrize("ranks_per_node", [1, 4])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_advised_cache_is_one_that_a_loader_takes(kind: str, ranks_per_node: int) -> None:
    size = 300_000
    slow = ranked(ranks_per_node, super_samples=60, size=size, rate=500_000, node=5e6, memory=14 * size)
    there_is = RESOURCES if kind == "memory" else replace(RESOURCES, memory_bytes=14 * size, disk_bytes=30 * size)
    found, by_name = advised(slow, there_is)
    assert by_name["cache"].advised.startswith(kind)
    (text,) = re.findall(r'^Loader\(cache="(.*)"\)$', by_name["cache"].command)
    create_tiers(CacheSpec.parse_all(text), found.workload.manifest, CacheSharing(ranks=ranks_per_node))


def test_no_disk_is_advised_that_has_no_room_for_a_super_sample_of_each_rank() -> None:
    slow = ranked(4, super_samples=60, size=300_000, rate=500_000, node=5e6, memory=14 * 300_000)
    _, by_name = advised(slow, replace(RESOURCES, memory_bytes=14 * 300_000, disk_bytes=1_200_000))
    assert (by_name["cache"].advised, by_name["cache"].reason) == ("none", "too small to help")


@pytest.mark.parametrize("folder", ["", "/mnt/a?b", '/mnt/a"b'])
def test_a_folder_that_no_url_can_name_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="disk_folder"):
        Resources(memory_bytes=MIB, disk_bytes=1, disk_folder=folder)


@pytest.mark.parametrize(("super_samples", "nodes"), [(40, 1), (400, 3)])
def test_tiny_batches_are_predicted_as_larger_ones_are(super_samples: int, nodes: int) -> None:
    given = workload(super_samples=super_samples, samples=20_000, rate=400_000, nodes=nodes)
    tiny, usual = (predict(replace(given, feed=replace(given.feed, batch_size=size))) for size in (2, 500))
    assert tiny.later.requests == pytest.approx(usual.later.requests, rel=0.02)
    assert tiny.later.seconds == pytest.approx(usual.later.seconds, rel=0.02)
    assert tiny.first_batch_seconds == pytest.approx(usual.first_batch_seconds, rel=0.05)


@pytest.mark.parametrize("max_queue_seconds", [math.inf, 0.0])
def test_a_limit_on_requests_is_predicted_and_more_memory_is_not_advised_against_it(
    max_queue_seconds: float,
) -> None:
    given = workload(rate=4000, super_samples=400, memory=40 * MIB)
    limited = replace(
        given.bucket, requests_per_second=20.0, burst=20, max_queue_seconds=max_queue_seconds, first_byte=_SOME
    )
    given = replace(given, bucket=limited)
    found, by_name = advised(given, replace(RESOURCES, memory_bytes=16 << 30))
    assert found.given is not None
    assert found.given.bound.limit == "request rate"
    assert found.given.later.seconds == pytest.approx(400 / 20, rel=0.02 if max_queue_seconds else 0.6)
    assert found.given.later.stall >= 0.3
    assert by_name["super-sample size"].is_change  # fewer requests are what helps
    assert found.workload.feed.memory_bytes < 400 * MIB


@pytest.mark.parametrize("super_samples", [10, 88])
def test_no_more_memory_is_advised_than_a_window_an_epoch_and_hedges_take(super_samples: int) -> None:
    given = workload(super_samples=super_samples, rate=50_000, node=20e6, memory=8 * MIB)
    found, _ = advised(given, replace(RESOURCES, memory_bytes=16 << 30))
    most = (4 + super_samples + 2) * 1.25 * MIB
    assert found.workload.feed.memory_bytes <= most


def test_what_is_drawn_for_an_object_does_not_depend_on_other_settings() -> None:
    """Alternatives meet the same late answers, so a difference between them is none of chance."""

    def first_bytes(keys: str) -> dict[str, float]:
        async def main() -> dict[str, float]:
            bucket = SimulatedBucket(BucketModel(first_byte=_SOME), dict.fromkeys("abc", 1000).__getitem__)
            view, found = BucketView(bucket, random.Random(1), seed="7"), {}
            for key in keys:
                begun = asyncio.get_running_loop().time()
                await view.head(key)
                found[key] = round(asyncio.get_running_loop().time() - begun, 9)
            return found

        return run_virtual(main())

    assert first_bytes("abc") == first_bytes("cab") == {**first_bytes("c"), **first_bytes("ab")}
    assert len(set(first_bytes("abc").values())) == 3


def test_the_first_batch_is_a_range_and_comes_before_the_first_epoch_ends() -> None:
    given = replace(workload(rate=1e9, super_samples=4), start_range_seconds=(0.4, 0.9))
    found = predict(replace(given, bucket=replace(given.bucket, first_byte=_SOME)), starts=5)
    low, high = found.first_batch_range_seconds
    assert low < found.first_batch_seconds < high <= 1.5 * (found.first.seconds + 0.9)
    assert found.first_batch_seconds <= found.first.seconds
    assert low >= 0.4 / 1.5
    assert high / low >= 1.5**2


def test_ranks_in_step_wait_for_the_slowest_of_them() -> None:
    given = ranked(2, 1, rate=50_000.0, super_samples=89)
    found = predict(given)
    assert found.bound.limit == "bandwidth"
    assert found.later.seconds == pytest.approx(found.bound.seconds, rel=0.15)
    assert found.later.wait_seconds == pytest.approx(found.later.seconds - found.bound.compute_seconds, rel=0.02)


def test_accelerator_utilization_leaves_out_the_first_step() -> None:
    late = predict(replace(workload(), start_seconds=5.0)).first
    assert late.stall > 0.4
    assert late.accelerator_utilization == predict(workload()).first.accelerator_utilization > 0.97
    slow = predict(workload(rate=50_000)).later
    assert slow.accelerator_utilization == pytest.approx(1 - slow.stall, abs=0.02)


@pytest.mark.parametrize("nodes", [1, 4])
def test_an_epoch_of_one_step_has_nothing_to_count(nodes: int) -> None:
    assert predict(workload(super_samples=nodes, nodes=nodes)).later.accelerator_utilization == 1.0


def test_a_part_of_few_large_steps_stands_for_the_whole_time() -> None:
    # 600 super-samples are 15 steps; 400 of them, which are simulated, have 10 whole ones or fewer.
    large = workload(super_samples=600, memory=400 * MIB)
    found = predict(replace(large, feed=replace(large.feed, batch_size=3900)))
    assert found.simulated < 1.0
    assert found.later.accelerator_utilization == pytest.approx(1.0)
    assert found.later.seconds == pytest.approx(found.bound.seconds)
    assert found.later.wait_seconds == pytest.approx(0.0, abs=1e-6)
