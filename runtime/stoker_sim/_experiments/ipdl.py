"""IPDL: fetching the next batch while one trains, beside loader workers, from one disk and from a cluster's memory.

X. Ruan, H. Chen, "Informed Prefetching in I/O Bounded Distributed Deep Learning" (PAISE 2021). The paper's loader is
the schedule ``NextBatch(1)`` with one reader; it and deeper ones are this package's own schedule, prefetcher and ring.
The plots' figures are not in the text, so ours stand beside the trends that the slides state. What a disk, a cluster
and a step take is not published: typical figures are assumed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker._base.clock import run_virtual
from stoker._diagnostics.latency import BucketModel, Late, LogNormal
from stoker._fetch.config import NextBatch, PipelineConfig
from stoker._format.manifest import Manifest
from stoker._memory.ring import anonymous_memory
from stoker._order.order import Order, OrderConfig
from stoker.abc import Readable
from stoker_sim._bucket import BucketView, SimulatedBucket, described, size_of
from stoker_sim._dataloader import DecodingView, Disk, DiskModel, DiskView, LoaderModel, Processors, train
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table, published
from stoker_sim._scenario import Node, one_by_one, slot_bytes

__all__ = ["EXPERIMENTS"]

_PAPER = published("ipdl")
_BATCH = _PAPER["batch_samples"]
_SAMPLE_BYTES = 2_500
_DECODE_SECONDS = 0.5e-3
_HAND_OVER_SECONDS = 1e-3
_STEP_SECONDS = 0.15
_WINDOW_BATCHES = 10
_READERS = (1, 4)
_LATE_READERS = 32
_LATE_FRACTION, _LATE_SECONDS = 0.01, 0.3
_SEED = 1


def _disk(manifest: Manifest) -> Readable:
    places = np.random.default_rng(_SEED).random(len(manifest))
    disk = Disk(DiskModel(), random.Random(_SEED))  # noqa: S311 - a model's
    return DiskView(disk, size_of(manifest), lambda key: float(places[int(key.rpartition("/")[2])]))


def _cluster(manifest: Manifest) -> Readable:
    model = BucketModel(first_byte=LogNormal(0.004, 0.012), connection_bytes_per_second=100e6)
    return BucketView(SimulatedBucket(model, size_of(manifest)), random.Random(_SEED))  # noqa: S311 - a model's


@dataclass(slots=True)
class _Steps:
    """What steps take, which notes when each begins."""

    begun_seconds: list[float] = field(default_factory=list)

    def begin(self) -> float:
        """Return what a step takes that begins now."""
        self.begun_seconds.append(asyncio.get_running_loop().time())
        return _STEP_SECONDS

    def draw(self, rng: random.Random) -> float:
        """The same, as a node asks for it: a :class:`~stoker._diagnostics.latency.Latency`."""
        return self.begin()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a loader took.

    Attributes:
        seconds: of ten batches, on average,
        least_seconds: and of the ten that were fastest.
        spread: how much it varies: the standard deviation over the mean.
        processor: part of the machine's cores that was busy.
    """

    seconds: float
    least_seconds: float
    spread: float
    processor: float

    @classmethod
    def of(cls, steps: _Steps, busy_seconds: float, cores: int) -> _Found:
        begun = np.array(steps.begun_seconds)
        tens = begun[_WINDOW_BATCHES:] - begun[:-_WINDOW_BATCHES]
        whole_seconds = begun[-1] + _STEP_SECONDS
        return cls(
            seconds=float(tens.mean()),
            least_seconds=float(tens.min()),
            spread=round(float(tens.std() / tens.mean()), 6),
            processor=float(busy_seconds / (whole_seconds * cores)),
        )


_ByWorkers = dict[int, _Found]
_Trend = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where samples are.

    Attributes:
        name: in tables.
        cores: of the machine that trains.
        trend: what the slides say.
        store: makes the store of a data set.
        trends: what the slides say, one by one: ours, and whether it holds, by what each number of workers took.
    """

    name: str
    cores: int
    trend: str
    store: Callable[[Manifest], Readable]
    trends: Callable[[_ByWorkers], Iterator[_Trend]]


def _late_bucket(manifest: Manifest) -> Readable:
    model = BucketModel(first_byte=Late(LogNormal(0.02, 0.08), _LATE_FRACTION, _LATE_SECONDS))
    return BucketView(SimulatedBucket(model, size_of(manifest)), random.Random(_SEED))  # noqa: S311 - a model's


def _disk_trends(found: _ByWorkers) -> Iterator[_Trend]:
    alone = found[1].seconds
    less = 1 - alone / found[0].seconds
    yield "0 and 1 alike", f"1 takes {less:.0%} less than 0", _holds(abs(less) < 0.1)
    more = found[2].seconds / alone - 1
    yield "2 worse", f"2 takes {more:.0%} more than 1", _holds(more > 0.1)
    for workers in (4, 8):
        ours = f"the fastest ten take {found[workers].least_seconds:.1f} s, with 1 worker {alone:.1f} s on average"
        yield f"{workers} better for some batches", ours, _holds(found[workers].least_seconds < alone)
        ours = f"varies by {found[workers].spread:.0%}, with 1 worker by {found[1].spread:.1%}"
        yield f"{workers} unsteady", ours, _holds(found[workers].spread > 0.1 > found[1].spread)


def _cluster_trends(found: _ByWorkers) -> Iterator[_Trend]:
    best = min(found[0].seconds, found[1].seconds)
    yield "2 much better than 0 and 1", f"{found[2].seconds / best:.0%} of it", _holds(found[2].seconds < 0.7 * best)
    least = min(each.seconds for each in found.values())
    for workers in (4, 8):
        ours = f"{found[workers].seconds:.2f} s, the least is {least:.2f} s; varies by {found[workers].spread:.1%}"
        is_best = found[workers].seconds < 1.1 * least and found[workers].spread < 0.05
        yield f"{workers} best, and steady", ours, _holds(is_best)


def _holds(value: bool) -> str:
    return "yes" if value else "no"


_PLACES = (
    _Place(name="one disk", store=_disk, trends=_disk_trends, **_PAPER["disk"]),
    _Place(name="a cluster's memory", store=_cluster, trends=_cluster_trends, **_PAPER["cluster"]),
)
_LATE = _Place(
    name="a bucket", cores=_PAPER["cluster"]["cores"], trend="", store=_late_bucket, trends=lambda _: iter(())
)


def _with_workers(place: _Place, workers: int, batches: int) -> _Found:
    manifest, steps, processors = _dataset(), _Steps(), Processors(place.cores)
    store = DecodingView(place.store(manifest), processors, _DECODE_SECONDS)
    drawn = np.random.default_rng(_SEED).permutation(len(manifest))[: batches * _BATCH].reshape(batches, _BATCH)

    async def load(sample: int) -> None:
        await store.get_range(manifest.key(sample), 0, _SAMPLE_BYTES, into=memoryview(b""))

    async def step() -> None:
        await processors.work(steps.begin())  # the loop keeps a core busy while it drives the accelerator

    model = LoaderModel(workers=workers, hand_over_seconds=_HAND_OVER_SECONDS)
    run_virtual(train(model, drawn.tolist(), load, step))
    return _Found.of(steps, processors.busy_seconds, place.cores)


def _with_schedule(place: _Place, depth: int, readers: int, batches: int) -> _Found:
    manifest, steps, processors = _dataset(), _Steps(), Processors(place.cores - 1)  # one core is the loop's
    feed = PipelineConfig(
        order=OrderConfig(seed=_SEED, window=1),
        batch_size=_BATCH,
        memory_bytes=manifest.file_bytes + ((depth + 2) * _BATCH) * 2 * slot_bytes(_SAMPLE_BYTES),
        limit=batches * _BATCH,
        schedule=NextBatch(depth),
        fetch=one_by_one(readers, deadline_seconds=3600.0),
    )
    node = Node(
        manifest=manifest,
        feed=feed,
        bucket=DecodingView(place.store(manifest), processors, _DECODE_SECONDS),
        compute=steps,
        seed=_SEED,
        memory=anonymous_memory(slot_bytes(_SAMPLE_BYTES)),
        order=Order,
    )
    run_virtual(node.run())
    return _Found.of(steps, processors.busy_seconds + batches * _STEP_SECONDS, place.cores)


def _dataset() -> Manifest:
    samples = _PAPER["dataset_samples"]
    return described(super_samples=samples, samples=1, super_sample_bytes=_SAMPLE_BYTES, head_bytes=256)


def _run(quick: bool) -> Outcome:
    batches = 20 if quick else 100
    workers = (0, 1, 2, 4, 8) if quick else _PAPER["workers"]
    depths: Sequence[int] = (1, 4) if quick else (1, 2, 4, 8)
    shown = depths[:1] if quick else depths
    rows: list[tuple[Cell, ...]] = []
    trends: list[tuple[Cell, ...]] = []
    drawn = []
    for place in _PLACES:
        found = _found_at(place, workers, shown, batches)
        rows += [_row(place, way, number, each) for (way, number), each in found.items()]
        drawn.append(_panels(place, found))
        by_workers = {number: each for (way, number), each in found.items() if way == "DataLoader"}
        trends += [(place.name, *trend) for trend in place.trends(by_workers)]
    deeper = {depth: _with_schedule(_LATE, depth, _LATE_READERS, batches) for depth in depths}
    rows += [_row(_LATE, f"NextBatch, {_LATE_READERS} readers", depth, each) for depth, each in deeper.items()]
    columns = ("data", "loader", "workers or depth", "s per 10 batches", "fastest 10", "spread", "processors")
    table = Table("ipdl", columns, rows)
    checked = Table("ipdl-trends", ("data", "published", "ours", "holds"), trends)
    panels = [panel for row in zip(*drawn, strict=True) for panel in row]
    return Outcome([table, checked], [*panels, _depth_panel(deeper)], _REMARKS)


def _found_at(
    place: _Place, workers: Sequence[int], depths: Sequence[int], batches: int
) -> dict[tuple[str, int], _Found]:
    """Return what was found at a place, by loader and its number of workers or depth."""
    found = {("DataLoader", number): _with_workers(place, number, batches) for number in workers}
    for readers in _READERS:
        name = "NextBatch, " + ("1 reader" if readers == 1 else f"{readers} readers")
        found |= {(name, depth): _with_schedule(place, depth, readers, batches) for depth in depths}
    return found


def _row(place: _Place, way: str, number: int, found: _Found) -> tuple[Cell, ...]:
    return place.name, way, number, found.seconds, found.least_seconds, found.spread, found.processor


def _depth_panel(found: dict[int, _Found]) -> Panel:
    bound_seconds = _WINDOW_BATCHES * _STEP_SECONDS
    series = [
        Series("NextBatch", list(found), [each.seconds for each in found.values()]),
        Series("steps alone", list(found), [bound_seconds] * len(found)),
    ]
    title = f"From a bucket, {_LATE_FRACTION:.0%} of its answers {_LATE_SECONDS} s late; {_LATE_READERS} readers"
    return Panel(title, "depth", "seconds per 10 batches", series)


def _panels(place: _Place, found: dict[tuple[str, int], _Found]) -> list[Panel]:
    ways = list(dict.fromkeys(way for way, _ in found))
    x = {way: [number for name, number in found if name == way] for way in ways}

    def panel(y_label: str, figure: Callable[[_Found], float], note: str = "") -> Panel:
        series = [Series(way, x[way], [figure(found[way, number]) for number in x[way]]) for way in ways]
        return Panel(f"From {place.name}", "workers or depth", y_label, series, note=note)

    return [
        panel("seconds per 10 batches", lambda each: each.seconds, f"published trend: {place.trend}"),
        panel("how 10 batches' time varies: deviation / mean", lambda each: each.spread),
        panel("part of the processors that is busy", lambda each: each.processor),
    ]


_REMARKS = (
    "The slides state trends; their plots' figures are not in the text. NextBatch(1) with one reader is the paper's.",
    "Assumed: seeks of 1 to 16 ms, 7,200 turns a minute; 4 ms a file in a cluster; decoding 0.5 ms; steps 0.15 s.",
    "A file is two reads that lie together. One reader finds the head where it was; two take it from each other.",
    "With more, one of those that wait is near. Batches of workers come in bursts, so ten of them vary.",
    "Depth is worth something where reading keeps up but for what is late; where it does not, only readers are.",
    "No file is in the page cache.",
)

EXPERIMENTS = (Experiment("ipdl", "The next batch while one trains, beside loader workers", _PAPER["source"], _run),)
