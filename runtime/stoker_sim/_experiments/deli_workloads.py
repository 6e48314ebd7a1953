"""DELI's two workloads: what the paper says of them, what its authors measured, and what had to be fitted.

N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
Storage" (IC2E 2021), section V-A; the measurements are condensed from the authors' repository, cake-lab/DELI (MIT).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from stoker._fetch.schedule import FetchSize
from stoker_sim._scenarios.deli import SampleCosts, SampleEpoch, SampleRun, simulate_samples

__all__ = ["SOURCE", "WORKLOADS", "Measurement", "Setting", "Workload", "measurements", "sample_run", "simulated"]

SOURCE = "Krichevsky, St. Louis, Guo: DELI (IC2E 2021), and cake-lab/DELI"
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One of the two.

    Attributes:
        name: in the measurements.
        title: in plots.
        dataset_samples: of the training set, 70% of which is split among three nodes anew in every epoch.
        node_samples: of these, a node's in an epoch.
        compute_seconds: of an epoch.
        sample_bytes: of a sample in the cache.
        costs: what a sample takes; fitted, see ``python -m benchmarks.deli_calibration``.
    """

    name: str
    title: str
    dataset_samples: int
    node_samples: int
    compute_seconds: float
    sample_bytes: int
    costs: SampleCosts


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


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration of DELI.

    Attributes:
        fetch_size: samples that are fetched at a time; 0 where nothing is fetched ahead.
        threshold: and when so many that were fetched are left.
        cache_samples: that the cache holds; None any number, 0 no cache.
        batch_size: samples of a step.
    """

    fetch_size: int = 0
    threshold: int = 0
    cache_samples: int | None = None
    batch_size: int = 512


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
    """Return what the authors measured."""
    text = resources.files("stoker_sim").joinpath("published/deli.csv").read_text("utf-8")
    return tuple(_measured(text))


def _measured(text: str) -> Iterator[Measurement]:
    for row in csv.DictReader(text.splitlines()):
        yield Measurement(
            workload=row["workload"],
            experiment=row["experiment"],
            setting=_setting(row),
            epoch=int(row["epoch"]),
            wait_seconds=float(row["wait_s_mean"]),
            miss_rate=float(row["miss_rate_mean"]) if row["miss_rate_mean"] else None,
            epoch_seconds=float(row["epoch_run_s_mean"]),
        )


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


def sample_run(workload: Workload, setting: Setting) -> SampleRun:
    """Return what one node runs."""
    return SampleRun(
        dataset_samples=workload.dataset_samples,
        node_samples=workload.node_samples,
        batch_size=setting.batch_size,
        compute_seconds=workload.compute_seconds,
        schedule=FetchSize(setting.fetch_size, setting.threshold) if setting.fetch_size else None,
        cache_samples=setting.cache_samples,
        seed=_SEED,
    )


@lru_cache(maxsize=1024)
def simulated(workload: str, setting: Setting) -> tuple[SampleEpoch, ...]:
    """Return the epochs of one node, simulated."""
    chosen = WORKLOADS[workload]
    return tuple(simulate_samples(sample_run(chosen, setting), chosen.costs))
