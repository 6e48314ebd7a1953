"""Jobs that share cache and bandwidth, and their best allocation, found by exhaustive search."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import permutations

from stoker_sim._allocation import TrainingJob


def job(name: str, size: int, rate: float, dataset: str | None = None, nodes: int = 1) -> TrainingJob:
    return TrainingJob(name=name, dataset_bytes=size, compute_bytes_per_second=rate, dataset=dataset, nodes=nodes)


def placements(jobs: Sequence[TrainingJob], cache_bytes: int) -> Iterator[dict[Hashable, int]]:
    """Yield every placement that caches the data sets one after the other, in some order, until the cache is full.

    The demand of the jobs on the bucket is linear in the cached bytes, so one of these is the best for any rates.
    """
    sizes = {each.dataset_key: each.cacheable_bytes for each in jobs}
    for order in permutations(sizes):
        free, caches = cache_bytes, dict[Hashable, int]()
        for data in order:
            caches[data] = min(free, sizes[data])
            free -= caches[data]
        yield caches


def least_demand(jobs: Sequence[TrainingJob], rates: Sequence[float], cache_bytes: int) -> float:
    """Return the minimum bandwidth, in bytes per second, at which jobs can train at these rates."""
    return min(
        sum(rate * each.miss_rate(caches[each.dataset_key]) for each, rate in zip(jobs, rates, strict=True))
        for caches in placements(jobs, cache_bytes)
    )


def best_rate(jobs: Sequence[TrainingJob], cache_bytes: int, bandwidth: float) -> float:
    """Return the maximum total rate of jobs."""
    return max(_filled(jobs, caches, bandwidth) for caches in placements(jobs, cache_bytes))


def _filled(jobs: Sequence[TrainingJob], caches: dict[Hashable, int], bandwidth: float) -> float:
    total = 0.0
    for missed, rate in sorted(
        (each.miss_rate(caches[each.dataset_key]), each.compute_bytes_per_second) for each in jobs
    ):
        trained = min(rate, bandwidth / missed) if missed else rate
        bandwidth -= trained * missed
        total += trained
    return total
