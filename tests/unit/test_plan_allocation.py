"""Allocation of cache and bandwidth: SiloD's estimate, and the shares of each policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from stoker.errors import ConfigError
from stoker_sim._allocation import POLICIES, Allocation, Cluster, TrainingJob, allocate
from support.allocating import best_rate, job
from support.cases import for_each

FAST = job("fast", 100, 10.0)
SLOW = job("slow", 100, 2.0)
LARGE = job("large", 1000, 20.0)


def divided(policy: str, cache: int, bandwidth: float, *jobs: TrainingJob) -> Allocation:
    return allocate(jobs, Cluster(cache_bytes=cache, bytes_per_second=bandwidth), POLICIES[policy])


def caches(found: Allocation) -> list[int]:
    return [share.cache_bytes for share in found.shares]


def rates(found: Allocation) -> list[float]:
    return [share.rate for share in found.shares]


@pytest.mark.parametrize(
    ("cache", "bandwidth", "rate"),
    [
        (0, 4.0, 4.0),
        (0, 40.0, 10.0),
        (50, 4.0, 8.0),
        (75, 4.0, 10.0),
        (60, 4.0, 10.0),  # exactly what is needed
        (100, 0.0, 10.0),
        (200, 0.0, 10.0),
        (99, 0.0, 0.0),
    ],
)
def test_a_job_trains_as_fast_as_it_computes_or_as_its_misses_arrive(cache: int, bandwidth: float, rate: float) -> None:
    assert FAST.rate(FAST.miss_rate(cache), bandwidth) == pytest.approx(rate)


def test_nodes_that_keep_for_themselves_need_the_data_once_each() -> None:
    two = job("two", 100, 10.0, nodes=2)
    assert two.miss_rate(100) == 0.5
    assert two.miss_rate(200) == 0.0


def test_nodes_that_share_their_caches_need_the_data_once() -> None:
    together = replace(job("together", 100, 10.0, nodes=2), shares_caches=True)
    assert together.miss_rate(50) == 0.5
    assert together.miss_rate(100) == 0.0
    apart = job("apart", 100, 10.0, nodes=2)
    assert caches(divided("greedy", 150, 1.0, apart, together)) == [50, 100]


def test_greedy_caches_first_where_a_byte_saves_most() -> None:
    assert caches(divided("greedy", 150, 100.0, LARGE, SLOW, FAST)) == [0, 50, 100]


def test_bandwidth_follows_what_the_cache_leaves() -> None:
    found = divided("greedy", 150, 100.0, LARGE, SLOW, FAST)
    assert [share.bytes_per_second for share in found.shares] == pytest.approx([20.0, 1.0, 0.0])
    assert all(share.is_compute_bound for share in found.shares)


def test_where_bandwidth_does_not_suffice_greedy_gives_it_to_those_that_train_most_with_a_byte() -> None:
    assert rates(divided("greedy", 150, 1.5, LARGE, SLOW, FAST)) == pytest.approx([0.5, 2.0, 10.0])


def test_greedy_takes_cache_from_stalled_jobs() -> None:
    """By efficiency alone the first gets all of the cache, and trains no faster for it; the second needs half of it."""
    first, second = job("first", 200, 100.0), job("second", 50, 20.0)
    found = divided("greedy", 100, 0.0, first, second)
    assert rates(found) == [0.0, 20.0]


def test_max_min_gives_jobs_that_need_the_bucket_the_same_fraction_of_their_rate() -> None:
    found = divided("max-min", 150, 10.5, LARGE, SLOW, FAST)
    assert rates(found) == pytest.approx([10.0, 1.0, 10.0])


def test_max_min_leaves_the_cache_to_the_largest_savings_even_at_a_lower_total() -> None:
    first, second = job("first", 200, 100.0), job("second", 50, 20.0)
    found = divided("max-min", 100, 7.0, first, second)
    assert rates(found) == pytest.approx([10.0, 2.0])
    assert divided("greedy", 100, 7.0, first, second).rate > found.rate


def test_unusable_equal_parts_go_to_the_others() -> None:
    found = divided("equal", 900, 11.0, LARGE, SLOW, FAST)
    assert caches(found) == [700, 100, 100]
    assert found.shares[0].bytes_per_second == pytest.approx(6.0)


def test_jobs_that_share_a_data_set_share_what_is_cached_of_it() -> None:
    one, two = job("one", 100, 4.0, dataset="same"), job("two", 100, 4.0, dataset="same")
    found = divided("greedy", 100, 100.0, FAST, one, two, SLOW)
    assert caches(found) == [100, 0, 0, 0]
    third = job("three", 100, 4.0, dataset="same")
    found = divided("greedy", 100, 100.0, FAST, one, two, third, SLOW)
    assert caches(found) == [0, 100, 100, 100, 0]
    assert found.cache_bytes == 100


def test_jobs_that_share_put_equal_parts_together() -> None:
    one, two = job("one", 100, 4.0, dataset="same"), job("two", 100, 4.0, dataset="same")
    assert caches(divided("equal", 90, 1.0, FAST, one, two)) == [30, 60, 60]


def test_without_a_cache_all_read_from_the_bucket() -> None:
    found = divided("no-cache", 900, 6.0, FAST, SLOW)
    assert caches(found) == [0, 0]
    assert rates(found) == pytest.approx([4.0, 2.0])


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_can_be_divided(policy: str) -> None:
    assert rates(divided(policy, 0, 0.0, FAST, SLOW)) == [0.0, 0.0]
    assert divided(policy, 10, 1.0).shares == ()


def test_greedy_is_nearly_as_good_as_the_best_of_all_placements() -> None:
    """Which jobs should stand is a knapsack problem; on these 400 small ones, bandwidth is scarce in most."""
    rng = random.Random(5)
    parts = []
    for _ in range(400):
        jobs = [job(str(place), rng.randint(1, 100), rng.uniform(1, 100)) for place in range(rng.randint(1, 5))]
        cache = int(sum(each.dataset_bytes for each in jobs) * rng.random())
        bandwidth = sum(each.compute_bytes_per_second for each in jobs) * rng.random() ** 3
        best = best_rate(jobs, cache, bandwidth)
        parts.append(divided("greedy", cache, bandwidth, *jobs).rate / best if best else 1.0)
    assert min(parts) > 0.7
    assert sum(part > 0.999 for part in parts) >= 0.95 * len(parts)


def refused(*jobs: TrainingJob) -> Sequence[object]:
    return divided("greedy", 100, 1.0, *jobs).shares


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two jobs are called 'fast'"):
        refused(FAST, FAST)


@pytest.mark.parametrize(
    ("field", "other"), [("dataset_bytes", job("b", 99, 1.0, "x")), ("nodes", job("b", 100, 1.0, "x", 2))]
)
def test_jobs_that_disagree_on_the_data_set_that_they_share_are_refused(field: str, other: TrainingJob) -> None:
    with pytest.raises(ConfigError, match=f"'a' and 'b' share the data set 'x', and {field} is"):
        refused(job("a", 100, 1.0, "x"), other)


@for_each("name", ["dataset_bytes", "compute_bytes_per_second", "nodes"])
@for_each("value", [0, -1, float("nan"), float("inf")])
def test_a_job_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be (more than 0|at least 1) and less than inf, not {value}"):
        TrainingJob(**{"name": "x", "dataset_bytes": 1, "compute_bytes_per_second": 1.0, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cache_bytes", "bytes_per_second"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_cluster_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 0 and less than inf, not {value}"):
        Cluster(**{"cache_bytes": 1, "bytes_per_second": 1.0, name: value})  # type: ignore[arg-type]
