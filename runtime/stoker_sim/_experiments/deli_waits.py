"""DELI's figures of waits: its settings beside reading directly, and the wait over the miss rate."""

from __future__ import annotations

import math

import numpy as np

from stoker_sim._experiments.deli_workloads import SOURCE, WORKLOADS, Setting, measurements, simulated
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table

__all__ = ["EXPERIMENTS"]

_DISK = "disk"
_DIRECT = "bucket"
_SETTINGS = {
    _DISK: None,
    _DIRECT: Setting(cache_samples=0),
    "cache, unlimited": Setting(),
    "full fetch 1024": Setting(1024),
    "full fetch 2048": Setting(2048, 0, 2048),
    "50/50": Setting(1024, 1024, 2048),
}
_FEWER = {"mnist": 0.856, "cifar10": 0.935}
"""By how much less than reading directly the paper says that 50/50 waits."""


def _published(workload: str, setting: Setting | None, epoch: int) -> float | None:
    found = (each for each in measurements() if (each.workload, each.setting, each.epoch) == (workload, setting, epoch))
    return next((each.wait_seconds for each in found), None)


def _figure_3(quick: bool) -> Outcome:
    rows: list[tuple[Cell, ...]] = []
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        series = []
        for epoch in (1, 2):
            ours = [
                math.nan if setting is None else simulated(workload.name, setting)[epoch - 1].wait_seconds
                for setting in _SETTINGS.values()
            ]
            theirs = [_published(workload.name, setting, epoch) for setting in _SETTINGS.values()]
            for name, wait, known in zip(_SETTINGS, ours, theirs, strict=True):
                error = None if known is None or math.isnan(wait) else wait / known - 1
                rows.append((workload.name, name, epoch, None if math.isnan(wait) else wait, known, error))
            series.append(Series(name=f"epoch {epoch}", x=list(_SETTINGS), y=ours, kind="bars"))
            known_waits = [math.nan if known is None else known for known in theirs]
            series.append(
                Series(
                    name=f"epoch {epoch}, published", x=list(_SETTINGS), y=known_waits, is_published=True, kind="bars"
                )
            )
        panels.append(Panel(title=workload.title, x_label="", y_label="wait for data (s)", series=series))
        direct, best = (sum(e.wait_seconds for e in simulated(workload.name, _SETTINGS[n])) for n in (_DIRECT, "50/50"))
        remarks.append(
            f"{workload.title}: 50/50 waits {1 - best / direct:.1%} less than reading directly; the paper says "
            f"{_FEWER[workload.name]:.1%}."
        )
    remarks.append("The disk is not simulated: its published waits stand there to be compared with.")
    columns = ("workload", "setting", "epoch", "wait s", "published wait s", "difference")
    return Outcome(tables=[Table(name="deli-figure-3", columns=columns, rows=rows)], panels=panels, remarks=remarks)


def _figure_4(quick: bool) -> Outcome:
    sizes = (256, 1024, 2048) if quick else (256, 512, 768, 1024, 1280, 1536, 2048)
    settings = [*(Setting(size) for size in sizes), Setting(1024, 512, 2048), Setting(1024, 1024, 2048)]
    rows: list[tuple[Cell, ...]] = []
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        epochs = [epoch for setting in settings for epoch in simulated(workload.name, setting)]
        ours = [(epoch.miss_rate, epoch.wait_seconds) for epoch in epochs]
        theirs = [
            (each.miss_rate, each.wait_seconds)
            for each in measurements()
            if each.workload == workload.name and each.setting and each.setting.fetch_size and each.miss_rate
        ]
        series = []
        for name, points in (("simulated", ours), ("published", theirs)):
            x, y = np.array(points).T
            slope, intercept = np.polyfit(x, y, 1)
            straightness = float(np.corrcoef(x, y)[0, 1] ** 2)
            rows.append((workload.name, name, len(points), float(slope), float(intercept), straightness))
            is_published = name == "published"
            series.append(Series(name=name, x=x.tolist(), y=y.tolist(), is_published=is_published, kind="points"))
        line = [0.0, max(rate for rate, _ in ours)]
        slope, intercept = rows[-2][3], rows[-2][4]
        assert isinstance(slope, float)  # noqa: S101 - as was just appended
        assert isinstance(intercept, float)  # noqa: S101 - as was just appended
        series.append(Series(name="straight line through ours", x=line, y=[intercept + slope * rate for rate in line]))
        panels.append(Panel(title=workload.title, x_label="miss rate", y_label="wait for data (s)", series=series))
        remarks.append(
            f"{workload.title}: {slope:.0f} s a unit of miss rate beside {rows[-1][3]:.0f} published; a straight line "
            f"explains {rows[-2][5]:.1%} of ours and {rows[-1][5]:.1%} of theirs."
        )
    columns = ("workload", "figures", "points", "slope s", "intercept s", "r squared")
    return Outcome(tables=[Table(name="deli-figure-4", columns=columns, rows=rows)], panels=panels, remarks=remarks)


EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment(name="deli-figure-3", title="Wait for data by setting", source=SOURCE, run=_figure_3),
        Experiment(name="deli-figure-4", title="Wait for data by miss rate", source=SOURCE, run=_figure_4),
    )
}
"""By name."""
