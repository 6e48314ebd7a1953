"""Plots of the results of `benchmarks.compare`, as PNG: `python -m benchmarks.plots [RESULTS]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.cells import LIMITS, LOADERS, OURS, STARTED, STARTED_SHARE, STEP_SECONDS, TITLES
from benchmarks.results import Figure, Record, Results, quality
from benchmarks.workloads import RESULTS, WORKLOADS

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH_INCHES = 9.0  # at 100 dots per inch: 900 pixels
BAR_INCHES = 0.27
OURS_COLOUR, FULL_COLOUR, PEER_COLOUR, LIMIT_COLOUR = "#d1495b", "#e39a8b", "#8aa1b1", "#d0d0d0"
SPDL_COLOUR = "#4f6d7a"
LIMIT_COLOURS = {"sockets": "#1b4965", "aiohttp": "#2a9d8f", "gather": "#6a4c93", "decode": "#bc8034"}
PROFILE_TITLES = {
    "none": "a bucket as fast as the machine",
    "cloud": "a bucket like a cloud's: 20 ms, 90 MB/s a connection, 600 MB/s in all",
}
EPOCH_TITLES = {"cold": "first epoch, cold", "steady": "second epoch"}
PLOTS = {
    "throughput-none": "samples a second of every loader, unshaped bucket",
    "throughput-cloud": "samples a second of every loader, cloud-like bucket",
    "cpu": "processor time of a sample",
    "first-batch": "time to the first batch",
    "starts": "times to the first batch while some requests are late",
    "stall": "share of the time that a training loop waits",
    "tail": "rate when some requests are late, of that when none is",
}
"""Name of a plot's file → its title."""
STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Bars = list[tuple[str, float, str]]
"""Label, value and colour of each bar, from the top."""


@contextmanager
def panels(name: str, title: str, bars: list[Bars]) -> Iterator[list[Axes]]:
    """Save a plot with a panel below the other, each with the height of its bars, and one legend for the lines."""
    heights = [BAR_INCHES * len(each) + 0.75 for each in bars]
    with plt.rc_context(STYLE):
        size = (WIDTH_INCHES, sum(heights) + 0.5)
        figure, axes = plt.subplots(len(bars), figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        yield list(axes[:, 0])
        lines = {
            label: line for each in axes[:, 0] for line, label in zip(*each.get_legend_handles_labels(), strict=True)
        }
        if lines:
            figure.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=min(3, len(lines)))
        IMAGES.mkdir(parents=True, exist_ok=True)
        figure.savefig(IMAGES / f"{name}.png")
        plt.close(figure)
    print(IMAGES / f"{name}.png")


def draw(axes: Axes, bars: Bars, shown: str) -> None:
    """Draw bars with their values at their ends."""
    labels, values, colours = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), values, color=colours, height=0.72)
    axes.set_yticks(range(len(bars)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    readable = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # readable on a limit's line
    axes.bar_label(drawn, [shown.format(value) for value in values], padding=5, fontsize=9, bbox=readable)


def log_scale(axes: Axes, values: list[float]) -> None:
    positive = [value for value in values if value > 0]  # a processor time may be too short to show
    if not positive:
        return
    axes.set_xscale("log")
    axes.set_xlim(min(positive) / 2, max(positive) * 3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.minorticks_off()


def colour(loader: str) -> str:
    return {"ours": OURS_COLOUR, "spdl": SPDL_COLOUR}.get(loader, FULL_COLOUR if loader in OURS else PEER_COLOUR)


def label(results: Results, loader: str, workload: str) -> str:
    """Return a loader's name and the quality of its shuffle."""
    mixed = quality(results, workload=workload, mode="raw", loader=loader)
    return TITLES.get(loader, loader) + ("" if mixed is None else f" ({mixed:.2f})")


def rate(record: Record) -> float:
    return record.rate


def second_epoch(record: Record) -> float:
    return record.second_epoch_rate


def bars_of(results: Results, figure: Figure, workload: str, mode: str, profile: str, kind: str) -> Bars:
    """Return a bar for every loader with such a measurement, the longest first."""
    bars = []
    for loader in LOADERS:
        value = results.median(figure, workload=workload, mode=mode, profile=profile, kind=kind, loader=loader)
        if value is not None:
            bars.append((label(results, loader, workload), value, colour(loader)))
    return longest_first(bars)


def longest_first(bars: Bars) -> Bars:
    return sorted(bars, key=lambda bar: -bar[1])


def throughput_cases(results: Results, profile: str) -> list[tuple[str, Bars, dict[str, float]]]:
    """Return title, bars and limits of each panel: one of cold epochs, one of second ones."""
    cases = []
    for workload in WORKLOADS.values():
        for mode in workload.modes:
            where = {"workload": workload.name, "mode": mode, "profile": profile}
            found = {each: results.median(rate, **where, loader=each) for each in LIMIT_COLOURS}
            limits = {each: value for each, value in found.items() if value is not None}
            for kind, epochs in EPOCH_TITLES.items():
                figure = rate if kind == "cold" else second_epoch
                bars = bars_of(results, figure, workload.name, mode, profile, kind)
                if any(drawn != PEER_COLOUR for _, _, drawn in bars):
                    decoded = ", decoded" if mode == "decoded" else ""
                    cases.append((f"{workload.name}: {workload.title}{decoded}, {epochs}", bars, limits))
    return cases


def plot_throughput(results: Results, profile: str) -> None:
    cases = throughput_cases(results, profile)
    if not cases:
        return
    title = f"Samples a second from {PROFILE_TITLES[profile]} (in brackets: shuffle quality)"
    with panels(f"throughput-{profile}", title, [bars for _, bars, _ in cases]) as all_axes:
        for axes, (panel_title, bars, limits) in zip(all_axes, cases, strict=True):
            draw(axes, bars, "{:,.0f}")
            for limit, value in limits.items():
                axes.axvline(value, color=LIMIT_COLOURS[limit], lw=1.6, ls="--", label=TITLES[limit])
            log_scale(axes, [*limits.values(), *(value for _, value, _ in bars)])
            axes.set_title(panel_title)


def plot_cpu(results: Results) -> None:
    cases = [(workload.name, mode) for workload in WORKLOADS.values() for mode in workload.modes]
    found = {case: bars_of(results, lambda record: record.cpu_us_per_sample, *case, "none", "cold") for case in cases}
    found = {case: bars for case, bars in found.items() if bars}
    if not found:
        return
    title = "Processor time of a sample in a cold epoch, µs, all processes, imports aside"
    with panels("cpu", title, list(found.values())) as all_axes:
        for axes, ((workload, mode), bars) in zip(all_axes, found.items(), strict=True):
            draw(axes, bars, "{:,.1f}")
            log_scale(axes, [value for _, value, _ in bars])
            axes.set_title(f"{workload}: {WORKLOADS[workload].title}" + (", decoded" if mode == "decoded" else ""))


def plot_stall(results: Results) -> None:
    found = {
        workload: bars_of(results, lambda record: record.stall, workload, "raw", "cloud", "stall")
        for workload in WORKLOADS
    }
    found = {workload: bars for workload, bars in found.items() if bars}
    if not found:
        return
    title = (
        f"Share of the time that a training loop with a step of {STEP_SECONDS * 1e3:.0f} ms waits, cloud-like bucket"
    )
    with panels("stall", title, list(found.values())) as all_axes:
        for axes, (workload, bars) in zip(all_axes, found.items(), strict=True):
            draw(axes, bars, "{:.1%}")
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_title(f"{workload}: {WORKLOADS[workload].title}")


def plot_first_batch(results: Results) -> None:
    found = {
        workload: bars_of(results, lambda record: record.first_batch_seconds * 1e3, workload, "raw", "cloud", "cold")[
            ::-1
        ]
        for workload in WORKLOADS
    }
    found = {workload: bars for workload, bars in found.items() if bars}
    if not found:
        return
    title = "Milliseconds from constructing a loader to its first batch, cloud-like bucket"
    with panels("first-batch", title, list(found.values())) as all_axes:
        for axes, (workload, bars) in zip(all_axes, found.items(), strict=True):
            draw(axes, bars, "{:,.0f}")
            log_scale(axes, [value for _, value, _ in bars])
            axes.set_title(f"{workload}: {WORKLOADS[workload].title}")


def plot_starts(results: Results) -> None:
    """Plot the shares of starts that took longer than a time, on logarithmic axes."""
    found = {
        workload: [
            seconds
            for record in results.measured(workload=workload, loader="ours", kind="starts")
            for seconds in record.start_seconds
        ]
        for workload in STARTED
    }
    found = {workload: sorted(seconds) for workload, seconds in found.items() if seconds}
    if not found:
        return
    with plt.rc_context({**STYLE, "axes.grid.axis": "both"}):
        figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        for (workload, seconds), drawn in zip(found.items(), (OURS_COLOUR, SPDL_COLOUR), strict=False):
            longer = [1.0 - place / len(seconds) for place in range(len(seconds))]
            axes.step(seconds, longer, where="post", color=drawn, label=f"{workload}, {len(seconds):,} starts")
        axes.axhline(1.0 - STARTED_SHARE, color=LIMIT_COLOUR, lw=1.2, ls="--")
        axes.set(yscale="log", xlabel="seconds to the first batch", xlim=(0, None))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title("Share of starts that take longer, while 10% of requests are 2 s late", weight="bold")
        axes.legend()
        IMAGES.mkdir(parents=True, exist_ok=True)
        figure.savefig(IMAGES / "starts.png")
        plt.close(figure)
    print(IMAGES / "starts.png")


def plot_tail(results: Results) -> None:
    bars: Bars = []
    for loader in (*LOADERS, *LIMITS):
        is_limit = loader in LIMITS
        of = {"workload": "jpegs", "mode": "raw", "loader": loader, "kind": "limit" if is_limit else "cold"}
        value = results.ratio(rate, {**of, "profile": "cloud-tail"}, {**of, "profile": "cloud"})
        if value is not None:
            bars.append((TITLES.get(loader, loader), value, LIMIT_COLOUR if is_limit else colour(loader)))
    if not bars:
        return
    title = "What is left of a cold epoch's rate when 5% of requests take 2 s longer (jpegs)"
    with panels("tail", title, [bars]) as (axes,):
        draw(axes, longest_first(bars), "{:.2f}")
        axes.set_xlim(0, 1.1 * max(1.0, *(value for _, value, _ in bars)))


def plot(results: Results) -> None:
    """Write all plots that have figures."""
    for profile in PROFILE_TITLES:
        plot_throughput(results, profile)
    plot_cpu(results)
    plot_first_batch(results)
    plot_starts(results)
    plot_stall(results)
    plot_tail(results)


if __name__ == "__main__":
    plot(Results.load(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / "full.jsonl"))
