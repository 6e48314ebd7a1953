"""How cache and bandwidth are divided: the most in all, the same part for everybody, or the same for everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from stoker_sim._allocation.allocation import Caches, Cluster, Job, Policy

__all__ = ["POLICIES"]

_NO_GAIN = 1 + 1e-9
"""Times the rate before: a placement that is not better than this is the last."""
_TRIED = 64
"""Data sets that are placed first, one after the other, where bandwidth does not suffice."""


def _by_efficiency(jobs: Sequence[Job], rates: Sequence[float], cache_bytes: int) -> Caches:
    """Give most cache where a byte of it saves most: rate over size, the rates of all who share a data set together.

    This is the least that jobs of such rates can need from the bucket. Of equals the smallest is first, since what is
    cached whole needs nothing from the bucket.
    """
    sizes = {job.data: job.cacheable_bytes for job in jobs}
    saved, possible = (dict.fromkeys(sizes, 0.0) for _ in range(2))
    for job, rate in zip(jobs, rates, strict=True):
        saved[job.data] += rate / job.cacheable_bytes
        possible[job.data] += job.compute_bytes_per_second / job.cacheable_bytes
    caches = {}
    for data in sorted(sizes, key=lambda data: (-saved[data], -possible[data], sizes[data])):
        caches[data] = min(cache_bytes, sizes[data])
        cache_bytes -= caches[data]
    return caches


def _efficient_cache(jobs: Sequence[Job], cluster: Cluster) -> Caches:
    return _by_efficiency(jobs, [job.compute_bytes_per_second for job in jobs], cluster.cache_bytes)


def _even_cache(jobs: Sequence[Job], cluster: Cluster) -> Caches:
    """Give every job as much; those that share a data set put theirs together."""
    readers = Counter(job.data for job in jobs)
    parts = _filled(cluster.cache_bytes, [job.cacheable_bytes / readers[job.data] for job in jobs])
    caches = dict.fromkeys(readers, 0.0)
    for job, part in zip(jobs, parts, strict=True):
        caches[job.data] += part
    return {data: int(part) for data, part in caches.items()}


def _no_cache(jobs: Sequence[Job], cluster: Cluster) -> Caches:
    return {}


def _best_cache(jobs: Sequence[Job], cluster: Cluster) -> Caches:
    """Return a placement with which all jobs together train as fast as is found.

    The most efficient placement is best while there is bandwidth for what it leaves: all train at their full rates.
    Where there is not, some jobs stand, and what is cached of their data is wasted. Which should stand is a knapsack
    problem, so several placements are tried, and each is placed again with the rates that came out, as long as that
    gains. Neither half of a round can lose, and equal parts are among those tried.
    """
    full = sum(job.compute_bytes_per_second for job in jobs)
    best: Caches = {}
    best_rate = -1.0
    for caches in _tried(jobs, cluster):
        rate, better = _improved(jobs, cluster, caches)
        if rate > best_rate:
            best_rate, best = rate, better
        if best_rate * _NO_GAIN >= full:
            break
    return best


def _tried(jobs: Sequence[Job], cluster: Cluster) -> Iterator[Caches]:
    """Yield the most efficient placement, equal parts, and those that keep what fits whole, each in turn first."""
    efficient = _efficient_cache(jobs, cluster)
    yield efficient
    yield _even_cache(jobs, cluster)
    sizes = {job.data: job.cacheable_bytes for job in jobs}
    for first in list(efficient)[:_TRIED]:
        order = dict.fromkeys((first, *efficient))
        free, caches = cluster.cache_bytes, dict[Hashable, int]()
        for data in order:
            if sizes[data] <= free:
                caches[data] = sizes[data]
                free -= caches[data]
        for data in [data for data in order if data not in caches]:
            caches[data] = min(free, sizes[data])
            free -= caches[data]
        yield caches


def _improved(jobs: Sequence[Job], cluster: Cluster, caches: Caches) -> tuple[float, Caches]:
    rates = _fastest(jobs, cluster, caches)
    while True:
        other = _by_efficiency(jobs, rates, cluster.cache_bytes)
        others = _fastest(jobs, cluster, other)
        if sum(others) <= sum(rates) * _NO_GAIN:
            return sum(rates), caches
        rates, caches = others, other


def _fastest(jobs: Sequence[Job], cluster: Cluster, caches: Caches) -> list[float]:
    missed = [job.missed(caches[job.data]) for job in jobs]
    given = _most_hits_first(jobs, missed, cluster.bytes_per_second)
    return [job.rate(*each) for job, each in zip(jobs, zip(missed, given, strict=True), strict=True)]


def _in_proportion(jobs: Sequence[Job], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all the same part of what they need: all who need any train at the same part of their full rates."""
    needed = [job.compute_bytes_per_second * part for job, part in zip(jobs, missed, strict=True)]
    part = min(1.0, bytes_per_second / total) if (total := sum(needed)) else 0.0
    return [each * part for each in needed]


def _most_hits_first(jobs: Sequence[Job], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all that they need to those that train most with a byte; the last who get some share it in proportion."""
    given = [0.0] * len(jobs)
    for _, alike in groupby(sorted(range(len(jobs)), key=missed.__getitem__), key=missed.__getitem__):
        places = list(alike)
        parts = _in_proportion([jobs[place] for place in places], [missed[place] for place in places], bytes_per_second)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        bytes_per_second = max(0.0, bytes_per_second - sum(parts))
    return given


def _evenly(jobs: Sequence[Job], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all as much, as a network does that their connections share."""
    needed = [job.compute_bytes_per_second * part for job, part in zip(jobs, missed, strict=True)]
    return _filled(bytes_per_second, needed)


def _filled(total: float, caps: Sequence[float]) -> list[float]:
    """Divide a total evenly, but give none more than its cap: what one cannot use goes to the others."""
    parts = [0.0] * len(caps)
    for place, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        parts[index] = min(caps[index], total / (len(caps) - place))
        total -= parts[index]
    return parts


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="greedy", cache=_best_cache, bandwidth=_most_hits_first),
        Policy(name="max-min", cache=_efficient_cache, bandwidth=_in_proportion),
        Policy(name="equal", cache=_even_cache, bandwidth=_evenly),
        Policy(name="no-cache", cache=_no_cache, bandwidth=_evenly),
    )
}
"""By name: the most in all; the same part of its full rate for everybody, as large as can be; the same for everybody;
and the bucket alone."""
