"""Queues of jobs: use of the cache over time, waiting for other jobs, and losses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stoker import OrderConfig
from stoker._diagnostics.latency import Constant
from stoker._fetch.config import PipelineConfig
from stoker.errors import ConfigError
from stoker_sim import BucketModel
from stoker_sim._allocation import POLICIES, Cluster, JobCompletion, Submission, TrainingJob, simulate_queue
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._caches import CacheModel
from stoker_sim._experiments.silod import create_queue
from stoker_sim._scenario import Scenario, simulate
from support.allocating import job

CLUSTER = Cluster(cache_bytes=100, bytes_per_second=5.0)
FAST = job("fast", 100, 10.0)


def submitted(each: TrainingJob, epochs: int = 3, seconds: float = 0.0, gpus: int = 1) -> Submission:
    return Submission(job=each, seconds=seconds, epochs=epochs, gpus=gpus)


def done(*jobs: Submission, cluster: Cluster = CLUSTER, gpus: int = 8, policy: str = "max-min") -> list[JobCompletion]:
    return simulate_queue(jobs, cluster, gpus, POLICIES[policy])


def ends(*jobs: Submission, cluster: Cluster = CLUSTER, gpus: int = 8, policy: str = "max-min") -> dict[str, float]:
    found = done(*jobs, cluster=cluster, gpus=gpus, policy=policy)
    return {each.submission.job.name: each.ended_seconds for each in found}


def test_a_cache_counts_from_the_second_epoch_on() -> None:
    assert ends(submitted(FAST)) == {"fast": pytest.approx(20.0 + 10.0 + 10.0)}


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_a_cache_of_half_the_data_halves_what_later_epochs_wait_for(epochs: int) -> None:
    cluster = Cluster(cache_bytes=50, bytes_per_second=2.5)
    expected = 100 / 2.5 + (epochs - 1) * 100 / 5.0
    assert ends(submitted(FAST, epochs), cluster=cluster) == {"fast": pytest.approx(expected)}


def test_without_a_cache_every_epoch_is_read_again() -> None:
    assert ends(submitted(FAST), policy="no-cache") == {"fast": pytest.approx(60.0)}


def test_a_job_that_computes_longer_than_its_data_take_never_waits() -> None:
    slow = submitted(job("slow", 100, 2.0))
    assert ends(slow, policy="no-cache") == {"slow": pytest.approx(slow.min_seconds)}


def test_jobs_share_the_way_to_the_bucket() -> None:
    other = replace(FAST, name="other")
    assert ends(submitted(FAST), submitted(other), policy="no-cache") == pytest.approx({"fast": 120.0, "other": 120.0})


def test_a_job_begins_with_the_warm_cache_of_another() -> None:
    one, two = job("one", 100, 10.0, "same"), job("two", 100, 10.0, "same")
    found = ends(submitted(one), submitted(two, epochs=1, seconds=25.0))
    assert found == pytest.approx({"one": 40.0, "two": 35.0})


def test_unread_data_is_not_kept() -> None:
    one, two = job("one", 100, 10.0, "same"), job("two", 100, 10.0, "same")
    found = ends(submitted(one, epochs=1), submitted(two, epochs=1, seconds=25.0))
    assert found == pytest.approx({"one": 20.0, "two": 45.0})


def test_what_a_more_efficient_job_takes_of_the_cache_is_lost() -> None:
    """The first one's data are all cached after 20 s; five seconds later all of it goes to the other."""
    other = job("other", 100, 20.0)
    found = ends(submitted(FAST, epochs=2), submitted(other, epochs=1, seconds=25.0), policy="greedy")
    left = 100 - 5 * 10.0
    assert found["fast"] > 25.0 + left / 5.0


def test_nodes_fill_their_caches_over_several_epochs() -> None:
    """Each of two nodes needs all of the data, and is dealt half of them in an epoch."""
    two = job("two", 100, 10.0, nodes=2)
    cluster = Cluster(cache_bytes=200, bytes_per_second=5.0)
    first, second, third = 100 / 5.0, 100 / 10.0, 100 / 10.0
    assert ends(submitted(two), cluster=cluster) == {"two": pytest.approx(first + second + third)}
    slow = Cluster(cache_bytes=200, bytes_per_second=2.0)
    assert ends(submitted(two), cluster=slow) == {"two": pytest.approx(100 / 2 + 100 / 4 + 100 / 8)}


def test_jobs_wait_in_line_for_their_gpus() -> None:
    large, small = submitted(job("large", 100, 5.0), gpus=8), submitted(job("small", 100, 5.0), gpus=1)
    first, second, third = done(small, large, replace(small, job=job("last", 100, 5.0)), policy="no-cache")
    assert [each.submission.job.name for each in (first, second, third)] == ["small", "large", "last"]
    assert second.started_seconds == first.ended_seconds
    assert third.started_seconds == second.ended_seconds
    assert third.duration_seconds == third.ended_seconds


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share_data", [False, True])
def test_every_job_of_a_queue_ends_and_none_is_faster_than_it_computes(policy: str, share_data: bool) -> None:
    jobs = create_queue(40, 3, share_data=share_data)
    found = done(*jobs, cluster=Cluster(cache_bytes=10**12, bytes_per_second=2e8), gpus=32, policy=policy)
    assert sorted(each.submission.job.name for each in found) == sorted(each.job.name for each in jobs)
    for each in found:
        assert each.started_seconds >= each.submission.seconds
        assert each.ended_seconds - each.started_seconds >= each.submission.min_seconds * (1 - 1e-6)


def test_a_policy_that_keeps_what_saves_most_ends_a_queue_sooner_than_equal_parts_and_these_sooner_than_none() -> None:
    jobs = create_queue(80, 1)
    cluster = Cluster(cache_bytes=2 * 10**12, bytes_per_second=0.25e9)
    mean = {
        policy: sum(each.duration_seconds for each in done(*jobs, cluster=cluster, gpus=96, policy=policy)) / len(jobs)
        for policy in POLICIES
    }
    assert mean["greedy"] < 0.8 * mean["equal"]
    assert mean["equal"] < 0.8 * mean["no-cache"]


@pytest.mark.parametrize("bandwidth", [100e6, 250e6])
def test_a_job_takes_as_long_as_the_fetcher_does_in_virtual_time_while_its_cache_fills_and_later(
    bandwidth: float,
) -> None:
    manifest = synthetic_manifest(super_samples=250, samples=64, super_sample_bytes=8 << 20)
    order = OrderConfig(seed=1)
    run = simulate(
        Scenario(
            manifest=manifest,
            feed=PipelineConfig(order=order, batch_size=64, memory_bytes=manifest.file_bytes + (512 << 20)),
            bucket=BucketModel(total_bytes_per_second=bandwidth),
            compute=Constant((8 << 20) / 400e6),
            caches=[CacheModel(limit_bytes=manifest.size_bytes // 2, policy="no-evict")],
            epochs=3,
        )
    )
    cluster = Cluster(cache_bytes=manifest.size_bytes // 2, bytes_per_second=bandwidth)
    fluid = ends(submitted(job("job", manifest.size_bytes, 400e6)), cluster=cluster)
    assert run.seconds == pytest.approx(fluid["job"], rel=0.05)


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"gpus": 0}, {"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}]
)
def test_a_submission_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be at least"):
        submitted(FAST, **wrong)


def test_a_queue_that_can_never_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fast' wants 9 GPUs, and there are 8"):
        done(submitted(FAST, gpus=9))
    with pytest.raises(ConfigError, match="bytes_per_second of the cluster must be more than 0"):
        done(submitted(FAST), cluster=Cluster(cache_bytes=100, bytes_per_second=0.0))
