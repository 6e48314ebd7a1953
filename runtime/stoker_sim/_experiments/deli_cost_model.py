"""DELI's cost model, as its paper has it.

N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
Storage" (IC2E 2021), section III-C. Its symbols stand in the docstrings::

    C     = n · (p_s · S + p_vm · R) + C_api                        equations 1 and 4
    S     = s_os + s_data                                           all data on each node's disk
    S     = s_os + c · s̄                                            c samples in each node's cache
    R     = t_compute + t_wait
    C_api = e · (p_A · ⌈m / page⌉ + p_B · m)                        samples read when they are needed
    C_api = e · (p_A · ⌈m / page⌉ · ⌈m / f⌉ + p_B · m)              equation 7: fetched ahead, f at a time
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["DeliCost", "DeliRates", "cached_gb", "deli_cost", "on_disk_gb", "request_dollars", "run_hours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliRates:
    """What the model's prices are.

    Attributes:
        disk_dollars_per_gb_month: p_s.
        node_dollars_per_hour: p_vm.
        list_dollars: p_A, of one class A request: a page of a listing.
        get_dollars: p_B, of one class B request: a read.
    """

    disk_dollars_per_gb_month: float
    node_dollars_per_hour: float
    list_dollars: float
    get_dollars: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliCost:
    """The parts of a run's cost, in dollars.

    Attributes:
        requests: C_api.
        storage: n · p_s · S, for a month.
        nodes: n · p_vm · R.
    """

    requests: float
    storage: float
    nodes: float

    @property
    def total(self) -> float:
        """C."""
        return self.requests + self.storage + self.nodes


def on_disk_gb(system_gb: float, data_gb: float) -> float:
    """Return S = s_os + s_data, the disk of a node that has all the data."""
    return system_gb + data_gb


def cached_gb(system_gb: float, cached_samples: int, sample_gb: float) -> float:
    """Return S = s_os + c · s̄, the disk of a node that caches samples; of one without a cache c is 0."""
    return system_gb + cached_samples * sample_gb


def run_hours(compute_seconds: float, wait_seconds: float) -> float:
    """Return R = t_compute + t_wait in hours; the two do not overlap."""
    return (compute_seconds + wait_seconds) / 3600


def request_dollars(
    epochs: int,
    samples: int,
    rates: DeliRates,
    *,
    fetch_size: int | None = None,
    listed_objects: int | None = None,
    page_objects: int = 1000,
) -> float:
    """Return C_api.

    Args:
        epochs: e.
        samples: m, read once each in an epoch, over all nodes.
        rates: p_A and p_B.
        fetch_size: f, where samples are fetched ahead and each fetch lists the bucket; None lists once an epoch.
        listed_objects: that a listing goes through; the model's are the m samples, a bucket may have more.
        page_objects: page, that one request of a listing returns.

    Raises:
        ConfigError: a number is not positive.
    """
    listed = samples if listed_objects is None else listed_objects
    if min(epochs, samples, listed, page_objects) < 1 or (fetch_size is not None and fetch_size < 1):
        raise ConfigError("epochs, samples, fetch_size, listed_objects and page_objects are at least 1")
    listings = 1 if fetch_size is None else math.ceil(samples / fetch_size)
    pages = math.ceil(listed / page_objects)
    return epochs * (rates.list_dollars * pages * listings + rates.get_dollars * samples)


def deli_cost(nodes: int, disk_gb: float, hours: float, rates: DeliRates, *, requests: float = 0.0) -> DeliCost:
    """Return C = n · (p_s · S + p_vm · R) + C_api, part by part.

    Args:
        nodes: n.
        disk_gb: S, of each node.
        hours: R.
        rates: p_s and p_vm.
        requests: C_api; nothing where all data is on disk.
    """
    return DeliCost(
        requests=requests,
        storage=nodes * rates.disk_dollars_per_gb_month * disk_gb,
        nodes=nodes * rates.node_dollars_per_hour * hours,
    )
