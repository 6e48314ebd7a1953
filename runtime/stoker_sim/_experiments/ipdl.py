"""IPDL: fetching the next batch while one trains, beside loader workers, from one disk and from a cluster's memory.

X. Ruan, H. Chen, "Informed Prefetching in I/O Bounded Distributed Deep Learning" (PAISE 2021). The paper's loader is
the schedule ``NextBatch(1)`` with one reader; it and deeper ones are this package's own schedule, prefetcher and ring.
The plots' figures are not in the text, so ours stand beside the trends that the slides state. What a disk, a cluster
and a step take is not published: typical figures are assumed.

Workers load as in torch.utils.data (versions 1.4 to 2): every worker has a queue, batches are dealt to workers in
turn, as many as ``prefetch_factor`` for each at first and one more whenever the training loop takes one. A batch that
is ready early waits for those before it. Without workers the loop loads its batches itself.

The disk has one head: what it reads next is what lies nearest of what it is asked for. Serving the nearest request
never waits for a better one. So a lone reader, which asks for the next piece only when it has the last one, finds
the head where it left it; two readers take the head away from each other between two pieces of one file (S. Iyer, P.
Druschel, "Anticipatory scheduling", SOSP 2001, section 1); and of many requests one is near.
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
from stoker._base.sizes import counted
from stoker._base.task_group import task_group
from stoker._diagnostics.latency import BucketModel, Late, LogNormal
from stoker._fetch.config import NextBatch, PipelineConfig
from stoker._format.manifest import Manifest
from stoker._order.order import OrderConfig
from stoker.abc import Readable
from stoker_sim._bucket import BucketView, ModelledReader, Shared, SimulatedBucket, described, size_of
from stoker_sim._experiments import Outcome, Panel, Series, Table, published
from stoker_sim._scenario import Scenario, one_by_one, simulate, slot_bytes


@dataclass(eq=False)
class Disk:
    """One disk, which many may read from.

    Attributes:
        rng: for the platter's place.
        settle_seconds: of the shortest move of the head.
        stroke_seconds: of the longest; others grow with the root of the distance.
        turn_seconds: of a turn of the platter, of which each read waits for a part.
        bytes_per_second: while the head reads.
        pieces: places that a file is read from, one after the other, all near: its record, and its bytes.
    """

    rng: random.Random
    settle_seconds: float = 0.001
    stroke_seconds: float = 0.016
    turn_seconds: float = 60 / 7200
    bytes_per_second: float = 150e6
    pieces: int = 2

    def __post_init__(self) -> None:
        self._head = 0.5
        self._is_busy = False
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    async def read_file(self, place: float, size_bytes: int) -> None:
        """Take the time of a file; cancelled, let the head go on to the next one.

        Args:
            place: where it lies, 0 to 1.
            size_bytes: of its last piece; the others take none.
        """
        for piece in range(self.pieces):
            await self._read(place + piece * 1e-9, size_bytes if piece == self.pieces - 1 else 0)

    async def _read(self, place: float, size_bytes: int) -> None:
        await self._turn(place)
        try:
            seek_seconds = self._seek_seconds(abs(place - self._head))
            self._head = place
            turn_seconds = self.rng.random() * self.turn_seconds
            await asyncio.sleep(seek_seconds + turn_seconds + size_bytes / self.bytes_per_second)
        finally:
            self._pass_on()

    def _seek_seconds(self, distance: float) -> float:
        """Return how long the head takes for a distance, in parts of its whole way; 0 for none."""
        if not distance:
            return 0.0
        return self.settle_seconds + (self.stroke_seconds - self.settle_seconds) * math.sqrt(distance)

    async def _turn(self, place: float) -> None:
        """Return when the head may be moved to a place."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the head to whoever is nearest to it."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if not self._waiting:
            self._is_busy = False
            return
        nearest = min(self._waiting, key=lambda each: abs(each[0] - self._head))
        self._waiting.remove(nearest)
        nearest[1].set_result(None)


class DiskView(ModelledReader):
    """A disk's files as objects.

    Args:
        disk: where they are.
        size_of: the size in bytes of the file under a key; raises KeyError if there is none.
        place_of: where it lies, 0 to 1.
    """

    def __init__(self, disk: Disk, size_of: Callable[[str], int], place_of: Callable[[str], float]) -> None:
        super().__init__("simulated://disk", size_of)
        self._disk, self._place_of = disk, place_of

    async def _transfer(self, key: str, size_bytes: int) -> None:
        await self._disk.read_file(self._place_of(key), size_bytes)


T = TypeVar("T")


class Processors:
    """Cores that jobs share evenly, each on one of them at most.

    Attributes:
        cores: how many.
        busy_seconds: of work that was given to them, in seconds of one core.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.busy_seconds = 0.0
        self._shared = Shared(lambda jobs: min(1.0, cores / jobs))

    async def work(self, seconds: float) -> None:
        """Take what so many seconds of a core take beside the other jobs."""
        self.busy_seconds += seconds
        await self._shared.serve(seconds)


class DecodingView(ReaderWrapper[Readable]):
    """Another store to read from, each of whose answers is decoded once it is there.

    Args:
        wrapped: what is read.
        processors: CPU cores that decode.
        seconds: decode time of one answer, in seconds.
    """

    def __init__(self, wrapped: Readable, processors: Processors, seconds: float) -> None:
        super().__init__(wrapped)
        self._processors, self._seconds = processors, seconds

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Read, and decode what has bytes."""
        answer = await request()
        if operation is Operation.GET:
            await self._processors.work(self._seconds)
        return answer


Load = Callable[[int], Awaitable[object]]
"""Loads a sample, given by its number."""


async def train(
    batches: Sequence[Iterable[int]],
    load: Load,
    step: Callable[[], Awaitable[object]],
    *,
    workers: int,
    prefetch_factor: int = 2,
    hand_over_seconds: float = 0.0,
) -> None:
    """Load batches in their order and take a step on each.

    Args:
        batches: the samples of each.
        load: loads a sample; a worker loads one after the other.
        step: trains on the batch that is there.
        workers: processes that load; 0 loads in the training loop.
        prefetch_factor: batches that a worker is asked for ahead.
        hand_over_seconds: that the training loop takes for a batch of a worker's.
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
    disk = Disk(random.Random(_SEED))  # noqa: S311 - a model's
    return DiskView(disk, size_of(manifest), lambda key: float(places[int(key.rpartition("/")[2])]))


def _bucket(model: BucketModel, manifest: Manifest) -> Readable:
    return BucketView(SimulatedBucket(model, size_of(manifest)), random.Random(_SEED))  # noqa: S311 - a model's


_CLUSTER = BucketModel(first_byte=LogNormal(0.004, 0.012), connection_bytes_per_second=100e6)
_LATE_BUCKET = BucketModel(first_byte=Late(LogNormal(0.02, 0.08), _LATE_FRACTION, _LATE_SECONDS))


@dataclass(slots=True)
class _Steps:
    """What steps take, a :class:`~stoker._diagnostics.latency.Latency` which notes when each begins."""

    begun_seconds: list[float] = field(default_factory=list)

    def draw(self, rng: random.Random | None = None) -> float:
        """Return what a step takes that begins now."""
        self.begun_seconds.append(asyncio.get_running_loop().time())
        return _STEP_SECONDS


class _Found(NamedTuple):
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
        spread = round(float(tens.std() / tens.mean()), 6)
        processor = busy_seconds / ((begun[-1] + _STEP_SECONDS) * cores)
        return cls(float(tens.mean()), float(tens.min()), spread, float(processor))


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
    trend: str = ""
    store: Callable[[Manifest], Readable]
    trends: Callable[[_ByWorkers], Iterator[_Trend]] = lambda _: iter(())


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
    _Place(name="a cluster's memory", store=partial(_bucket, _CLUSTER), trends=_cluster_trends, **_PAPER["cluster"]),
)
_LATE = _Place(name="a bucket", cores=_PAPER["cluster"]["cores"], store=partial(_bucket, _LATE_BUCKET))


def _with_workers(place: _Place, workers: int, batches: int) -> _Found:
    manifest, steps, processors = _dataset(), _Steps(), Processors(place.cores)
    store = DecodingView(place.store(manifest), processors, _DECODE_SECONDS)
    drawn = np.random.default_rng(_SEED).permutation(len(manifest))[: batches * _BATCH].reshape(batches, _BATCH)

    async def load(sample: int) -> None:
        await store.get_range(manifest.key(sample), 0, _SAMPLE_BYTES, into=memoryview(b""))

    async def step() -> None:
        await processors.work(steps.draw())  # the loop keeps a core busy while it drives the accelerator

    run_virtual(train(drawn.tolist(), load, step, workers=workers, hand_over_seconds=_HAND_OVER_SECONDS))
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
    simulate(
        Scenario(
            manifest=manifest,
            feed=feed,
            store=DecodingView(place.store(manifest), processors, _DECODE_SECONDS),
            compute=steps,
            seed=_SEED,
        )
    )
    return _Found.of(steps, processors.busy_seconds + batches * _STEP_SECONDS, place.cores)


def _dataset() -> Manifest:
    samples = _PAPER["dataset_samples"]
    return described(super_samples=samples, samples=1, super_sample_bytes=_SAMPLE_BYTES, head_bytes=256)


def run(quick: bool) -> Outcome:
    """Loader workers beside schedules of ours."""
    batches = 20 if quick else 100
    workers = (0, 1, 2, 4, 8) if quick else _PAPER["workers"]
    depths: Sequence[int] = (1, 4) if quick else (1, 2, 4, 8)
    shown = depths[:1] if quick else depths
    columns = ("data", "loader", "workers or depth", "s per 10 batches", "fastest 10", "spread", "processors")
    table, trends = Table("ipdl", columns), Table("ipdl-trends", ("data", "published", "ours", "holds"))
    for place in _PLACES:
        by_workers = {number: _with_workers(place, number, batches) for number in workers}
        table.rows.extend((place.name, "DataLoader", number, *found) for number, found in by_workers.items())
        for readers, depth in product(_READERS, shown):
            found = _with_schedule(place, depth, readers, batches)
            table.add(place.name, f"NextBatch, {counted(readers, 'reader')}", depth, *found)
        trends.rows.extend((place.name, *trend) for trend in place.trends(by_workers))
    for depth in depths:
        found = _with_schedule(_LATE, depth, _LATE_READERS, batches)
        table.add(_LATE.name, f"NextBatch, {counted(_LATE_READERS, 'reader')}", depth, *found)
    return Outcome([table, trends], _panels(table), _REMARKS)


def _panels(table: Table) -> list[Panel]:
    labels = {
        "s per 10 batches": "seconds per 10 batches",
        "spread": "how 10 batches' time varies: deviation / mean",
        "processors": "part of the processors that is busy",
    }
    panels = []
    for (column, label), place in product(labels.items(), _PLACES):
        lines = table.where("data", place.name).lines("loader", "workers or depth", column)
        note = f"published trend: {place.trend}" if column == "s per 10 batches" else ""
        panels.append(Panel(f"From {place.name}", "workers or depth", label, lines, note=note))
    late = table.where("data", _LATE.name)
    depths, seconds = late.cells("workers or depth"), late.cells("s per 10 batches")
    alone = Series("steps alone", depths, [_WINDOW_BATCHES * _STEP_SECONDS] * len(depths))
    title = f"From a bucket, {_LATE_FRACTION:.0%} of its answers {_LATE_SECONDS} s late; {_LATE_READERS} readers"
    return [*panels, Panel(title, "depth", "seconds per 10 batches", [Series("NextBatch", depths, seconds), alone])]


_REMARKS = (
    "The slides state trends; their plots' figures are not in the text. NextBatch(1) with one reader is the paper's.",
    "Assumed: seeks of 1 to 16 ms, 7,200 turns a minute; 4 ms a file in a cluster; decoding 0.5 ms; steps 0.15 s.",
    "A file is two reads that lie together. One reader finds the head where it was; two take it from each other.",
    "With more, one of those that wait is near. Batches of workers come in bursts, so ten of them vary.",
    "Depth is worth something where reading keeps up but for what is late; where it does not, only readers are.",
    "No file is in the page cache.",
)
