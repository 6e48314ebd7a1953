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

from stoker._base.arguments import AtLeastOne, BoundedConfig, Finite, NotNegative, Positive
from stoker._base.sizes import format_count
from stoker.errors import ConfigError

CacheByDataset = Mapping[Hashable, int]
"""Cached bytes of each data set, on all its nodes together, by :attr:`Job.dataset_key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(BoundedConfig):
    """A training job.

    Attributes:
        name: name of the job.
        dataset: name of its data set; jobs with the same one share its cache. None if no other job reads it.
        dataset_bytes: size of the data set, in bytes.
        compute_bytes_per_second: rate at which it trains without waiting for data, on all its nodes together.
        nodes: number of machines. A node reads another part of the data set in each epoch.
        shares_caches: whether the caches of all nodes serve each of them; else only its own cache serves a node.
    """

    name: str
    dataset: str | None = None
    dataset_bytes: Finite[Positive[int]]
    compute_bytes_per_second: Finite[Positive[float]]
    nodes: Finite[AtLeastOne[int]] = 1
    shares_caches: bool = False

    @property
    def dataset_key(self) -> Hashable:
        """Key of its data set, equal for jobs that share it."""
        return (self.dataset,) if self.dataset is not None else (None, self.name)

    @property
    def cacheable_bytes(self) -> int:
        """Cache on all its nodes together with which it reads nothing from the bucket, in bytes."""
        return self.dataset_bytes * (1 if self.shares_caches else self.nodes)

    def miss_rate(self, cache_bytes: float) -> float:
        """Return the miss rate, 0 to 1, with ``cache_bytes`` of cache on all its nodes together."""
        return max(0.0, 1.0 - cache_bytes / self.cacheable_bytes)

    def rate(self, miss_rate: float, bytes_per_second: float) -> float:
        """Return the rate at which it trains, in bytes a second: SiloD's estimate.

        Args:
            miss_rate: fraction of its reads that go to the bucket, 0 to 1.
            bytes_per_second: bandwidth from the bucket.
        """
        if bytes_per_second >= self.compute_bytes_per_second * miss_rate:
            return self.compute_bytes_per_second
        return bytes_per_second / miss_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(BoundedConfig):
    """The resources that jobs share.

    Attributes:
        cache_bytes: cache of all nodes together, in bytes.
        bytes_per_second: bandwidth from the bucket.
    """

    cache_bytes: Finite[NotNegative[int]]
    bytes_per_second: Finite[NotNegative[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShare:
    """Allocation of one job.

    Attributes:
        job: the job.
        cache_bytes: cache of its data set, on all its nodes together; jobs that share the data set share it.
        bytes_per_second: bandwidth from the bucket.
    """

    job: TrainingJob
    cache_bytes: int
    bytes_per_second: float

    @property
    def hit_rate(self) -> float:
        """Fraction of its reads that the cache serves from the second epoch on, 0 to 1."""
        return 1.0 - self.job.miss_rate(self.cache_bytes)

    @property
    def rate(self) -> float:
        """Rate at which it trains from the second epoch on, in bytes a second."""
        return self.job.rate(self.job.miss_rate(self.cache_bytes), self.bytes_per_second)

    @property
    def is_compute_bound(self) -> bool:
        """Whether it never waits for data, to within a millionth."""
        return self.rate >= self.job.compute_bytes_per_second * (1 - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Allocation of all jobs, in the order of the jobs."""

    shares: tuple[JobShare, ...]

    @property
    def rate(self) -> float:
        """Total rate at which the jobs train, in bytes a second."""
        return sum(share.rate for share in self.shares)

    @property
    def cache_bytes(self) -> int:
        """Total cache of all data sets, in bytes."""
        return sum({share.job.dataset_key: share.cache_bytes for share in self.shares}.values())

    @property
    def bytes_per_second(self) -> float:
        """Total bandwidth of all jobs from the bucket."""
        return sum(share.bytes_per_second for share in self.shares)


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """A policy that divides the resources of a cluster.

    Attributes:
        name: name of the policy.
        divide_cache: function from jobs and cluster to the cache of each data set.
        divide_bandwidth: function to the bandwidth of each job, from the bandwidth with which each trains at its full
            rate, the miss rate of each, and the total bandwidth.
    """

    name: str
    divide_cache: Callable[[Sequence[TrainingJob], Cluster], CacheByDataset]
    divide_bandwidth: Callable[[Sequence[float], Sequence[float], float], list[float]]

    def training_rates(
        self, jobs: Sequence[TrainingJob], cached: Sequence[float], bytes_per_second: float
    ) -> list[tuple[float, float]]:
        """Return for each job its bandwidth from the bucket and its training rate, both in bytes a second.

        Args:
            jobs: the jobs.
            cached: cached bytes that count for each job in this epoch, which may be fewer than the cache holds.
            bytes_per_second: total bandwidth from the bucket.
        """
        missed = [job.miss_rate(cache_bytes) for job, cache_bytes in zip(jobs, cached, strict=True)]
        needed = [job.compute_bytes_per_second * part for job, part in zip(jobs, missed, strict=True)]
        given = self.divide_bandwidth(needed, missed, bytes_per_second)
        return [(rate, job.rate(part, rate)) for job, part, rate in zip(jobs, missed, given, strict=True)]


def allocate(jobs: Sequence[TrainingJob], cluster: Cluster, policy: AllocationPolicy) -> Allocation:
    """Divide the resources of a cluster among jobs.

    Raises:
        ConfigError: two jobs have the same name, or disagree on the size, the nodes or the caches of a data set that
            they share.
    """
    _check(jobs)
    caches = policy.divide_cache(jobs, cluster)
    cached = [caches.get(job.dataset_key, 0) for job in jobs]
    given = zip(jobs, cached, policy.training_rates(jobs, cached, cluster.bytes_per_second), strict=True)
    return Allocation(shares=tuple(JobShare(job=job, cache_bytes=c, bytes_per_second=b) for job, c, (b, _) in given))


def _check(jobs: Sequence[TrainingJob]) -> None:
    names, known = set[str](), dict[Hashable, TrainingJob]()
    for job in jobs:
        if job.name in names:
            raise ConfigError(f"two jobs are called {job.name!r}; give each one its own name")
        names.add(job.name)
        first = known.setdefault(job.dataset_key, job)
        for field in ("dataset_bytes", "nodes", "shares_caches"):
            if getattr(job, field) != getattr(first, field):
                raise ConfigError(
                    f"the jobs {first.name!r} and {job.name!r} share the data set {job.dataset!r}, and "
                    f"{field} is {getattr(first, field)} in one and {getattr(job, field)} in the other: give both the "
                    "same value, or give the data set another name in one of them"
                )


_MIN_GAIN_FACTOR = 1 + 1e-9
"""Minimum factor by which a placement must improve the rate for the search to go on."""
_MAX_FIRST_DATASETS = 64
"""Maximum number of data sets tried in first place if bandwidth does not suffice."""


def _divide_cache_by_efficiency(
    jobs: Sequence[TrainingJob], rates: Sequence[float], cache_bytes: int
) -> CacheByDataset:
    """Fill the cache in order of bytes saved per byte cached: the sum of the rates of a data set's jobs over its size.

    With these rates no placement needs less from the bucket. Of equal data sets the smallest is first, since one that
    is cached whole needs nothing from the bucket.
    """
    sizes = {job.dataset_key: job.cacheable_bytes for job in jobs}
    saved, possible = (dict.fromkeys(sizes, 0.0) for _ in range(2))
    for job, rate in zip(jobs, rates, strict=True):
        saved[job.dataset_key] += rate / job.cacheable_bytes
        possible[job.dataset_key] += job.compute_bytes_per_second / job.cacheable_bytes
    caches = {}
    for data in sorted(sizes, key=lambda data: (-saved[data], -possible[data], sizes[data])):
        caches[data] = min(cache_bytes, sizes[data])
        cache_bytes -= caches[data]
    return caches


def _divide_cache_at_full_rates(jobs: Sequence[TrainingJob], cluster: Cluster) -> CacheByDataset:
    return _divide_cache_by_efficiency(jobs, [job.compute_bytes_per_second for job in jobs], cluster.cache_bytes)


def _divide_cache_evenly(jobs: Sequence[TrainingJob], cluster: Cluster) -> CacheByDataset:
    """Give each job the same cache; jobs that share a data set add theirs up."""
    readers = Counter(job.dataset_key for job in jobs)
    parts = _water_fill(cluster.cache_bytes, [job.cacheable_bytes / readers[job.dataset_key] for job in jobs])
    caches = dict.fromkeys(readers, 0.0)
    for job, part in zip(jobs, parts, strict=True):
        caches[job.dataset_key] += part
    return {data: int(part) for data, part in caches.items()}


def _search_best_cache(jobs: Sequence[TrainingJob], cluster: Cluster) -> CacheByDataset:
    """Return the placement with the highest total training rate found.

    The most efficient placement is optimal if the bandwidth suffices for its misses: all jobs train at full rate. If
    not, some jobs stop, and the cache of their data is wasted. To choose these jobs is a knapsack problem, so several
    placements are tried, equal parts among them, and each is improved by placing again with the resulting rates while
    that gains. Neither half of such a round can lower the rate.
    """
    full = sum(job.compute_bytes_per_second for job in jobs)
    best: CacheByDataset = {}
    best_rate = -1.0
    for caches in _candidate_caches(jobs, cluster):
        rate, better = _improve_cache(jobs, cluster, caches)
        if rate > best_rate:
            best_rate, best = rate, better
        if best_rate * _MIN_GAIN_FACTOR >= full:
            break
    return best


def _candidate_caches(jobs: Sequence[TrainingJob], cluster: Cluster) -> Iterator[CacheByDataset]:
    """Yield the most efficient placement, equal parts, and placements of whole data sets, each with another first."""
    efficient = _divide_cache_at_full_rates(jobs, cluster)
    yield efficient
    yield _divide_cache_evenly(jobs, cluster)
    sizes = {job.dataset_key: job.cacheable_bytes for job in jobs}
    for first in list(efficient)[:_MAX_FIRST_DATASETS]:
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


def _improve_cache(
    jobs: Sequence[TrainingJob], cluster: Cluster, caches: CacheByDataset
) -> tuple[float, CacheByDataset]:
    rates = _greedy_rates(jobs, cluster, caches)
    while True:
        other = _divide_cache_by_efficiency(jobs, rates, cluster.cache_bytes)
        others = _greedy_rates(jobs, cluster, other)
        if sum(others) <= sum(rates) * _MIN_GAIN_FACTOR:
            return sum(rates), caches
        rates, caches = others, other


def _greedy_rates(jobs: Sequence[TrainingJob], cluster: Cluster, caches: CacheByDataset) -> list[float]:
    flow = _GREEDY.training_rates(jobs, [caches[job.dataset_key] for job in jobs], cluster.bytes_per_second)
    return [rate for _, rate in flow]


def _divide_in_proportion(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all jobs the same fraction of their need, so that all train at the same fraction of their full rates."""
    part = min(1.0, bytes_per_second / total) if (total := sum(needed)) else 0.0
    return [each * part for each in needed]


def _divide_by_miss_rate(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Satisfy jobs in order of rising miss rate; jobs of equal miss rate share in proportion to their need."""
    given = [0.0] * len(needed)
    for _, alike in groupby(sorted(range(len(needed)), key=missed.__getitem__), key=missed.__getitem__):
        places = list(alike)
        parts = _divide_in_proportion([needed[place] for place in places], missed, bytes_per_second)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        bytes_per_second = max(0.0, bytes_per_second - sum(parts))
    return given


def _divide_evenly(needed: Sequence[float], missed: Sequence[float], bytes_per_second: float) -> list[float]:
    """Give all jobs the same bandwidth, as a network does that their connections share."""
    return _water_fill(bytes_per_second, needed)


def _water_fill(total: float, caps: Sequence[float]) -> list[float]:
    """Divide a total evenly with a cap for each part (water-filling): the rest of a capped part goes to the others."""
    parts = [0.0] * len(caps)
    for place, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        parts[index] = min(caps[index], total / (len(caps) - place))
        total -= parts[index]
    return parts


_GREEDY = AllocationPolicy("greedy", _search_best_cache, _divide_by_miss_rate)
_POLICIES = (
    _GREEDY,
    AllocationPolicy("max-min", _divide_cache_at_full_rates, _divide_in_proportion),
    AllocationPolicy("equal", _divide_cache_evenly, _divide_evenly),
    AllocationPolicy("no-cache", lambda jobs, cluster: {}, _divide_evenly),
)
POLICIES = {policy.name: policy for policy in _POLICIES}
"""Policies by name: highest total rate; largest equal fraction of the full rates; equal parts; and no cache."""


_END_TOLERANCE = 1e-9
"""Remaining fraction of an epoch at which it counts as read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(BoundedConfig):
    """A job in the queue.

    Attributes:
        job: the job.
        seconds: time of its submission, in seconds.
        epochs: number of epochs that it trains.
        gpus: number of GPUs that it holds while it runs.

    Raises:
        ConfigError: a number is out of bounds.
    """

    job: TrainingJob
    seconds: Finite[NotNegative[float]]
    epochs: AtLeastOne[int]
    gpus: AtLeastOne[int] = 1

    @property
    def min_seconds(self) -> float:
        """Duration without other jobs and with all its data cached, in seconds."""
        return self.epochs * self.job.dataset_bytes / self.job.compute_bytes_per_second


@dataclass(frozen=True, slots=True)
class JobCompletion:
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
    def duration_seconds(self) -> float:
        """Job completion time, from submission to end, in seconds."""
        return self.ended_seconds - self.submission.seconds


@dataclass(slots=True)
class _RunningJob:
    """A running job: the rest of its work, and the cached bytes that count in this epoch."""

    submission: Submission
    started_seconds: float
    epochs_left: int
    left_bytes: float
    counted_bytes: float


def simulate_queue(
    submissions: Sequence[Submission], cluster: Cluster, gpus: int, policy: AllocationPolicy
) -> list[JobCompletion]:
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
            raise ConfigError(f"the job {each.job.name!r} wants {format_count(each.gpus, 'GPU')}, and there are {gpus}")
    if not cluster.bytes_per_second > 0:
        raise ConfigError("bytes_per_second of the cluster must be more than 0 for jobs to read their data")
    return _Queue(submissions, cluster, gpus, policy).run()


class _Queue:
    def __init__(
        self, submissions: Sequence[Submission], cluster: Cluster, gpus: int, policy: AllocationPolicy
    ) -> None:
        self._pending = deque(sorted(submissions, key=lambda each: each.seconds))
        self._cluster, self._free_gpus, self._policy = cluster, gpus, policy
        self._now_seconds = 0.0
        self._running: list[_RunningJob] = []
        self._cached_bytes: dict[Hashable, float] = {}
        self._completions: list[JobCompletion] = []
        self._must_divide = True

    def run(self) -> list[JobCompletion]:
        """Advance from event to event, submissions and ends of epochs; divide the cache when a job starts or ends."""
        caches: CacheByDataset = {}
        while self._pending or self._running:
            self._start()
            if self._must_divide:
                caches = self._divide_cache()
            jobs = [each.submission.job for each in self._running]
            counted_bytes = [each.counted_bytes for each in self._running]
            flow = self._policy.training_rates(jobs, counted_bytes, self._cluster.bytes_per_second)
            seconds = self._until_next([rate for _, rate in flow])
            self._now_seconds += seconds
            for each, (arriving, rate) in zip(self._running, flow, strict=True):
                each.left_bytes -= rate * seconds
                self._fill(each.submission.job, arriving * seconds, caches)
            self._end_epochs()
        return self._completions

    def _start(self) -> None:
        """Start submitted jobs in order until the first one whose GPUs are not free."""
        while self._pending and self._pending[0].seconds <= self._now_seconds:
            if self._pending[0].gpus > self._free_gpus:
                break
            each = self._pending.popleft()
            self._free_gpus -= each.gpus
            self._must_divide = True
            job = each.job
            cached_bytes = self._cached_bytes.get(job.dataset_key, 0.0)
            self._running.append(_RunningJob(each, self._now_seconds, each.epochs, job.dataset_bytes, cached_bytes))

    def _divide_cache(self) -> CacheByDataset:
        """Divide the cache; cached bytes above a data set's new part are lost at once."""
        caches = self._policy.divide_cache([each.submission.job for each in self._running], self._cluster)
        self._cached_bytes = {data: min(self._cached_bytes.get(data, 0.0), room) for data, room in caches.items()}
        for each in self._running:
            each.counted_bytes = min(each.counted_bytes, self._cached_bytes.get(each.submission.job.dataset_key, 0.0))
        self._must_divide = False
        return caches

    def _fill(self, job: TrainingJob, arrived_bytes: float, caches: CacheByDataset) -> None:
        if job.dataset_key in caches:
            self._cached_bytes[job.dataset_key] = min(
                caches[job.dataset_key], self._cached_bytes[job.dataset_key] + arrived_bytes
            )

    def _until_next(self, rates: Sequence[float]) -> float:
        waits = [each.left_bytes / rate for each, rate in zip(self._running, rates, strict=True) if rate]
        if self._pending and self._pending[0].seconds > self._now_seconds:
            waits.append(self._pending[0].seconds - self._now_seconds)
        return min(waits, default=math.inf)

    def _end_epochs(self) -> None:
        for each in list(self._running):
            job = each.submission.job
            if each.left_bytes > job.dataset_bytes * _END_TOLERANCE:
                continue
            each.epochs_left -= 1
            each.left_bytes, each.counted_bytes = job.dataset_bytes, self._cached_bytes.get(job.dataset_key, 0.0)
            if not each.epochs_left:
                self._running.remove(each)
                self._must_divide = True
                self._free_gpus += each.submission.gpus
                self._completions.append(JobCompletion(each.submission, each.started_seconds, self._now_seconds))
