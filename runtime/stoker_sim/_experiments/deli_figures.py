"""DELI's Table I and its figures: how fast small samples are read, waits, and miss rates by every setting.

Table I has beside it what the same bucket gives in super-samples. Waits stand by setting beside reading directly, and
over the miss rate; miss rates by the sizes of cache and fetch and by the threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stoker._diagnostics.latency import BucketModel, Constant
from stoker._fetch.config import FetchConfig
from stoker._order.order import OrderConfig
from stoker_sim._bucket import described
from stoker_sim._experiments import Experiment, Outcome, Panel, Row, Series, Table, bars_beside, difference, excess
from stoker_sim._experiments.deli import SOURCE, WORKLOADS, Setting, Workload, measured, measurements, simulated
from stoker_sim._scenario import by_lanes, simulate

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
    size_bytes = of_one_object * _SAMPLE_BYTES
    fetch = FetchConfig(hedge=False, concurrency_start=at_once, concurrency_least=1, concurrency_most=at_once)
    objects, ring_bytes = max(2, samples // of_one_object), 128 * size_bytes + (1 << 20)
    manifest = described(super_samples=objects, samples=of_one_object, super_sample_bytes=size_bytes)
    order = OrderConfig(shuffle="none")
    run = simulate(by_lanes(manifest, order, of_one_object, ring_bytes, fetch, bucket=BUCKET))
    return run.read_bytes / run.seconds


def _table_1(quick: bool) -> Outcome:
    samples, large = 500 if quick else 5_000, _SUPER_SAMPLE_BYTES // _SAMPLE_BYTES
    one, several = _bytes_per_second(samples // 5, 1, 1), _bytes_per_second(samples, 1, 16)
    packed, several_packed = _bytes_per_second(20 * large, large, 1), _bytes_per_second(100 * large, large, 16)
    ways: list[tuple[str, str, float | None, float | None]] = [
        ("disk", "disk", None, 18.63e6),
        ("1 request", "bucket, one request after the other", one, 49.80e3),
        ("16 requests", "bucket, 16 requests at once", several, 281.73e3),
        ("8 MiB", "bucket, super-samples of 8 MiB, one after the other", packed, None),
        ("16 times 8 MiB", "bucket, super-samples of 8 MiB, 16 at once", several_packed, None),
    ]
    rows: list[Row] = []
    ours, theirs = [], []
    for _, way, rate, known in ways:
        ours.append(rate and rate / 1e3)
        theirs.append(known and known / 1e3)
        figures: Row = {"kB/s": ours[-1], "published kB/s": theirs[-1], "difference": excess(rate, known)}
        rows.append({"read from": way, **figures})
    bars = bars_beside("simulated", [name for name, *_ in ways], ours, theirs, published="published")
    limits = f"{_GET_SECONDS * 1e3:.0f} ms and {_GETS_PER_SECOND:.0f} are answered a second"
    remarks = (
        f"A request takes {limits}, as the authors' measurements have it.",
        f"{_SAMPLE_BYTES:,} bytes a sample make the first rate what it is, so only the others are predicted.",
        f"Super-samples: {_CONNECTION_BYTES_PER_SECOND / 1e6:.0f} MB/s a connection are an assumption.",
        "The disk is not simulated.",
    )
    panel = Panel("Reading MNIST", "", "kB/s", bars, y_log=True)
    return Outcome([Table.of("deli-table-1", rows)], [panel], remarks)


_DISK = "disk"
_DIRECT = "bucket"
_BEST = "50/50"
_SETTINGS = {
    _DISK: None,
    _DIRECT: Setting(cache_samples=0),
    "cache, unlimited": Setting(),
    "full fetch 1024": Setting(1024),
    "full fetch 2048": Setting(2048, 0, 2048),
    _BEST: Setting(1024, 1024, 2048),
}
_FEWER = {"mnist": 0.856, "cifar10": 0.935}
"""By how much less than reading directly the paper says that 50/50 waits."""


def _figure_3(quick: bool) -> Outcome:
    rows: list[Row] = []
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        waits = {name: _waits(workload.name, setting) for name, setting in _SETTINGS.items()}
        series = []
        for number, epoch in enumerate(_EPOCHS):
            ours, theirs = ([each[number] for each in of] for of in zip(*waits.values(), strict=True))
            for name, wait, known in zip(waits, ours, theirs, strict=True):
                place: Row = {"workload": workload.name, "setting": name, "epoch": epoch}
                rows.append(place | {"wait s": wait, "published wait s": known, "difference": excess(wait, known)})
            series += bars_beside(f"epoch {epoch}", [*waits], ours, theirs)
        panels.append(Panel(workload.title, "", "wait for data (s)", series))
        direct, best = (sum(wait or 0.0 for wait in waits[name][0]) for name in (_DIRECT, _BEST))
        remarks.append(
            f"{workload.title}: 50/50 waits {1 - best / direct:.1%} less than reading directly; the paper says "
            f"{_FEWER[workload.name]:.1%}."
        )
    remarks.append("The disk is not simulated: its published waits stand there to be compared with.")
    return Outcome([Table.of("deli-figure-3", rows)], panels, remarks)


_Waits = list[float | None]


def _waits(workload: str, setting: Setting | None) -> tuple[_Waits, _Waits]:
    """Return the waits of each epoch: ours, which are none from the disk, and the published ones."""
    ours: _Waits = [None, None] if setting is None else [each.wait_seconds for each in simulated(workload, setting)]
    return ours, [each.wait_seconds if each else None for each in measured(workload, setting)]


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
    sizes = (256, 1024, 2048) if quick else _FETCH_SIZES
    settings = [*(Setting(size) for size in sizes), Setting(1024, 512, 2048), Setting(1024, 1024, 2048)]
    rows: list[Row] = []
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        ours, theirs = _waits_by_misses(workload.name, settings)
        series, lines = [], []
        for name, points in (("simulated", ours), ("published", theirs)):
            x, y = np.array(points).T
            slope, intercept = map(float, np.polyfit(x, y, 1))
            straightness = float(np.corrcoef(x, y)[0, 1] ** 2)
            lines.append((slope, intercept, straightness))
            line: Row = {"slope s": slope, "intercept s": intercept, "r squared": straightness}
            rows.append({"workload": workload.name, "figures": name, "points": len(points), **line})
            series.append(Series(name, x.tolist(), y.tolist(), is_published=name == "published", kind="points"))
        (slope, intercept, straightness), (their_slope, _, their_straightness) = lines
        x_ends = [0.0, max(rate for rate, _ in ours)]
        y_ends = [intercept + slope * rate for rate in x_ends]
        series.append(Series("straight line through ours", x_ends, y_ends))
        panels.append(Panel(workload.title, "miss rate", "wait for data (s)", series))
        remarks.append(
            f"{workload.title}: {slope:.0f} s a unit of miss rate beside {their_slope:.0f} published; a straight line "
            f"explains {straightness:.1%} of ours and {their_straightness:.1%} of theirs."
        )
    return Outcome([Table.of("deli-figure-4", rows)], panels, remarks)


_EPOCHS = (1, 2)
_CACHE_SHARES = (0.25, 0.5, 0.75, 1.0)
_FETCH_SIZES = (256, 512, 768, 1024, 1280, 1536, 2048)
_CACHE_SIZES = (256, 512, 768, 1024, 1536, 2048, 4096)
_FETCH_SIZE = 1024
"""Of Figures 7 and 8 (section V-D)."""
_BATCH_SIZES = (512, 1024)
_CACHE_FETCHES = (0.5, 1.0, 2.0, 3.0)
"""Cache sizes of Figure 8, in fetches."""
_THRESHOLD_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Thresholds of Figure 8, as parts of the cache, and none to compare them with."""
_STATED_FALLS = {"mnist": 0.31, "cifar10": 0.80}
"""By which part a threshold of half of the cache lowers the misses (Figure 8)."""
_STATED_BEST = {"mnist": "a small difference", "cifar10": "83% fewer misses with 50/50"}
"""Of a full fetch of the cache's size and 50/50 (Figure 9)."""


def _table(name: str, cases: Iterable[tuple[str, Setting]]) -> Table:
    rows: list[Row] = []
    for workload, setting in cases:
        epochs = zip(_EPOCHS, simulated(workload, setting), measured(workload, setting), strict=True)
        for epoch, ours, theirs in epochs:
            miss_rate = theirs.miss_rate if theirs else None
            wait_seconds = theirs.wait_seconds if theirs else None
            rows.append(
                {
                    "workload": workload,
                    "batch size": setting.batch_size,
                    "fetch size": setting.fetch_size,
                    "threshold": setting.threshold,
                    "cache samples": "unlimited" if setting.cache_samples is None else setting.cache_samples,
                    "epoch": epoch,
                    "miss rate": ours.miss_rate,
                    "published miss rate": miss_rate,
                    "difference": difference(ours.miss_rate, miss_rate),
                    "wait s": ours.wait_seconds,
                    "published wait s": wait_seconds,
                    "wait difference": excess(ours.wait_seconds, wait_seconds),
                }
            )
    return Table.of(name, rows)


def _agreement(table: Table) -> str:
    misses, waits = (
        [abs(cell) for cell in table.cells(column) if isinstance(cell, float)]
        for column in ("difference", "wait difference")
    )
    if not misses:
        return "No point of this figure is among the published measurements."
    return (
        f"Of {len(table.rows)} points {len(misses)} were published: the miss rate differs by at most "
        f"{max(misses):.3f}, the wait by at most {max(waits):.1%}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Settings of a workload that differ in one number: a panel.

    Attributes:
        workload: which.
        cases: that number, and the setting.
        title: what follows the workload's.
        note: below the panel.
    """

    workload: Workload
    cases: Sequence[tuple[float, Setting]]
    title: str = ""
    note: str = ""

    def panel(self, x_label: str) -> Panel:
        """Return miss rates over the number: a line an epoch, and what was published beside it."""
        series = []
        x = [number for number, _ in self.cases]
        for number, epoch in enumerate(_EPOCHS):
            rates = [simulated(self.workload.name, setting)[number].miss_rate for _, setting in self.cases]
            series.append(Series(f"epoch {epoch}", x, rates))
            known = [(at, measured(self.workload.name, setting)[number]) for at, setting in self.cases]
            points = [(at, each.miss_rate) for at, each in known if each is not None and each.miss_rate is not None]
            if points:
                known_x, y = zip(*points, strict=True)
                series.append(Series(f"epoch {epoch}, published", known_x, y, is_published=True))
        title = f"{self.workload.title}{self.title}"
        return Panel(title, x_label, "miss rate", series, note=self.note)


def _swept(name: str, x_label: str, sweeps: Sequence[_Sweep]) -> tuple[Table, list[Panel]]:
    table = _table(name, [(sweep.workload.name, setting) for sweep in sweeps for _, setting in sweep.cases])
    return table, [sweep.panel(x_label) for sweep in sweeps]


def _figure_5_or_6(
    name: str, x_label: str, cases_of: Callable[[Workload], Sequence[tuple[float, Setting]]], quick: bool
) -> Outcome:
    cases = {workload.name: cases_of(workload) for workload in WORKLOADS.values()}
    ends = {workload: each[:: len(each) - 1] if quick else each for workload, each in cases.items()}
    sweeps = [_Sweep(workload=workload, cases=ends[workload.name]) for workload in WORKLOADS.values()]
    table, panels = _swept(name, x_label, sweeps)
    return Outcome([table], panels, [_agreement(table)])


def _cache_sizes(workload: Workload) -> list[tuple[float, Setting]]:
    """Return caches without fetching ahead; the unlimited one stands at the whole data set."""
    sizes = [(share, Setting(cache_samples=int(share * workload.node_samples))) for share in _CACHE_SHARES]
    return [*sizes, (workload.dataset_samples / workload.node_samples, Setting())]


def _fetch_sizes(_: Workload) -> list[tuple[float, Setting]]:
    return [(size, Setting(fetch_size=size)) for size in _FETCH_SIZES]


def _figure_7(quick: bool) -> Outcome:
    sweeps = [
        _Sweep(
            workload=workload,
            cases=[
                (size / _FETCH_SIZE, Setting(_FETCH_SIZE, 0, size, batch_size))
                for size in (_CACHE_SIZES[::3] if quick else _CACHE_SIZES)
            ],
            title=f", batch {batch_size}",
            note="published trend: no gain beyond 1",
        )
        for workload in WORKLOADS.values()
        for batch_size in _BATCH_SIZES
    ]
    table, panels = _swept("deli-figure-7", "cache size / fetch size (1,024 samples)", sweeps)
    beyond = [
        simulated(workload, Setting(1024, 0, 4096, batch))[1].miss_rate
        - simulated(workload, Setting(1024, 0, 1024, batch))[1].miss_rate
        for workload in WORKLOADS
        for batch in _BATCH_SIZES
    ]
    remark = (
        f"From a cache of one fetch to one of four, the miss rate of the second epoch changes by "
        f"{min(beyond):+.3f} to {max(beyond):+.3f}; the paper's trend is that it does not."
    )
    return Outcome([table], panels, [remark])


def _thresholds(cache: int) -> list[tuple[float, Setting]]:
    return [(share, Setting(_FETCH_SIZE, int(share * cache), cache)) for share in _THRESHOLD_SHARES]


def _figure_8(quick: bool) -> Outcome:
    caches = [int(fetches * _FETCH_SIZE) for fetches in (_CACHE_FETCHES[2:3] if quick else _CACHE_FETCHES)]
    sweeps = [
        _Sweep(
            workload=workload,
            cases=_thresholds(cache),
            title=f", cache of {cache:,}",
            note=f"published: -{_STATED_FALLS[workload.name]:.0%} at 0.5" if cache == 2048 else "",
        )
        for cache in caches
        for workload in WORKLOADS.values()
    ]
    table, panels = _swept("deli-figure-8", "threshold / cache size", sweeps)
    remarks = [_agreement(table)]
    for name, stated in _STATED_FALLS.items():
        without, *others = (
            [each.miss_rate for each in simulated(name, setting)] for _, setting in _thresholds(2 * _FETCH_SIZE)
        )
        falls = "; ".join(
            f"{share:.0%} of the cache {' and '.join(f'{1 - b / a:.0%}' for a, b in zip(without, rates, strict=True))}"
            for share, rates in zip(_THRESHOLD_SHARES[1:], others, strict=True)
        )
        remarks.append(
            f"{WORKLOADS[name].title}, cache of 2,048: a threshold lowers the miss rate of epochs 1 and 2 by: {falls}; "
            f"the paper states {stated:.0%} for 50%."
        )
    return Outcome([table], panels, remarks)


def _figure_9(quick: bool) -> Outcome:
    settings = {"full fetch 2048": Setting(2048, 0, 2048), "50/50, 1024": Setting(1024, 1024, 2048)}
    table = _table("deli-figure-9", [(workload, setting) for workload in WORKLOADS for setting in settings.values()])
    panels, remarks = [], [_agreement(table)]
    for workload in WORKLOADS.values():
        series = []
        ours = [simulated(workload.name, setting) for setting in settings.values()]
        theirs = [measured(workload.name, setting) for setting in settings.values()]
        for number, epoch in enumerate(_EPOCHS):
            rates = [epochs[number].miss_rate for epochs in ours]
            known = [each.miss_rate if each else None for each in (epochs[number] for epochs in theirs)]
            series += bars_beside(f"epoch {epoch}", [*settings], rates, known)
        stated = f"published: {_STATED_BEST[workload.name]}"
        panels.append(Panel(workload.title, "", "miss rate", series, note=stated))
        before, after = (sum(each.miss_rate for each in of) for of in ours)
        remarks.append(f"{workload.title}: 50/50 has {1 - after / before:.0%} fewer misses than a full fetch of 2,048.")
    remarks += [f"The paper states for {WORKLOADS[name].title}: {stated}." for name, stated in _STATED_BEST.items()]
    return Outcome([table], panels, remarks)


_WHOLE = "cache size / a node's samples (3: the whole data set)"
_FIGURE_5 = partial(_figure_5_or_6, "deli-figure-5", _WHOLE, _cache_sizes)
_FIGURE_6 = partial(_figure_5_or_6, "deli-figure-6", "fetch size (samples)", _fetch_sizes)

EXPERIMENTS = (
    Experiment("deli-table-1", "Speed of reading small samples", SOURCE, _table_1),
    Experiment("deli-figure-3", "Wait for data by setting", SOURCE, _figure_3),
    Experiment("deli-figure-4", "Wait for data by miss rate", SOURCE, _figure_4),
    Experiment("deli-figure-5", "A cache alone: miss rate by its size", SOURCE, _FIGURE_5),
    Experiment("deli-figure-6", "Miss rate by fetch size", SOURCE, _FIGURE_6),
    Experiment("deli-figure-7", "Miss rate by cache size, fetches of 1,024", SOURCE, _figure_7),
    Experiment("deli-figure-8", "Miss rate by threshold, fetches of 1,024", SOURCE, _figure_8),
    Experiment("deli-figure-9", "The best settings for a cache of 2,048", SOURCE, _figure_9),
)
