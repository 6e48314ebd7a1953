"""Our own experiments: DELI's workloads with our schedules, caches by policy, and the cost of simulating 1,000 nodes.

The workloads are read from the same bucket sample by sample and as super-samples. Of 1,000 nodes, each reads 1,000
super-samples an epoch.

Caches belong to a single node that reads everything, or to several that partition each epoch. References: the hit rate
of uniform caching is the cache's share of the data (SiloD, EuroSys 2023; CoorDL, VLDB 2021); that of LRU follows from
random orders, share + (1 - share) ln(1 - share). The experiment ``caching`` runs the policies alone. In ``ddp`` three
nodes train together and partition each epoch again: the whole fetcher uses the caches as it fetches ahead, and misses
are read from a bucket.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product, zip_longest
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.config import FetchConfig
from stoker._order.order import Order, OrderConfig
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._caches import CacheModel, hit_rates
from stoker_sim._experiments import Cell, ExperimentResult, Panel, Series, Table, create_series, difference
from stoker_sim._experiments.deli import WORKLOADS, DeliSetting, DeliWorkload, find_measurements, simulate_setting
from stoker_sim._experiments.scenarios import aligned_slot_bytes, create_lane_scenario
from stoker_sim._scenario import EpochResult, SimulationResult, simulate

_NODES = 3
_BATCH_SIZE = 512
_CACHE_SAMPLES = 2048
_GETS_PER_SECOND = 100.0
"""Request rate of one of the paper's nodes with 16 threads."""
_CONNECTION_BYTES_PER_SECOND = 20e6
_OBJECT_BYTES = 1 << 18
_WINDOW = 4
_REQUESTS_AT_ONCE = 16
_EPOCHS = 2
"""The first epoch, and one that is typical of all later ones."""
_DIRECT = "directly"
_THEIRS = {_DIRECT: DeliSetting(cache_samples=0), "DELI, 50/50": DeliSetting(1024, 1024, 2048)}
"""Settings that the paper measured, too."""
_QUICK_DIVISOR = 12
"""Divisor of each data set and its compute time in a quick run."""


def _simulate_epochs(workload: DeliWorkload, samples: int) -> list[EpochResult]:
    """Return the epochs of the first node, with a ring of the size of the paper's cache and ``samples`` per object."""
    bucket = BucketModel(
        first_byte=Constant(workload.costs.get_seconds),
        requests_per_second=_NODES * _GETS_PER_SECOND,
        connection_bytes_per_second=_CONNECTION_BYTES_PER_SECOND,
    )
    size_bytes = samples * workload.sample_bytes
    objects = workload.dataset_samples // samples
    manifest = synthetic_manifest(super_samples=objects, samples=samples, super_sample_bytes=size_bytes, head_bytes=64)
    order = OrderConfig(seed=1, window=_WINDOW if samples > 1 else 1, lanes=_NODES)
    fetch = FetchConfig(start_concurrency=_REQUESTS_AT_ONCE, max_concurrency=_REQUESTS_AT_ONCE)
    ring_bytes = _CACHE_SAMPLES // samples * aligned_slot_bytes(size_bytes)
    scenario = create_lane_scenario(manifest, order, _BATCH_SIZE, ring_bytes, fetch, bucket=bucket, epochs=_EPOCHS)
    steps = scenario.feed.sharding(scenario.manifest.samples).count_steps(0)
    run = simulate(replace(scenario, compute=Constant(workload.compute_seconds / steps)))
    return [each for each in run.epochs if each.rank == 0]


def _rows(
    workload: DeliWorkload, way: str, epochs: Sequence[EpochResult], direct_seconds: float
) -> Iterator[tuple[Cell, ...]]:
    for number, epoch in enumerate(epochs, start=1):
        bound_seconds = max(workload.compute_seconds, epoch.lookups / _GETS_PER_SECOND)
        fewer = round(1 - epoch.wait_seconds / direct_seconds, 9) + 0.0  # not -0.0
        over_bound = None if way in _THEIRS else epoch.seconds / bound_seconds
        yield workload.name, way, number, epoch.wait_seconds, fewer, epoch.miss_rate, epoch.seconds, over_bound


def _scale_down(workload: DeliWorkload, divisor: int) -> DeliWorkload:
    return replace(
        workload,
        dataset_samples=workload.dataset_samples // divisor,
        node_samples=workload.node_samples // divisor,
        compute_seconds=workload.compute_seconds / divisor,
    )


def run_ours(quick: bool) -> ExperimentResult:
    """Run the paper's workloads with our schedules."""
    part = _QUICK_DIVISOR if quick else 1
    columns = ("workload", "way", "epoch", "wait s", "less than directly", "miss rate", "epoch s", "epoch / bound")
    table, panels = Table("ours", columns), []
    for workload in WORKLOADS.values():
        own = _scale_down(workload, part)
        in_objects = _OBJECT_BYTES // workload.sample_bytes
        theirs = {way: simulate_setting(workload.name, setting) for way, setting in _THEIRS.items()}
        ours = {"ours, by sample": _simulate_epochs(own, 1), "ours, super-samples": _simulate_epochs(own, in_objects)}
        direct_seconds = theirs[_DIRECT][-1].wait_seconds
        for way, epochs in theirs.items():
            table.rows.extend(_rows(workload, way, epochs, direct_seconds))
        for way, own_epochs in ours.items():
            table.rows.extend(_rows(own, way, own_epochs, direct_seconds / part))
        waits = [
            *(results[-1].wait_seconds for results in theirs.values()),
            *(results[-1].wait_seconds * part for results in ours.values()),
        ]
        later = [find_measurements(workload.name, setting)[-1] for setting in _THEIRS.values()]
        known = [*(each.wait_seconds if each else None for each in later), *(None for _ in ours)]
        bars = create_series("simulated", [*theirs, *ours], waits, known, published_name="published")
        panels.append(Panel(workload.title, "", "wait for data in epoch 2 (s)", bars))
    remarks = (*_REMARKS, f"Our rows are for 1/{part} of each data set.") if quick else _REMARKS
    return ExperimentResult([table], panels, remarks)


_REMARKS = (
    f"The bucket is the paper's: {_GETS_PER_SECOND:.0f} requests per second and node.",
    f"Our ring holds {_CACHE_SAMPLES:,} samples, as many as the cache of 50/50; nothing else is cached.",
    "Each epoch is partitioned again. The bound is the larger of the times of computing and of requests at that rate.",
)


_POLICIES = ("lru", "fifo", "no-evict", "next-use")
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Cache sizes, as fractions of the objects that a node reads in an epoch."""
_WARM_UP_FRACTION = 0.6
"""Fraction of epochs that is not counted, while caches fill and next-use adapts."""
_PARTITIONED_HITS = {
    "fifo": (0.011, 0.048, 0.112, 0.207),
    "no-evict": (0.083, 0.167, 0.249, 0.332),
    "next-use": (0.250, 0.416, 0.539, 0.627),
}
"""Reference hit rates of three nodes that partition each epoch again, for each of ``_SHARES``."""
_OF_READ = "cache / what the node reads in an epoch"


def _settled_hit_rate(epochs: Sequence[NDArray[np.int64]], capacity: int, policy: str) -> float:
    rates = hit_rates(epochs, capacity, policy)
    return float(np.mean(rates[int(len(rates) * _WARM_UP_FRACTION) :]))


def run_caching(quick: bool) -> ExperimentResult:
    """Run the policies alone and return their hit rates."""
    objects, epochs = (300, 10) if quick else (3_000, 30)
    rng = np.random.default_rng(7)
    alone = [rng.permutation(objects) for _ in range(epochs)]
    shared = [rng.permutation(objects)[: objects // _NODES] for _ in range(epochs)]
    table = Table("caching", ("nodes", "policy", "cache share", "hit rate", "reference", "difference"))
    for (nodes, readings), policy in product({1: alone, _NODES: shared}.items(), _POLICIES):
        ours = [_settled_hit_rate(readings, int(share * len(readings[0])), policy) for share in _SHARES]
        for share, rate, known in zip_longest(_SHARES, ours, _reference_hit_rates(nodes, policy)):
            table.add(nodes, policy, share, rate, known, difference(rate, known))
    titles = {1: "one node", _NODES: f"{_NODES} nodes, each epoch partitioned anew"}
    panels = [
        Panel(title, _OF_READ, "hit rate", table.select("nodes", nodes).lines(*table.columns[1:5]))
        for nodes, title in titles.items()
    ]
    errors = [abs(error or 0.0) for error in table.cells("difference")]
    counted = f"{objects:,} objects, {epochs} epochs, of which the last {1 - _WARM_UP_FRACTION:.0%} count"
    remarks = (
        f"{counted}; ours differ from the reference by at most {max(errors):.3f}.",
        "A cache shared by nodes can have hits of its whole share; a node's own keeps objects that it reads again.",
    )
    return ExperimentResult([table], panels, remarks)


def _reference_hit_rates(nodes: int, policy: str) -> Sequence[float]:
    """Return reference hit rates, or an empty sequence if there are none."""
    if nodes > 1:
        return _PARTITIONED_HITS.get(policy, ())
    if policy == "lru":
        return [share + (1 - share) * math.log(1 - share) if share < 1 else 1.0 for share in _SHARES]
    return () if policy == "fifo" else _SHARES


_DDP_POLICIES = ("fifo", "no-evict", "next-use")
_WARM_UP_EPOCHS = 8
"""Number of first epochs that are not counted, while caches fill and next-use adapts. The last epoch is not counted
either: a part of it is fetched before it begins, and nothing is fetched for a next one."""
_SAMPLES = 64
_SUPER_SAMPLE_BYTES = 8 << 20
_SLOTS = 20
_ORDER = OrderConfig(seed=1, window=4, lanes=_NODES)


def _simulate_with_cache(policy: str, share: float, super_samples: int, epochs: int) -> SimulationResult:
    size_bytes = _SUPER_SAMPLE_BYTES
    manifest = synthetic_manifest(
        super_samples=super_samples, samples=_SAMPLES, super_sample_bytes=size_bytes, head_bytes=64
    )
    scenario = create_lane_scenario(
        manifest,
        _ORDER,
        _SAMPLES,
        _SLOTS * size_bytes,
        FetchConfig(),
        bucket=BucketModel(first_byte=LogNormal(0.02, 0.08)),
        compute=Constant(0.1),
        caches=[CacheModel(limit_bytes=_cache_objects(share, super_samples) * size_bytes, policy=policy)],
        epochs=epochs,
        in_step=True,
    )
    return simulate(scenario)


def _cache_objects(share: float, super_samples: int) -> int:
    return round(share * super_samples / _NODES)


def _policy_hit_rate(policy: str, share: float, super_samples: int, epochs: int) -> float:
    """Return the hit rate of a policy alone that reads the same objects in the same order, one after the other."""
    samples = np.full(super_samples, _SAMPLES)
    orders = [Order(samples, _ORDER, epoch) for epoch in range(epochs)]
    rates = [
        hit_rates([order.lane(node).super_samples for order in orders], _cache_objects(share, super_samples), policy)
        for node in range(_NODES)
    ]
    return fmean(rate for of_node in rates for rate in of_node[_WARM_UP_EPOCHS : epochs - 1])


def _fraction_of_lookups(counts: Callable[[EpochResult], int], epochs: Sequence[EpochResult]) -> float:
    return sum(map(counts, epochs)) / sum(each.lookups for each in epochs)


def _ddp_row(policy: str, share: float, super_samples: int, epochs: int) -> tuple[float, ...]:
    run = _simulate_with_cache(policy, share, super_samples, epochs)
    settled = [each for each in run.epochs if _WARM_UP_EPOCHS <= each.epoch < epochs - 1]
    later = [each for each in run.epochs if each.epoch]
    hits = _fraction_of_lookups(lambda each: each.tier_hits["disk"], settled)
    known = _PARTITIONED_HITS[policy][_SHARES.index(share)]
    alone = _policy_hit_rate(policy, share, super_samples, epochs)
    misses = _fraction_of_lookups(lambda each: each.misses, later)
    read = _fraction_of_lookups(lambda each: each.read_bytes, settled) / _SUPER_SAMPLE_BYTES
    return hits, known, hits - known, alone, misses, fmean(each.wait_seconds for each in later), read


def run_ddp(quick: bool) -> ExperimentResult:
    """Run nodes that train together and return the hit rates of their caches."""
    super_samples, epochs = (240, _WARM_UP_EPOCHS + 5) if quick else (3_000, _WARM_UP_EPOCHS + 9)
    cases = product(_DDP_POLICIES, (0.5,) if quick else _SHARES)
    columns = (
        *("policy", "cache share", "hit rate", "reference", "difference", "policy alone"),
        *("miss rate of the loop", "wait s of an epoch", "read of what is used"),
    )
    table = Table("ddp", columns, [(*case, *_ddp_row(*case, super_samples, epochs)) for case in cases])
    lines = table.lines(*columns[:4])
    panel = Panel(f"{_NODES} nodes, each epoch partitioned anew", _OF_READ, "hit rate of the cache", lines)
    error, missed = (max(map(abs, table.cells(column))) for column in ("difference", "miss rate of the loop"))
    both = zip(table.cells("hit rate"), table.cells("policy alone"), strict=True)
    lost = max(abs(hits - alone) for hits, alone in both)
    remarks = (
        f"{super_samples:,} super-samples, {epochs} epochs; hits are counted from the {_WARM_UP_EPOCHS + 1}th on.",
        f"Hit rates differ from the reference by at most {error:.3f}.",
        f"A policy alone, in the same order, has the same hit rates within {lost:.4f}.",
        f"After the first epoch the loop misses at most {missed:.2%} of its look-ups, with any size of the cache.",
    )
    return ExperimentResult([table], [panel], remarks)


_SIZES = ((1, 1_000), (10, 1_000), (100, 1_000), (1_000, 1_000))
_QUICK_SIZES = ((1, 100), (10, 100), (20, 100))
_SCALE_SAMPLES = 1_024
_SCALE_BYTES = 8 << 20


def measure_simulation(nodes: int, super_samples: int) -> tuple[float, SimulationResult]:
    """Simulate an epoch and return the processor time of this process in seconds, and the run.

    Args:
        nodes: number of nodes.
        super_samples: number of super-samples that each node reads, each of 8 MiB and one batch.
    """
    objects, order = nodes * super_samples, OrderConfig(seed=1, lanes=nodes)
    manifest = synthetic_manifest(super_samples=objects, samples=_SCALE_SAMPLES, super_sample_bytes=_SCALE_BYTES)
    bucket, compute = BucketModel(first_byte=LogNormal(0.02, 0.08)), Constant(0.1)
    scenario = create_lane_scenario(
        manifest, order, _SCALE_SAMPLES, 256 << 20, FetchConfig(), bucket=bucket, compute=compute
    )
    begun = time.process_time()
    run = simulate(scenario)
    return time.process_time() - begun, run


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def run_scale(quick: bool) -> ExperimentResult:
    """Run simulations of growing size and return their processor time and memory."""
    columns = ("nodes", "super-samples of each", "fetches", "processor s", "µs a fetch", "peak memory MB", "stall")
    table, panels = Table("scale", columns), []
    for nodes, super_samples in _QUICK_SIZES if quick else _SIZES:
        seconds, run = measure_simulation(nodes, super_samples)
        each_us = seconds / run.lookups * 1e6
        table.add(nodes, super_samples, run.lookups, seconds, each_us, peak_bytes() / 1e6, run.stall)
    for title, unit, column in (("Processor time", "s", "processor s"), ("Memory", "MB", "peak memory MB")):
        series = [Series("simulated", table.cells("nodes"), table.cells(column))]
        panels.append(Panel(title, "nodes", unit, series, x_log=True, y_log=True))
    remarks = (
        "One process on one core; processor time, since other programs may run. It differs between machines.",
        "Every fetch runs the real prefetcher, fetcher (permit, deadline, hedge timer, retries) and ring.",
    )
    return ExperimentResult([table], panels, remarks)
