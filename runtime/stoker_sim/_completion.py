"""When jobs in a queue are done: a cluster whose policy divides cache and bandwidth anew whenever one comes or goes.

Data flows as a fluid: between two events every job trains at the rate of SiloD's estimate. A job's cache fills as it
reads, and what it adds counts for it from its next epoch on, since each sample is read once an epoch. What a policy
takes from a data set is lost and must be read again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from stoker._base.sizes import counted
from stoker.errors import ConfigError
from stoker_sim._allocation import Caches, Cluster, Job, Policy

__all__ = ["Completion", "Submission", "completions"]

_ENDED = 1e-9
"""Of an epoch: what is left of it when it counts as read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job in the queue.

    Attributes:
        job: what it is.
        seconds: when it is handed in.
        epochs: how many it trains.
        gpus: that it holds while it runs.

    Raises:
        ConfigError: a number cannot be.
    """

    job: Job
    seconds: float
    epochs: int
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf or self.epochs < 1 or self.gpus < 1:
            raise ConfigError(
                f"the job {self.job.name!r} is handed in at a time from 0, for 1 epoch and on 1 GPU at least, not at "
                f"{self.seconds} s, for {self.epochs} and on {self.gpus}"
            )

    @property
    def least_seconds(self) -> float:
        """What it takes alone, with all its data at hand."""
        return self.epochs * self.job.dataset_bytes / self.job.compute_bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A job that is done.

    Attributes:
        submission: which.
        started_seconds: when it got its GPUs.
        ended_seconds: when its last epoch ended.
    """

    submission: Submission
    started_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """The job completion time: from handing in to the end."""
        return self.ended_seconds - self.submission.seconds


@dataclass(slots=True)
class _Running:
    """A job that trains: what is left to do, and what of the cache counts in this epoch."""

    submission: Submission
    started_seconds: float
    epochs_left: int
    left_bytes: float
    counted_bytes: float

    @property
    def missed(self) -> float:
        return self.submission.job.missed(self.counted_bytes)


def completions(submissions: Sequence[Submission], cluster: Cluster, gpus: int, policy: Policy) -> list[Completion]:
    """Run a queue, first in, first out, and return the jobs in the order in which they end.

    Raises:
        ConfigError: a job wants more GPUs than there are, or nothing comes from the bucket, so that no cache can fill.
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
        """Go from event to event: a job comes, or an epoch ends. The cache is divided anew when a job comes or goes."""
        caches: Caches = {}
        while self._coming or self._running:
            self._start()
            if self._changed:
                caches = self._place()
            jobs = [each.submission.job for each in self._running]
            missed = [each.missed for each in self._running]
            given = self._policy.bandwidth(jobs, missed, self._cluster.bytes_per_second)
            rates = [job.rate(*each) for job, each in zip(jobs, zip(missed, given, strict=True), strict=True)]
            seconds = self._until_next(rates)
            self._now_seconds += seconds
            for each, rate, arriving in zip(self._running, rates, given, strict=True):
                each.left_bytes -= rate * seconds
                self._fill(each.submission.job, arriving * seconds, caches)
            self._end_epochs()
        return self._done

    def _start(self) -> None:
        """Let jobs begin that have come, in line, as long as the first finds its GPUs free."""
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
        """Divide the cache; what is over a data set's part is lost at once."""
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
                self._done.append(
                    Completion(
                        submission=each.submission,
                        started_seconds=each.started_seconds,
                        ended_seconds=self._now_seconds,
                    )
                )
