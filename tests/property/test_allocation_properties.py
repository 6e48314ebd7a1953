"""What holds for every division of cache and bandwidth, whatever the jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker_sim._allocation import POLICIES, Allocation, Cluster, TrainingJob, allocate
from support.allocating import job, least_demand

NEARLY = 1 + 1e-9
datasets = st.tuples(st.integers(1, 300), st.integers(1, 2))
speeds = st.integers(1, 300).map(float)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[TrainingJob], Cluster]:
    """Up to five jobs, some of which read the same; cache for none to all of it, bandwidth for none to all."""
    jobs = []
    for number, (size, nodes) in enumerate(draw(st.lists(datasets, min_size=1, max_size=4))):
        readers = draw(st.integers(1, 2))
        jobs += [job(f"{number}-{reader}", size, draw(speeds), str(number), nodes) for reader in range(readers)]
    jobs = jobs[:5]
    size = sum({each.dataset_key: each.cacheable_bytes for each in jobs}.values())
    needed = sum(each.compute_bytes_per_second for each in jobs)
    cluster = Cluster(
        cache_bytes=draw(st.integers(0, size + 1)), bytes_per_second=needed * draw(st.integers(0, 101)) / 100
    )
    return jobs, cluster


def divided(case: tuple[list[TrainingJob], Cluster], policy: str) -> Allocation:
    return allocate(*case, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@given(case=clusters())
def test_allocations_stay_within_the_resources_and_are_useful(
    policy: str, case: tuple[list[TrainingJob], Cluster]
) -> None:
    jobs, cluster = case
    found = divided(case, policy)
    assert [share.job for share in found.shares] == jobs
    assert found.cache_bytes <= cluster.cache_bytes
    assert found.bytes_per_second <= cluster.bytes_per_second * NEARLY
    for share in found.shares:
        assert 0 <= share.cache_bytes <= share.job.cacheable_bytes
        assert share.bytes_per_second >= 0
        assert share.bytes_per_second <= share.rate * share.job.miss_rate(share.cache_bytes) * NEARLY
        assert share.rate <= share.job.compute_bytes_per_second


@given(case=clusters())
def test_jobs_that_share_a_data_set_have_one_cache(case: tuple[list[TrainingJob], Cluster]) -> None:
    for policy in POLICIES:
        shares = divided(case, policy).shares
        assert len({(share.job.dataset_key, share.cache_bytes) for share in shares}) == len(
            {each.dataset_key for each in case[0]}
        )


@given(case=clusters())
def test_greedy_trains_at_least_as_much_as_every_other_policy(case: tuple[list[TrainingJob], Cluster]) -> None:
    most = divided(case, "greedy").rate
    assert all(divided(case, policy).rate <= most * NEARLY for policy in POLICIES)


@given(case=clusters())
def test_greedy_lets_all_jobs_train_at_full_rate_if_possible(case: tuple[list[TrainingJob], Cluster]) -> None:
    jobs, cluster = case
    full = [each.compute_bytes_per_second for each in jobs]
    suffices = least_demand(jobs, full, cluster.cache_bytes)
    if suffices <= cluster.bytes_per_second:
        assert all(share.is_compute_bound for share in divided(case, "greedy").shares)
    enough = replace(cluster, bytes_per_second=suffices * NEARLY)
    assert allocate(jobs, enough, POLICIES["greedy"]).rate == pytest.approx(sum(full))


@given(case=clusters(), raised=st.sampled_from([0.01, 0.3, 1.0]))
def test_under_max_min_no_job_gains_without_a_loss_for_a_poorer_one(
    case: tuple[list[TrainingJob], Cluster], raised: float
) -> None:
    """Wealth is the fraction of a job's full rate. A richer job may fall to the level that a raised one reaches.

    Without any bandwidth a job trains at its full rate, if its data is cached whole, or not at all: nothing is divided.
    """
    jobs, cluster = case
    assume(cluster.bytes_per_second)
    parts = [share.rate / share.job.compute_bytes_per_second for share in divided(case, "max-min").shares]
    for place, part in enumerate(parts):
        if part > 1 - 1e-9:
            continue
        aim = min(1.0, part + raised)
        wanted = [min(other, aim) for other in parts]
        wanted[place] = aim
        rates = [each.compute_bytes_per_second * other for each, other in zip(jobs, wanted, strict=True)]
        assert least_demand(jobs, rates, cluster.cache_bytes) > cluster.bytes_per_second * (1 + 1e-11)


@given(case=clusters())
def test_under_max_min_the_poorest_is_at_least_as_rich_as_under_any_other_policy(
    case: tuple[list[TrainingJob], Cluster],
) -> None:
    def poorest(policy: str) -> float:
        return min(share.rate / share.job.compute_bytes_per_second for share in divided(case, policy).shares)

    assert all(poorest(policy) <= poorest("max-min") * NEARLY for policy in POLICIES)


@given(case=clusters())
def test_under_equal_parts_only_those_have_less_than_others_who_need_no_more(
    case: tuple[list[TrainingJob], Cluster],
) -> None:
    shares = divided(case, "equal").shares
    most = max(share.bytes_per_second for share in shares)
    for share in shares:
        assert share.bytes_per_second * NEARLY >= most or share.is_compute_bound
