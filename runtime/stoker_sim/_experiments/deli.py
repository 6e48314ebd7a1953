"""DELI's loader, which reads sample by sample, in virtual time, and its two workloads.

N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
Storage" (IC2E 2021), section V-A; its measurements are condensed from the authors' repository, cake-lab/DELI (MIT).
:class:`~stoker._fetch.config.FetchSize` decides when to fetch and :class:`~stoker._cache.eviction.Fifo` what to evict,
as in a loader; the durations of requests are modelled. The figures of the workloads are the paper's, the authors'
measurements, and fitted constants.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from stoker._base.clock import run_virtual
from stoker._base.task_group import task_group
from stoker._cache.eviction import CacheEntries, Fifo
from stoker._fetch.config import FetchSize, Progress
from stoker_sim._bucket import ProcessorSharing
from stoker_sim._experiments import load_published_rows
from stoker_sim._scenario import EpochResult

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """Durations of the operations on one sample, in seconds.

    Attributes:
        get_seconds: read from the bucket by the training loop.
        hit_seconds: read from the cache.
        insert_seconds: insertion into the cache by the training loop.
        list_page_seconds: one page of the listing that precedes each fetch; 0 if nothing is listed.
        fetch_seconds: share of one sample in a fetch by the service: read and insertion.
        contention: slowdown of concurrent fetches, apart from sharing the processors: the rate of each is divided by
            1 + contention · (fetches - 1).
    """

    get_seconds: float
    hit_seconds: float = 0.0
    insert_seconds: float = 0.0
    list_page_seconds: float = 0.0
    fetch_seconds: float = 0.0
    contention: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliWorkload:
    """Training of one of several equal nodes.

    Attributes:
        name: name in the measurements.
        title: title in figures.
        dataset_samples: samples of the training set, all of which are listed; 70% of it is partitioned among three
            nodes again in each epoch.
        node_samples: samples of one node in an epoch.
        compute_seconds: compute time of an epoch's steps beside its fetches, in seconds.
        sample_bytes: size of a sample in the cache, in bytes.
        costs: durations of operations, fitted by ``python -m benchmarks.deli_calibration``.
        processors: cores of the node. A step keeps as many threads busy, a fetch one, and all threads share the cores
            evenly: while a step computes on 2 cores, one fetch runs at 2/3 of its rate.
    """

    name: str
    title: str
    dataset_samples: int
    node_samples: int
    compute_seconds: float
    sample_bytes: int
    costs: SampleCosts
    processors: int = 2


@dataclass(frozen=True, slots=True)
class DeliSetting:
    """A configuration of DELI.

    Attributes:
        fetch_size: samples of one fetch; 0 fetches nothing ahead, and the training loop fills the cache.
        threshold: number of fetched samples left at which the next fetch starts.
        cache_samples: capacity of the cache, in samples; None for unlimited, 0 for no cache.
        batch_size: samples of a step, all of which are drawn before the first one is read.
    """

    fetch_size: int = 0
    threshold: int = 0
    cache_samples: int | None = None
    batch_size: int = 512


@dataclass(slots=True, kw_only=True)
class SampleEpoch(EpochResult):
    """Result of an epoch, whose look-ups and misses count samples.

    Attributes:
        fetches: number of fetches requested of the service.
    """

    fetches: int = 0


def simulate_samples(workload: DeliWorkload, setting: DeliSetting) -> list[SampleEpoch]:
    """Simulate one node and return its epochs; the same arguments give the same result."""
    return run_virtual(_TrainingLoop(workload, setting).run())


class _TrainingLoop:
    """A training loop with a sampler, a cache and a service."""

    def __init__(self, workload: DeliWorkload, setting: DeliSetting) -> None:
        self._workload, self._setting, self._costs = workload, setting, workload.costs
        self._schedule = FetchSize(setting.fetch_size, setting.threshold) if setting.fetch_size else None
        capacity = _UNLIMITED if setting.cache_samples is None else setting.cache_samples
        self._cache: CacheEntries[int] = CacheEntries(Fifo(), capacity)
        self._processors = ProcessorSharing(self._fetch_rate)
        self._epochs: list[SampleEpoch] = []

    async def run(self) -> list[SampleEpoch]:
        rng = np.random.default_rng(_SEED)
        async with task_group() as service:
            for _ in EPOCHS:
                samples = rng.permutation(self._workload.dataset_samples)[: self._workload.node_samples].tolist()
                await self._train(samples, service)
        return self._epochs

    async def _train(self, samples: Sequence[int], service: asyncio.TaskGroup) -> None:
        loop, batch_size = asyncio.get_running_loop(), self._setting.batch_size
        now = SampleEpoch(rank=0, epoch=len(self._epochs))
        self._epochs.append(now)
        begun_seconds, fetched = loop.time(), 0
        for start in range(0, len(samples), batch_size):
            batch = samples[start : start + batch_size]
            for drawn in range(start, start + len(batch)):  # the whole batch is drawn before it is read
                if fetched < len(samples) and (wanted := self._fetch_samples(fetched - drawn)):
                    service.create_task(self._fetch(samples[fetched : fetched + wanted]))
                    fetched = min(fetched + wanted, len(samples))
                    now.fetches += 1
            await asyncio.sleep(0)  # let requested fetches start
            asked_seconds = loop.time()
            await self._read(batch, now)
            now.wait_seconds += loop.time() - asked_seconds
            await self._compute(self._workload.compute_seconds * len(batch) / len(samples))
        now.seconds = loop.time() - begun_seconds

    async def _compute(self, seconds: float) -> None:
        """Compute for ``seconds``, during which fetches have only a part of the processors."""
        self._processors.set_rate(partial(self._fetch_rate, step_threads=self._workload.processors))
        await asyncio.sleep(seconds)
        self._processors.set_rate(self._fetch_rate)

    def _fetch_rate(self, fetches: int, step_threads: int = 0) -> float:
        """Return the rate of each of several concurrent fetches, relative to a single one."""
        share = min(1.0, self._workload.processors / (fetches + step_threads))
        return share / (1.0 + self._costs.contention * (fetches - 1))

    def _fetch_samples(self, queued: int) -> int:
        """Return the number of samples to fetch if ``queued`` are fetched and not drawn yet."""
        if self._schedule is None:
            return 0
        return self._schedule.admit(Progress(issued=queued, consumed=0, next_item_step=None, step=0))

    async def _read(self, batch: Sequence[int], now: SampleEpoch) -> None:
        """Read one sample after the other; sleep only once for all reads until a fetch may change the cache."""
        due_seconds, left_seconds = 0.0, self._seconds_until_fetch_ends()
        for sample in batch:
            if due_seconds >= left_seconds:
                await asyncio.sleep(due_seconds)
                due_seconds, left_seconds = 0.0, self._seconds_until_fetch_ends()
            due_seconds += self._look_up_seconds(sample, now)
        await asyncio.sleep(due_seconds)

    def _seconds_until_fetch_ends(self) -> float:
        """Return the time until the next end of a fetch if none starts before, in seconds."""
        return self._processors.next_end_seconds - asyncio.get_running_loop().time()

    def _look_up_seconds(self, sample: int, now: SampleEpoch) -> float:
        costs = self._costs
        now.lookups += 1
        if self._cache.look_up(sample):
            return costs.hit_seconds
        now.misses += 1
        if self._schedule is not None or not self._cache.capacity:
            return costs.get_seconds
        self._cache.offer(sample)  # without a service, the loop itself fills the cache
        return costs.get_seconds + costs.insert_seconds

    async def _fetch(self, samples: Sequence[int]) -> None:
        """Read the samples that are not cached; all become visible at once, after the last one."""
        missing = [sample for sample in samples if sample not in self._cache]
        pages = math.ceil(self._workload.dataset_samples / OBJECTS_PER_PAGE)
        await self._processors.serve(pages * self._costs.list_page_seconds + len(missing) * self._costs.fetch_seconds)
        for sample in missing:
            self._cache.offer(sample)


EPOCHS = (1, 2)
OBJECTS_PER_PAGE = 1000
"""Number of objects on a page of a listing."""
_SEED = 1

_HIT_SECONDS_PER_BYTE, _INSERT_SECONDS_PER_BYTE = 1.59e-7, 5.53e-7


def _create_costs(*, sample_bytes: int, get_seconds: float, fetch_seconds: float) -> SampleCosts:
    """Return the costs of a workload: bucket and machine are the same for both, the cache's times grow with bytes."""
    return SampleCosts(
        get_seconds=get_seconds,
        hit_seconds=sample_bytes * _HIT_SECONDS_PER_BYTE,
        insert_seconds=sample_bytes * _INSERT_SECONDS_PER_BYTE,
        list_page_seconds=0.190,
        fetch_seconds=fetch_seconds,
        contention=0.348,
    )


WORKLOADS = {
    "mnist": DeliWorkload(
        name="mnist",
        title="MNIST, small CNN",
        dataset_samples=42_000,
        node_samples=14_000,
        compute_seconds=14.7,
        sample_bytes=3_100,
        costs=_create_costs(sample_bytes=3_100, get_seconds=0.0515, fetch_seconds=0.00397),
    ),
    "cifar10": DeliWorkload(
        name="cifar10",
        title="CIFAR-10, ResNet-50",
        dataset_samples=35_001,
        node_samples=11_667,
        compute_seconds=147.2,
        sample_bytes=12_300,
        costs=_create_costs(sample_bytes=12_300, get_seconds=0.0555, fetch_seconds=0.00317),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The authors' measurements of one epoch, means over nodes and trials.

    Attributes:
        workload: name of the workload.
        experiment: the authors' name of the experiment.
        setting: measured setting; None for reads from the disk.
        epoch: number of the epoch, 1 or 2.
        wait_seconds: time waiting for data, in seconds.
        miss_rate: miss rate of look-ups, 0 to 1; None without a cache.
        epoch_seconds: duration of the epoch, waiting and computing, in seconds.
    """

    workload: str
    experiment: str
    setting: DeliSetting | None
    epoch: int
    wait_seconds: float
    miss_rate: float | None
    epoch_seconds: float


@lru_cache(maxsize=1)
def load_measurements() -> tuple[Measurement, ...]:
    """Return the authors' measurements, one for each workload, setting and epoch."""
    return tuple(
        Measurement(
            workload=row["workload"],
            experiment=row["experiment"],
            setting=_parse_setting(row),
            epoch=int(row["epoch"]),
            wait_seconds=float(row["wait_s_mean"]),
            miss_rate=float(row["miss_rate_mean"]) if row["miss_rate_mean"] else None,
            epoch_seconds=float(row["epoch_run_s_mean"]),
        )
        for row in load_published_rows("deli")
    )


def find_measurements(workload: str, setting: DeliSetting | None) -> list[Measurement | None]:
    """Return the measurements of a setting in the first and the second epoch, None where there is none."""
    by_epoch = {
        each.epoch: each for each in load_measurements() if (each.workload, each.setting) == (workload, setting)
    }
    return [by_epoch.get(epoch) for epoch in EPOCHS]


def _parse_setting(row: dict[str, str]) -> DeliSetting | None:
    batch_size = int(row["batch_size"])
    cache_samples = int(row["cache_size"]) if row["cache_size"].isdecimal() else None
    match row["experiment"]:
        case "Baseline (From Disk)":
            return None
        case "Baseline (From GCP)":
            return DeliSetting(cache_samples=0, batch_size=batch_size)
        case "Baseline (From Cache)":
            return DeliSetting(cache_samples=cache_samples, batch_size=batch_size)
        case "Fetch Size":
            return DeliSetting(int(row["fetch_size"]), 0, cache_samples, batch_size)
        case _:  # thresholds were measured with fetches of half the cache
            return DeliSetting((cache_samples or 0) // 2, int(row["threshold"]), cache_samples, batch_size)


@lru_cache(maxsize=1024)
def simulate_setting(workload: str, setting: DeliSetting) -> tuple[SampleEpoch, ...]:
    """Simulate one node of a workload and return its epochs."""
    return tuple(simulate_samples(WORKLOADS[workload], setting))
