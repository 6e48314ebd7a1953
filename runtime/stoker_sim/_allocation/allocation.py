"""Who gets how much cache and how much of the way to the bucket, where jobs share both.

The model is SiloD's (H. Zhao and others, "SiloD: A Co-design of Caching and Scheduling for Deep Learning Clusters",
EuroSys 2023): a job that computes ``f*`` bytes a second, reads a data set of ``d`` bytes once an epoch in random order,
has ``c`` of them cached and ``b`` bytes a second from the bucket, trains ``f = min(f*, b / (1 - c/d))`` bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["Allocation", "Caches", "Cluster", "Job", "Policy", "Share", "allocate"]

Caches = Mapping[Hashable, int]
"""What is cached of each data set, in bytes on all its nodes together, by :attr:`Job.data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One that trains.

    Attributes:
        name: of it.
        dataset: what it reads; jobs that name the same one share what is cached of it. None: nobody else reads it.
        dataset_bytes: of all of it.
        compute_bytes_per_second: what it trains while it never waits for data, on all its nodes together.
        nodes: machines with a cache each. A node keeps for itself, and reads another part in each epoch, so only its
            own cache serves it.
    """

    name: str
    dataset: str | None = None
    dataset_bytes: int
    compute_bytes_per_second: float
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("dataset_bytes", "compute_bytes_per_second", "nodes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} of the job {self.name!r} must be more than 0 and finite, not {getattr(self, name)}"
                )

    @property
    def data(self) -> Hashable:
        """What it reads, equal for jobs that share it."""
        return (self.dataset,) if self.dataset is not None else (None, self.name)

    @property
    def cacheable_bytes(self) -> int:
        """What caches on all its nodes need so that it reads nothing from the bucket."""
        return self.dataset_bytes * self.nodes

    def missed(self, cache_bytes: float) -> float:
        """Return the part of its reads, 0 to 1, that so much cache on all its nodes together does not serve."""
        return max(0.0, 1.0 - cache_bytes / self.cacheable_bytes)

    def rate(self, missed: float, bytes_per_second: float) -> float:
        """Return the bytes that it trains a second: SiloD's estimate.

        Args:
            missed: the part of its reads that goes to the bucket.
            bytes_per_second: from the bucket.
        """
        if bytes_per_second >= self.compute_bytes_per_second * missed:
            return self.compute_bytes_per_second
        return bytes_per_second / missed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What jobs share.

    Attributes:
        cache_bytes: on all nodes together.
        bytes_per_second: from the bucket.
    """

    cache_bytes: int
    bytes_per_second: float

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "bytes_per_second"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} of the cluster must be at least 0 and finite, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a job gets.

    Attributes:
        job: who.
        cache_bytes: of its data set, on all its nodes together; jobs that share the data set share these.
        bytes_per_second: from the bucket.
    """

    job: Job
    cache_bytes: int
    bytes_per_second: float

    @property
    def hit_rate(self) -> float:
        """The part of its reads that the cache serves, from the second epoch on."""
        return 1.0 - self.job.missed(self.cache_bytes)

    @property
    def rate(self) -> float:
        """The bytes that it trains a second, from the second epoch on."""
        return self.job.rate(self.job.missed(self.cache_bytes), self.bytes_per_second)

    @property
    def is_compute_bound(self) -> bool:
        """Whether it never waits for data, to a millionth."""
        return self.rate >= self.job.compute_bytes_per_second * (1 - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What every job gets, in the order of the jobs."""

    shares: tuple[Share, ...]

    @property
    def rate(self) -> float:
        """The bytes that all jobs train a second."""
        return sum(share.rate for share in self.shares)

    @property
    def cache_bytes(self) -> int:
        """What is cached of all data sets."""
        return sum({share.job.data: share.cache_bytes for share in self.shares}.values())

    @property
    def bytes_per_second(self) -> float:
        """What all jobs get from the bucket."""
        return sum(share.bytes_per_second for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way to divide.

    Attributes:
        name: of it.
        cache: gives each data set its cache.
        bandwidth: gives each job its bytes a second, for jobs that miss such parts of their reads. What is cached may
            count only later, so this is asked by itself.
    """

    name: str
    cache: Callable[[Sequence[Job], Cluster], Caches]
    bandwidth: Callable[[Sequence[Job], Sequence[float], float], list[float]]


def allocate(jobs: Sequence[Job], cluster: Cluster, policy: Policy) -> Allocation:
    """Divide what a cluster has.

    Raises:
        ConfigError: two jobs have one name, or disagree on the size or the nodes of a data set that they share.
    """
    _check(jobs)
    caches = policy.cache(jobs, cluster)
    cached = [caches.get(job.data, 0) for job in jobs]
    missed = [job.missed(cache_bytes) for job, cache_bytes in zip(jobs, cached, strict=True)]
    rates = policy.bandwidth(jobs, missed, cluster.bytes_per_second)
    given = zip(jobs, cached, rates, strict=True)
    return Allocation(shares=tuple(Share(job=job, cache_bytes=c, bytes_per_second=b) for job, c, b in given))


def _check(jobs: Sequence[Job]) -> None:
    names, known = set[str](), dict[Hashable, Job]()
    for job in jobs:
        if job.name in names:
            raise ConfigError(f"two jobs are called {job.name!r}; give each a name of its own")
        names.add(job.name)
        first = known.setdefault(job.data, job)
        for field in ("dataset_bytes", "nodes"):
            if getattr(job, field) != getattr(first, field):
                raise ConfigError(
                    f"the jobs {first.name!r} and {job.name!r} share the data set {job.dataset!r}, and "
                    f"{field} is {getattr(first, field)} in one and {getattr(job, field)} in the other: they share its "
                    "cache only on the same nodes; else name the data set differently"
                )
