"""DIESEL's experiments: chunks beside files, and metadata in one object beside lists and servers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from stoker._base.clock import run_virtual
from stoker._diagnostics.latency import Constant
from stoker._format.manifest import POINTER_KEY
from stoker._format.versions import read_manifest
from stoker.errors import NotFoundError
from stoker_sim._experiments import load
from stoker_sim._experiments.outcome import Cell, Table
from stoker_sim._experiments.published import published
from stoker_sim._models.bucket import BucketModel, BucketView, SimulatedBucket
from stoker_sim._models.dataset import described
from stoker_sim._models.held import HeldView


def cells(table: Table, *columns: str) -> list[tuple[Cell, ...]]:
    places = [table.columns.index(column) for column in columns]
    return [tuple(row[place] for place in places) for row in table.rows]


def number(cell: Cell) -> float:
    assert isinstance(cell, (int, float))
    return float(cell)


def test_by_chunk_is_faster_by_more_than_was_published() -> None:
    reads, units = load("diesel-reads").run(True).tables
    known = [
        (number(times), least) for times, least in cells(reads, "times", "published, more than") if least is not None
    ]
    assert {least for _, least in known} == {each["more_than_times"] for each in published("diesel")["reads"]}
    assert all(times > number(least) for times, least in known)
    speeds = {(place, size): times for place, size, times in cells(units, "store", "unit bytes", "times 4 KiB")}
    assert 20 < number(speeds["file system", 131_072]) < 30


def test_a_snapshot_scales_with_workers_lists_by_files_and_servers_by_servers() -> None:
    (table,) = load("diesel-start-up").run(True).tables
    found = {
        (way, files, workers): number(seconds) for way, files, workers, seconds in cells(table, *table.columns[:4])
    }
    assert found["snapshot", 128_000, 64] == pytest.approx(found["snapshot", 128_000, 1], rel=0.25)
    assert found["1 server", 128_000, 64] == pytest.approx(64 * 128_000 / 70_000)
    assert found["4 servers", 128_000, 16] == pytest.approx(found["1 server", 128_000, 16] / 4)
    assert found["lists", 100_000, 16] == pytest.approx(10 * found["lists", 10_000, 16], rel=0.01)
    assert found["snapshot", 128_000, 16] < 0.1 * min(found["4 servers", 128_000, 16], found["lists", 128_000, 16])


def held(size: int, **model: Any) -> tuple[HeldView, bytes]:
    data = described(super_samples=size, samples=1, super_sample_bytes=8192).to_bytes()
    bucket = SimulatedBucket(BucketModel(first_byte=Constant(0.1), **model), {POINTER_KEY: len(data)}.__getitem__)
    return HeldView(BucketView(bucket, random.Random(1)), {POINTER_KEY: data}), data


def test_a_manifest_is_read_as_a_run_reads_it_in_the_time_that_its_bytes_take() -> None:
    view, data = held(1000, connection_bytes_per_second=1e6)

    async def main() -> tuple[bytes, float]:
        manifest = await read_manifest(view)
        return manifest.to_bytes(), asyncio.get_running_loop().time()

    read, seconds = run_virtual(main())
    assert read == data
    assert seconds == pytest.approx(0.1 + len(data) / 1e6)


def test_a_large_manifest_is_read_in_ranges_at_once() -> None:
    view, data = held(700_000, connection_bytes_per_second=10e6)
    assert len(data) > 3 * (8 << 20) - (1 << 20)

    async def main() -> tuple[int, float]:
        return len(await read_manifest(view)), asyncio.get_running_loop().time()

    rows, seconds = run_virtual(main())
    assert rows == 700_000
    assert seconds < 0.6 * len(data) / 10e6


def test_what_is_not_held_is_not_found() -> None:
    view, _ = held(1)
    with pytest.raises(NotFoundError):
        run_virtual(view.get("other"))
