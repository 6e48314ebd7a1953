"""Targets of the loader and their results: `python -m benchmarks.targets [RESULTS]` prints a Markdown table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cells import STARTED, STARTED_SHARE
from benchmarks.results import Figure, Record, Results
from benchmarks.workloads import RESULTS, WORKLOADS

MIN_TAIL_GETS = 500
FIXED = ("images", "tokens")  # samples of one size
COLD_OVER_SPDL = {"images": 1.5, "jpegs": 1.1, "tokens": 1.5}
FIRST_BATCH_MS = {"images": 100, "jpegs": 140, "tokens": 100}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure and its bound.

    Attributes:
        what: description of the figure.
        measure: function from the results to the figure; None if they do not have it.
        least: minimum value; default none.
        most: maximum value; default none. A figure without either is only shown for comparison.
        shown: format of the figure.
    """

    what: str
    measure: Callable[[Results], float | None]
    minimum: float | None = None
    maximum: float | None = None
    shown: str = "{:.2f}"

    @property
    def bound(self) -> str:
        if self.minimum is not None:
            return f"≥ {self.shown.format(self.minimum)}"
        return "" if self.maximum is None else f"≤ {self.shown.format(self.maximum)}"

    def verdict(self, value: float | None) -> str:
        """Return whether a figure is within the bound, as a word."""
        if value is None:
            return "not measured"
        if self.minimum is None and self.maximum is None:
            return ""
        is_met = (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        return "met" if is_met else "**missed**"


def _rate(record: Record) -> float:
    return record.rate


def _ours(workload: str, profile: str, kind: str = "steady", mode: str = "raw", loader: str = "ours") -> dict[str, Any]:
    return {"workload": workload, "profile": profile, "kind": kind, "mode": mode, "loader": loader}


def of_limit(results: Results, limit: str, workload: str, profile: str, mode: str = "raw") -> float | None:
    """Return our steady rate as a multiple of a limit's."""
    of = _ours(workload, profile, mode=mode)
    return results.ratio(_rate, of, {**of, "loader": limit, "kind": "limit"})


def over(results: Results, figure: Figure, loader: str, workload: str, profile: str, kind: str) -> float | None:
    """Return a figure of ours as a multiple of another loader's, in runs of the same kind."""
    of = _ours(workload, profile, kind)
    return results.ratio(figure, of, {**of, "loader": loader})


def over_peers(results: Results, figure: Figure, workload: str, kind: str, loader: str = "ours") -> float | None:
    """Return a rate of ours as a multiple of that of the fastest peer with a real shuffle, from the unshaped bucket."""
    of = _ours(workload, "none", kind, loader=loader)
    peers = results.shuffling_peers(workload)
    ratios = [results.ratio(figure, of, {**of, "loader": peer}) for peer in peers]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def further_epochs(results: Results, workload: str, profile: str, count: Figure, loader: str = "ours") -> float | None:
    """Return a count per further epoch: a steady run minus a run of one epoch, per epoch; median over rounds."""
    where = _ours(workload, profile, loader=loader)
    cold = {record.cell.round: record for record in results.measured(**{**where, "kind": "cold"})}
    found = [
        (count(record) - count(cold[record.cell.round])) / (record.cell.epochs - 1)
        for record in results.measured(**where)
        if record.cell.round in cold
    ]
    return median(found) if found else None


def cpu_us(results: Results, workload: str, profile: str, loader: str = "ours") -> float | None:
    """Return the processor time per sample in steady state, in microseconds."""
    epoch = further_epochs(results, workload, profile, lambda record: record.cpu_seconds, loader)
    samples = further_epochs(results, workload, profile, lambda record: record.delivered, loader)
    return epoch * 1e6 / samples if epoch is not None and samples else None


def cpu_seconds_per_gb(results: Results, workload: str, profile: str) -> float | None:
    """Return the processor time per gigabyte of payload in steady state."""
    us = cpu_us(results, workload, profile)
    sample_bytes = results.median(lambda record: record.sample_bytes, **_ours(workload, profile))
    return us * 1e3 / sample_bytes if us is not None and sample_bytes else None


def stream_cpu(results: Results, workload: str) -> float | None:
    """Return the processor time per sample of `StreamDataset`, as a multiple of `Loader`'s, in steady state."""
    stream, ours = (cpu_us(results, workload, "none", loader) for loader in ("ours_stream", "ours"))
    return stream / ours if stream is not None and ours else None


def started_within(results: Results, workload: str) -> float | None:
    """Return the time within which 99% of all starts had their first batch, in seconds."""
    runs = results.measured(**_ours(workload, "cloud-late", "starts"))
    found = [seconds for run in runs for seconds in run.start_seconds]
    return float(np.quantile(found, STARTED_SHARE, method="inverted_cdf")) if found else None


def gets_per_super_sample(results: Results, workload: str, profile: str) -> float | None:
    """Return the GETs per super-sample of an epoch in steady state, without hedges."""
    epoch = further_epochs(results, workload, profile, lambda record: record.gets - record.hedges)
    objects = results.median(lambda record: record.result["super_samples"], **_ours(workload, profile))
    return epoch / objects if epoch is not None and objects else None


def amplification(results: Results, workload: str, profile: str) -> float | None:
    """Return the ratio of read bytes to payload of an epoch in steady state."""
    epoch = further_epochs(results, workload, profile, lambda record: record.read_bytes)
    payload = results.median(lambda record: record.payload_bytes, **_ours(workload, profile))
    return epoch / payload if epoch is not None and payload else None


def tail_ratio(results: Results) -> float | None:
    """Return the rate with 5% of late requests, as a multiple of that without; only with enough GETs."""
    gets = results.median(lambda record: record.gets, **_ours("jpegs", "cloud-tail"))
    if gets is None or gets < MIN_TAIL_GETS:
        return None
    return results.ratio(_rate, _ours("jpegs", "cloud-tail"), _ours("jpegs", "cloud"))


def largest(results: Results, figure: Callable[[Record], float]) -> float | None:
    """Return the maximum of a figure over all our epochs, of every workload, network and kind."""
    runs = (record for record in results.measured(loader="ours") if record.cell.kind != "starts")
    return max((figure(record) for record in runs), default=None)


def _spare_mb(record: Record) -> float:
    return float((record.extra_bytes - record.result["budget_bytes"]) / 1e6)


def _wrong_samples(record: Record) -> float:
    return float("inf") if record.mixing is None else record.mixing.missing + record.mixing.duplicated


def _uniform_distance(results: Results) -> float | None:
    distances = [record.mixing.distance for record in results.measured(loader="ours_full") if record.mixing is not None]
    return max((abs(distance - 1.0) for distance in distances), default=None)


def _cloud_median(results: Results, figure: Figure, workload: str, kind: str) -> float | None:
    return results.median(figure, **_ours(workload, "cloud", kind))


def _first_batch_seconds(record: Record) -> float:
    return record.first_batch_seconds


def _second_epoch(record: Record) -> float:
    return record.second_epoch_rate


def targets() -> Iterator[Target]:
    """Yield all targets: for the unshaped bucket, for the cloud, and for every run."""
    yield from _unshaped()
    yield from _cloud()
    yield Target(
        what="peak memory beyond the budget and a bare torch import, MB",
        measure=partial(largest, figure=_spare_mb),
        maximum=150,
        shown="{:.0f}",
    )
    yield Target(
        what="bytes on disk",
        measure=partial(largest, figure=lambda record: record.disk_bytes),
        maximum=0,
        shown="{:.0f}",
    )
    yield Target(
        what="samples lost or delivered twice",
        measure=partial(largest, figure=_wrong_samples),
        maximum=0,
        shown="{:.0f}",
    )
    for name in WORKLOADS:
        for profile in ("none", "cloud"):
            yield Target(
                what=f"{name}, `{profile}`: GETs an epoch, hedges aside, by super-samples",
                measure=partial(gets_per_super_sample, workload=name, profile=profile),
                maximum=1.02,  # the two compared runs begin with different ranges
                shown="{:.2f}",
            )
            yield Target(
                what=f"{name}, `{profile}`: bytes read over payload",
                measure=partial(amplification, workload=name, profile=profile),
                maximum=1.02,
                shown="{:.4f}",
            )
    yield Target(
        what="`full` shuffle: packed neighbours' distance, off a uniform permutation's",
        measure=_uniform_distance,
        maximum=0.02,
        shown="{:.1%}",
    )


def _unshaped() -> Iterator[Target]:
    for name, minimum in (("images", 1.1), ("jpegs", 1.1), ("tokens", 0.9)):
        yield Target(
            what=f"{name}: steady rate, of plain aiohttp's",
            measure=partial(of_limit, limit="aiohttp", workload=name, profile="none"),
            minimum=minimum,
        )
    yield Target(
        what="images: CPU of a sample in steady state, µs",
        measure=partial(cpu_us, workload="images", profile="none"),
        maximum=1.4,
    )
    yield Target(
        what="jpegs: CPU of a gigabyte in steady state, s",
        measure=partial(cpu_seconds_per_gb, workload="jpegs", profile="none"),
        maximum=0.5,
    )
    yield Target(
        what="JPEGs decoded: of the bare decoding rate of all cores",
        measure=partial(of_limit, limit="decode", workload="jpegs", profile="none", mode="decoded"),
        minimum=0.95,
    )
    for name in WORKLOADS:
        yield Target(
            what=f"{name}: CPU of a sample from `StreamDataset`, in whole batches, times `Loader`'s",
            measure=partial(stream_cpu, workload=name),
            maximum=2.0,
        )
    yield from _beside_peers()


def _beside_peers() -> Iterator[Target]:
    """Yield the ratios to peers, of cold epochs to cold ones and of second epochs to second ones."""
    for name in WORKLOADS:
        yield from _beside_spdl(name, "none", COLD_OVER_SPDL[name])
    times = "{:.1f}"
    for name in WORKLOADS:
        yield Target(
            what=f"{name}: cold rate, times the best really shuffling peer's",
            measure=partial(over_peers, figure=_rate, workload=name, kind="cold"),
            minimum=6.0 if name in FIXED else None,
            shown=times,
        )
        yield Target(  # not a target, but of interest to readers
            what=f"{name}: cold rate with `full` shuffle, times the best really shuffling peer's",
            measure=partial(over_peers, figure=_rate, workload=name, kind="cold", loader="ours_full"),
            shown=times,
        )
        yield Target(
            what=f"{name}: second epoch, times the best really shuffling peer's, most from its disk",
            measure=partial(over_peers, figure=_second_epoch, workload=name, kind="steady"),
            shown=times,
        )


def _beside_spdl(workload: str, profile: str, cold_minimum: float) -> Iterator[Target]:
    spdl = partial(over, loader="spdl", workload=workload, profile=profile)
    yield Target(
        what=f"{workload}, `{profile}`: cold rate, times SPDL's",
        measure=partial(spdl, figure=_rate, kind="cold"),
        minimum=cold_minimum,
    )
    yield Target(
        what=f"{workload}, `{profile}`: time to first batch, of SPDL's",
        measure=partial(spdl, figure=_first_batch_seconds, kind="cold"),
        maximum=0.6,
    )
    yield Target(
        what=f"{workload}, `{profile}`: second epoch, times SPDL's",
        measure=partial(spdl, figure=_second_epoch, kind="steady"),
    )


def _cloud() -> Iterator[Target]:
    for name in WORKLOADS:
        yield from _beside_spdl(name, "cloud", 1.05)
        yield Target(
            what=f"{name}, `cloud`: steady rate, of raw sockets with as many connections",
            measure=partial(of_limit, limit="sockets", workload=name, profile="cloud"),
            minimum=0.95,
        )
        yield Target(
            what=f"{name}, `cloud`: stall behind the first batch, with a step of 50 ms",
            measure=partial(_cloud_median, figure=lambda record: record.stall, workload=name, kind="stall"),
            maximum=0.004,
            shown="{:.2%}",
        )
        yield Target(
            what=f"{name}, `cloud`: wait for the second batch, with a step of 50 ms, ms",
            measure=partial(
                _cloud_median, figure=lambda record: record.second_batch_seconds * 1e3, workload=name, kind="stall"
            ),
            maximum=2,
            shown="{:.1f}",
        )
        yield Target(
            what=f"{name}, `cloud`: time to first batch, ms",
            measure=partial(
                _cloud_median, figure=lambda record: record.first_batch_seconds * 1e3, workload=name, kind="cold"
            ),
            maximum=FIRST_BATCH_MS[name],
            shown="{:.0f}",
        )
    for name in STARTED:
        yield Target(
            what=f"{name}: 10% of requests delayed by 2 s: 99% of starts have a first batch within, s",
            measure=partial(started_within, workload=name),
            maximum=0.35,
        )
    yield Target(
        what="5% of requests delayed by 2 s: rate, of that without",
        measure=tail_ratio,
        minimum=0.90,
    )


def table(results: Results) -> str:
    """Return the targets and the results, as a Markdown table."""
    lines = ["| what | target | measured | |", "| --- | ---: | ---: | --- |"]
    for target in targets():
        value = target.measure(results)
        measured = "" if value is None else target.shown.format(value)
        lines.append(f"| {target.what} | {target.bound} | {measured} | {target.verdict(value)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Results.load(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "full.jsonl")))
