"""DIESEL: shuffled reads of small files, and the time until workers have the metadata of a data set.

L. Wang et al., "DIESEL: A Dataset-Based Distributed Storage and Caching System for Large-Scale Deep Learning
Training" (ICPP 2020). Reads by chunk use this package's shuffle ``block`` over super-samples; reads one by one use the
same fetcher over objects of one file each. There are two stores: a bucket, and a file system whose cost of a read is
fitted to one of the paper's two figures, so that the other one is a check. Workers start (slides 21 to 23 and 28) from
a snapshot, from listings, or from a server; the snapshot is this package's manifest, read by the code of every run.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from stoker._base.clock import run_virtual
from stoker._base.meter import Operation
from stoker._cost.prices import Prices
from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._format.manifest import POINTER_KEY, Manifest
from stoker._format.versions import read_manifest
from stoker._order.order import OrderConfig
from stoker_sim._bucket import BucketView, ProcessorSharing, SimulatedBucket, synthetic_manifest
from stoker_sim._experiments import ExperimentResult, Panel, Series, Table, create_series, load_paper
from stoker_sim._experiments.deli import WORKLOADS
from stoker_sim._experiments.scenarios import aligned_slot_bytes, create_lane_scenario, whole_object_fetch
from stoker_sim._scenario import simulate

_PAPER = load_paper("diesel")
_CHUNK_BYTES = 4 << 20
_WINDOW = 8
_CLIENTS = (1, 2, 4, 8, 16)
_UNITS = tuple(4096 << shift for shift in (0, 2, 4, 5, 6, 8, 10, 12))
_BATCH_FILES = 256
_HANDLING_SECONDS = 2e-6
"""Processor time of a file after its bytes have arrived, as in this package's loader."""
_EPOCHS = 3
"""Number of epochs, of which the middle one is measured: it begins with a full ring and fetches ahead to its end."""
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreModel:
    """A store, and the concurrency of its clients.

    Attributes:
        name: name in tables.
        model: model of the store.
        concurrency: number of concurrent reads of a client.
    """

    name: str
    model: BucketModel
    concurrency: int


_FILE_SYSTEM = _StoreModel(
    name="file system",
    model=BucketModel(
        first_byte=Constant(1e-3),  # fitted, with the rate, to slightly more than the factor 4 at 128 KiB
        connection_bytes_per_second=500e6,
        total_bytes_per_second=40e9,
        requests_per_second=50_000.0,
    ),
    concurrency=4,
)
_BUCKET = _StoreModel(
    name="bucket",
    model=BucketModel(first_byte=LogNormal(0.02, 0.08), connection_bytes_per_second=90e6, requests_per_second=5_500.0),
    concurrency=16,
)


@dataclass(frozen=True, slots=True)
class _ReadCounts:
    """Number of objects that each client reads."""

    files: int
    chunks: int


def _epoch_seconds(place: _StoreModel, *, objects: int, files: int, object_bytes: int, clients: int) -> float:
    """Return the time of an epoch of clients that partition a shuffled data set, in seconds."""
    slots = 2 * _WINDOW + 2 * place.concurrency + 4 if files > 1 else 2 * _BATCH_FILES
    batch_files = max(1, min(_BATCH_FILES, objects * files // clients))
    manifest = synthetic_manifest(super_samples=objects, samples=files, super_sample_bytes=object_bytes, head_bytes=64)
    order = OrderConfig(seed=_SEED, shuffle="block", window=_WINDOW if files > 1 else 1, lanes=clients)
    ring_bytes = slots * aligned_slot_bytes(object_bytes)
    fetch = whole_object_fetch(place.concurrency)
    compute = Constant(batch_files * _HANDLING_SECONDS)
    scenario = create_lane_scenario(
        manifest, order, batch_files, ring_bytes, fetch, bucket=place.model, compute=compute
    )
    run = simulate(replace(scenario, epochs=_EPOCHS, seed=_SEED))
    return max(epoch.seconds for epoch in run.of_epoch(1))


def _files_per_second(place: _StoreModel, file_bytes: int, clients: int, size: _ReadCounts, *, by_chunk: bool) -> float:
    files = max(1, _CHUNK_BYTES // file_bytes) if by_chunk else 1
    objects = clients * (size.chunks if by_chunk else size.files)
    object_bytes = files * file_bytes
    return (
        objects
        * files
        / _epoch_seconds(place, objects=objects, files=files, object_bytes=object_bytes, clients=clients)
    )


def _compare_reads(size: _ReadCounts, clients: tuple[int, ...]) -> tuple[Table, Panel, list[Panel]]:
    """Compare reads by chunk and one by one.

    Returns:
        The table, the panel of the speed-up for one client, and a panel of rates by number of clients for each store.
    """
    figures = ("files/s one by one", "files/s by chunk", "times", "published, more than")
    table = Table("diesel-reads", ("store", "file bytes", "clients", *figures))
    panels = []
    for place in (_FILE_SYSTEM, _BUCKET):
        series = []
        for known in _PAPER["reads"]:
            file_bytes = known["file_bytes"]
            least = known["more_than_times"] if place is _FILE_SYSTEM else None
            chunks, files = (
                [_files_per_second(place, file_bytes, count, size, by_chunk=by_chunk) for count in clients]
                for by_chunk in (True, False)
            )
            for count, chunk, file in zip(clients, chunks, files, strict=True):
                table.add(place.name, file_bytes, count, file, chunk, chunk / file, least)
            series.append(Series(f"{file_bytes >> 10} KiB by chunk", clients, chunks))
            series.append(Series(f"{file_bytes >> 10} KiB one by one", clients, files))
        title = f"Shuffled reads from a {place.name}"
        panels.append(Panel(title, "clients", "files a second", series, x_log=True, y_log=True))
    alone = table.select("clients", clients[0])
    times, bucket_times = (alone.select("store", place.name).cells("times") for place in (_FILE_SYSTEM, _BUCKET))
    names = [f"{known['file_bytes'] >> 10} KiB files" for known in _PAPER["reads"]]
    bounds = [known["more_than_times"] for known in _PAPER["reads"]]
    bars = create_series(_FILE_SYSTEM.name, names, times, bounds, published_name="published, more than")
    bars.append(Series(_BUCKET.name, names, bucket_times, kind="bars"))
    by_one = Panel("Files a second by chunk / one by one, one client", "", "times", bars, y_log=True)
    return table, by_one, panels


def _read_units(size: _ReadCounts) -> tuple[Table, Panel]:
    """Measure random reads of units of several sizes, for the effect of the size alone."""
    table = Table("diesel-reads-units", ("store", "unit bytes", "bytes/s", "times 4 KiB"))
    for place in (_FILE_SYSTEM, _BUCKET):
        speeds = []
        for unit_bytes in _UNITS:
            units = max(64, min(size.files, (1 << 30) // unit_bytes))
            seconds = _epoch_seconds(place, objects=units, files=1, object_bytes=unit_bytes, clients=1)
            speeds.append(units * unit_bytes / seconds)
            table.add(place.name, unit_bytes, speeds[-1], speeds[-1] / speeds[0])
    series = table.lines("store", "unit bytes", "times 4 KiB")
    times = float(_PAPER["unit_size_times"])
    series.insert(1, Series("published, of a size that is not named", [131_072], [times], is_published=True))
    title, y_label = "Speed by what is read at a time, one client", "speed / speed at 4 KiB"
    panel = Panel(title, "bytes of a read", y_label, series, x_log=True, y_log=True)
    return table, panel


def run_reads(quick: bool) -> ExperimentResult:
    """Run shuffled reads by chunk and one by one."""
    size = _ReadCounts(files=100, chunks=16) if quick else _ReadCounts(files=600, chunks=96)
    reads, times_panel, panels = _compare_reads(size, _CLIENTS[:2] if quick else _CLIENTS)
    units, unit_panel = _read_units(size)
    return ExperimentResult([reads, units], [times_panel, unit_panel, *panels], _REMARKS)


_REMARKS = (
    "By chunk: super-samples of 4 MiB, shuffle block in groups of 8. One by one: one object per file, same fetcher.",
    "Fitted to slightly over 4 times at 128 KiB: 1 ms per read and 500 MB/s per stream. Over 50 times at 4 KiB follow.",
    "The 25 times of the unit size follow, too, if the talk, which does not name its units, means 4 and 128 KiB.",
    "The effect of shuffled chunks on accuracy is not simulated; benchmarks/shuffle_quality measures the mixing.",
)


_FILE_BYTES = _PAPER["imagenet_bytes"] // _PAPER["imagenet_files"]
_SUPER_SAMPLE_BYTES = 8 << 20
_PAGE_FILES = 1000
_PAGE_SECONDS = WORKLOADS["cifar10"].costs.list_page_seconds
"""Duration of one page of a listing, in seconds, as measured by DELI's authors."""
_FIRST_BYTE_SECONDS = 0.05
_REQUESTS_PER_SECOND = 5_500.0
_LOOK_UPS_PER_SECOND = 70_000.0
"""Rate of one in-memory server, as of a Redis with pipelined requests."""
_SERVERS = (1, 4)
_WORKERS = (1, 4, 16, 64)
_FILES = (10_000, 100_000, 1_280_000, 9_000_000)
_FIXED_WORKERS = 16


class _StartResult(NamedTuple):
    """Result of a start.

    Attributes:
        seconds: time until the last worker has the metadata of the data set, in seconds.
        requests: number of requests of all workers.
        read_bytes: number of bytes read by all workers.
        dollars: price of the requests, in dollars.
    """

    seconds: float
    requests: int
    read_bytes: int = 0
    dollars: float = 0.0


def _dataset(files: int) -> Manifest:
    in_each = min(files, max(1, _SUPER_SAMPLE_BYTES // _FILE_BYTES))
    return synthetic_manifest(
        super_samples=-(-files // in_each), samples=in_each, super_sample_bytes=in_each * _FILE_BYTES, head_bytes=4096
    )


def _run_workers(each: Callable[[int], Awaitable[object]], workers: int) -> float:
    """Run workers that start together and return the time at which the last one ends, in seconds."""

    async def main() -> float:
        await asyncio.gather(*(each(rank) for rank in range(workers)))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def _start_from_snapshot(files: int, workers: int) -> _StartResult:
    data = _dataset(files).to_bytes()
    model = BucketModel(
        first_byte=Constant(_FIRST_BYTE_SECONDS),
        total_bytes_per_second=12.5e9,
        requests_per_second=_REQUESTS_PER_SECOND,
    )
    bucket = SimulatedBucket(model, {POINTER_KEY: len(data)}.__getitem__, {POINTER_KEY: data})

    def read(rank: int) -> Awaitable[Manifest]:
        rng = random.Random(rank)  # noqa: S311 - a model's
        return read_manifest(BucketView(bucket, rng, bytes_per_second=1.25e9))

    dollars = workers * Prices.load().request_dollars("s3", Operation.GET)
    return _StartResult(_run_workers(read, workers), workers, workers * len(data), dollars)


def _start_from_lists(files: int, workers: int) -> _StartResult:
    pages = math.ceil(files / _PAGE_FILES)
    model = BucketModel(first_byte=Constant(_PAGE_SECONDS), requests_per_second=_REQUESTS_PER_SECOND)
    bucket = SimulatedBucket(model, lambda _: 0)

    async def listed(rank: int) -> None:
        view = BucketView(bucket, random.Random(rank))  # noqa: S311 - a model's
        for page in range(pages):  # pages are sequential: each one gives the start of the next
            await view.head(str(page))

    dollars = workers * pages * Prices.load().request_dollars("s3", Operation.LIST)
    return _StartResult(_run_workers(listed, workers), workers * pages, dollars=dollars)


def _start_from_servers(files: int, workers: int, servers: int) -> _StartResult:
    shared = ProcessorSharing(lambda asking: servers * _LOOK_UPS_PER_SECOND / asking)
    return _StartResult(_run_workers(lambda _: shared.serve(files), workers), workers * files)


_WAYS: dict[str, Callable[[int, int], _StartResult]] = {
    "snapshot": _start_from_snapshot,
    **{
        f"{servers} server" + "s" * (servers > 1): partial(_start_from_servers, servers=servers) for servers in _SERVERS
    },
    "lists": _start_from_lists,
}


def run_start_up(quick: bool) -> ExperimentResult:
    """Run the start of workers from a snapshot, from servers and from listings."""
    most_files = 128_000 if quick else _PAPER["imagenet_files"]
    sizes = [files for files in _FILES if files <= most_files] if quick else _FILES
    cases = dict.fromkeys([*product((most_files,), _WORKERS), *product(sizes, (_FIXED_WORKERS,))])
    columns = ("way", "files", "workers", "seconds", "files known/s", "requests", "bytes", "request $")
    table = Table("diesel-start-up", columns)
    for (way, start), (files, workers) in product(_WAYS.items(), cases):
        seconds, *others = start(files, workers)
        table.add(way, files, workers, seconds, files * workers / seconds, *others)
    by_workers = table.select("files", most_files)
    by_files = table.select("workers", _FIXED_WORKERS)
    by_files = replace(by_files, rows=sorted(by_files.rows, key=itemgetter(1)))
    rates = by_workers.lines("way", "workers", "files known/s")
    trend = [by_workers.cells("files known/s")[0] * workers for workers in _WORKERS]
    rates.insert(1, Series("published trend, from our first point", _WORKERS, trend, is_published=True))
    dollars = by_workers.lines("way", "workers", "request $")
    panel = partial(Panel, x_log=True, y_log=True)
    note = f"published: {_PAPER['snapshot_trend']}"
    known = by_workers.lines("way", "workers", "seconds")
    known_files = by_files.lines("way", "files", "seconds")
    panels = [
        panel(f"Until all workers know {most_files:,} files", "workers", "seconds", known),
        panel(f"Until {_FIXED_WORKERS} workers know all files", "files of the data set", "seconds", known_files),
        panel("Metadata that all workers come to know", "workers", "files a second", rates, note=note),
        panel("What the bucket asks for it", "workers", "dollars", [dollars[0], dollars[-1]]),
    ]
    return ExperimentResult([table], panels, _remarks(most_files))


def _remarks(files: int) -> tuple[str, ...]:
    size_bytes = _dataset(files).file_bytes
    return (
        f"The snapshot of {files:,} files is our manifest: {size_bytes:,} bytes, a row for each super-sample of 8 MiB.",
        "The head of a super-sample, read with it, lists its content. DIESEL's snapshot has a row for each file.",
        f"A page of a listing takes {_PAGE_SECONDS:.2f} s, as DELI's authors measured.",
        f"A server answers {_LOOK_UPS_PER_SECOND:,.0f} look-ups a second, as one Redis does.",
        "Only trends are published: throughput grows with workers with a snapshot, and with servers without one.",
    )
