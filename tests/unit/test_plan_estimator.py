"""SiloD's estimate beside the fetcher itself in virtual time, with real policies and a modelled bucket."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stoker._cache.eviction import CacheEntries, NoEviction
from stoker._diagnostics.latency import Constant
from stoker_sim._allocation import JobShare, TrainingJob
from stoker_sim._experiments.silod import EstimateConditions, simulate_rate

DATASET_BYTES = 250 * (8 << 20)
AROUND = EstimateConditions(super_samples=250, warm_epochs=1)
KNEE = 1.0


def share(part: float, supply: float, *, rate: float = 400e6, nodes: int = 1) -> JobShare:
    """Return a fraction of the data set as cache, and a fraction of the full rate's demand as bandwidth."""
    job = TrainingJob(name="job", dataset_bytes=DATASET_BYTES, compute_bytes_per_second=rate, nodes=nodes)
    cache_bytes = round(part * job.cacheable_bytes)
    return JobShare(job=job, cache_bytes=cache_bytes, bytes_per_second=supply * rate * job.miss_rate(cache_bytes))


def error(given: JobShare, around: EstimateConditions = AROUND, kept: CacheEntries[str] | None = None) -> float:
    return simulate_rate(given, around, kept) / given.rate - 1


@pytest.mark.parametrize("supply", [0.5, 1.25])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.9])
def test_the_estimate_is_met_within_five_percent(part: float, supply: float) -> None:
    assert error(share(part, supply)) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_it_is_met_where_bandwidth_is_exactly_what_the_full_rate_needs(part: float) -> None:
    assert error(share(part, KNEE)) == pytest.approx(0.0, abs=0.05)


def test_there_it_is_a_bound_that_is_missed_where_misses_are_rare_and_come_in_bunches() -> None:
    assert -0.15 < error(share(0.9, KNEE)) < 0.0


@pytest.mark.parametrize("supply", [0.8, KNEE, 1.25])
def test_bunches_cost_what_they_cost_any_reader_that_looks_as_far_ahead(supply: float) -> None:
    around = EstimateConditions(super_samples=1000, memory_bytes=512 << 20)
    dataset_bytes = around.super_samples * (8 << 20)
    job = TrainingJob(name="job", dataset_bytes=dataset_bytes, compute_bytes_per_second=400e6)
    cache_bytes = round(0.9 * dataset_bytes)
    given = JobShare(job=job, cache_bytes=cache_bytes, bytes_per_second=supply * 400e6 * job.miss_rate(cache_bytes))
    slots_ahead = 512 // 8 - 12  # of which the window and late requests take some
    assert error(given, around) == pytest.approx(error_of_bunches(0.1, supply, slots_ahead), abs=0.015)


def error_of_bunches(missed: float, supply: float, ahead: int, steps: int = 40_000) -> float:
    """Return what the estimate overlooks: misses at random, on a link without delay that all under way share evenly.

    A step needs one super-sample, which comes into sight ``ahead`` steps before.
    """
    rng, arriving = random.Random(1), supply * missed  # super-samples, in the time of a step
    left: dict[int, float] = {}

    def first_seconds() -> float:
        return min(left.values(), default=0.0) * len(left) / arriving

    def elapse(seconds: float) -> None:
        while left and seconds > 0.0:
            passed = min(seconds, first_seconds())
            part = passed * arriving / len(left)
            for key, still in list(left.items()):
                left[key] = still - part
                if left[key] < 1e-9:
                    del left[key]
            seconds -= passed

    waited_seconds = 0.0
    for step in range(steps):
        if rng.random() < missed:
            left[step] = 1.0
        while step - ahead in left:
            waited_seconds += (seconds := first_seconds())
            elapse(seconds)
        elapse(1.0)
    return steps / (steps + waited_seconds) / min(1.0, supply) - 1


def test_memory_for_reading_ahead_evens_bunches_out() -> None:
    little, much = (replace(AROUND, memory_bytes=size << 20) for size in (256, 2048))
    assert error(share(0.9, KNEE), little) < error(share(0.9, KNEE), much) - 0.02


@pytest.mark.parametrize("rate", [50e6, 800e6])
def test_it_holds_for_slow_and_for_fast_jobs(rate: float) -> None:
    assert error(share(0.5, 0.5, rate=rate)) == pytest.approx(0.0, abs=0.05)


def test_what_is_cached_whole_needs_no_bandwidth() -> None:
    assert error(share(1.0, 0.0)) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("supply", [0.5, 1.25])
def test_nodes_that_keep_for_themselves_have_the_hits_of_their_own_caches(supply: float) -> None:
    assert error(share(0.5, supply, nodes=2)) == pytest.approx(0.0, abs=0.05)


def test_jobs_of_different_speed_that_share_a_data_set_both_have_all_of_its_cache() -> None:
    kept = CacheEntries[str](NoEviction(), DATASET_BYTES // 2)
    for given in (share(0.5, 0.5), share(0.5, 0.8, rate=100e6)):
        assert error(given, kept=kept) == pytest.approx(0.0, abs=0.05)
    assert len(kept) == 125


def test_full_reads_are_as_fast_with_next_use_as_with_uniform() -> None:
    """An epoch's misses are spread over it, and do not come at its end, when no bandwidth would be enough."""
    uniform, next_use = (
        error(share(0.75, KNEE), replace(AROUND, policy=policy, memory_bytes=256 << 20))
        for policy in ("no-evict", "next-use")
    )
    assert next_use == pytest.approx(uniform, abs=0.02)


def test_the_slower_the_answers_the_more_must_be_on_their_way() -> None:
    near, far = (replace(AROUND, first_byte=Constant(seconds)) for seconds in (0.01, 0.3))
    assert error(share(0.0, 0.5), far) < error(share(0.0, 0.5), near) - 0.05
