"""DELI: its way of loading, sample by sample, in virtual time, and its two workloads.

N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
Storage" (IC2E 2021), section V-A; its measurements are condensed from the authors' repository, cake-lab/DELI (MIT).
When to fetch is decided by :class:`~stoker._fetch.config.FetchSize`, what stays by
:class:`~stoker._cache.eviction.Fifo`: the code that a loader runs. What a request takes is the model's. Of the
workloads there is what the paper says of them, what its authors measured, and what had to be fitted.
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
from stoker._cache.eviction import Fifo, Residents
from stoker._fetch.config import FetchSize, Progress
from stoker_sim._bucket import Shared
from stoker_sim._experiments import published_rows
from stoker_sim._scenario import EpochResult

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """What a sample takes, in seconds.

    Attributes:
        get_seconds: read from the bucket by the training loop.
        hit_seconds: read from the cache.
        insert_seconds: added to the cache by the training loop.
        list_page_seconds: a page of the listing that precedes each fetch; 0 where nothing is listed.
        fetch_seconds: read and added to the cache by the service, of a fetch's total.
        contention: how much one fetch slows another one at the same time, apart from sharing the processors: the rate
            of each is divided by 1 + contention · (fetches - 1).
    """

    get_seconds: float
    hit_seconds: float = 0.0
    insert_seconds: float = 0.0
    list_page_seconds: float = 0.0
    fetch_seconds: float = 0.0
    contention: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one node of several that do the same trains.

    Attributes:
        name: in the measurements.
        title: in plots.
        dataset_samples: of the training set, which is what is listed; 70% of it is split among three nodes anew in
            every epoch.
        node_samples: of these, a node's in an epoch.
        compute_seconds: of an epoch's steps, beside fetches as they come.
        sample_bytes: of a sample in the cache.
        costs: what a sample takes; fitted, see ``python -m benchmarks.deli_calibration``.
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
class Setting:
    """A configuration of DELI.

    Attributes:
        fetch_size: samples that are fetched at a time; 0 where nothing is fetched ahead, and the loop fills the cache.
        threshold: and when so many that were fetched are left.
        cache_samples: that the cache holds; None any number, 0 no cache.
        batch_size: samples of a step, all of which are drawn before the first of them is read.
    """

    fetch_size: int = 0
    threshold: int = 0
    cache_samples: int | None = None
    batch_size: int = 512


@dataclass(slots=True, kw_only=True)
class SampleEpoch(EpochResult):
    """What an epoch took: look-ups and misses are of samples.

    Attributes:
        fetches: that the service was asked for.
    """

    fetches: int = 0


def simulate_samples(workload: Workload, setting: Setting) -> list[SampleEpoch]:
    """Return the epochs of one node, simulated; the same node gives the same epochs."""
    return run_virtual(_Loop(workload, setting).run())


class _Loop:
    """A training loop with a sampler, a cache and a service."""

    def __init__(self, workload: Workload, setting: Setting) -> None:
        self._workload, self._setting, self._costs = workload, setting, workload.costs
        self._schedule = FetchSize(setting.fetch_size, setting.threshold) if setting.fetch_size else None
        capacity = _UNLIMITED if setting.cache_samples is None else setting.cache_samples
        self._cache: Residents[int] = Residents(Fifo(), capacity)
        self._machine = Shared(self._fetch_rate)
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
            for drawn in range(start, start + len(batch)):  # a batch is drawn whole before its first sample is read
                if fetched < len(samples) and (wanted := self._wanted(fetched - drawn)):
                    service.create_task(self._fetch(samples[fetched : fetched + wanted]))
                    fetched = min(fetched + wanted, len(samples))
                    now.fetches += 1
            await asyncio.sleep(0)  # fetches that were asked for are under way
            asked_seconds = loop.time()
            await self._read(batch, now)
            now.wait_seconds += loop.time() - asked_seconds
            await self._compute(self._workload.compute_seconds * len(batch) / len(samples))
        now.seconds = loop.time() - begun_seconds

    async def _compute(self, seconds: float) -> None:
        """Take a step, whose threads leave fetches a part of the processors."""
        self._machine.set_rate(partial(self._fetch_rate, step_threads=self._workload.processors))
        await asyncio.sleep(seconds)
        self._machine.set_rate(self._fetch_rate)

    def _fetch_rate(self, fetches: int, step_threads: int = 0) -> float:
        """Return the rate of each of several fetches, of that of one alone."""
        share = min(1.0, self._workload.processors / (fetches + step_threads))
        return share / (1.0 + self._costs.contention * (fetches - 1))

    def _wanted(self, queued: int) -> int:
        """Return how many samples to fetch when so many are fetched and not drawn."""
        if self._schedule is None:
            return 0
        return self._schedule.admit(Progress(issued=queued, consumed=0, next_item_step=None, step=0))

    async def _read(self, batch: Sequence[int], now: SampleEpoch) -> None:
        """Have each sample after the one before. Time passes at once until a fetch may change what the cache has."""
        due_seconds, left_seconds = 0.0, self._unchanged_seconds()
        for sample in batch:
            if due_seconds >= left_seconds:
                await asyncio.sleep(due_seconds)
                due_seconds, left_seconds = 0.0, self._unchanged_seconds()
            due_seconds += self._look_up_seconds(sample, now)
        await asyncio.sleep(due_seconds)

    def _unchanged_seconds(self) -> float:
        """Return for how long no fetch ends, if nothing happens meanwhile."""
        return self._machine.next_end_seconds - asyncio.get_running_loop().time()

    def _look_up_seconds(self, sample: int, now: SampleEpoch) -> float:
        costs = self._costs
        now.look_ups += 1
        if self._cache.look_up(sample):
            return costs.hit_seconds
        now.misses += 1
        if self._schedule is not None or not self._cache.capacity:
            return costs.get_seconds
        self._cache.offer(sample)  # without a service, the loop itself fills the cache
        return costs.get_seconds + costs.insert_seconds

    async def _fetch(self, samples: Sequence[int]) -> None:
        """Read what is not cached; all of it is seen at once, when the last one is there."""
        missing = [sample for sample in samples if sample not in self._cache]
        pages = math.ceil(self._workload.dataset_samples / PAGE_OBJECTS)
        await self._machine.serve(pages * self._costs.list_page_seconds + len(missing) * self._costs.fetch_seconds)
        for sample in missing:
            self._cache.offer(sample)


EPOCHS = (1, 2)
PAGE_OBJECTS = 1000
"""That one page of a listing has."""
_SEED = 1

_HIT_SECONDS_PER_BYTE, _INSERT_SECONDS_PER_BYTE = 1.59e-7, 5.53e-7


def _costs(*, sample_bytes: int, get_seconds: float, fetch_seconds: float) -> SampleCosts:
    """Return costs: one bucket and machine for both workloads, and a cache that takes time by the byte."""
    return SampleCosts(
        get_seconds=get_seconds,
        hit_seconds=sample_bytes * _HIT_SECONDS_PER_BYTE,
        insert_seconds=sample_bytes * _INSERT_SECONDS_PER_BYTE,
        list_page_seconds=0.190,
        fetch_seconds=fetch_seconds,
        contention=0.348,
    )


WORKLOADS = {
    "mnist": Workload(
        name="mnist",
        title="MNIST, small CNN",
        dataset_samples=42_000,
        node_samples=14_000,
        compute_seconds=14.7,
        sample_bytes=3_100,
        costs=_costs(sample_bytes=3_100, get_seconds=0.0515, fetch_seconds=0.00397),
    ),
    "cifar10": Workload(
        name="cifar10",
        title="CIFAR-10, ResNet-50",
        dataset_samples=35_001,
        node_samples=11_667,
        compute_seconds=147.2,
        sample_bytes=12_300,
        costs=_costs(sample_bytes=12_300, get_seconds=0.0555, fetch_seconds=0.00317),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Means over nodes and trials of one epoch, as the authors measured them.

    Attributes:
        workload: its name.
        experiment: the authors' name of it.
        setting: what was measured; None for reading from the disk.
        epoch: 1 or 2.
        wait_seconds: for data.
        miss_rate: of look-ups; None where there was no cache.
        epoch_seconds: of the epoch, wait and computing.
    """

    workload: str
    experiment: str
    setting: Setting | None
    epoch: int
    wait_seconds: float
    miss_rate: float | None
    epoch_seconds: float


@lru_cache(maxsize=1)
def measurements() -> tuple[Measurement, ...]:
    """Return what the authors measured: each setting of a workload once, in each epoch."""
    return tuple(
        Measurement(
            workload=row["workload"],
            experiment=row["experiment"],
            setting=_setting(row),
            epoch=int(row["epoch"]),
            wait_seconds=float(row["wait_s_mean"]),
            miss_rate=float(row["miss_rate_mean"]) if row["miss_rate_mean"] else None,
            epoch_seconds=float(row["epoch_run_s_mean"]),
        )
        for row in published_rows("deli")
    )


def measured(workload: str, setting: Setting | None) -> list[Measurement | None]:
    """Return what was measured of a setting: in the first epoch and in the second, None where nothing was."""
    found = {each.epoch: each for each in measurements() if (each.workload, each.setting) == (workload, setting)}
    return [found.get(epoch) for epoch in EPOCHS]


def _setting(row: dict[str, str]) -> Setting | None:
    batch_size = int(row["batch_size"])
    cache_samples = int(row["cache_size"]) if row["cache_size"].isdecimal() else None
    match row["experiment"]:
        case "Baseline (From Disk)":
            return None
        case "Baseline (From GCP)":
            return Setting(cache_samples=0, batch_size=batch_size)
        case "Baseline (From Cache)":
            return Setting(cache_samples=cache_samples, batch_size=batch_size)
        case "Fetch Size":
            return Setting(int(row["fetch_size"]), 0, cache_samples, batch_size)
        case _:  # thresholds were measured with fetches of half the cache
            return Setting((cache_samples or 0) // 2, int(row["threshold"]), cache_samples, batch_size)


@lru_cache(maxsize=1024)
def simulated(workload: str, setting: Setting) -> tuple[SampleEpoch, ...]:
    """Return the epochs of one node, simulated."""
    return tuple(simulate_samples(WORKLOADS[workload], setting))
