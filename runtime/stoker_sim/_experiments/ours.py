"""Our own runs: DELI's workloads with our schedules, and what simulating a thousand nodes takes.

The workloads are read sample by sample from the same bucket, and as super-samples. Of 1,000 nodes, each reads 1,000
super-samples an epoch.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, replace

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.config import FetchConfig
from stoker._fetch.pipeline import PipelineConfig
from stoker._order.order import OrderConfig
from stoker_sim._bucket import described
from stoker_sim._experiments.deli import SOURCE, WORKLOADS, Setting, Workload, measurements, simulated
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._scenario import EpochResult, Run, Scenario, simulate

__all__ = [
    "EXPERIMENTS",
    "Cost",
    "measured",
]

_NODES = 3
_BATCH_SIZE = 512
_CACHE_SAMPLES = 2048
_GETS_PER_SECOND = 100.0
"""That one of the paper's nodes got with 16 threads."""
_CONNECTION_BYTES_PER_SECOND = 20e6
_SUPER_SAMPLE_BYTES = 1 << 18
_WINDOW = 4
_REQUESTS_AT_ONCE = 16
_EPOCHS = 2
"""The first, and one like all later ones."""
_DIRECT = "directly"
_THEIRS = {_DIRECT: Setting(cache_samples=0), "DELI, 50/50": Setting(1024, 1024, 2048)}
"""Ways that the paper measured, too."""
_QUICK_PART = 12
"""A quick run has this part of each data set, and of its computing."""


def _epochs(workload: Workload, samples: int) -> list[EpochResult]:
    """Return each epoch of the first node, with a ring as large as the paper's cache and so many samples an object."""
    manifest = described(
        super_samples=workload.dataset_samples // samples,
        samples=samples,
        super_sample_bytes=samples * workload.sample_bytes,
        head_bytes=64,
    )
    slot_bytes = -(-manifest.largest_bytes // 64) * 64
    feed = PipelineConfig(
        order=OrderConfig(seed=1, window=_WINDOW if samples > 1 else 1, lanes=_NODES),
        batch_size=_BATCH_SIZE,
        world_size=_NODES,
        memory_bytes=manifest.file_bytes + _CACHE_SAMPLES // samples * slot_bytes,
        fetch=FetchConfig(concurrency_start=_REQUESTS_AT_ONCE, concurrency_most=_REQUESTS_AT_ONCE),
    )
    steps = feed.dealing(manifest.samples).steps_from(0)
    scenario = Scenario(
        manifest=manifest,
        feed=feed,
        bucket=BucketModel(
            first_byte=Constant(workload.costs.get_seconds),
            requests_per_second=_NODES * _GETS_PER_SECOND,
            connection_bytes_per_second=_CONNECTION_BYTES_PER_SECOND,
        ),
        compute=Constant(workload.compute_seconds / steps),
        epochs=_EPOCHS,
    )
    return [each for each in simulate(scenario).epochs if each.rank == 0]


def _row(workload: Workload, way: str, epoch: int, ours: EpochResult, direct_seconds: float) -> tuple[Cell, ...]:
    request_seconds = ours.look_ups / _GETS_PER_SECOND
    bound_seconds = max(workload.compute_seconds, request_seconds)
    fewer = 1 - ours.wait_seconds / direct_seconds
    miss_rate = ours.misses / ours.look_ups
    return workload.name, way, epoch, ours.wait_seconds, fewer, miss_rate, ours.seconds, ours.seconds / bound_seconds


def _measured_wait(workload: str, setting: Setting) -> float:
    """Return what DELI's authors measured in the second epoch."""
    found = (e for e in measurements() if (e.workload, e.setting, e.epoch) == (workload, setting, 2))
    return next(found).wait_seconds


def _part(workload: Workload, part: int) -> Workload:
    return replace(
        workload,
        dataset_samples=workload.dataset_samples // part,
        node_samples=workload.node_samples // part,
        compute_seconds=workload.compute_seconds / part,
    )


def _their_rows(workload: Workload, direct_seconds: float) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for way, setting in _THEIRS.items():
        for number, epoch in enumerate(simulated(workload.name, setting), start=1):
            fewer = round(1 - epoch.wait_seconds / direct_seconds, 9) + 0.0  # not -0.0
            rows.append((workload.name, way, number, epoch.wait_seconds, fewer, epoch.miss_rate, epoch.seconds, None))
    return rows


def _panel(workload: Workload, waits: dict[str, float]) -> Panel:
    known = [_measured_wait(workload.name, _THEIRS[way]) if way in _THEIRS else math.nan for way in waits]
    bars = [
        Series(name="simulated", x=list(waits), y=list(waits.values()), kind="bars"),
        Series(name="published", x=list(waits), y=known, is_published=True, kind="bars"),
    ]
    return Panel(title=workload.title, x_label="", y_label="wait for data in epoch 2 (s)", series=bars)


def _ours(quick: bool) -> Outcome:
    part = _QUICK_PART if quick else 1
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for workload in WORKLOADS.values():
        own, in_objects = _part(workload, part), _SUPER_SAMPLE_BYTES // workload.sample_bytes
        waits = {way: simulated(workload.name, setting)[-1].wait_seconds for way, setting in _THEIRS.items()}
        direct_seconds = waits[_DIRECT]
        rows += _their_rows(workload, direct_seconds)
        for way, samples in (("ours, by sample", 1), ("ours, super-samples", in_objects)):
            ours = _epochs(own, samples)
            rows += [_row(own, way, number, each, direct_seconds / part) for number, each in enumerate(ours, start=1)]
            waits[way] = ours[-1].wait_seconds * part
        panels.append(_panel(workload, waits))
    columns = ("workload", "way", "epoch", "wait s", "less than directly", "miss rate", "epoch s", "epoch / bound")
    remarks = (*_REMARKS, f"Our rows are of 1/{part} of each data set.") if quick else _REMARKS
    return Outcome(tables=[Table(name="ours", columns=columns, rows=rows)], panels=panels, remarks=remarks)


_REMARKS = (
    f"The bucket is the paper's: {_GETS_PER_SECOND:.0f} requests a second and node.",
    f"Our ring has room for {_CACHE_SAMPLES:,} samples, as the cache of 50/50; nothing else is cached.",
    "Epochs are partitioned anew. The bound is the longer of computing and requests at that rate.",
)


_SIZES = ((1, 1_000), (10, 1_000), (100, 1_000), (1_000, 1_000))
_QUICK_SIZES = ((1, 100), (10, 100), (20, 100))
_SAMPLES = 1_024
_SCALE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a simulation took.

    Attributes:
        cpu_seconds: of this process.
        peak_bytes: the most memory that this process ever had.
        fetches: super-samples.
        run: what was simulated.
    """

    cpu_seconds: float
    peak_bytes: int
    fetches: int
    run: Run


def measured(nodes: int, super_samples: int) -> Cost:
    """Simulate an epoch on so many nodes, each with as many super-samples of 8 MiB, a batch each."""
    manifest = described(
        super_samples=nodes * super_samples, samples=_SAMPLES, super_sample_bytes=_SCALE_BYTES, head_bytes=4096
    )
    scenario = Scenario(
        manifest=manifest,
        feed=PipelineConfig(
            order=OrderConfig(seed=1, lanes=nodes),
            batch_size=_SAMPLES,
            world_size=nodes,
            memory_bytes=manifest.file_bytes + (256 << 20),
        ),
        bucket=BucketModel(first_byte=LogNormal(0.02, 0.08)),
        compute=Constant(0.1),
    )
    begun = time.process_time()
    run = simulate(scenario)
    cpu_seconds = time.process_time() - begun
    fetches = sum(each.look_ups for each in run.epochs)
    return Cost(cpu_seconds=cpu_seconds, peak_bytes=_peak_bytes(), fetches=fetches, run=run)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _scale(quick: bool) -> Outcome:
    rows = []
    for nodes, super_samples in _QUICK_SIZES if quick else _SIZES:
        cost = measured(nodes, super_samples)
        each_us = cost.cpu_seconds / cost.fetches * 1e6
        rows.append(
            (nodes, super_samples, cost.fetches, cost.cpu_seconds, each_us, cost.peak_bytes / 1e6, cost.run.stall)
        )
    columns = ("nodes", "super-samples of each", "fetches", "processor s", "µs a fetch", "peak memory MB", "stall")
    x = [float(row[0]) for row in rows]
    panels = [
        Panel(
            title=title,
            x_label="nodes",
            y_label=y_label,
            series=[Series(name="simulated", x=x, y=[float(row[place]) for row in rows])],
            x_log=True,
            y_log=True,
        )
        for title, y_label, place in (("Processor time", "s", 3), ("Memory", "MB", 5))
    ]
    remarks = (
        "One process on one core; processor time, since the machine may have other work. It differs between machines.",
        "Every fetch runs the real prefetcher, fetcher (permit, deadline, hedge timer, retries) and ring.",
    )
    return Outcome(tables=[Table(name="scale", columns=columns, rows=rows)], panels=panels, remarks=remarks)


EXPERIMENTS = (
    Experiment(name="ours", title="The paper's workloads with our schedules", source=SOURCE, run=_ours),
    Experiment(name="scale", title="What simulating takes", source="this machine", run=_scale),
)
