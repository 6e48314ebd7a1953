"""IPDL: prefetching the next batch, beside loader workers, from one disk and from a cluster's memory.

X. Ruan, H. Chen, "Informed Prefetching in I/O Bounded Distributed Deep Learning" (PAISE 2021). The paper's loader is
the schedule ``NextBatch(1)`` with one reader; it and deeper ones use this package's schedule, prefetcher and ring. The
text does not give the figures of the plots, so ours are compared with the trends that the slides state. The times of a
disk, a cluster and a step are not published: typical figures are assumed.

Workers load as in torch.utils.data (versions 1.4 to 2): each worker has a queue, and batches are assigned to workers in
turn, ``prefetch_factor`` to each at first and one more whenever the training loop takes one. A batch that is ready
early waits for those before it. Without workers the training loop loads its batches itself.

The disk has one head and serves the nearest pending request first, without waiting for a nearer one. So a single
reader, which requests the next piece after it has received the last one, finds the head where it left it; two readers
move the head away from each other between two pieces of one file (S. Iyer, P. Druschel, "Anticipatory scheduling", SOSP
2001, section 1); and of many requests one is near.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from stoker._base.clock import run_virtual
from stoker._base.meter import Operation, ReaderWrapper
from stoker._base.sizes import format_count
from stoker._base.task_group import task_group
from stoker._diagnostics.latency import BucketModel, LateTail, LogNormal
from stoker._fetch.config import NextBatch, PipelineConfig
from stoker._format.manifest import Manifest
from stoker._order.order import OrderConfig
from stoker.abc import Readable
from stoker_sim._bucket import (
    BucketView,
    ModelledReader,
    ProcessorSharing,
    SimulatedBucket,
    create_size_lookup,
    synthetic_manifest,
)
from stoker_sim._experiments import ExperimentResult, Panel, Series, Table, load_paper
from stoker_sim._experiments.scenarios import aligned_slot_bytes, whole_object_fetch
from stoker_sim._scenario import Scenario, simulate


@dataclass(eq=False)
class Disk:
    """Model of one disk for any number of readers.

    Attributes:
        rng: generator of rotational delays.
        settle_seconds: duration of the shortest seek, in seconds.
        stroke_seconds: duration of the longest seek, in seconds; others grow with the square root of the distance.
        rotation_seconds: duration of one rotation, in seconds; each read waits for a random part of it.
        bytes_per_second: transfer rate.
        pieces: number of consecutive reads of a file at nearby positions: its record, and its bytes.
    """

    rng: random.Random
    settle_seconds: float = 0.001
    stroke_seconds: float = 0.016
    rotation_seconds: float = 60 / 7200
    bytes_per_second: float = 150e6
    pieces: int = 2

    def __post_init__(self) -> None:
        self._head = 0.5
        self._is_busy = False
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    async def read_file(self, place: float, size_bytes: int) -> None:
        """Wait as long as the read of a file takes; if cancelled, the head moves on to the next request.

        Args:
            place: position of the file on the disk, 0 to 1.
            size_bytes: size of its last piece, in bytes; the others have none.
        """
        for piece in range(self.pieces):
            await self._read(place + piece * 1e-9, size_bytes if piece == self.pieces - 1 else 0)

    async def _read(self, place: float, size_bytes: int) -> None:
        await self._acquire_head(place)
        try:
            seek_seconds = self._seek_seconds(abs(place - self._head))
            self._head = place
            turn_seconds = self.rng.random() * self.rotation_seconds
            await asyncio.sleep(seek_seconds + turn_seconds + size_bytes / self.bytes_per_second)
        finally:
            self._release_head()

    def _seek_seconds(self, distance: float) -> float:
        """Return the duration of a seek over a distance from 0 to 1, in seconds; 0 if the distance is 0."""
        if not distance:
            return 0.0
        return self.settle_seconds + (self.stroke_seconds - self.settle_seconds) * math.sqrt(distance)

    async def _acquire_head(self, place: float) -> None:
        """Wait until the head may move to a position."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release_head()
            raise

    def _release_head(self) -> None:
        """Give the head to the nearest pending request."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if not self._waiting:
            self._is_busy = False
            return
        nearest = min(self._waiting, key=lambda each: abs(each[0] - self._head))
        self._waiting.remove(nearest)
        nearest[1].set_result(None)


class DiskReader(ModelledReader):
    """Reader of a disk's files as objects.

    Args:
        disk: the disk.
        size_of: function from a key to the size of its file in bytes; raises KeyError if there is none.
        place_of: function from a key to the position of its file, 0 to 1.
    """

    def __init__(self, disk: Disk, size_of: Callable[[str], int], place_of: Callable[[str], float]) -> None:
        super().__init__("simulated://disk", size_of)
        self._disk, self._place_of = disk, place_of

    async def _transfer(self, key: str, size_bytes: int) -> None:
        await self._disk.read_file(self._place_of(key), size_bytes)


T = TypeVar("T")


class Processors:
    """Cores that jobs share evenly; each job uses at most one core.

    Attributes:
        cores: number of cores.
        busy_seconds: total work, in core-seconds.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.busy_seconds = 0.0
        self._shared = ProcessorSharing(lambda jobs: min(1.0, cores / jobs))

    async def work(self, seconds: float) -> None:
        """Wait as long as work of this many core-seconds takes beside the other jobs."""
        self.busy_seconds += seconds
        await self._shared.serve(seconds)


class DecodingReader(ReaderWrapper[Readable]):
    """Wrapper of a store that decodes each answer after it has arrived.

    Args:
        wrapped: store to read from.
        processors: CPU cores that decode.
        seconds: decode time of one answer, in seconds.
    """

    def __init__(self, wrapped: Readable, processors: Processors, seconds: float) -> None:
        super().__init__(wrapped)
        self._processors, self._seconds = processors, seconds

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Perform the request, and decode the answer if it has bytes."""
        answer = await request()
        if operation is Operation.GET:
            await self._processors.work(self._seconds)
        return answer


Load = Callable[[int], Awaitable[object]]
"""Function that loads the sample of a number."""


async def train(
    batches: Sequence[Iterable[int]],
    load: Load,
    step: Callable[[], Awaitable[object]],
    *,
    workers: int,
    prefetch_factor: int = 2,
    hand_over_seconds: float = 0.0,
) -> None:
    """Load batches in order and run a step on each.

    Args:
        batches: sample numbers of each batch.
        load: function that loads a sample; a worker loads one after the other.
        step: function that trains on a loaded batch.
        workers: number of worker processes; 0 loads in the training loop.
        prefetch_factor: number of batches that each worker loads ahead.
        hand_over_seconds: time that the training loop takes to receive a batch from a worker, in seconds.
    """
    if not workers:
        for batch in batches:
            for sample in batch:
                await load(sample)
            await step()
        return
    ready = [asyncio.Event() for _ in batches]
    queues: list[asyncio.Queue[int | None]] = [asyncio.Queue() for _ in range(workers)]

    def ask(number: int) -> None:
        queues[number % workers].put_nowait(number if number < len(batches) else None)

    async def work(queue: asyncio.Queue[int | None]) -> None:
        while (number := await queue.get()) is not None:
            for sample in batches[number]:
                await load(sample)
            ready[number].set()

    async with task_group() as group:
        for queue in queues:
            group.create_task(work(queue))
        ahead = workers * prefetch_factor
        for number in range(ahead):
            ask(number)
        for number, is_ready in enumerate(ready):
            await is_ready.wait()
            ask(number + ahead)
            await asyncio.sleep(hand_over_seconds)
            await step()


_PAPER = load_paper("ipdl")
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
    disk = Disk(random.Random(_SEED))  # noqa: S311 - a model's
    return DiskReader(disk, create_size_lookup(manifest), lambda key: float(places[int(key.rpartition("/")[2])]))


def _bucket(model: BucketModel, manifest: Manifest) -> Readable:
    return BucketView(SimulatedBucket(model, create_size_lookup(manifest)), random.Random(_SEED))  # noqa: S311 - a model's


_CLUSTER = BucketModel(first_byte=LogNormal(0.004, 0.012), connection_bytes_per_second=100e6)
_LATE_BUCKET = BucketModel(first_byte=LateTail(LogNormal(0.02, 0.08), _LATE_FRACTION, _LATE_SECONDS))


@dataclass(slots=True)
class _StepLatency:
    """Durations of steps, a :class:`~stoker._diagnostics.latency.Latency` that records the start of each step."""

    begun_seconds: list[float] = field(default_factory=list)

    def draw(self, rng: random.Random | None = None) -> float:
        """Record a step that begins now and return its duration, in seconds."""
        self.begun_seconds.append(asyncio.get_running_loop().time())
        return _STEP_SECONDS


class _LoaderResult(NamedTuple):
    """Result of a loader.

    Attributes:
        seconds: mean time of ten batches, in seconds.
        min_seconds: minimum time of ten batches, in seconds.
        spread: standard deviation of that time over its mean.
        processor: fraction of the machine's cores that was busy, 0 to 1.
    """

    seconds: float
    min_seconds: float
    spread: float
    processor: float

    @classmethod
    def from_steps(cls, steps: _StepLatency, busy_seconds: float, cores: int) -> _LoaderResult:
        begun = np.array(steps.begun_seconds)
        tens = begun[_WINDOW_BATCHES:] - begun[:-_WINDOW_BATCHES]
        spread = round(float(tens.std() / tens.mean()), 6)
        processor = busy_seconds / ((begun[-1] + _STEP_SECONDS) * cores)
        return cls(float(tens.mean()), float(tens.min()), spread, float(processor))


_ByWorkers = dict[int, _LoaderResult]
_Trend = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreCase:
    """A store of samples, and the published trends.

    Attributes:
        name: name in tables.
        cores: cores of the machine that trains.
        trend: trend that the slides state.
        store: function that creates the store of a data set.
        trends: function from our results by number of workers to rows of trend, our figures, and whether it holds.
    """

    name: str
    cores: int
    trend: str = ""
    store: Callable[[Manifest], Readable]
    trends: Callable[[_ByWorkers], Iterator[_Trend]] = lambda _: iter(())


def _disk_trends(by_workers: _ByWorkers) -> Iterator[_Trend]:
    alone = by_workers[1].seconds
    less = 1 - alone / by_workers[0].seconds
    yield "0 and 1 alike", f"1 takes {less:.0%} less than 0", _yes_or_no(abs(less) < 0.1)
    more = by_workers[2].seconds / alone - 1
    yield "2 worse", f"2 takes {more:.0%} more than 1", _yes_or_no(more > 0.1)
    for workers in (4, 8):
        ours = f"the fastest ten take {by_workers[workers].min_seconds:.1f} s, with 1 worker {alone:.1f} s on average"
        yield f"{workers} better for some batches", ours, _yes_or_no(by_workers[workers].min_seconds < alone)
        ours = f"varies by {by_workers[workers].spread:.0%}, with 1 worker by {by_workers[1].spread:.1%}"
        yield f"{workers} unsteady", ours, _yes_or_no(by_workers[workers].spread > 0.1 > by_workers[1].spread)


def _cluster_trends(by_workers: _ByWorkers) -> Iterator[_Trend]:
    best = min(by_workers[0].seconds, by_workers[1].seconds)
    yield (
        "2 much better than 0 and 1",
        f"{by_workers[2].seconds / best:.0%} of it",
        _yes_or_no(by_workers[2].seconds < 0.7 * best),
    )
    fastest = min(each.seconds for each in by_workers.values())
    for workers in (4, 8):
        result = by_workers[workers]
        ours = f"{result.seconds:.2f} s, the least is {fastest:.2f} s; varies by {result.spread:.1%}"
        is_best = result.seconds < 1.1 * fastest and result.spread < 0.05
        yield f"{workers} best, and steady", ours, _yes_or_no(is_best)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


_PLACES = (
    _StoreCase(name="one disk", store=_disk, trends=_disk_trends, **_PAPER["disk"]),
    _StoreCase(
        name="a cluster's memory", store=partial(_bucket, _CLUSTER), trends=_cluster_trends, **_PAPER["cluster"]
    ),
)
_LATE = _StoreCase(name="a bucket", cores=_PAPER["cluster"]["cores"], store=partial(_bucket, _LATE_BUCKET))


def _run_workers(place: _StoreCase, workers: int, batches: int) -> _LoaderResult:
    manifest, steps, processors = _dataset(), _StepLatency(), Processors(place.cores)
    store = DecodingReader(place.store(manifest), processors, _DECODE_SECONDS)
    samples = np.random.default_rng(_SEED).permutation(len(manifest))[: batches * _BATCH].reshape(batches, _BATCH)

    async def load(sample: int) -> None:
        await store.get_range(manifest.key(sample), 0, _SAMPLE_BYTES, into=memoryview(b""))

    async def step() -> None:
        await processors.work(steps.draw())  # the training loop keeps one core busy during a step

    run_virtual(train(samples.tolist(), load, step, workers=workers, hand_over_seconds=_HAND_OVER_SECONDS))
    return _LoaderResult.from_steps(steps, processors.busy_seconds, place.cores)


def _run_schedule(place: _StoreCase, depth: int, readers: int, batches: int) -> _LoaderResult:
    manifest, steps = _dataset(), _StepLatency()
    processors = Processors(place.cores - 1)  # one core runs the training loop
    feed = PipelineConfig(
        order=OrderConfig(seed=_SEED, window=1),
        batch_size=_BATCH,
        memory_bytes=manifest.file_bytes + ((depth + 2) * _BATCH) * 2 * aligned_slot_bytes(_SAMPLE_BYTES),
        limit=batches * _BATCH,
        schedule=NextBatch(depth),
        fetch=whole_object_fetch(readers, deadline_seconds=3600.0),
    )
    simulate(
        Scenario(
            manifest=manifest,
            feed=feed,
            store=DecodingReader(place.store(manifest), processors, _DECODE_SECONDS),
            compute=steps,
            seed=_SEED,
        )
    )
    return _LoaderResult.from_steps(steps, processors.busy_seconds + batches * _STEP_SECONDS, place.cores)


def _dataset() -> Manifest:
    samples = _PAPER["dataset_samples"]
    return synthetic_manifest(super_samples=samples, samples=1, super_sample_bytes=_SAMPLE_BYTES, head_bytes=256)


def run(quick: bool) -> ExperimentResult:
    """Run loader workers and our schedules."""
    batches = 20 if quick else 100
    workers = (0, 1, 2, 4, 8) if quick else _PAPER["workers"]
    depths: Sequence[int] = (1, 4) if quick else (1, 2, 4, 8)
    shown_depths = depths[:1] if quick else depths
    columns = ("data", "loader", "workers or depth", "s per 10 batches", "fastest 10", "spread", "processors")
    table = Table("ipdl", columns)
    trends = Table("ipdl-trends", ("data", "published", "ours", "holds"))
    for place in _PLACES:
        by_workers = {number: _run_workers(place, number, batches) for number in workers}
        table.rows.extend((place.name, "DataLoader", number, *cells) for number, cells in by_workers.items())
        for readers, depth in product(_READERS, shown_depths):
            result = _run_schedule(place, depth, readers, batches)
            table.add(place.name, f"NextBatch, {format_count(readers, 'reader')}", depth, *result)
        trends.rows.extend((place.name, *trend) for trend in place.trends(by_workers))
    for depth in depths:
        result = _run_schedule(_LATE, depth, _LATE_READERS, batches)
        table.add(_LATE.name, f"NextBatch, {format_count(_LATE_READERS, 'reader')}", depth, *result)
    return ExperimentResult([table, trends], _panels(table), _REMARKS)


def _panels(table: Table) -> list[Panel]:
    labels = {
        "s per 10 batches": "seconds per 10 batches",
        "spread": "how 10 batches' time varies: deviation / mean",
        "processors": "part of the processors that is busy",
    }
    panels = []
    for (column, label), place in product(labels.items(), _PLACES):
        lines = table.select("data", place.name).lines("loader", "workers or depth", column)
        note = f"published trend: {place.trend}" if column == "s per 10 batches" else ""
        panels.append(Panel(f"From {place.name}", "workers or depth", label, lines, note=note))
    late = table.select("data", _LATE.name)
    depths, seconds = late.cells("workers or depth"), late.cells("s per 10 batches")
    alone = Series("steps alone", depths, [_WINDOW_BATCHES * _STEP_SECONDS] * len(depths))
    title = f"From a bucket, {_LATE_FRACTION:.0%} of its answers {_LATE_SECONDS} s late; {_LATE_READERS} readers"
    return [*panels, Panel(title, "depth", "seconds per 10 batches", [Series("NextBatch", depths, seconds), alone])]


_REMARKS = (
    "The slides state trends; the text has no figures of their plots. NextBatch(1) with one reader is the paper's.",
    "Assumed: seeks of 1 to 16 ms, 7,200 rpm; 4 ms per file in a cluster; decoding 0.5 ms; steps 0.15 s.",
    "A file is two adjacent reads. A single reader finds the head where it left it; two move it away from each other.",
    "With more readers a pending request is near. Batches of workers come in bursts, so the time of ten varies.",
    "Depth helps if reading keeps up except for late answers; if it does not, only more readers help.",
    "No file is in the page cache.",
)
