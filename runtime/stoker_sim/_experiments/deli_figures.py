"""DELI's Table I and its figures: how fast small samples are read, waits, and miss rates by every setting.

Table I has beside it what the same bucket gives in super-samples. Waits stand by setting beside reading directly, and
over the miss rate; miss rates by the sizes of cache and fetch and by the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import numpy as np

from stoker._diagnostics.latency import BucketModel, Constant
from stoker._fetch.config import FetchConfig
from stoker._fetch.pipeline import PipelineConfig
from stoker._order.order import OrderConfig
from stoker_sim._bucket import described
from stoker_sim._experiments.deli import (
    SOURCE,
    WORKLOADS,
    Measurement,
    Setting,
    Workload,
    measurements,
    simulated,
)
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._scenario import Scenario, simulate

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
    feed = PipelineConfig(
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


def _published_wait(workload: str, setting: Setting | None, epoch: int) -> float | None:
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
            theirs = [_published_wait(workload.name, setting, epoch) for setting in _SETTINGS.values()]
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


_EPOCHS = (1, 2)
_CACHE_SHARES = (0.25, 0.5, 0.75, 1.0, None)
_FETCH_SIZES = (256, 512, 768, 1024, 1280, 1536, 2048)
_CACHE_SIZES = (256, 512, 768, 1024, 1536, 2048, 4096)
_FETCH_SIZE = 1024
"""Of Figures 7 and 8 (section V-D)."""
_CACHE_FETCHES = (0.5, 1.0, 2.0, 3.0)
"""Cache sizes of Figure 8, in fetches."""
_THRESHOLD_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Thresholds of Figure 8, as parts of the cache, and none to compare them with."""
_STATED_FALLS = {"mnist": 0.31, "cifar10": 0.80}
"""By which part a threshold of half of the cache lowers the misses (Figure 8)."""
_STATED_BEST = {"mnist": "a small difference", "cifar10": "83% fewer misses with 50/50"}
"""Of a full fetch of the cache's size and 50/50 (Figure 9)."""
_COLUMNS = (
    "workload",
    "batch size",
    "fetch size",
    "threshold",
    "cache samples",
    "epoch",
    "miss rate",
    "published miss rate",
    "difference",
    "wait s",
    "published wait s",
    "wait difference",
)


def _published_rate(workload: str, setting: Setting, epoch: int) -> Measurement | None:
    found = (each for each in measurements() if each.workload == workload and each.setting == setting)
    return next((each for each in found if each.epoch == epoch), None)


def _table(name: str, cases: Iterable[tuple[str, Setting]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for workload, setting in cases:
        for epoch, ours in zip(_EPOCHS, simulated(workload, setting), strict=True):
            theirs = _published_rate(workload, setting, epoch)
            miss_rate = None if theirs is None else theirs.miss_rate
            wait_seconds = None if theirs is None else theirs.wait_seconds
            rows.append(
                (
                    workload,
                    setting.batch_size,
                    setting.fetch_size,
                    setting.threshold,
                    "unlimited" if setting.cache_samples is None else setting.cache_samples,
                    epoch,
                    ours.miss_rate,
                    miss_rate,
                    None if miss_rate is None else ours.miss_rate - miss_rate,
                    ours.wait_seconds,
                    wait_seconds,
                    None if wait_seconds is None else ours.wait_seconds / wait_seconds - 1,
                )
            )
    return Table(name=name, columns=_COLUMNS, rows=rows)


def _agreement(table: Table) -> str:
    misses = [abs(row[8]) for row in table.rows if isinstance(row[8], float)]
    waits = [abs(row[11]) for row in table.rows if isinstance(row[11], float)]
    if not misses:
        return "No point of this figure is among the published measurements."
    return (
        f"Of {len(table.rows)} points {len(misses)} were published: the miss rate differs by at most "
        f"{max(misses):.3f}, the wait by at most {max(waits):.1%}."
    )


def _panel(
    workload: Workload, x_label: str, cases: Sequence[tuple[float, Setting]], *, note: str = "", title: str = ""
) -> Panel:
    """Return miss rates over what the settings differ in: a line an epoch, and what was published beside it."""
    series = []
    for epoch in _EPOCHS:
        rates = [simulated(workload.name, setting)[epoch - 1].miss_rate for _, setting in cases]
        series.append(Series(name=f"epoch {epoch}", x=[x for x, _ in cases], y=rates))
        known = [(x, _published_rate(workload.name, setting, epoch)) for x, setting in cases]
        points = [(x, each.miss_rate) for x, each in known if each is not None and each.miss_rate is not None]
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(name=f"epoch {epoch}, published", x=x, y=y, is_published=True))
    return Panel(title=f"{workload.title}{title}", x_label=x_label, y_label="miss rate", series=series, note=note)


def _swept(
    name: str,
    x_label: str,
    cases_of: Callable[[Workload], Sequence[tuple[float, Setting]]],
    note: str,
    quick: bool,
) -> Outcome:
    cases = {workload.name: cases_of(workload) for workload in WORKLOADS.values()}
    if quick:
        cases = {workload: each[:: max(1, len(each) - 1)] for workload, each in cases.items()}
    table = _table(name, [(workload, setting) for workload, each in cases.items() for _, setting in each])
    panels = [_panel(WORKLOADS[workload], x_label, each, note=note) for workload, each in cases.items()]
    return Outcome(tables=[table], panels=panels, remarks=[_agreement(table)])


def _cache_sizes(workload: Workload) -> list[tuple[float, Setting]]:
    """Return caches without fetching ahead; the unlimited one stands at the whole data set."""
    whole = workload.dataset_samples / workload.node_samples
    return [
        (whole, Setting()) if share is None else (share, Setting(cache_samples=int(share * workload.node_samples)))
        for share in _CACHE_SHARES
    ]


def _fetch_sizes(_: Workload) -> list[tuple[float, Setting]]:
    return [(size, Setting(fetch_size=size)) for size in _FETCH_SIZES]


def _figure_7(quick: bool) -> Outcome:
    sizes = _CACHE_SIZES[::3] if quick else _CACHE_SIZES
    panels, cases = [], []
    for workload in WORKLOADS.values():
        for batch_size in (512, 1024):
            swept = [(size / _FETCH_SIZE, Setting(_FETCH_SIZE, 0, size, batch_size)) for size in sizes]
            cases += [(workload.name, setting) for _, setting in swept]
            panels.append(
                _panel(
                    workload,
                    "cache size / fetch size (1,024 samples)",
                    swept,
                    title=f", batch {batch_size}",
                    note="published trend: no gain beyond 1",
                )
            )
    table = _table("deli-figure-7", cases)
    beyond = [
        simulated(workload, Setting(1024, 0, 4096, batch))[1].miss_rate
        - simulated(workload, Setting(1024, 0, 1024, batch))[1].miss_rate
        for workload in WORKLOADS
        for batch in (512, 1024)
    ]
    remark = (
        f"From a cache of one fetch to one of four, the miss rate of the second epoch changes by "
        f"{min(beyond):+.3f} to {max(beyond):+.3f}; the paper's trend is that it does not."
    )
    return Outcome(tables=[table], panels=panels, remarks=[remark])


def _figure_8(quick: bool) -> Outcome:
    panels, cases = [], []
    for fetches, workload in product(_CACHE_FETCHES[2:3] if quick else _CACHE_FETCHES, WORKLOADS.values()):
        cache = int(fetches * _FETCH_SIZE)
        swept = [(share, Setting(_FETCH_SIZE, int(share * cache), cache)) for share in _THRESHOLD_SHARES]
        cases += [(workload.name, setting) for _, setting in swept]
        panels.append(
            _panel(
                workload,
                "threshold / cache size",
                swept,
                title=f", cache of {cache:,}",
                note=f"published: -{_STATED_FALLS[workload.name]:.0%} at 0.5" if cache == 2048 else "",
            )
        )
    remarks = [_agreement(table := _table("deli-figure-8", cases))]
    for name, stated in _STATED_FALLS.items():
        without, *others = (_miss_rates(name, share) for share in _THRESHOLD_SHARES)
        falls = "; ".join(
            f"{share:.0%} of the cache {' and '.join(f'{1 - b / a:.0%}' for a, b in zip(without, rates, strict=True))}"
            for share, rates in zip(_THRESHOLD_SHARES[1:], others, strict=True)
        )
        remarks.append(
            f"{WORKLOADS[name].title}, cache of 2,048: a threshold lowers the miss rate of epochs 1 and 2 by: {falls}; "
            f"the paper states {stated:.0%} for 50%."
        )
    return Outcome(tables=[table], panels=panels, remarks=remarks)


def _miss_rates(workload: str, threshold_share: float) -> list[float]:
    """Return the miss rate of each epoch with a cache of two fetches."""
    cache = 2 * _FETCH_SIZE
    return [each.miss_rate for each in simulated(workload, Setting(_FETCH_SIZE, int(threshold_share * cache), cache))]


def _figure_9(quick: bool) -> Outcome:
    settings = {"full fetch 2048": Setting(2048, 0, 2048), "50/50, 1024": Setting(1024, 1024, 2048)}
    table = _table("deli-figure-9", [(workload, setting) for workload in WORKLOADS for setting in settings.values()])
    panels, remarks = [], [_agreement(table)]
    for workload in WORKLOADS.values():
        series = []
        for epoch in _EPOCHS:
            ours = [simulated(workload.name, setting)[epoch - 1].miss_rate for setting in settings.values()]
            series.append(Series(name=f"epoch {epoch}", x=list(settings), y=ours, kind="bars"))
            known = {name: _published_rate(workload.name, setting, epoch) for name, setting in settings.items()}
            points = {name: each.miss_rate for name, each in known.items() if each is not None and each.miss_rate}
            series.append(
                Series(
                    name=f"epoch {epoch}, published",
                    x=list(settings),
                    y=[points.get(name, math.nan) for name in settings],
                    is_published=True,
                    kind="bars",
                )
            )
        stated = f"published: {_STATED_BEST[workload.name]}"
        panels.append(Panel(title=workload.title, x_label="", y_label="miss rate", series=series, note=stated))
        before, after = (sum(each.miss_rate for each in simulated(workload.name, s)) for s in settings.values())
        remarks.append(f"{workload.title}: 50/50 has {1 - after / before:.0%} fewer misses than a full fetch of 2,048.")
    remarks += [f"The paper states for {WORKLOADS[name].title}: {stated}." for name, stated in _STATED_BEST.items()]
    return Outcome(tables=[table], panels=panels, remarks=remarks)


_FIGURE_5 = partial(_swept, "deli-figure-5", "cache size / a node's samples (3: the whole data set)", _cache_sizes, "")
_FIGURE_6 = partial(_swept, "deli-figure-6", "fetch size (samples)", _fetch_sizes, "")

EXPERIMENTS = (
    Experiment(name="deli-table-1", title="Speed of reading small samples", source=SOURCE, run=_table_1),
    Experiment(name="deli-figure-3", title="Wait for data by setting", source=SOURCE, run=_figure_3),
    Experiment(name="deli-figure-4", title="Wait for data by miss rate", source=SOURCE, run=_figure_4),
    Experiment(name="deli-figure-5", title="A cache alone: miss rate by its size", source=SOURCE, run=_FIGURE_5),
    Experiment(name="deli-figure-6", title="Miss rate by fetch size", source=SOURCE, run=_FIGURE_6),
    Experiment(name="deli-figure-7", title="Miss rate by cache size, fetches of 1,024", source=SOURCE, run=_figure_7),
    Experiment(name="deli-figure-8", title="Miss rate by threshold, fetches of 1,024", source=SOURCE, run=_figure_8),
    Experiment(name="deli-figure-9", title="The best settings for a cache of 2,048", source=SOURCE, run=_figure_9),
)
