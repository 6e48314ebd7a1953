"""Allocation of cache and bandwidth to jobs that share both, and job completion times of a queue.

The model is SiloD's (H. Zhao and others, "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters",
EuroSys 2023): a job that computes ``f*`` bytes a second, reads a data set of ``d`` bytes once an epoch in random order,
has ``c`` of them cached and ``b`` bytes a second from the bucket, trains ``f = min(f*, b / (1 - c/d))`` bytes a second.

For a queue, the policy divides both again whenever a job starts or ends. Data flows as a fluid: between two events each
job trains at the rate of that estimate. A job's cache fills while the job reads, and additions count for the job from
its next epoch on, since each sample is read once an epoch. Bytes that a policy takes from a data set are lost and must
be read again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stoker._base.arguments import AtLeastOne, Bounded, Finite, NotNegative, Positive
from stoker._base.sizes import counted
from stoker.errors import ConfigError

Caches = Mapping[Hashable, int]
"""Cached bytes of each data set, on all its nodes together, by :attr:`Job.data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Bounded):
    """A training job.

    Attributes:
        name: name of the job.
        dataset: name of its data set; jobs with the same one share its cache. None if no other job reads it.
        dataset_bytes: size of the data set, in bytes.
        compute_bytes_per_second: rate at which it trains without waiting for data, on all its nodes together.
        nodes: number of machines, each with its own cache. A node reads another part of the data set in each epoch,
            and only its own cache serves it.
    """

    name: str
    dataset: str | None = None
    dataset_bytes: Finite[Positive[int]]
    compute_bytes_per_second: Finite[Positive[float]]
    nodes: Finite[AtLeastOne[int]] = 1

    @property
    def data(self) -> Hashable:
        """Key of its data set, equal for jobs that share it."""
        return (self.dataset,) if self.dataset is not None else (None, self.name)

    @property
    def cacheable_bytes(self) -> int:
        """Cache on all its nodes together with which it reads nothing from the bucket, in bytes."""
        return self.dataset_bytes * self.nodes

    def missed(self, cache_bytes: float) -> float:
        """Return the miss rate, 0 to 1, with ``cache_bytes`` of cache on all its nodes together."""
        return max(0.0, 1.0 - cache_bytes / self.cacheable_bytes)

    def rate(self, missed: float, bytes_per_second: float) -> float:
        """Return the rate at which it trains, in bytes a second: SiloD's estimate.

        Args:
            missed: fraction of its reads that go to the bucket, 0 to 1.
            bytes_per_second: bandwidth from the bucket.
        """
        if bytes_per_second >= self.compute_bytes_per_second * missed:
            return self.compute_bytes_per_second
        return bytes_per_second / missed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Bounded):
    """The resources that jobs share.

    Attributes:
        cache_bytes: cache of all nodes together, in bytes.
        bytes_per_second: bandwidth from the bucket.
    """

    cache_bytes: Finite[NotNegative[int]]
    bytes_per_second: Finite[NotNegative[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Allocation of one job.

    Attributes:
        job: the job.
        cache_bytes: cache of its data set, on all its nodes together; jobs that share the data set share it.
        bytes_per_second: bandwidth from the bucket.
    """

    job: Job
    cache_bytes: int
    bytes_per_second: float

    @property
    def hit_rate(self) -> float:
        """Fraction of its reads that the cache serves from the second epoch on, 0 to 1."""
        return 1.0 - self.job.missed(self.cache_bytes)

    @property
    def rate(self) -> float:
        """Rate at which it trains from the second epoch on, in bytes a second."""
        return self.job.rate(self.job.missed(self.cache_bytes), self.bytes_per_second)

    @property
    def is_compute_bound(self) -> bool:
        """Whether it never waits for data, to within a millionth."""
        return self.rate >= self.job.compute_bytes_per_second * (1 - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Allocation of all jobs, in the order of the jobs."""

    shares: tuple[Share, ...]

    @property
    def rate(self) -> float:
        """Total rate at which the jobs train, in bytes a second."""
        return sum(share.rate for share in self.shares)

    @property
    def cache_bytes(self) -> int:
        """Total cache of all data sets, in bytes."""
        return sum({share.job.data: share.cache_bytes for share in self.shares}.values())

    @property
    def bytes_per_second(self) -> float:
        """Total bandwidth of all jobs from the bucket."""
        return sum(share.bytes_per_second for share in self.shares)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that divides the resources of a cluster.

    Attributes:
        name: name of the policy.
        cache: function from jobs and cluster to the cache of each data set.
        bandwidth: function to the bandwidth of each job, from the bandwidth with which each trains at its full rate,
            the miss rate of each, and the total bandwidth.
    """

    name: str
    cache: Callable[[Sequence[Job], Cluster], Caches]
    bandwidth: Callable[[Sequence[float], Sequence[float], float], list[float]]

    def flow(self, jobs: Sequence[Job], cached: Sequence[float], bytes_per_second: float) -> list[tuple[float, float]]:
        """Return for each job its bandwidth from the bucket and its training rate, both in bytes a second.

        Args:
            jobs: the jobs.
            cached: cached bytes that count for each job in this epoch, which may be fewer than the cache holds.
            bytes_per_second: total bandwidth from the bucket.
        """
        missed = [job.missed(cache_bytes) for job, cache_bytes in zip(jobs, cached, strict=True)]
        needed = [job.compute_bytes_per_second * part for job, part in zip(jobs, missed, strict=True)]
        given = self.bandwidth(needed, missed, bytes_per_second)
        return [(rate, job.rate(part, rate)) for job, part, rate in zip(jobs, missed, given, strict=True)]


def allocate(jobs: Sequence[Job], cluster: Cluster, policy: Policy) -> Allocation:
    """Divide the resources of a cluster among jobs.

    Raises:
        ConfigError: two jobs have the same name, or disagree on the size or the nodes of a data set that they share.
    """
    _check(jobs)
    caches = policy.cache(jobs, cluster)
    cached = [caches.get(job.data, 0) for job in jobs]
    given = zip(jobs, cached, policy.flow(jobs, cached, cluster.bytes_per_second), strict=True)
    return Allocation(shares=tuple(Share(job=job, cache_bytes=c, bytes_per_second=b) for job, c, (b, _) in given))


def _check(jobs: Sequence[Job]) -> None:
    names, known = set[str](), dict[Hashable, Job]()
    for job in jobs:
        if job.name in names:
            raise ConfigError(f"two jobs are called {job.name!r}; give each one its own name")
        names.add(job.name)
        first = known.setdefault(job.data, job)
        for field in ("dataset_bytes", "nodes"):
            if getattr(job, field) != getattr(first, field):
                raise ConfigError(
                    f"the jobs {first.name!r} and {job.name!r} share the data set {job.dataset!r}, and "
                    f"{field} is {getattr(first, field)} in one and {getattr(job, field)} in the other: give both the "
                    "same value, or give the data set another name in one of them"
                )


_NO_GAIN = 1 + 1e-9
"""Minimum factor by which a placement must improve the rate for the search to go on."""
_TRIED = 64
"""Maximum number of data sets tried in first place if bandwidth does not suffice."""


def _by_efficiency(jobs: Sequence[Job], rates: Sequence[float], cache_bytes: int) -> Caches:
    """Fill the cache in order of bytes saved per byte cached: the sum of the rates of a data set's jobs over its size.

    With these rates no placement needs less from the bucket. Of equal data sets the smallest is first, since one that
    is cached whole needs nothing from the bucket.
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
    """Give each job the same cache; jobs that share a data set add theirs up."""
    readers = Counter(job.data for job in jobs)
    parts = _filled(cluster.cache_bytes, [job.cacheable_bytes / readers[job.data] for job in jobs])
    caches = dict.fromkeys(readers, 0.0)
    for job, part in zip(jobs, parts, strict=True):
        caches[job.data] += part
    return {data: int(part) for data, part in caches.items()}


def _best_cache(jobs: Sequence[Job], cluster: Cluster) -> Caches:
    """Return the placement with the highest total training rate found.

    The most efficient placement is optimal if the bandwidth suffices for its misses: all jobs train at full rate. If
    not, some jobs stop, and the cache of their data is wasted. To choose these jobs is a knapsack problem, so several
    placements are tried, equal parts among them, and each is improved by placing again with the resulting rates while
    that gains. Neither half of such a round can lower the rate.
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
    """Yield the most efficient placement, equal parts, and placements of whole data sets, each with another first."""
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
    flow = _GREEDY.flow(jobs, [caches[job.data] for job in jobs], cluster.bytes_per_second)
    return [rate for _, rate in flow]


def _in_proportion(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all jobs the same fraction of their need, so that all train at the same fraction of their full rates."""
    part = min(1.0, bytes_per_second / total) if (total := sum(needed)) else 0.0
    return [each * part for each in needed]


def _most_hits_first(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Satisfy jobs in order of rising miss rate; jobs of equal miss rate share in proportion to their need."""
    given = [0.0] * len(needed)
    for _, alike in groupby(sorted(range(len(needed)), key=missed.__getitem__), key=missed.__getitem__):
        places = list(alike)
        parts = _in_proportion([needed[place] for place in places], missed, bytes_per_second)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        bytes_per_second = max(0.0, bytes_per_second - sum(parts))
    return given


def _evenly(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all jobs the same bandwidth, as a network does that their connections share."""
    return _filled(bytes_per_second, needed)


def _filled(total: float, caps: Sequence[float]) -> list[float]:
    """Divide a total evenly with a cap for each part (water-filling): the rest of a capped part goes to the others."""
    parts = [0.0] * len(caps)
    for place, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        parts[index] = min(caps[index], total / (len(caps) - place))
        total -= parts[index]
    return parts


_GREEDY = Policy("greedy", _best_cache, _most_hits_first)
_POLICIES = (
    _GREEDY,
    Policy("max-min", _efficient_cache, _in_proportion),
    Policy("equal", _even_cache, _evenly),
    Policy("no-cache", lambda jobs, cluster: {}, _evenly),
)
POLICIES = {policy.name: policy for policy in _POLICIES}
"""Policies by name: highest total rate; largest equal fraction of the full rates; equal parts; and no cache."""


_ENDED = 1e-9
"""Remaining fraction of an epoch at which it counts as read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(Bounded):
    """A job in the queue.

    Attributes:
        job: the job.
        seconds: time of its submission, in seconds.
        epochs: number of epochs that it trains.
        gpus: number of GPUs that it holds while it runs.

    Raises:
        ConfigError: a number is out of bounds.
    """

    job: Job
    seconds: Finite[NotNegative[float]]
    epochs: AtLeastOne[int]
    gpus: AtLeastOne[int] = 1

    @property
    def least_seconds(self) -> float:
        """Duration without other jobs and with all its data cached, in seconds."""
        return self.epochs * self.job.dataset_bytes / self.job.compute_bytes_per_second


@dataclass(frozen=True, slots=True)
class Completion:
    """A completed job.

    Attributes:
        submission: the submission of the job.
        started_seconds: time at which it got its GPUs, in seconds.
        ended_seconds: time at which its last epoch ended, in seconds.
    """

    submission: Submission
    started_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """Job completion time, from submission to end, in seconds."""
        return self.ended_seconds - self.submission.seconds


@dataclass(slots=True)
class _Running:
    """A running job: the rest of its work, and the cached bytes that count in this epoch."""

    submission: Submission
    started_seconds: float
    epochs_left: int
    left_bytes: float
    counted_bytes: float


def completions(submissions: Sequence[Submission], cluster: Cluster, gpus: int, policy: Policy) -> list[Completion]:
    """Run a queue, first in, first out, and return the jobs in the order in which they end.

    Args:
        submissions: jobs in any order.
        cluster: cache and bandwidth that the jobs share.
        gpus: number of GPUs of the cluster.
        policy: policy that divides cache and bandwidth.

    Raises:
        ConfigError: a job wants more GPUs than there are, or the bandwidth is 0, so that no cache can fill.
    """
    for each in submissions:
        if each.gpus > gpus:
            raise ConfigError(f"the job {each.job.name!r} wants {counted(each.gpus, 'GPU')}, and there are {gpus}")
    if not cluster.bytes_per_second > 0:
        raise ConfigError("bytes_per_second of the cluster must be more than 0 for jobs to read their data")
    return _Queue(submissions, cluster, gpus, policy).run()


class _Queue:
    def __init__(self, submissions: Sequence[Submission], cluster: Cluster, gpus: int, policy: Policy) -> None:
        self._coming = deque(sorted(submissions, key=lambda each: each.seconds))
        self._cluster, self._free_gpus, self._policy = cluster, gpus, policy
        self._now_seconds = 0.0
        self._running: list[_Running] = []
        self._resident: dict[Hashable, float] = {}
        self._done: list[Completion] = []
        self._changed = True

    def run(self) -> list[Completion]:
        """Advance from event to event, submissions and ends of epochs; divide the cache when a job starts or ends."""
        caches: Caches = {}
        while self._coming or self._running:
            self._start()
            if self._changed:
                caches = self._place()
            jobs = [each.submission.job for each in self._running]
            counted_bytes = [each.counted_bytes for each in self._running]
            flow = self._policy.flow(jobs, counted_bytes, self._cluster.bytes_per_second)
            seconds = self._until_next([rate for _, rate in flow])
            self._now_seconds += seconds
            for each, (arriving, rate) in zip(self._running, flow, strict=True):
                each.left_bytes -= rate * seconds
                self._fill(each.submission.job, arriving * seconds, caches)
            self._end_epochs()
        return self._done

    def _start(self) -> None:
        """Start submitted jobs in order until the first one whose GPUs are not free."""
        while self._coming and self._coming[0].seconds <= self._now_seconds:
            if self._coming[0].gpus > self._free_gpus:
                break
            each = self._coming.popleft()
            self._free_gpus -= each.gpus
            self._changed = True
            job = each.job
            kept = self._resident.get(job.data, 0.0)
            self._running.append(_Running(each, self._now_seconds, each.epochs, job.dataset_bytes, kept))

    def _place(self) -> Caches:
        """Divide the cache; cached bytes above a data set's new part are lost at once."""
        caches = self._policy.cache([each.submission.job for each in self._running], self._cluster)
        self._resident = {data: min(self._resident.get(data, 0.0), room) for data, room in caches.items()}
        for each in self._running:
            each.counted_bytes = min(each.counted_bytes, self._resident.get(each.submission.job.data, 0.0))
        self._changed = False
        return caches

    def _fill(self, job: Job, arrived_bytes: float, caches: Caches) -> None:
        if job.data in caches:
            self._resident[job.data] = min(caches[job.data], self._resident[job.data] + arrived_bytes)

    def _until_next(self, rates: Sequence[float]) -> float:
        waits = [each.left_bytes / rate for each, rate in zip(self._running, rates, strict=True) if rate]
        if self._coming and self._coming[0].seconds > self._now_seconds:
            waits.append(self._coming[0].seconds - self._now_seconds)
        return min(waits, default=math.inf)

    def _end_epochs(self) -> None:
        for each in list(self._running):
            job = each.submission.job
            if each.left_bytes > job.dataset_bytes * _ENDED:
                continue
            each.epochs_left -= 1
            each.left_bytes, each.counted_bytes = job.dataset_bytes, self._resident.get(job.data, 0.0)
            if not each.epochs_left:
                self._running.remove(each)
                self._changed = True
                self._free_gpus += each.submission.gpus
                self._done.append(Completion(each.submission, each.started_seconds, self._now_seconds))
