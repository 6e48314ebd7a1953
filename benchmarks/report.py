"""Tables of the results of `benchmarks.compare` in docs/performance.md: `python -m benchmarks.report [RESULTS]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.cells import EPOCH_PROFILES, EVERY_ROUND, LIMITS, LOADERS, OURS, STARTED, TITLES
from benchmarks.document import markers, replace_between
from benchmarks.plots import IMAGES, PLOTS
from benchmarks.results import Figure, Mixing, Record, Results, quality
from benchmarks.targets import table as target_table
from benchmarks.workloads import RESULTS, WORKLOADS

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
NAME = "compare"
BEGIN, END = markers(NAME)
NONE = ""

Cells = Callable[[str], list[str]]
"""The cells of a loader's table row, after its name."""


def format_value(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def table(head: list[str], names: list[str], cells: Cells) -> str:
    """Return a Markdown table with a row for each loader or limit that has a figure."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for name in names:
        row = cells(name)
        if any(row):
            lines.append(f"| {TITLES.get(name, name)} | {' | '.join(row)} |")
    return "\n".join(lines)


def speed_table(results: Results, workload: str, mode: str, profile: str) -> str:
    """Return a table of the rate, processor time and shuffle quality of each loader and limit."""

    def cells(name: str) -> list[str]:
        where = {"workload": workload, "mode": mode, "profile": profile, "loader": name}

        def figure(figure: Figure, form: str, *kinds: str) -> str:
            found = (results.median(figure, **where, kind=kind) for kind in kinds)
            return format_value(next((value for value in found if value is not None), None), form)

        best = ("steady", "cold", "limit") if name in OURS else ("cold", "limit")
        return [
            figure(lambda record: record.rate, "{:,.0f}", "cold") or failure(results, workload, mode, profile, name),
            figure(lambda record: record.second_epoch_rate, "{:,.0f}", "steady"),
            figure(lambda record: record.rate, "{:,.0f}", *(("steady",) if name in EVERY_ROUND else ()), "limit"),
            figure(lambda record: record.bytes_per_second / 1e6, "{:,.0f}", *best),
            figure(lambda record: record.cpu_us_per_sample, "{:,.2f}", *best),
            figure(lambda record: record.cpu_seconds_per_gb, "{:,.2f}", *best),
            figure(lambda record: record.first_batch_seconds, "{:.2f}", "cold"),
            figure(lambda record: record.stall, "{:.1%}", "stall"),
            format_value(quality(results, **where), "{:.2f}"),
        ]

    head = ["", "cold, samples/s", "second epoch", "steady, or limit", "MB/s", "CPU µs/sample", "CPU s/GB"]
    return table([*head, "first batch, s", "stall", "shuffle"], [*LOADERS, *LIMITS], cells)


def starts_table(results: Results) -> str:
    """Return a table of the times to the first batch of many starts, if 10% of the requests take 2 s longer."""
    lines = ["| | starts | median, s | 90%, s | 99%, s | longest, s |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for workload in STARTED:
        runs = results.measured(workload=workload, loader="ours", kind="starts")
        found = np.array([seconds for record in runs for seconds in record.start_seconds])
        if len(found):
            shown = (f"{np.quantile(found, share, method='inverted_cdf'):.3f}" for share in (0.5, 0.9, 0.99, 1.0))
            lines.append(f"| {workload} | {len(found):,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def failure(results: Results, workload: str, mode: str, profile: str, loader: str) -> str:
    """Return the error of a loader that was run and has no figure; the limits have no cold run."""
    tried = results.where(workload=workload, mode=mode, profile=profile, loader=loader, kind="cold")
    return (tried[0].error or "") if tried else ""


def cost_table(results: Results, workload: str) -> str:
    """Return a table of each loader's resource usage and mixing in a cold epoch, from the unshaped bucket."""

    def cells(name: str) -> list[str]:
        where = {"workload": workload, "mode": "raw", "profile": "none", "loader": name, "kind": "cold"}

        def figure(figure: Figure, form: str) -> str:
            return format_value(results.median(figure, **where), form)

        def mixing(figure: Callable[[Mixing], float], form: str) -> str:
            found = [figure(record.mixing) for record in results.measured(**where) if record.mixing is not None]
            return format_value(max(found), form) if found else NONE

        memory = max((record.extra_bytes / 1e6 for record in memory_records(results, workload, name)), default=None)
        return [
            format_value(memory, "{:,.0f}"),
            figure(lambda record: record.disk_bytes / 1e6, "{:,.0f}"),
            figure(lambda record: record.gets, "{:,.0f}"),
            figure(lambda record: record.amplification, "{:.3f}"),
            mixing(lambda found: found.rank_correlation, "{:.3f}"),
            mixing(lambda found: found.neighbours, "{:,.1f}"),
            mixing(lambda found: found.distance, "{:.2f}"),
            mixing(lambda found: found.missing, "{:,.0f}"),
            mixing(lambda found: found.duplicated, "{:,.0f}"),
        ]

    head = ["", "memory, MB", "disk, MB", "GETs", "bytes/payload"]
    head += ["rank correlation", "neighbours", "distance", "lost", "twice"]
    return table(head, list(LOADERS), cells)


def memory_records(results: Results, workload: str, loader: str) -> Iterator[Record]:
    """Yield the runs of a workload, of which the largest memory counts."""
    for kind in ("cold", "steady"):
        yield from results.measured(workload=workload, mode="raw", loader=loader, kind=kind)


def text(results: Results) -> str:
    """Return all tables, each under its heading."""
    plots = [f"![{what}](images/{name}.png)" for name, what in PLOTS.items() if (IMAGES / f"{name}.png").exists()]
    machine, selection = results.settings["machine"], results.settings["selection"]
    parts = [
        f"Measured with Python {machine['python']} on {machine['cores']} cores, in {selection['rounds']} rounds"
        + (f", at {selection['scale']:g} of the full size;" if selection["scale"] != 1 else ";")
        + " medians.",
        "### Targets",
        target_table(results),
        *(["### Plots", *plots] if plots else []),
    ]
    if results.where(kind="starts"):
        parts += ["### Starts while 10% of requests are 2 s late", starts_table(results)]
    for workload in WORKLOADS.values():
        for mode in workload.modes:
            for profile in EPOCH_PROFILES:
                if results.where(workload=workload.name, mode=mode, profile=profile):
                    parts.append(f"### {workload.name}, {mode}, bucket `{profile}`: {workload.title}")
                    parts.append(speed_table(results, workload.name, mode, profile))
        if results.where(workload=workload.name, mode="raw", profile="none", kind="cold"):
            parts.append(f"### {workload.name}: what else a cold epoch takes, and how it mixes")
            parts.append(cost_table(results, workload.name))
    return "\n\n".join(parts)


def write(results: Results, document: Path = DOCUMENT) -> None:
    """Write the tables between the markers of a document.

    Raises:
        ValueError: it does not have them.
    """
    replace_between(document, NAME, text(results))


if __name__ == "__main__":
    write(Results.load(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "full.jsonl"))
    print(f"tables: {DOCUMENT}")
