"""Ratios of stoker to the other loaders of a comparison: `python -m benchmarks.ratios RESULTS` prints tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.cells import LIMITS, LOADERS, TITLES
from benchmarks.document import table
from benchmarks.results import Figure, Results

FIGURES: dict[str, dict[str, tuple[Figure, str]]] = {
    "cold": {
        "samples/s": (lambda record: record.rate, "{:,.0f}"),
        "first batch, ms": (lambda record: record.first_batch_seconds * 1e3, "{:,.0f}"),
        "CPU µs/sample": (lambda record: record.cpu_us_per_sample, "{:,.2f}"),
    },
    "steady": {
        "samples/s": (lambda record: record.rate, "{:,.0f}"),
        "second epoch": (lambda record: record.second_epoch_rate, "{:,.0f}"),
        "CPU µs/sample": (lambda record: record.cpu_us_per_sample, "{:,.2f}"),
    },
    "stall": {
        "stall": (lambda record: record.stall, "{:.2%}"),
        "first batch, ms": (lambda record: record.first_batch_seconds * 1e3, "{:,.0f}"),
        "second batch, ms": (lambda record: record.second_batch_seconds * 1e3, "{:,.2f}"),
    },
    "starts": {
        "median, ms": (lambda record: median(record.start_seconds) * 1e3, "{:,.0f}"),
        "longest, ms": (lambda record: max(record.start_seconds) * 1e3, "{:,.0f}"),
    },
    "limit": {"samples/s": (lambda record: record.rate, "{:,.0f}")},
}
"""Kind of run → name of a figure → the figure and its format."""


def ratios(results: Results) -> str:
    """Return a table for each workload, mode, network and kind: medians, and stoker's ratios to them within rounds.

    The ratios to limits, which have a kind of their own, stand among those of steady runs.
    """
    cases = dict.fromkeys((each.cell.workload, each.cell.mode, each.cell.profile, each.cell.kind) for each in results)
    return "\n".join(
        f"\n{workload}, {mode}, bucket `{profile}`, {kind}\n\n{_table(results, workload, mode, profile, kind)}"
        for workload, mode, profile, kind in cases
    )


def _table(results: Results, workload: str, mode: str, profile: str, kind: str) -> str:
    figures = FIGURES[kind]
    head = ["", *(each for name in figures for each in (name, "stoker's, of it"))]
    rows = []
    where = {"workload": workload, "mode": mode, "profile": profile}
    ours = {**where, "loader": "ours", "kind": "steady" if kind == "limit" else kind}
    for loader in (*LOADERS, *LIMITS):
        theirs = {**where, "loader": loader, "kind": kind}
        if results.where(**theirs):
            errors = [record.error for record in results.where(**theirs) if record.error]
            cells = _cells(results, figures, ours, theirs)
            rows.append([TITLES.get(loader, loader) + (f" ({errors[0]})" if errors else ""), *cells])
    return table(head, rows)


def _cells(
    results: Results, figures: dict[str, tuple[Figure, str]], ours: dict[str, str], theirs: dict[str, str]
) -> Iterator[str]:
    for figure, form in figures.values():
        value, ratio = results.median(figure, **theirs), results.ratio(figure, ours, theirs)
        yield "" if value is None else form.format(value)
        yield "" if ratio is None or theirs["loader"] == "ours" else f"{ratio:.2f}"


if __name__ == "__main__":
    print(ratios(Results.load(Path(sys.argv[1]))))
