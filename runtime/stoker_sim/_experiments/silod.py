"""SiloD: job completion times on a cluster whose jobs share cache and bandwidth, and its estimate of a training rate.

Completion times compare our policies with equal parts; the estimate is compared with the fetcher in virtual time with
the same cache and bucket.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import attrgetter
from statistics import mean, median, quantiles

from stoker._base.sizes import format_count
from stoker._cache.eviction import CacheEntries, NoEviction
from stoker._diagnostics.latency import BucketModel, Constant, Latency, LogNormal
from stoker._fetch.config import FetchConfig
from stoker._order.order import OrderConfig
from stoker_sim._allocation import (
    POLICIES,
    AllocationPolicy,
    Cluster,
    JobShare,
    Submission,
    TrainingJob,
    simulate_queue,
)
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._caches import CacheModel, SimulatedCache
from stoker_sim._experiments import ExperimentResult, Panel, Series, Table
from stoker_sim._experiments.scenarios import create_lane_scenario
from stoker_sim._scenario import Scenario, simulate

_GPUS = 96
_CACHE_BYTES = 2 * 10**12
_GPU_UTILIZATION = 0.7
"""Utilization of the GPUs if no job waited for data."""
_BANDWIDTHS = (0.125e9, 0.25e9, 0.375e9, 0.5e9, 1e9, 2e9)
"""Bandwidths from the bucket in bytes a second: 1 to 16 Gbit/s."""
_DRAWN_BANDWIDTH = 0.25e9
"""Bandwidth of the panel that shows all jobs, in bytes a second."""
_PUBLISHED = 7.4
_HOUR = 3600.0


_JOB_KINDS = (
    ("images, 143 GB (ImageNet-1K, ResNet-50)", 143 * 10**9, 114e6),
    ("images, 660 GB (OpenImages, ResNet-50)", 660 * 10**9, 114e6),
    ("images, 1.36 TB (ImageNet-22K, EfficientNet)", 1360 * 10**9, 69e6),
    ("speech, 60 GB (LibriSpeech)", 60 * 10**9, 15e6),
    ("language, 160 GB (tokens, BERT)", 160 * 10**9, 2e6),
)
"""Kinds of jobs, equally likely: name, bytes of the data set, and bytes a second that one GPU of 2020 trains."""
_GPUS_OF_A_JOB = (1, 1, 1, 2, 2, 4, 8)
_MIN_HOURS, _MAX_HOURS = 1.0, 24.0


def create_queue(jobs: int, seed: int, *, share_data: bool = False) -> list[Submission]:
    """Return a random queue of jobs of the mix, with log-uniform lengths and exponential gaps.

    Args:
        jobs: number of jobs.
        seed: seed of the draws.
        share_data: whether all jobs of a kind read one data set; otherwise each has its own.
    """
    rng = random.Random(f"silod {seed}")  # noqa: S311 - a model's
    submissions = []
    for number in range(jobs):
        (kind, dataset_bytes, gpu_rate), gpus = rng.choice(_JOB_KINDS), rng.choice(_GPUS_OF_A_JOB)
        rate = gpu_rate * gpus
        hours = _MIN_HOURS * (_MAX_HOURS / _MIN_HOURS) ** rng.random()
        job = TrainingJob(
            name=f"{number}: {kind}",
            dataset=kind if share_data else None,
            dataset_bytes=dataset_bytes,
            compute_bytes_per_second=rate,
        )
        epochs = max(2, round(hours * _HOUR * rate / dataset_bytes))
        submissions.append(Submission(job=job, seconds=0.0, epochs=epochs, gpus=gpus))
    gap_seconds = mean(each.gpus * each.min_seconds for each in submissions) / (_GPU_UTILIZATION * _GPUS)
    gaps = (rng.expovariate(1 / gap_seconds) for _ in submissions)
    return [replace(each, seconds=seconds) for each, seconds in zip(submissions, accumulate(gaps), strict=True)]


_GREEDY, _MAX_MIN, _EQUAL = (POLICIES[name] for name in ("greedy", "max-min", "equal"))
_BY_EFFICIENCY = AllocationPolicy(
    name="efficiency alone", divide_cache=_MAX_MIN.divide_cache, divide_bandwidth=_GREEDY.divide_bandwidth
)
"""SiloD's greedy placement, without the improvement of ours by the resulting rates."""
_CASES = {
    **{f"{policy.name}, own data": (policy, False) for policy in (_GREEDY, _BY_EFFICIENCY, _MAX_MIN, _EQUAL)},
    **{f"{policy.name}, shared data": (policy, True) for policy in (_GREEDY, _MAX_MIN, _EQUAL)},
    "no cache": (POLICIES["no-cache"], False),
}
"""Name → policy, and whether jobs share data sets."""
_FACTORS = (
    ("own data: greedy over equal parts", "greedy, own data", "equal, own data"),
    ("shared data: greedy over equal parts", "greedy, shared data", "equal, shared data"),
    ("greedy with shared caches over equal caches of one's own", "greedy, shared data", "equal, own data"),
)
"""Name, our case, and the case it is compared with."""


def _completion_hours(way: str, bandwidth: float, jobs: int, seeds: Sequence[int]) -> list[float]:
    """Return the completion times of all jobs in hours, queue by queue, in the order of submission."""
    policy, shares_data = _CASES[way]
    cluster = Cluster(cache_bytes=_CACHE_BYTES, bytes_per_second=bandwidth)
    hours = list[float]()
    for seed in seeds:
        done = simulate_queue(create_queue(jobs, seed, share_data=shares_data), cluster, _GPUS, policy)
        hours += [each.duration_seconds / _HOUR for each in sorted(done, key=lambda each: each.submission.seconds)]
    return hours


def run_allocate(quick: bool) -> ExperimentResult:
    """Run queues of jobs and return completion times by policy."""
    jobs, seeds, bandwidths = (80, (1,), (0.25e9, 1e9)) if quick else (150, (1, 2, 3), _BANDWIDTHS)
    hours_by_case = {(way, at): _completion_hours(way, at, jobs, seeds) for at, way in product(bandwidths, _CASES)}
    means = {case: mean(hours) for case, hours in hours_by_case.items()}
    columns = ("Gbit/s", "way", "mean JCT h", "median h", "95% h", "x equal, own data", "x no cache")
    table = Table("silod", columns)
    for (name, at), hours in hours_by_case.items():
        cuts = quantiles(hours, n=20)
        over_equal, over_none = (means[other, at] / means[name, at] for other in ("equal, own data", "no cache"))
        table.add(at * 8 / 1e9, name, means[name, at], cuts[9], cuts[18], over_equal, over_none)
    return ExperimentResult([table], _panels(table, hours_by_case, means), _remarks(means, jobs, seeds))


_Means = dict[tuple[str, float], float]


def _panels(table: Table, hours_by_case: dict[tuple[str, float], list[float]], means: _Means) -> list[Panel]:
    label = "bandwidth from the bucket (Gbit/s)"
    bandwidths = list(dict.fromkeys(at for _, at in hours_by_case))
    gigabits = [at * 8 / 1e9 for at in bandwidths]
    factors = [
        Series(name, gigabits, [means[theirs, at] / means[ours, at] for at in bandwidths])
        for name, ours, theirs in _FACTORS
    ]
    by_way = table.lines("way", "Gbit/s", "mean JCT h")
    claim = Series("published: up to 7.4 to 8", gigabits, [_PUBLISHED] * len(gigabits), is_published=True)
    jobs = [
        Series(way, sorted(hours), [rank / len(hours) for rank in range(1, len(hours) + 1)])
        for (way, at), hours in hours_by_case.items()
        if at == _DRAWN_BANDWIDTH
    ]
    share = "fraction of jobs completed"
    return [
        Panel("Mean job completion time", label, "hours", by_way, x_log=True, y_log=True),
        Panel(
            "Times faster on average",
            label,
            "factor",
            [*factors, claim],
            x_log=True,
            note="published for another mix of jobs and another cluster, at none of these bandwidths",
        ),
        Panel("All jobs, at 2 Gbit/s", "hours", share, jobs, x_log=True),
    ]


def _remarks(means: _Means, jobs: int, seeds: Sequence[int]) -> list[str]:
    cluster = f"{len(seeds)} x {jobs} jobs of 5 kinds on {_GPUS} GPUs with {_CACHE_BYTES / 1e12:g} TB of cache"
    remarks = [
        f"{cluster}; both differ from the paper's, so the published factor is shown but not matched point by point.",
        "Equal parts are divided among the jobs that can use them, as in a shared network.",
    ]
    for name, ours, theirs in _FACTORS:
        factors = [means[theirs, at] / hours for (way, at), hours in means.items() if way == ours]
        remarks.append(f"{name}: {min(factors):.1f} to {max(factors):.1f} times faster on average.")
    return remarks


_SAMPLES = 64
"""Samples of a super-sample, and of a batch of each node."""
_SUPER_SAMPLE_BYTES = 8 << 20
_RATE = 400e6
_FIRST_BYTE = LogNormal(0.02, 0.08)
_GOOD_ERROR = 0.05
_SEED = 1
_UNREAD_FRACTION = 0.01
"""Fraction of the data set that a node has not read when its cache counts as filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateConditions:
    """Conditions of a simulation that the estimate does not depend on.

    Attributes:
        super_samples: number of super-samples of the data set.
        policy: name of the cache's eviction policy.
        first_byte: distribution of the bucket's time to the first byte.
        memory_bytes: memory of each node for fetches ahead, in bytes.
        warm_epochs: number of epochs trained with filled caches.
    """

    super_samples: int = 500
    policy: str = "no-evict"
    first_byte: Latency = _FIRST_BYTE
    memory_bytes: int = 1 << 30
    warm_epochs: int = 3


_USUAL = EstimateConditions()
_SLOW = EstimateConditions(first_byte=LogNormal(0.1, 0.5))
_SEVERAL = EstimateConditions(memory_bytes=256 << 20, warm_epochs=18)
"""Several nodes: which parts a node reads is random, and so are its hits; many epochs average them."""
_LITTLE = EstimateConditions(super_samples=2000, memory_bytes=512 << 20)
"""Memory much smaller than the data set, as usual in practice, so that fetching ahead does not act as a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateCase:
    """A job whose rate is estimated and simulated.

    Attributes:
        kind: kind of the case.
        supply: bandwidth of the job over the bandwidth that it needs to train at its full rate.
        share: allocation of the job.
        conditions: all other figures.
        shared_entries: entries of a cache that it shares with other jobs; None for its own.
    """

    kind: str
    supply: float
    share: JobShare
    conditions: EstimateConditions
    shared_entries: CacheEntries[str] | None = None

    def error(self) -> float:
        """Return the relative difference of the simulated rate from the estimate."""
        return simulate_rate(self.share, self.conditions, self.shared_entries) / self.share.rate - 1


def simulate_rate(
    share: JobShare, conditions: EstimateConditions, shared_entries: CacheEntries[str] | None = None
) -> float:
    """Return the simulated rate of a job with a warm cache, in bytes a second.

    Args:
        share: allocation of the job.
        conditions: all other figures.
        shared_entries: entries, by key, of a cache that several jobs on one node share; None for a cache on each of the
            job's nodes.
    """
    scenario = _scenario(share, conditions)
    if shared_entries is None:
        model = CacheModel(limit_bytes=share.cache_bytes // share.job.nodes, policy=conditions.policy)
        run = simulate(replace(scenario, caches=[model]))
    else:
        model, rng = CacheModel(limit_bytes=shared_entries.capacity), random.Random(0)  # noqa: S311 - a model's
        run = simulate(
            replace(scenario, tiers=lambda *_: [SimulatedCache(shared_entries, attrgetter("key"), model, rng)])
        )
    cold = _fill_epochs(share.job.nodes)
    warm = range(cold, cold + conditions.warm_epochs)
    seconds = sum(max(each.seconds for each in run.of_epoch(epoch)) for epoch in warm)
    return len(warm) * scenario.manifest.size_bytes / seconds


def _scenario(share: JobShare, conditions: EstimateConditions) -> Scenario:
    """Return the scenario of a job without its cache; one extra epoch lets the counted ones fetch ahead."""
    job = share.job
    super_sample_bytes = job.dataset_bytes // conditions.super_samples
    return create_lane_scenario(
        synthetic_manifest(
            super_samples=conditions.super_samples, samples=_SAMPLES, super_sample_bytes=super_sample_bytes
        ),
        OrderConfig(seed=_SEED, lanes=job.nodes),
        _SAMPLES,
        conditions.memory_bytes,
        FetchConfig(),
        bucket=BucketModel(
            first_byte=conditions.first_byte,
            total_bytes_per_second=share.bytes_per_second or math.inf,  # without a limit it can fill its cache
        ),
        compute=Constant(super_sample_bytes * job.nodes / job.compute_bytes_per_second),
        epochs=_fill_epochs(job.nodes) + conditions.warm_epochs + 1,
        in_step=True,
        seed=_SEED,
    )


def _fill_epochs(nodes: int) -> int:
    """Return the number of epochs until the caches of nodes are filled, each with a random part of the data set.

    One extra epoch lets the fetches complete that were in flight at the end of the last of these epochs.
    """
    return 1 + (1 if nodes == 1 else math.ceil(math.log(_UNREAD_FRACTION) / math.log(1 - 1 / nodes)))


def cases(quick: bool = False) -> Iterator[EstimateCase]:
    """Yield the cases, kind by kind."""
    rates = (_RATE,) if quick else (_RATE, 100e6, 800e6)
    cached = (0.0, 0.9) if quick else (0.0, 0.25, 0.5, 0.75, 0.9)
    supplies = (0.5, 1.0) if quick else (0.25, 0.5, 0.8, 1.0, 1.25, 2.0)
    usual, slow, several, little = (
        replace(around, warm_epochs=1) if quick else around for around in (_USUAL, _SLOW, _SEVERAL, _LITTLE)
    )
    for rate, part, supply in product(rates, cached, supplies):
        yield _create_case("one node", rate, part, supply, usual)
    for part, supply in product(cached, supplies):
        yield _create_case("one node, slow answers", _RATE, part, supply, slow)
    for nodes, part, supply in product((2,) if quick else (2, 4), cached, (0.5, 1.25)):
        yield _create_case("several nodes", _RATE, part, supply, several, nodes=nodes)
    shares, few = ((0.9,), (1.0,)) if quick else ((0.5, 0.9), (0.5, 0.8, 1.0, 1.25))
    for policy, part, supply in product(("no-evict", "next-use"), shares, few):
        yield _create_case(f"one node, little memory, {policy}", _RATE, part, supply, replace(little, policy=policy))
    for part, supply in product(cached[1:], supplies):
        entries = CacheEntries[str](NoEviction(), round(part * _USUAL.super_samples * _SUPER_SAMPLE_BYTES))
        for rate in (_RATE, _RATE / 3):
            yield replace(_create_case("two jobs, one data set", rate, part, supply, usual), shared_entries=entries)


def _create_case(
    kind: str, rate: float, part: float, supply: float, conditions: EstimateConditions, nodes: int = 1
) -> EstimateCase:
    size_bytes = conditions.super_samples * _SUPER_SAMPLE_BYTES
    job = TrainingJob(name=kind, dataset_bytes=size_bytes, compute_bytes_per_second=rate, nodes=nodes)
    cache_bytes = round(part * job.cacheable_bytes)
    needed = rate * job.miss_rate(cache_bytes)
    share = JobShare(job=job, cache_bytes=cache_bytes, bytes_per_second=supply * needed)
    return EstimateCase(kind=kind, supply=supply, share=share, conditions=conditions)


def run_estimate(quick: bool) -> ExperimentResult:
    """Run the estimate of a rate beside the fetcher in virtual time."""
    columns = ("kind", "nodes", "f* MB/s", "cached", "supply", "estimate MB/s", "simulated MB/s", "error")
    table = Table("silod-estimator", columns)
    for case in cases(quick):
        error, share, job = case.error(), case.share, case.share.job
        rates = job.compute_bytes_per_second, share.rate, share.rate * (1 + error)
        full, estimate, simulated = (rate / 1e6 for rate in rates)
        table.add(case.kind, job.nodes, full, share.hit_rate, case.supply, estimate, simulated, error)
    kinds = {kind: table.select("kind", kind) for kind in dict.fromkeys(table.cells("kind"))}
    panels = [_panel(kind, of_kind) for kind, of_kind in kinds.items()]
    return ExperimentResult([table], panels, [_remark(kind, of_kind.cells("error")) for kind, of_kind in kinds.items()])


def _panel(kind: str, table: Table) -> Panel:
    series = []
    for part in dict.fromkeys(table.cells("cached")):
        selected = table.select("cached", part)
        series.append(Series(f"{part:.0%} cached", selected.cells("supply"), selected.cells("error"), kind="points"))
    label = "bandwidth / bandwidth that the full rate needs"
    return Panel(kind, label, "simulated / estimate - 1", series)


def _remark(kind: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    within = sum(size < _GOOD_ERROR for size in sizes) / len(sizes)
    return (
        f"{kind}: {format_count(len(sizes), 'case')}, error {median(sizes):.1%} in the median and "
        f"{sizes[-1]:.1%} at most; {within:.0%} of them are within {_GOOD_ERROR:.0%}."
    )
