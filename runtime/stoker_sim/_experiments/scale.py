"""What simulating takes: a training on up to 1,000 nodes, each of which reads 1,000 super-samples an epoch."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.feed import FeedConfig
from stoker._order.order import OrderConfig
from stoker_sim._experiments.outcome import Experiment, Outcome, Panel, Series, Table
from stoker_sim._models.dataset import described
from stoker_sim._scenarios.scenario import Run, Scenario, simulate

__all__ = ["EXPERIMENTS", "Cost", "measured"]

_SIZES = ((1, 1_000), (10, 1_000), (100, 1_000), (1_000, 1_000))
_QUICK_SIZES = ((1, 100), (10, 100), (20, 100))
_SAMPLES = 1_024
_SUPER_SAMPLE_BYTES = 8 << 20


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
        super_samples=nodes * super_samples, samples=_SAMPLES, super_sample_bytes=_SUPER_SAMPLE_BYTES, head_bytes=4096
    )
    scenario = Scenario(
        manifest=manifest,
        feed=FeedConfig(
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


def _run(quick: bool) -> Outcome:
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


EXPERIMENTS = {
    "scale": Experiment(name="scale", title="What simulating takes", source="this machine", run=_run),
}
"""By name."""
