"""DELI's Table I and its figures: read rates of small samples, waits, and miss rates by setting.

Table I is extended by super-samples from the same bucket. Waits are shown by setting, beside direct reads, and by miss
rate; miss rates by cache size, fetch size and threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker._diagnostics.latency import BucketModel, Constant
from stoker._fetch.config import FetchConfig
from stoker._order.order import OrderConfig
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._experiments import (
    Cell,
    ExperimentResult,
    Panel,
    Series,
    Table,
    create_series,
    difference,
    relative_difference,
)
from stoker_sim._experiments.deli import (
    EPOCHS,
    WORKLOADS,
    DeliSetting,
    DeliWorkload,
    Measurement,
    SampleEpoch,
    find_measurements,
    load_measurements,
    simulate_setting,
)
from stoker_sim._experiments.scenarios import create_lane_scenario
from stoker_sim._scenario import simulate

_GET_SECONDS = 0.055
_GETS_PER_SECOND = 100.0
_SAMPLE_BYTES = 2_740
"""Object size at which sequential requests read 49.80 kB/s; the paper does not give the size."""
_SUPER_SAMPLE_BYTES = 8 << 20
_CONNECTION_BYTES_PER_SECOND = 20e6

BUCKET = BucketModel(
    first_byte=Constant(_GET_SECONDS),
    requests_per_second=_GETS_PER_SECOND,
    connection_bytes_per_second=_CONNECTION_BYTES_PER_SECOND,
)
"""The paper's bucket as one node measured it: 55 ms a request, 100 requests a second with 16 threads. The rate of a
large transfer is not in the paper; 20 MB/s is typical of a small machine of its time."""


def _read_rate(samples: int, samples_per_object: int, concurrency: int) -> float:
    """Return the rate at which a node reads objects of ``samples_per_object`` samples, ``concurrency`` concurrently."""
    size_bytes = samples_per_object * _SAMPLE_BYTES
    fetch = FetchConfig(hedge=False, start_concurrency=concurrency, min_concurrency=1, max_concurrency=concurrency)
    objects = max(2, samples // samples_per_object)
    ring_bytes = 128 * size_bytes + (1 << 20)
    manifest = synthetic_manifest(super_samples=objects, samples=samples_per_object, super_sample_bytes=size_bytes)
    order = OrderConfig(shuffle="none")
    run = simulate(create_lane_scenario(manifest, order, samples_per_object, ring_bytes, fetch, bucket=BUCKET))
    return run.read_bytes / run.seconds


def run_table_1(quick: bool) -> ExperimentResult:
    """Run Table I: read rates of small samples, and of super-samples."""
    samples, large = 500 if quick else 5_000, _SUPER_SAMPLE_BYTES // _SAMPLE_BYTES
    one, several = _read_rate(samples // 5, 1, 1), _read_rate(samples, 1, 16)
    packed = _read_rate(20 * large, large, 1)
    several_packed = _read_rate(100 * large, large, 16)
    ways: list[tuple[str, str, float | None, float | None]] = [
        ("disk", "disk", None, 18.63e6),
        ("1 request", "bucket, one request after the other", one, 49.80e3),
        ("16 requests", "bucket, 16 requests at once", several, 281.73e3),
        ("8 MiB", "bucket, super-samples of 8 MiB, one after the other", packed, None),
        ("16 times 8 MiB", "bucket, super-samples of 8 MiB, 16 at once", several_packed, None),
    ]
    table = Table("deli-table-1", ("read from", "kB/s", "published kB/s", "difference"))
    for _, way, rate, known in ways:
        table.add(way, rate and rate / 1e3, known and known / 1e3, relative_difference(rate, known))
    names = [name for name, *_ in ways]
    bars = create_series(
        "simulated", names, table.cells("kB/s"), table.cells("published kB/s"), published_name="published"
    )
    limits = f"{_GET_SECONDS * 1e3:.0f} ms and {_GETS_PER_SECOND:.0f} are answered a second"
    remarks = (
        f"A request takes {limits}, as the authors measured.",
        f"The size of a sample, {_SAMPLE_BYTES:,} bytes, is fitted to the first rate; only the others are predicted.",
        f"Super-samples: {_CONNECTION_BYTES_PER_SECOND / 1e6:.0f} MB/s per connection are assumed.",
        "The disk is not simulated.",
    )
    panel = Panel("Reading MNIST", "", "kB/s", bars, y_log=True)
    return ExperimentResult([table], [panel], remarks)


_DIRECT, _BEST = DeliSetting(cache_samples=0), DeliSetting(1024, 1024, 2048)
_SETTINGS = {
    "disk": None,
    "bucket": _DIRECT,
    "cache, unlimited": DeliSetting(),
    "full fetch 1024": DeliSetting(1024),
    "full fetch 2048": DeliSetting(2048, 0, 2048),
    "50/50": _BEST,
}
_STATED_WAIT_REDUCTIONS = {"mnist": 0.856, "cifar10": 0.935}
"""Relative reduction of the wait by 50/50 against direct reads, as the paper states it."""


_COLUMNS = (
    *("workload", "batch size", "fetch size", "threshold", "cache samples", "epoch"),
    *("miss rate", "published miss rate", "difference", "wait s", "published wait s", "wait difference"),
)


def _table(name: str, workload: DeliWorkload, settings: Iterable[DeliSetting | None]) -> Table:
    """Return a table of our figures and the published ones for each epoch; reads from the disk are not simulated."""
    table = Table(name, _COLUMNS)
    for setting in settings:
        applied = setting or DeliSetting()
        cached = "unlimited" if applied.cache_samples is None else applied.cache_samples
        ours = simulate_setting(workload.name, setting) if setting else (None, None)
        for epoch, simulated, measured in zip(EPOCHS, ours, find_measurements(workload.name, setting), strict=True):
            rates = simulated.miss_rate if simulated else None, measured.miss_rate if measured else None
            waits = simulated.wait_seconds if simulated else None, measured.wait_seconds if measured else None
            place = workload.name, applied.batch_size, applied.fetch_size, applied.threshold, cached, epoch
            table.add(*place, *rates, difference(*rates), *waits, relative_difference(*waits))
    return table


def _epoch_series(table: Table, figure: str, x: Iterable[Cell]) -> list[Series]:
    """Return series of a column over the settings for each epoch, each beside the published one."""
    series, settings = [], [*x]
    for epoch in EPOCHS:
        selected = table.select("epoch", epoch)
        series += create_series(
            f"epoch {epoch}", settings, selected.cells(figure), selected.cells(f"published {figure}")
        )
    return series


def run_figure_3(quick: bool) -> ExperimentResult:
    """Run Figure 3: waits by setting."""
    table = Table("deli-figure-3", ("workload", "setting", "epoch", "wait s", "published wait s", "difference"))
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        measured = _table("", workload, _SETTINGS.values())
        for epoch in EPOCHS:
            for name, row in zip(_SETTINGS, measured.select("epoch", epoch).rows, strict=True):
                table.add(workload.name, name, epoch, *row[-3:])
        panels.append(Panel(workload.title, "", "wait for data (s)", _epoch_series(measured, "wait s", _SETTINGS)))
        direct, best = (
            sum(each.wait_seconds for each in simulate_setting(workload.name, setting)) for setting in (_DIRECT, _BEST)
        )
        remarks.append(
            f"{workload.title}: 50/50 waits {1 - best / direct:.1%} less than reading directly; the paper says "
            f"{_STATED_WAIT_REDUCTIONS[workload.name]:.1%}."
        )
    remarks.append("The disk is not simulated: its published waits are shown for comparison.")
    return ExperimentResult([table], panels, remarks)


def run_figure_4(quick: bool) -> ExperimentResult:
    """Run Figure 4: waits by miss rate."""
    sizes = (256, 1024, 2048) if quick else _FETCH_SIZES
    settings = [*map(DeliSetting, sizes), DeliSetting(1024, 512, 2048), _BEST]
    table = Table("deli-figure-4", ("workload", "figures", "points", "slope s", "intercept s", "r squared"))
    panels, remarks = [], []
    for workload in WORKLOADS.values():
        series, lines, ours = [], [], _simulate_settings(workload, settings)
        for name, epochs in (("simulated", ours), ("published", _measured_epochs(workload))):
            points = np.array([(each.miss_rate, each.wait_seconds) for each in epochs], np.float64)
            lines.append(_fit_line(points))
            table.add(workload.name, name, len(points), *lines[-1])
            rates, waits = points.T.tolist()
            series.append(Series(name, rates, waits, is_published=name == "published", kind="points"))
        (slope, intercept, straightness), (their_slope, _, their_straightness) = lines
        x_ends = [0.0, max(each.miss_rate for each in ours)]
        series.append(Series("straight line through ours", x_ends, [intercept + slope * rate for rate in x_ends]))
        panels.append(Panel(workload.title, "miss rate", "wait for data (s)", series))
        remarks.append(
            f"{workload.title}: {slope:.0f} s per unit of miss rate, {their_slope:.0f} published; a straight line "
            f"explains {straightness:.1%} of ours and {their_straightness:.1%} of theirs."
        )
    return ExperimentResult([table], panels, remarks)


def _simulate_settings(workload: DeliWorkload, settings: Iterable[DeliSetting]) -> list[SampleEpoch]:
    return [epoch for setting in settings for epoch in simulate_setting(workload.name, setting)]


def _measured_epochs(workload: DeliWorkload) -> list[Measurement]:
    """Return the published epochs with fetches and a known miss rate."""
    fetched = (each for each in load_measurements() if each.setting and each.setting.fetch_size and each.miss_rate)
    return [each for each in fetched if each.workload == workload.name]


def _fit_line(points: NDArray[np.float64]) -> tuple[float, float, float]:
    """Fit a straight line to points ``[n, 2]`` and return its slope, intercept and coefficient of determination."""
    x, y = points.T
    slope, intercept = map(float, np.polyfit(x, y, 1))
    return slope, intercept, float(np.corrcoef(x, y)[0, 1] ** 2)


_CACHE_SHARES = (0.25, 0.5, 0.75, 1.0)
_FETCH_SIZES = (256, 512, 768, 1024, 1280, 1536, 2048)
_CACHE_SIZES = (256, 512, 768, 1024, 1536, 2048, 4096)
_FETCH_SIZE = 1024
"""Fetch size of Figures 7 and 8 (section V-D), in samples."""
_BATCH_SIZES = (512, 1024)
_CACHE_FETCHES = (0.5, 1.0, 2.0, 3.0)
"""Cache sizes of Figure 8, in multiples of the fetch size."""
_THRESHOLD_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Thresholds of Figure 8, as fractions of the cache; 0 for comparison."""
_STATED_FALLS, _STATED_FETCHES = {"mnist": 0.31, "cifar10": 0.80}, 2.0
"""Stated reduction of misses by a threshold of half of the cache, and the cache size in fetches (Figure 8)."""
_STATED_BEST = {"mnist": "a small difference", "cifar10": "83% fewer misses with 50/50"}
"""Stated comparison of 50/50 with a full fetch of the cache's size (Figure 9)."""


class _Sweep(NamedTuple):
    """Settings of a workload by the varied value, drawn in one panel; ``title`` is appended to the workload's title."""

    workload: DeliWorkload
    settings: Mapping[Any, DeliSetting]
    title: str = ""
    note: str = ""

    def miss_rates(self, name: Cell) -> list[float]:
        """Return the miss rate of a setting in each epoch."""
        return [each.miss_rate for each in simulate_setting(self.workload.name, self.settings[name])]


def _run_sweeps(name: str, x_label: str, sweeps: Sequence[_Sweep]) -> ExperimentResult:
    """Return miss rates over the varied value, beside the published ones, with a remark on their agreement."""
    joined = Table(name, _COLUMNS)
    panels = []
    for workload, settings, title, note in sweeps:
        table = _table(name, workload, settings.values())
        joined.rows.extend(table.rows)
        series = _epoch_series(table, "miss rate", settings)
        panels.append(Panel(f"{workload.title}{title}", x_label, "miss rate", series, note=note))
    return ExperimentResult([joined], panels, [_describe_agreement(joined)])


def _describe_agreement(table: Table) -> str:
    misses, waits = (
        [abs(cell) for cell in table.cells(column) if cell is not None] for column in ("difference", "wait difference")
    )
    if not misses:
        return "No point of this figure is among the published measurements."
    return (
        f"Of {len(table.rows)} points {len(misses)} were published: the miss rate differs by at most "
        f"{max(misses):.3f}, the wait by at most {max(waits):.1%}."
    )


def run_figure_5(quick: bool) -> ExperimentResult:
    """Run Figure 5: miss rates of a cache alone; the unlimited one is drawn at the size of the whole data set."""
    sweeps = []
    for workload in WORKLOADS.values():
        samples = workload.node_samples
        shares = _CACHE_SHARES[:1] if quick else _CACHE_SHARES
        settings = {share: DeliSetting(cache_samples=int(share * samples)) for share in shares}
        sweeps.append(_Sweep(workload, {**settings, workload.dataset_samples / samples: DeliSetting()}))
    return _run_sweeps("deli-figure-5", "cache size / a node's samples (3: the whole data set)", sweeps)


def run_figure_6(quick: bool) -> ExperimentResult:
    """Run Figure 6: miss rates by fetch size."""
    sizes = _FETCH_SIZES[:: len(_FETCH_SIZES) - 1] if quick else _FETCH_SIZES
    sweeps = [_Sweep(workload, {float(size): DeliSetting(size) for size in sizes}) for workload in WORKLOADS.values()]
    return _run_sweeps("deli-figure-6", "fetch size (samples)", sweeps)


def run_figure_7(quick: bool) -> ExperimentResult:
    """Run Figure 7: miss rates by cache size."""
    sizes = _CACHE_SIZES[::3] if quick else _CACHE_SIZES
    sweeps = []
    for workload, batch_size in product(WORKLOADS.values(), _BATCH_SIZES):
        settings = {size / _FETCH_SIZE: DeliSetting(_FETCH_SIZE, 0, size, batch_size) for size in sizes}
        sweeps.append(_Sweep(workload, settings, f", batch {batch_size}", "published trend: no gain beyond 1"))
    beyond = [each.miss_rates(4)[1] - each.miss_rates(1)[1] for each in sweeps]
    remark = (
        f"From a cache of one fetch to one of four, the miss rate of the second epoch changes by "
        f"{min(beyond):+.3f} to {max(beyond):+.3f}; the paper's trend is no change."
    )
    result = _run_sweeps("deli-figure-7", "cache size / fetch size (1,024 samples)", sweeps)
    return replace(result, remarks=[remark])


def run_figure_8(quick: bool) -> ExperimentResult:
    """Run Figure 8: miss rates by threshold."""
    sweeps, falls = [], []
    for fetches, workload in product(_CACHE_FETCHES[2:3] if quick else _CACHE_FETCHES, WORKLOADS.values()):
        cache = int(fetches * _FETCH_SIZE)
        settings = {share: DeliSetting(_FETCH_SIZE, int(share * cache), cache) for share in _THRESHOLD_SHARES}
        sweep = _Sweep(workload, settings, title=f", cache of {cache:,}")
        if fetches == _STATED_FETCHES:
            stated = _STATED_FALLS[workload.name]
            sweep = sweep._replace(note=f"published: -{stated:.0%} at 0.5")
            falls.append(
                f"{workload.title}, cache of {cache:,}: a threshold lowers the miss rate of epochs 1 and 2 by: "
                f"{_describe_falls(sweep)}; the paper states {stated:.0%} for 50%."
            )
        sweeps.append(sweep)
    result = _run_sweeps("deli-figure-8", "threshold / cache size", sweeps)
    return replace(result, remarks=[*result.remarks, *falls])


def _describe_falls(sweep: _Sweep) -> str:
    """Describe the relative reduction of the miss rates by each threshold."""
    without, *shares = sweep.settings
    return "; ".join(
        f"{share:.0%} of the cache "
        + " and ".join(
            f"{1 - after / before:.0%}"
            for before, after in zip(sweep.miss_rates(without), sweep.miss_rates(share), strict=True)
        )
        for share in shares
    )


def run_figure_9(quick: bool) -> ExperimentResult:
    """Run Figure 9: the best settings of one cache size."""
    settings = {"full fetch 2048": DeliSetting(2048, 0, 2048), "50/50, 1024": _BEST}
    sweeps = [_Sweep(each, settings, note=f"published: {_STATED_BEST[each.name]}") for each in WORKLOADS.values()]
    result, remarks = _run_sweeps("deli-figure-9", "", sweeps), []
    for each in sweeps:
        before, after = (sum(each.miss_rates(name)) for name in settings)
        remarks.append(
            f"{each.workload.title}: 50/50 has {1 - after / before:.0%} fewer misses than a full fetch of 2,048."
        )
    stated = [f"The paper states for {WORKLOADS[name].title}: {stated}." for name, stated in _STATED_BEST.items()]
    return replace(result, remarks=[*result.remarks, *remarks, *stated])
