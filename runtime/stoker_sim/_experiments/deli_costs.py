"""DELI's Table II: cost of two epochs of each workload with the disk, the bucket and the paper's best settings.

The model is that of N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep
Learning with Cloud Storage" (IC2E 2021), section III-C. Docstrings use its symbols::

    C     = n · (p_s · S + p_vm · R) + C_api                        equations 1 and 4
    S     = s_os + s_data                                           all data on each node's disk
    S     = s_os + c · s̄                                            c samples in each node's cache
    R     = t_compute + t_wait
    C_api = e · (p_A · ⌈m / page⌉ + p_B · m)                        samples read when they are needed
    C_api = e · (p_A · ⌈m / page⌉ · ⌈m / f⌉ + p_B · m)              equation 7: fetched ahead, f at a time
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from importlib import resources
from itertools import product
from statistics import mean

from stoker._base.meter import Operation
from stoker._cost.prices import GB_BYTES, Prices
from stoker_sim._experiments import Cell, ExperimentResult, Panel, Table, create_series, load_published_rows
from stoker_sim._experiments.deli import (
    OBJECTS_PER_PAGE,
    WORKLOADS,
    DeliSetting,
    find_measurements,
    load_measurements,
    simulate_setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliRates:
    """Prices of the model.

    Attributes:
        disk_dollars_per_gb_month: p_s, price of a disk.
        node_dollars_per_hour: p_vm, price of a node.
        list_dollars: p_A, price of one class A request, a page of a listing.
        get_dollars: p_B, price of one class B request, a read.
    """

    disk_dollars_per_gb_month: float
    node_dollars_per_hour: float
    list_dollars: float
    get_dollars: float


def request_dollars(
    epochs: int, samples: int, rates: DeliRates, *, fetch_size: int = 0, listed_objects: int | None = None
) -> float:
    """Return C_api, the price of all requests in dollars.

    Args:
        epochs: e, number of epochs.
        samples: m, number of samples, each read once in an epoch by one of the nodes.
        rates: prices p_A and p_B.
        fetch_size: f, samples of a fetch, each of which lists the bucket; 0 fetches nothing ahead and lists once an
            epoch.
        listed_objects: number of objects in a listing; None for the model's m, although a bucket may have more.
    """
    pages = math.ceil((listed_objects or samples) / OBJECTS_PER_PAGE)
    listings = math.ceil(samples / fetch_size) if fetch_size else 1
    return epochs * (rates.list_dollars * pages * listings + rates.get_dollars * samples)


def deli_cost(nodes: int, disk_gb: float, seconds: float, rates: DeliRates, requests: float = 0.0) -> dict[str, float]:
    """Return the dollars of each of :data:`PARTS`: C_api, n · p_s · S for a month, n · p_vm · R, and C, their sum.

    Args:
        nodes: n, number of nodes.
        disk_gb: S, disk of each node, in GB.
        seconds: R, sum of compute and wait time, in seconds.
        rates: prices p_s and p_vm.
        requests: C_api, price of the requests; 0 if all data is on disk.
    """
    storage = nodes * rates.disk_dollars_per_gb_month * disk_gb
    running = nodes * rates.node_dollars_per_hour * seconds / 3600
    return dict(zip(PARTS, (requests, storage, running, requests + storage + running), strict=True))


PARTS = ("api", "storage", "compute and loading", "total")
_NODES = 3
_EPOCHS = 2
_PIXELS_GB = (60_000 * 28 * 28 + 50_000 * 32 * 32 * 3) / GB_BYTES
_COLUMNS = ("workload", "method", "part", "$", "published $", "difference $", "to the cent", "wait s", "waits")
_METHODS: dict[str, DeliSetting | None] = {
    "disk": None,
    "bucket": DeliSetting(cache_samples=0),
    "full fetch 1024": DeliSetting(1024),
    "full fetch 2048": DeliSetting(2048, 0, 2048),
    "50/50 1024": DeliSetting(1024, 1024, 2048),
}
"""Settings as measured: fetches of 1024 with an unlimited cache. The cache's part of the disk is the paper's: one
fetch, and two for 50/50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assumptions:
    """Assumptions on figures that the paper does not give; the defaults are fitted to its Table II.

    Attributes:
        rates: prices.
        objects: number of objects in the bucket and in each listing: the training sets of both workloads. None for
            the workload's samples, as in the paper's equations.
        system_gb: s_os of a node, in GB.
        data_gb: s_data on the disk of a node, in GB. Its format is not known; the pixels of both sets are 0.19 GB.
    """

    rates: DeliRates
    objects: int | None = 60_000 + 50_000
    system_gb: float = 16.08
    data_gb: float = 0.16


def _published_rates() -> DeliRates:
    with resources.as_file(resources.files("stoker_sim").joinpath("published/deli_prices.toml")) as path:
        prices = Prices.load(path)
    bucket = prices.store("gs")
    return DeliRates(
        disk_dollars_per_gb_month=prices.disk("pd-standard").storage_dollars_per_gb_month,
        node_dollars_per_hour=prices.machine("n1-standard-2-k80").dollars_per_hour,
        list_dollars=bucket.request_dollars(Operation.LIST),
        get_dollars=bucket.request_dollars(Operation.GET),
    )


@lru_cache(maxsize=1)
def _load_published() -> dict[tuple[str, str, str], Decimal]:
    """Return the paper's cells by (workload, method, part)."""
    rows = load_published_rows("deli_table_2")
    return {(row["workload"], row["method"], part): Decimal(row[part]) for row in rows for part in PARTS if row[part]}


def _compute_seconds(workload: str) -> float:
    """Return t_compute: the mean of all measured epochs, as in the paper."""
    known = [each for each in load_measurements() if each.workload == workload]
    return _EPOCHS * mean(each.epoch_seconds - each.wait_seconds for each in known)


def _wait_seconds(workload: str, setting: DeliSetting | None) -> tuple[float, str]:
    """Return t_wait and whether it was measured or simulated."""
    known = [each for each in find_measurements(workload, setting) if each is not None]
    if known or setting is None:
        return sum(each.wait_seconds for each in known), "measured"
    return sum(each.wait_seconds for each in simulate_setting(workload, setting)), "simulated"


def _cost(workload: str, setting: DeliSetting | None, assumed: _Assumptions) -> dict[str, float]:
    wait_seconds, _ = _wait_seconds(workload, setting)
    seconds = _compute_seconds(workload) + wait_seconds
    if setting is None:
        return deli_cost(_NODES, assumed.system_gb + assumed.data_gb, seconds, assumed.rates)
    requests = request_dollars(
        _EPOCHS,
        WORKLOADS[workload].dataset_samples,
        assumed.rates,
        fetch_size=setting.fetch_size,
        listed_objects=assumed.objects,
    )
    cached_gb = (setting.fetch_size + setting.threshold) * WORKLOADS[workload].sample_bytes / GB_BYTES
    return deli_cost(_NODES, assumed.system_gb + cached_gb, seconds, assumed.rates, requests)


@dataclass(frozen=True, slots=True)
class _CostCell:
    """A cell of the table, in dollars."""

    workload: str
    method: str
    part: str
    ours: float
    published: Decimal

    @property
    def is_equal_to_cent(self) -> bool:
        """Whether ours equals the published one to the cent."""
        return Decimal(repr(self.ours)).quantize(Decimal("0.01"), ROUND_HALF_UP) == self.published


def _cells(assumed: _Assumptions) -> list[_CostCell]:
    costs = {
        (workload, method): _cost(workload, setting, assumed)
        for workload, (method, setting) in product(WORKLOADS, _METHODS.items())
    }
    return [
        _CostCell(*case, part, dollars, _load_published()[*case, part])
        for case, cost in costs.items()
        for part, dollars in cost.items()
        if (*case, part) in _load_published()
    ]


def _row(cell: _CostCell) -> tuple[Cell, ...]:
    known, is_met = float(cell.published), "yes" if cell.is_equal_to_cent else "no"
    more = round(cell.ours - known, 4) + 0.0  # not -0.0
    waits = _wait_seconds(cell.workload, _METHODS[cell.method])
    return cell.workload, cell.method, cell.part, round(cell.ours, 4), known, more, is_met, *waits


def _describe_difference(cell: _CostCell, rates: DeliRates) -> str:
    """Describe the difference of a cell from the published one."""
    parts = [
        known
        for (workload, method, part), known in _load_published().items()
        if part != "total" and (workload, method) == (cell.workload, cell.method)
    ]
    beyond = abs(cell.ours - float(cell.published)) - 0.005
    seconds = beyond / (_NODES * rates.node_dollars_per_hour) * 3600
    waits = "{:.0f} s of {} waits".format(*_wait_seconds(cell.workload, _METHODS[cell.method]))
    return (
        f"Not met: {cell.workload}, {cell.method}, {cell.part}: ${cell.ours:.4f} beside ${cell.published}. The "
        f"published parts of this row add up to ${sum(parts)}; {seconds:.0f} s of the {waits} explain the difference."
    )


def _panel(workload: str, parts: Sequence[str], cells: Sequence[_CostCell]) -> Panel:
    series = []
    for part in parts:
        selected = [cell for cell in cells if (cell.workload, cell.part) == (workload, part)]
        ours = {cell.method: cell.ours for cell in selected}
        known = {cell.method: float(cell.published) for cell in selected}
        series += create_series(part, [*_METHODS], [*map(ours.get, _METHODS)], [*map(known.get, _METHODS)])
    return Panel(WORKLOADS[workload].title, "", "dollars for two epochs", series)


def run(quick: bool) -> ExperimentResult:
    """Run Table II: the cost of two epochs."""
    assumed = _Assumptions(rates=_published_rates())
    cells = _cells(assumed)
    as_printed = replace(assumed.rates, get_dollars=0.002 / 10_000)
    others = {
        "as here": assumed,
        "class B at $0.002 for 10,000, as the paper prints": replace(assumed, rates=as_printed),
        "listings of the workload's samples, as its equations say": replace(assumed, objects=None),
        "the pixels of both data sets on the disk": replace(assumed, data_gb=_PIXELS_GB),
    }
    met: list[tuple[Cell, ...]] = [
        (name, sum(cell.is_equal_to_cent for cell in _cells(other)), len(cells)) for name, other in others.items()
    ]
    tables = [
        Table("deli-table-2", _COLUMNS, [_row(cell) for cell in cells]),
        Table("deli-table-2-assumptions", ("assumption", "cells met", "of"), met),
    ]
    panels = [
        _panel(workload, parts, cells)
        for parts in (("total",), ("api", "compute and loading"))
        for workload in WORKLOADS
    ]
    unmet = [_describe_difference(cell, assumed.rates) for cell in cells if not cell.is_equal_to_cent]
    return ExperimentResult(tables, panels, [*unmet, *_remarks(assumed)])


def _remarks(assumed: _Assumptions) -> list[str]:
    rates = assumed.rates
    return [
        "t_wait is measured, or else simulated; t_compute is the mean of all measured epochs.",
        f"A node-hour costs ${rates.node_dollars_per_hour:.3f}, n1-standard-2 with a K80, listed; the paper has none.",
        f"10,000 class B requests cost ${rates.get_dollars * 10_000:.3f}, the list price; the paper prints $0.002.",
        f"Disks cost ${rates.disk_dollars_per_gb_month:g} per GB and month, the list price; the paper gives none.",
        f"Fitted: s_os is {assumed.system_gb:g} GB and s_data {assumed.data_gb:g} GB per node.",
        f"Fitted: each fetch lists {assumed.objects:,} objects, both training sets in one bucket.",
    ]
