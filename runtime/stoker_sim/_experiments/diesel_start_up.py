"""DIESEL: how long workers take to know a data set: from a snapshot, from lists, or from a server.

L. Wang et al., "DIESEL: A Dataset-Based Distributed Storage and Caching System for Large-Scale Deep Learning Training"
(ICPP 2020), slides 21 to 23 and 28. A snapshot here is this package's manifest, read by the code that starts every run.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from stoker._base.clock import run_virtual
from stoker._base.meter import Operation
from stoker._cost.prices import Prices
from stoker._diagnostics.latency import BucketModel, Constant
from stoker._format.manifest import POINTER_KEY, Manifest
from stoker._format.versions import read_manifest
from stoker_sim._experiments.deli_workloads import WORKLOADS
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._experiments.published import published
from stoker_sim._models.bucket import BucketView, SimulatedBucket
from stoker_sim._models.dataset import described
from stoker_sim._models.held import HeldView
from stoker_sim._models.link import Shared

__all__ = ["EXPERIMENTS"]

_PAPER = published("diesel")
_FILE_BYTES = _PAPER["imagenet_bytes"] // _PAPER["imagenet_files"]
_SUPER_SAMPLE_BYTES = 8 << 20
_PAGE_FILES = 1000
_PAGE_SECONDS = WORKLOADS["cifar10"].costs.list_page_seconds
"""Of a page of a listing: DELI's measurements say so."""
_FIRST_BYTE_SECONDS = 0.05
_REQUESTS_PER_SECOND = 5_500.0
_LOOK_UPS_PER_SECOND = 70_000.0
"""Of one server in memory: what one Redis answers to pipelined requests."""
_SERVERS = (1, 4)
_WORKERS = (1, 4, 16, 64)
_FILES = (10_000, 100_000, 1_280_000, 9_000_000)
_FIXED_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What starting took.

    Attributes:
        seconds: until the last worker knows the data set.
        requests: of all workers.
        read_bytes: of all workers.
        dollars: for the requests.
    """

    seconds: float
    requests: int
    read_bytes: int
    dollars: float


def _dataset(files: int) -> Manifest:
    in_each = min(files, max(1, _SUPER_SAMPLE_BYTES // _FILE_BYTES))
    return described(
        super_samples=-(-files // in_each), samples=in_each, super_sample_bytes=in_each * _FILE_BYTES, head_bytes=4096
    )


def _elapsed(each: Callable[[int], Awaitable[object]], workers: int) -> float:
    """Return when the last of the workers, which start together, is done."""

    async def main() -> float:
        await asyncio.gather(*(each(rank) for rank in range(workers)))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def _view(bucket: SimulatedBucket, rank: int) -> BucketView:
    return BucketView(bucket, random.Random(rank), bytes_per_second=1.25e9)  # noqa: S311 - a model's


def _from_snapshot(files: int, workers: int) -> _Start:
    data = _dataset(files).to_bytes()
    bucket = SimulatedBucket(
        BucketModel(
            first_byte=Constant(_FIRST_BYTE_SECONDS),
            total_bytes_per_second=12.5e9,
            requests_per_second=_REQUESTS_PER_SECOND,
        ),
        {POINTER_KEY: len(data)}.__getitem__,
    )
    seconds = _elapsed(lambda rank: read_manifest(HeldView(_view(bucket, rank), {POINTER_KEY: data})), workers)
    dollars = workers * Prices.load().request_dollars("s3", Operation.GET)
    return _Start(seconds=seconds, requests=workers, read_bytes=workers * len(data), dollars=dollars)


def _from_lists(files: int, workers: int) -> _Start:
    pages = math.ceil(files / _PAGE_FILES)
    model = BucketModel(first_byte=Constant(_PAGE_SECONDS), requests_per_second=_REQUESTS_PER_SECOND)
    bucket = SimulatedBucket(model, lambda _: 0)

    async def listed(rank: int) -> None:
        view = _view(bucket, rank)
        for page in range(pages):  # a page says where the next one begins
            await view.head(str(page))

    dollars = workers * pages * Prices.load().request_dollars("s3", Operation.LIST)
    return _Start(seconds=_elapsed(listed, workers), requests=workers * pages, read_bytes=0, dollars=dollars)


def _from_servers(files: int, workers: int, servers: int) -> _Start:
    shared = Shared(lambda asking: servers * _LOOK_UPS_PER_SECOND / asking)
    seconds = _elapsed(lambda _: shared.serve(files), workers)
    return _Start(seconds=seconds, requests=workers * files, read_bytes=0, dollars=0.0)


_Way = Callable[[int, int], _Start]
_WAYS: dict[str, _Way] = {
    "snapshot": _from_snapshot,
    **{f"{servers} server" + "s" * (servers > 1): partial(_from_servers, servers=servers) for servers in _SERVERS},
    "lists": _from_lists,
}


def _run(quick: bool) -> Outcome:
    most_files = 128_000 if quick else _PAPER["imagenet_files"]
    sizes = [files for files in _FILES if files <= most_files] if quick else _FILES
    by_workers = {way: [start(most_files, workers) for workers in _WORKERS] for way, start in _WAYS.items()}
    by_files = {way: [start(files, _FIXED_WORKERS) for files in sizes] for way, start in _WAYS.items()}
    rows: list[tuple[Cell, ...]] = []
    for way in _WAYS:
        rows += [_row(way, most_files, *each) for each in zip(_WORKERS, by_workers[way], strict=True)]
        rows += [
            _row(way, files, _FIXED_WORKERS, start)
            for files, start in zip(sizes, by_files[way], strict=True)
            if files != most_files  # which stands above
        ]
    columns = ("way", "files", "workers", "seconds", "files known/s", "requests", "bytes", "request $")
    panels = [
        _panel(f"Until all workers know {most_files:,} files", "workers", _WORKERS, by_workers),
        _panel(f"Until {_FIXED_WORKERS} workers know all files", "files of the data set", sizes, by_files),
        _throughput(most_files, by_workers),
        _dollars({way: by_workers[way] for way in ("snapshot", "lists")}),
    ]
    return Outcome(
        tables=[Table(name="diesel-start-up", columns=columns, rows=rows)],
        panels=panels,
        remarks=_remarks(most_files),
    )


def _row(way: str, files: int, workers: int, start: _Start) -> tuple[Cell, ...]:
    rate = files * workers / start.seconds
    return way, files, workers, start.seconds, rate, start.requests, start.read_bytes, start.dollars


def _panel(title: str, x_label: str, x: Sequence[int], ways: dict[str, list[_Start]]) -> Panel:
    series = [Series(name=way, x=x, y=[start.seconds for start in starts]) for way, starts in ways.items()]
    return Panel(title=title, x_label=x_label, y_label="seconds", series=series, x_log=True, y_log=True)


def _throughput(files: int, ways: dict[str, list[_Start]]) -> Panel:
    series = []
    for way, starts in ways.items():
        rates = [files * workers / start.seconds for workers, start in zip(_WORKERS, starts, strict=True)]
        series.append(Series(name=way, x=_WORKERS, y=rates))
        if way == "snapshot":
            trend = [rates[0] * workers for workers in _WORKERS]
            series.append(Series(name="published trend, from our first point", x=_WORKERS, y=trend, is_published=True))
    return Panel(
        title="Metadata that all workers come to know",
        x_label="workers",
        y_label="files a second",
        series=series,
        x_log=True,
        y_log=True,
        note=f"published: {_PAPER['snapshot_trend']}",
    )


def _dollars(ways: dict[str, list[_Start]]) -> Panel:
    series = [Series(name=way, x=_WORKERS, y=[start.dollars for start in starts]) for way, starts in ways.items()]
    return Panel(
        title="What the bucket asks for it", x_label="workers", y_label="dollars", series=series, x_log=True, y_log=True
    )


def _remarks(files: int) -> tuple[str, ...]:
    size_bytes = _dataset(files).file_bytes
    return (
        f"The snapshot of {files:,} files is our manifest: {size_bytes:,} bytes, a row for each super-sample of 8 MiB.",
        "What a super-sample holds, its head says, which comes with it. DIESEL's snapshot has a row for each file.",
        f"A page of a listing takes {_PAGE_SECONDS:.2f} s, as DELI measured.",
        f"A server answers {_LOOK_UPS_PER_SECOND:,.0f} look-ups a second, as one Redis does.",
        "Published are trends only: with a snapshot throughput grows with workers, without one with servers.",
    )


EXPERIMENTS = {
    "diesel-start-up": Experiment(
        name="diesel-start-up",
        title="Until workers know the data set: snapshot, lists, servers",
        source=_PAPER["source"],
        run=_run,
    )
}
"""By name."""
