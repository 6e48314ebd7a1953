"""DIESEL's experiments: chunks beside files, and metadata in one object beside lists and servers."""

from __future__ import annotations

from stoker.plan.experiments import load
from stoker.plan.experiments.outcome import Cell, Table
from stoker.plan.experiments.published import published


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
    assert {least for _, least in known} == {each["at_least_times"] for each in published("diesel")["reads"]}
    assert all(times > number(least) for times, least in known)
    speeds = {(place, size): times for place, size, times in cells(units, "store", "unit bytes", "times 4 KiB")}
    assert 20 < number(speeds["file system", 131_072]) < 30
