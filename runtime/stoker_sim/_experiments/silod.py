"""Job completion times of a queue on a cluster whose jobs share cache and bandwidth: our policies and equal parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, quantiles

from stoker_sim._allocation.allocation import Cluster, Job, Policy
from stoker_sim._allocation.completion import Submission, completions
from stoker_sim._allocation.sharing import POLICIES
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table

__all__ = ["EXPERIMENTS", "queue"]

_GPUS = 96
_CACHE_BYTES = 2 * 10**12
_LOAD = 0.7
"""Of the GPUs, by what the queue would take if nobody ever waited for data."""
_BANDWIDTHS = (0.125e9, 0.25e9, 0.375e9, 0.5e9, 1e9, 2e9)
"""Bytes a second from the bucket: 1 to 16 Gbit/s."""
_SHOWN = 0.25e9
"""Of which every job is shown."""
_PUBLISHED = 7.4
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class _Workload:
    """A kind of job: what a GPU of 2020 trains of it, in bytes a second, and how large its data set is."""

    name: str
    dataset_bytes: int
    gpu_bytes_per_second: float


_MIX = (
    _Workload("images, 143 GB (ImageNet-1K, ResNet-50)", 143 * 10**9, 114e6),
    _Workload("images, 660 GB (OpenImages, ResNet-50)", 660 * 10**9, 114e6),
    _Workload("images, 1.36 TB (ImageNet-22K, EfficientNet)", 1360 * 10**9, 69e6),
    _Workload("speech, 60 GB (LibriSpeech)", 60 * 10**9, 15e6),
    _Workload("language, 160 GB (tokens, BERT)", 160 * 10**9, 2e6),
)
"""In equal parts."""
_GPUS_OF_A_JOB = (1, 1, 1, 2, 2, 4, 8)
_LEAST_HOURS, _MOST_HOURS = 1.0, 24.0


def queue(jobs: int, seed: int, *, share_data: bool = False) -> list[Submission]:
    """Return a queue: jobs of the mix, with lengths drawn log-uniformly, that come at random.

    Args:
        jobs: how many.
        seed: of what is drawn.
        share_data: whether all jobs of a kind read one data set; else each has its own.
    """
    rng = random.Random(f"silod {seed}")  # noqa: S311 - a model's
    drawn = []
    for number in range(jobs):
        kind, gpus = rng.choice(_MIX), rng.choice(_GPUS_OF_A_JOB)
        rate = kind.gpu_bytes_per_second * gpus
        hours = _LEAST_HOURS * (_MOST_HOURS / _LEAST_HOURS) ** rng.random()
        job = Job(
            name=f"{number}: {kind.name}",
            dataset=kind.name if share_data else None,
            dataset_bytes=kind.dataset_bytes,
            compute_bytes_per_second=rate,
        )
        epochs = max(2, round(hours * _HOUR * rate / kind.dataset_bytes))
        drawn.append(Submission(job=job, seconds=0.0, epochs=epochs, gpus=gpus))
    gap_seconds = mean(each.gpus * each.least_seconds for each in drawn) / (_LOAD * _GPUS)
    return list(_arriving(drawn, gap_seconds, rng))


def _arriving(drawn: Sequence[Submission], gap_seconds: float, rng: random.Random) -> Iterator[Submission]:
    seconds = 0.0
    for each in drawn:
        seconds += rng.expovariate(1 / gap_seconds)
        yield Submission(job=each.job, seconds=seconds, epochs=each.epochs, gpus=each.gpus)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to divide, for jobs that share data sets or not."""

    name: str
    policy: Policy
    shares_data: bool


_GREEDY, _MAX_MIN, _EQUAL = (POLICIES[name] for name in ("greedy", "max-min", "equal"))
_BY_EFFICIENCY = Policy(name="efficiency alone", cache=_MAX_MIN.cache, bandwidth=_GREEDY.bandwidth)
"""SiloD's greedy placement, where ours asks again which rates come out."""
_WAYS = (
    *(_Way(f"{policy.name}, own data", policy, False) for policy in (_GREEDY, _BY_EFFICIENCY, _MAX_MIN, _EQUAL)),
    *(_Way(f"{policy.name}, shared data", policy, True) for policy in (_GREEDY, _MAX_MIN, _EQUAL)),
    _Way("no cache", POLICIES["no-cache"], False),
)
_FACTORS = (
    ("own data: greedy over equal parts", "greedy, own data", "equal, own data"),
    ("shared data: greedy over equal parts", "greedy, shared data", "equal, shared data"),
    ("greedy with shared caches over equal caches of one's own", "greedy, shared data", "equal, own data"),
)
"""Name, ours, and what ours is compared with."""


def _hours(way: _Way, bandwidth: float, jobs: int, seeds: Sequence[int]) -> list[float]:
    """Return the completion time of each job, in the order in which they are handed in, of one queue after another."""
    cluster, hours = Cluster(cache_bytes=_CACHE_BYTES, bytes_per_second=bandwidth), list[float]()
    for seed in seeds:
        done = completions(queue(jobs, seed, share_data=way.shares_data), cluster, _GPUS, way.policy)
        hours += [each.seconds / _HOUR for each in sorted(done, key=lambda each: each.submission.seconds)]
    return hours


def _run(quick: bool) -> Outcome:
    jobs, seeds, bandwidths = (80, (1,), (0.25e9, 1e9)) if quick else (150, (1, 2, 3), _BANDWIDTHS)
    found = {(way.name, at): _hours(way, at, jobs, seeds) for at in bandwidths for way in _WAYS}
    means = {case: mean(hours) for case, hours in found.items()}
    rows: list[tuple[Cell, ...]] = []
    for (name, at), hours in found.items():
        cuts = quantiles(hours, n=20)
        over_equal, over_none = (means[other, at] / means[name, at] for other in ("equal, own data", "no cache"))
        rows.append((at * 8 / 1e9, name, means[name, at], cuts[9], cuts[18], over_equal, over_none))
    columns = ("Gbit/s", "way", "mean JCT h", "median h", "95% h", "x equal, own data", "x no cache")
    table = Table(name="silod", columns=columns, rows=rows)
    return Outcome(tables=[table], panels=_panels(found, means, bandwidths), remarks=_remarks(means, jobs, seeds))


_Means = dict[tuple[str, float], float]


def _panels(found: dict[tuple[str, float], list[float]], means: _Means, bandwidths: Sequence[float]) -> list[Panel]:
    gigabits, label = [at * 8 / 1e9 for at in bandwidths], "bandwidth from the bucket (Gbit/s)"
    by_way = [Series(name=way.name, x=gigabits, y=[means[way.name, at] for at in bandwidths]) for way in _WAYS]
    factors = [
        Series(name=name, x=gigabits, y=[means[theirs, at] / means[ours, at] for at in bandwidths])
        for name, ours, theirs in _FACTORS
    ]
    claim = Series(name="published: up to 7.4 to 8", x=gigabits, y=[_PUBLISHED] * len(gigabits), is_published=True)
    ordered = {way.name: sorted(found[way.name, _SHOWN]) for way in _WAYS}
    jobs = [
        Series(name=name, x=hours, y=[place / len(hours) for place in range(1, len(hours) + 1)])
        for name, hours in ordered.items()
    ]
    share = "part of the jobs that is done"
    return [
        Panel(title="Mean job completion time", x_label=label, y_label="hours", series=by_way, x_log=True, y_log=True),
        Panel(
            title="Times faster on average",
            x_label=label,
            y_label="factor",
            series=[*factors, claim],
            x_log=True,
            note="published for a mix and a cluster of their own, of no bandwidth that is here",
        ),
        Panel(title="All jobs, at 2 Gbit/s", x_label="hours", y_label=share, series=jobs, x_log=True),
    ]


def _remarks(means: _Means, jobs: int, seeds: Sequence[int]) -> list[str]:
    cluster = f"{len(seeds)} x {jobs} jobs of 5 kinds on {_GPUS} GPUs with {_CACHE_BYTES / 1e12:g} TB of cache"
    remarks = [
        f"{cluster}; both are ours, so the published factor stands beside ours and is not met point by point.",
        "Equal parts are divided among those who can use them, as a shared network does.",
    ]
    for name, ours, theirs in _FACTORS:
        factors = [means[theirs, at] / hours for (way, at), hours in means.items() if way == ours]
        remarks.append(f"{name}: {min(factors):.1f} to {max(factors):.1f} times faster on average.")
    return remarks


EXPERIMENTS = {
    "silod": Experiment(
        name="silod",
        title="Job completion times: cache and bandwidth by policy, against equal parts",
        source="SiloD (EuroSys 2023)",
        run=_run,
    )
}
"""By name."""
