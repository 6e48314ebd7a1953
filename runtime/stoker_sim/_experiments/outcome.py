"""What an experiment hands back: tables to read and to keep, and panels to draw; and what the papers say."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

__all__ = [
    "Cell",
    "Experiment",
    "Outcome",
    "Panel",
    "Series",
    "Table",
    "published",
]

Cell = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of figures.

    Attributes:
        name: of the table, fit for a file's name.
        columns: their names, with units.
        rows: one cell a column; None is empty.
    """

    name: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def to_csv(self) -> str:
        """Return the table as CSV, with a line of names."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(cell) for cell in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is drawn with one mark.

    Attributes:
        name: in the legend.
        x: numbers, or names for bars.
        y: numbers, as many.
        is_published: whether somebody else's figures, which are drawn as open marks.
        kind: how to draw it.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    is_published: bool = False
    kind: Literal["line", "points", "bars"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        x_label: with unit.
        y_label: with unit.
        series: drawn into it.
        x_log: whether the axis is logarithmic,
        y_log: and the other one.
        note: below it: a trend that was published without figures, for example.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an experiment found.

    Attributes:
        tables: the first one is the experiment's own.
        panels: of its figure.
        remarks: sentences on how well it agrees with what was published, and on what it assumes.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel]
    remarks: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Something that can be run again.

    Attributes:
        name: on the command line.
        title: one line.
        source: whose figures ours stand beside.
        run: does it; True for a quick, coarser one.
    """

    name: str
    title: str
    source: str
    run: Callable[[bool], Outcome]


def _plain(cell: Cell) -> Cell:
    return f"{cell:.6g}" if isinstance(cell, float) else cell


@lru_cache(maxsize=16)
def published(paper: str) -> dict[str, Any]:
    """Return a paper's figures and statements; ``source`` says where they stand."""
    return tomllib.loads(resources.files("stoker_sim").joinpath(f"published/{paper}.toml").read_text("utf-8"))
