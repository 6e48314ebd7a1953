"""DIESEL: shuffled reads of small files, one by one and by the chunks that hold them.

L. Wang et al., "DIESEL: A Dataset-Based Distributed Storage and Caching System for Large-Scale Deep Learning Training"
(ICPP 2020). By chunks is this package's shuffle ``block`` over super-samples; one by one is the same fetcher over
objects that hold one file each. Two stores: a file system whose cost of a read is fitted to one of the paper's two
figures, so that the other one is a check, and a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.config import FetchConfig
from stoker._fetch.feed import FeedConfig
from stoker._order.order import OrderConfig
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._experiments.published import published
from stoker_sim._models.dataset import described
from stoker_sim._scenarios.scenario import Scenario, simulate

__all__ = ["EXPERIMENTS"]

_PAPER = published("diesel")
_CHUNK_BYTES = 4 << 20
_WINDOW = 8
_CLIENTS = (1, 2, 4, 8, 16)
_UNITS = tuple(4096 << shift for shift in (0, 2, 4, 5, 6, 8, 10, 12))
_BATCH_FILES = 256
_HANDLING_SECONDS = 2e-6
"""Of a file once its bytes are there: this package's loader takes as long."""
_EPOCHS = 3
"""Of which the middle one is measured: it neither waits for the first bytes nor runs out of what comes next."""
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A store and how a client reads from it.

    Attributes:
        name: in tables.
        model: of the store.
        at_once: reads of a client.
    """

    name: str
    model: BucketModel
    at_once: int


_FILE_SYSTEM = _Place(
    name="file system",
    model=BucketModel(
        first_byte=Constant(1e-3),  # fitted, with the rate, to a little over four times at 128 KiB
        connection_bytes_per_second=500e6,
        total_bytes_per_second=40e9,
        requests_per_second=50_000.0,
    ),
    at_once=4,
)
_BUCKET = _Place(
    name="bucket",
    model=BucketModel(first_byte=LogNormal(0.02, 0.08), connection_bytes_per_second=90e6, requests_per_second=5_500.0),
    at_once=16,
)


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is read: objects of each client."""

    files: int
    chunks: int


def _seconds(place: _Place, *, objects: int, files: int, object_bytes: int, clients: int) -> float:
    """Return how long clients take that divide a shuffled data set of so many objects: an epoch between two others."""
    manifest = described(super_samples=objects, samples=files, super_sample_bytes=object_bytes, head_bytes=64)
    slots = 2 * _WINDOW + 2 * place.at_once + 4 if files > 1 else 2 * _BATCH_FILES
    order = OrderConfig(seed=_SEED, shuffle="block", window=_WINDOW if files > 1 else 1, lanes=clients)
    batch_files = max(1, min(_BATCH_FILES, objects * files // clients))
    feed = FeedConfig(
        order=order,
        batch_size=batch_files,
        world_size=clients,
        memory_bytes=manifest.file_bytes + slots * (-(-manifest.largest_bytes // 64) * 64),
        fetch=FetchConfig(
            concurrency_start=place.at_once,
            concurrency_least=place.at_once,
            concurrency_most=place.at_once,
            split_parts=1,
            hedge=False,
        ),
    )
    compute = Constant(batch_files * _HANDLING_SECONDS)
    run = simulate(
        Scenario(manifest=manifest, feed=feed, bucket=place.model, compute=compute, epochs=_EPOCHS, seed=_SEED)
    )
    return max(epoch.seconds for epoch in run.of_epoch(1))


def _files_per_second(place: _Place, file_bytes: int, clients: int, size: _Size, *, by_chunk: bool) -> float:
    files = max(1, _CHUNK_BYTES // file_bytes) if by_chunk else 1
    objects = clients * (size.chunks if by_chunk else size.files)
    object_bytes = files * file_bytes
    return objects * files / _seconds(place, objects=objects, files=files, object_bytes=object_bytes, clients=clients)


def _compared(size: _Size, clients: tuple[int, ...]) -> tuple[Table, list[Panel]]:
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for place in (_FILE_SYSTEM, _BUCKET):
        series = []
        for known in _PAPER["reads"]:
            file_bytes, least = known["file_bytes"], known["more_than_times"]
            rates: dict[bool, list[float]] = {True: [], False: []}
            for count in clients:
                chunk, file = (
                    _files_per_second(place, file_bytes, count, size, by_chunk=by_chunk) for by_chunk in (True, False)
                )
                rates[True].append(chunk)
                rates[False].append(file)
                theirs = least if place is _FILE_SYSTEM else None
                rows.append((place.name, file_bytes, count, file, chunk, chunk / file, theirs))
            for by_chunk, way in ((True, "by chunk"), (False, "one by one")):
                series.append(Series(name=f"{file_bytes >> 10} KiB {way}", x=clients, y=rates[by_chunk]))
        panels.append(
            Panel(
                title=f"Shuffled reads from a {place.name}",
                x_label="clients",
                y_label="files a second",
                series=series,
                x_log=True,
                y_log=True,
            )
        )
    columns = (
        "store",
        "file bytes",
        "clients",
        "files/s one by one",
        "files/s by chunk",
        "times",
        "published, more than",
    )
    return Table(name="diesel-reads", columns=columns, rows=rows), panels


def _times(reads: Table) -> Panel:
    """Draw by how much reading by chunk is faster for one client, beside the paper's lower bounds."""
    names = [f"{known['file_bytes'] >> 10} KiB files" for known in _PAPER["reads"]]
    ours = {
        place: [float(row[5] or 0) for row in reads.rows if row[0] == place and row[2] == 1]
        for place in (_FILE_SYSTEM.name, _BUCKET.name)
    }
    series = [
        Series(name="file system", x=names, y=ours[_FILE_SYSTEM.name], kind="bars"),
        Series(
            name="published, more than",
            x=names,
            y=[known["more_than_times"] for known in _PAPER["reads"]],
            is_published=True,
            kind="bars",
        ),
        Series(name="bucket", x=names, y=ours[_BUCKET.name], kind="bars"),
    ]
    title = "Files a second by chunk / one by one, one client"
    return Panel(title=title, x_label="", y_label="times", series=series, y_log=True)


def _units(size: _Size) -> tuple[Table, Panel]:
    """Read units of many sizes at random: what the size alone is worth."""
    rows: list[tuple[Cell, ...]] = []
    series = []
    for place in (_FILE_SYSTEM, _BUCKET):
        speeds = []
        for unit_bytes in _UNITS:
            units = max(64, min(size.files, (1 << 30) // unit_bytes))
            seconds = _seconds(place, objects=units, files=1, object_bytes=unit_bytes, clients=1)
            speeds.append(units * unit_bytes / seconds)
        rows += [
            (place.name, unit_bytes, speed, speed / speeds[0]) for unit_bytes, speed in zip(_UNITS, speeds, strict=True)
        ]
        series.append(Series(name=place.name, x=_UNITS, y=[speed / speeds[0] for speed in speeds]))
    times = float(_PAPER["unit_size_times"])
    series.insert(1, Series(name="published, of a size that is not named", x=[131_072], y=[times], is_published=True))
    panel = Panel(
        title="Speed by what is read at a time, one client",
        x_label="bytes of a read",
        y_label="speed / speed at 4 KiB",
        series=series,
        x_log=True,
        y_log=True,
    )
    return Table(name="diesel-reads-units", columns=("store", "unit bytes", "bytes/s", "times 4 KiB"), rows=rows), panel


def _run(quick: bool) -> Outcome:
    size = _Size(files=200, chunks=24) if quick else _Size(files=600, chunks=96)
    reads, panels = _compared(size, _CLIENTS[:2] if quick else _CLIENTS)
    units, unit_panel = _units(size)
    return Outcome(tables=[reads, units], panels=[_times(reads), unit_panel, *panels], remarks=_REMARKS)


_REMARKS = (
    "By chunk: super-samples of 4 MiB, shuffle block in groups of 8. One by one: an object a file, the same fetcher.",
    "Fitted: a read takes 1 ms and a stream has 500 MB/s, to just over 4 times at 128 KiB; over 50 at 4 KiB follow.",
    "So do the 25 times of the unit size, if the talk, which does not name its units, means 4 and 128 KiB.",
    "What a shuffle of chunks does to accuracy is not simulated; benchmarks/shuffle_quality measures how it mixes.",
)

EXPERIMENTS = {
    "diesel-reads": Experiment(
        name="diesel-reads",
        title="Shuffled reads of small files, by chunk and one by one",
        source=_PAPER["source"],
        run=_run,
    )
}
"""By name."""
