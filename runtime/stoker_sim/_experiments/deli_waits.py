"""DELI's waits: its Table I, how fast a bucket and a disk give small samples, and its figures of settings.

Table I has beside it what the same bucket gives in super-samples. The figures are its settings beside reading directly,
and the wait over the miss rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stoker._diagnostics.latency import BucketModel, Constant
from stoker._fetch.config import FetchConfig
from stoker._fetch.pipeline import FeedConfig
from stoker._order.order import OrderConfig
from stoker_sim._experiments.deli import SOURCE, WORKLOADS, Setting, measurements, simulated
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._models.dataset import described
from stoker_sim._scenarios.scenario import Scenario, simulate

__all__ = [
    "BUCKET",
    "EXPERIMENTS",
]

_GET_SECONDS = 0.055
_GETS_PER_SECOND = 100.0
_SAMPLE_BYTES = 2_740
"""What 49.80 kB/s are at one request after the other: the paper does not say how large the objects were."""
_SUPER_SAMPLE_BYTES = 8 << 20
_CONNECTION_BYTES_PER_SECOND = 20e6

BUCKET = BucketModel(
    first_byte=Constant(_GET_SECONDS),
    requests_per_second=_GETS_PER_SECOND,
    connection_bytes_per_second=_CONNECTION_BYTES_PER_SECOND,
)
"""Its bucket, as one node saw it: 55 ms a request, 100 requests a second with 16 threads. The rate of a large transfer
is not in the paper; 20 MB/s is what a small machine of its time is known to get."""


def _bytes_per_second(samples: int, of_one_object: int, at_once: int) -> float:
    """Return what a node reads of objects that hold so many samples, so many at once."""
    objects = max(2, samples // of_one_object)
    manifest = described(super_samples=objects, samples=of_one_object, super_sample_bytes=of_one_object * _SAMPLE_BYTES)
    fetch = FetchConfig(hedge=False, concurrency_start=at_once, concurrency_least=1, concurrency_most=at_once)
    feed = FeedConfig(
        order=OrderConfig(shuffle="none"),
        batch_size=of_one_object,
        memory_bytes=manifest.file_bytes + 128 * manifest.largest_bytes + (1 << 20),
        fetch=fetch,
    )
    run = simulate(Scenario(manifest=manifest, feed=feed, bucket=BUCKET))
    return run.read_bytes / run.seconds


def _table_1(quick: bool) -> Outcome:
    samples = 500 if quick else 5_000
    large = _SUPER_SAMPLE_BYTES // _SAMPLE_BYTES
    rows: list[tuple[str, float | None, float | None]] = [
        ("disk", None, 18.63e6),
        ("bucket, one request after the other", _bytes_per_second(samples // 5, 1, 1), 49.80e3),
        ("bucket, 16 requests at once", _bytes_per_second(samples, 1, 16), 281.73e3),
        ("bucket, super-samples of 8 MiB, one after the other", _bytes_per_second(20 * large, large, 1), None),
        ("bucket, super-samples of 8 MiB, 16 at once", _bytes_per_second(100 * large, large, 16), None),
    ]
    ours = [rate for _, rate, _ in rows]
    table = Table(
        name="deli-table-1",
        columns=("read from", "kB/s", "published kB/s", "difference"),
        rows=[
            (
                name,
                None if rate is None else rate / 1e3,
                None if known is None else known / 1e3,
                None if rate is None or known is None else rate / known - 1,
            )
            for name, rate, known in rows
        ],
    )
    names = ["disk", "1 request", "16 requests", "8 MiB", "16 times 8 MiB"]
    series = [
        Series(
            name="simulated", x=names, y=[float("nan") if rate is None else rate / 1e3 for rate in ours], kind="bars"
        ),
        Series(
            name="published",
            x=names,
            y=[float("nan") if known is None else known / 1e3 for _, _, known in rows],
            is_published=True,
            kind="bars",
        ),
    ]
    panel = Panel(title="Reading MNIST", x_label="", y_label="kB/s", series=series, y_log=True)
    limits = f"{_GET_SECONDS * 1e3:.0f} ms and {_GETS_PER_SECOND:.0f} are answered a second"
    remarks = (
        f"A request takes {limits}, as the authors' measurements have it.",
        f"{_SAMPLE_BYTES:,} bytes a sample make the first rate what it is, so only the others are predicted.",
        f"Super-samples: {_CONNECTION_BYTES_PER_SECOND / 1e6:.0f} MB/s a connection are an assumption.",
        "The disk is not simulated.",
    )
    return Outcome(tables=[table], panels=[panel], remarks=remarks)


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


_Points = list[tuple[float, float]]
"""Miss rate and seconds of waiting."""


def _waits_by_misses(workload: str, settings: Sequence[Setting]) -> tuple[_Points, _Points]:
    """Return the epochs of a workload: those that are simulated, and the published ones."""
    epochs = [epoch for setting in settings for epoch in simulated(workload, setting)]
    return [(epoch.miss_rate, epoch.wait_seconds) for epoch in epochs], [
        (each.miss_rate, each.wait_seconds)
        for each in measurements()
        if each.workload == workload and each.setting and each.setting.fetch_size and each.miss_rate
    ]


def _figure_4(quick: bool) -> Outcome:
    sizes = (256, 1024, 2048) if quick else (256, 512, 768, 1024, 1280, 1536, 2048)
    settings = [*(Setting(size) for size in sizes), Setting(1024, 512, 2048), Setting(1024, 1024, 2048)]
    rows: list[tuple[Cell, ...]] = []
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        ours, theirs = _waits_by_misses(workload.name, settings)
        series, lines = [], []
        for name, points in (("simulated", ours), ("published", theirs)):
            x, y = np.array(points).T
            slope, intercept = map(float, np.polyfit(x, y, 1))
            lines.append((slope, intercept, float(np.corrcoef(x, y)[0, 1] ** 2)))
            rows.append((workload.name, name, len(points), *lines[-1]))
            is_published = name == "published"
            series.append(Series(name=name, x=x.tolist(), y=y.tolist(), is_published=is_published, kind="points"))
        (slope, intercept, straightness), (their_slope, _, their_straightness) = lines
        x_ends = [0.0, max(rate for rate, _ in ours)]
        y_ends = [intercept + slope * rate for rate in x_ends]
        series.append(Series(name="straight line through ours", x=x_ends, y=y_ends))
        panels.append(Panel(title=workload.title, x_label="miss rate", y_label="wait for data (s)", series=series))
        remarks.append(
            f"{workload.title}: {slope:.0f} s a unit of miss rate beside {their_slope:.0f} published; a straight line "
            f"explains {straightness:.1%} of ours and {their_straightness:.1%} of theirs."
        )
    columns = ("workload", "figures", "points", "slope s", "intercept s", "r squared")
    return Outcome(tables=[Table(name="deli-figure-4", columns=columns, rows=rows)], panels=panels, remarks=remarks)


EXPERIMENTS = (
    Experiment(name="deli-table-1", title="Speed of reading small samples", source=SOURCE, run=_table_1),
    Experiment(name="deli-figure-3", title="Wait for data by setting", source=SOURCE, run=_figure_3),
    Experiment(name="deli-figure-4", title="Wait for data by miss rate", source=SOURCE, run=_figure_4),
)
