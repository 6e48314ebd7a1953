"""The papers' experiments that ``stoker simulate`` reproduces, and their tables and figures.

An experiment returns tables, and panels with our figures beside the published ones. Panels are drawn as PNG by
matplotlib and as an interactive, self-contained HTML page by plotly.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stoker._trace.picture import html_page
from stoker.errors import ConfigError

Cell = str | int | float | None
Row = dict[str, Cell]
"""A row of a table: column name → cell."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of figures.

    Attributes:
        name: name of the table, which is also the stem of its file.
        columns: names of the columns, with units.
        rows: rows with one cell for each column; None is an empty cell.
    """

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Append a row."""
        self.rows.append(cells)

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[Row]) -> Table:
        """Return a table of at least one row, whose columns are the keys of the first row."""
        return cls(name, tuple(rows[0]), [tuple(row.values()) for row in rows])

    def select(self, column: str, value: Cell) -> Table:
        """Return a table of the rows whose cell in ``column`` equals ``value``."""
        index = self.columns.index(column)
        return Table(self.name, self.columns, [row for row in self.rows if row[index] == value])

    def cells(self, column: str) -> list[Any]:
        """Return the cells of a column, from top to bottom; usually numbers or None."""
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def lines(self, by: str, x: str, y: str, published: str = "") -> list[Series]:
        """Return a line for each value of the column ``by``, over the column ``x``.

        Args:
            by: column of the lines' names.
            x: column of the x values.
            y: column of our figures.
            published: column of the published figures, empty for none; its name is appended to that of the line.
        """
        series = []
        for name in dict.fromkeys(self.cells(by)):
            selected = self.select(by, name)
            known = selected.cells(published) if published else []
            series += create_series(
                str(name), selected.cells(x), selected.cells(y), known, published_name=f"{name}, {published}"
            )
        return series

    def to_csv(self) -> str:
        """Return the table as CSV with a header line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_format_cell(cell) for cell in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True, slots=True)
class Series:
    """A series of values in a panel.

    Attributes:
        name: name in the legend.
        x: x values: numbers, or names of bars.
        y: y values, as many as ``x``; None is not drawn.
        is_published: whether these are published figures, which are drawn as open marks.
        kind: style of the drawing.
    """

    name: str
    x: Sequence[Cell]
    y: Sequence[float | None]
    is_published: bool = False
    kind: Literal["line", "points", "bars"] = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: title above the axes.
        x_label: label of the x axis, with its unit.
        y_label: label of the y axis, with its unit.
        series: series to draw.
        x_log: whether the x axis is logarithmic.
        y_log: whether the y axis is logarithmic.
        note: text below the axes, for example a trend that was published without figures.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """Result of an experiment.

    Attributes:
        tables: tables; the first one has the experiment's name as its file name.
        panels: panels of the figure.
        remarks: sentences on the agreement with published figures and on assumptions.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel]
    remarks: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment.

    Attributes:
        name: name on the command line.
        title: title, one line.
        source: paper whose figures are shown beside ours.
        run: function that runs it; its argument is True for a quick run with fewer points.
    """

    name: str
    title: str
    source: str
    run: Callable[[bool], ExperimentResult]


def difference(ours: float | None, theirs: float | None) -> float | None:
    """Return ``ours - theirs``; None if one of them is None."""
    return None if ours is None or theirs is None else ours - theirs


def relative_difference(ours: float | None, theirs: float | None) -> float | None:
    """Return the relative difference ``ours / theirs - 1``; None if one of them is None."""
    return None if ours is None or theirs is None else ours / theirs - 1


def create_series(
    name: str,
    x: Sequence[Cell],
    ours: Sequence[float | None],
    published_figures: Sequence[float | None],
    *,
    published_name: str = "",
) -> list[Series]:
    """Return series of our figures and, if there are any, of the published ones: bars over names, lines over numbers.

    Args:
        name: name of our series.
        x: x values, numbers or names.
        ours: our figures.
        published_figures: published figures; None where there is none.
        published_name: name of their series; by default ``name`` with ", published".
    """
    kind: Literal["bars", "line"] = "bars" if isinstance(x[0], str) else "line"
    series = [Series(name, x, ours, kind=kind)]
    if any(figure is not None for figure in published_figures):
        series.append(
            Series(published_name or f"{name}, published", x, published_figures, is_published=True, kind=kind)
        )
    return series


def _format_cell(cell: Cell) -> Cell:
    return f"{cell:.6g}" if isinstance(cell, float) else cell


@lru_cache(maxsize=16)
def load_paper(paper: str) -> dict[str, Any]:
    """Return a paper's figures and statements; ``source`` is the citation."""
    return tomllib.loads(_read_published(f"{paper}.toml"))


def load_published_rows(table: str) -> list[dict[str, str]]:
    """Return the rows of a published table."""
    return list(csv.DictReader(_read_published(f"{table}.csv").splitlines()))


def _read_published(name: str) -> str:
    return resources.files("stoker_sim").joinpath(f"published/{name}").read_text("utf-8")


_DELI = "Krichevsky, St. Louis, Guo: DELI (IC2E 2021), and cake-lab/DELI"
_DIESEL, _INFINICACHE, _IPDL = (load_paper(paper)["source"] for paper in ("diesel", "infinicache", "ipdl"))
_SILOD = "SiloD (EuroSys 2023)"
_CACHES = "no-evict: SiloD (EuroSys 2023), CoorDL (VLDB 2021); next-use: Belady (1966), NoPFS (SC'21)"
_DDP = "next-use: Belady (1966), NoPFS (SC'21); figures simulated for policies alone"
_OUR_TIER = "Our warm tier beside InfiniCache: what lasts an hour, and dollars, if instances are taken at random"
_ESTIMATE = "The estimate f = min(f*, b / (1 - c/d)), beside the fetcher in virtual time"
_EXPERIMENTS = {
    "deli-table-1": ("deli_figures.run_table_1", "Speed of reading small samples", _DELI),
    "deli-table-2": ("deli_costs.run", "Cost of two epochs", _DELI),
    "deli-figure-3": ("deli_figures.run_figure_3", "Wait for data by setting", _DELI),
    "deli-figure-4": ("deli_figures.run_figure_4", "Wait for data by miss rate", _DELI),
    "deli-figure-5": ("deli_figures.run_figure_5", "A cache alone: miss rate by its size", _DELI),
    "deli-figure-6": ("deli_figures.run_figure_6", "Miss rate by fetch size", _DELI),
    "deli-figure-7": ("deli_figures.run_figure_7", "Miss rate by cache size, fetches of 1,024", _DELI),
    "deli-figure-8": ("deli_figures.run_figure_8", "Miss rate by threshold, fetches of 1,024", _DELI),
    "deli-figure-9": ("deli_figures.run_figure_9", "The best settings for a cache of 2,048", _DELI),
    "ours": ("ours.run_ours", "The paper's workloads with our schedules", _DELI),
    "caching": ("ours.run_caching", "Hit rate by policy and size of the cache", _CACHES),
    "ddp": ("ours.run_ddp", "Caches of nodes that train together", _DDP),
    "scale": ("ours.run_scale", "What simulating takes", "this machine"),
    "ipdl": ("ipdl.run", "The next batch while one trains, beside loader workers", _IPDL),
    "diesel-reads": ("diesel.run_reads", "Shuffled reads of small files, by chunk and one by one", _DIESEL),
    "diesel-start-up": ("diesel.run_start_up", "Until workers know the data set: snapshot, lists, servers", _DIESEL),
    "silod": ("silod.run_allocate", "Job completion times: cache and bandwidth by policy, against equal parts", _SILOD),
    "silod-estimator": ("silod.run_estimate", _ESTIMATE, _SILOD),
    "infinicache": (
        "infinicache.run",
        "A cache in functions: what lasts an hour, dollars, and latency by parity",
        _INFINICACHE,
    ),
    "warm-tier": ("warm_tier.run", _OUR_TIER, _INFINICACHE),
}
"""Name → ``module.function`` in this folder, title, and paper whose figures are shown beside ours."""

NAMES = tuple(_EXPERIMENTS)
"""Names of all experiments, in the order in which they are listed."""


def load_experiment(name: str) -> Experiment:
    """Return the experiment with this name.

    Raises:
        ConfigError: there is no experiment with this name; the error lists all names.
    """
    if name not in _EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}; the experiments are {', '.join(NAMES)}")
    place, title, source = _EXPERIMENTS[name]
    module, _, function = place.partition(".")
    run: Callable[[bool], ExperimentResult] = getattr(import_module(f"{__name__}.{module}"), function)
    return Experiment(name, title, source, run)


_COLOURS = ("#d1495b", "#1b4965", "#2a9d8f", "#bc8034", "#6a4c93", "#4f772d", "#8aa1b1", "#444444")
_PANEL_INCHES = (6.4, 4.2)
_COLUMNS = 2
_DOTS_PER_INCH = 110
_HEADROOM = 0.2
"""Fraction of the axis above bars that is left free for the legend."""
_MAX_LABELLED_BARS = 12
"""Maximum number of bars in a panel with their values as labels: more bars leave no room."""
_MAX_LABELLED_TICKS = 7
"""Maximum number of x values that are all labelled on a logarithmic axis."""
_LINE_WIDTHS_POINTS = (1.5, 3.0)
"""Width of the last and of the first line, in points, so that lines that coincide are all visible."""
_MISSING_EXTRA_MESSAGE = "drawing needs the extra 'plan': pip install 'stoker[plan]'; the CSV is written without it"


def write_png(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw panels into a PNG file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _create_figure(panels, title).savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _create_figure(panels: Sequence[Panel], title: str) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(_MISSING_EXTRA_MESSAGE) from None
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < len(panels):
            _draw(axes, panels[number])
        else:
            axes.set_axis_off()
    _clear_legends(figure)
    return figure


def _clear_legends(figure: Any) -> None:
    """Move legends that overlap a line or a point below their axes."""
    from matplotlib.transforms import ScaledTranslation

    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is None or not any(_touches(line, legend.get_window_extent()) for line in axes.lines):
            continue
        inches = (axes.get_window_extent().y0 - axes.xaxis.label.get_window_extent().y0) / figure.dpi
        below = axes.transAxes + ScaledTranslation(0.0, -inches, figure.dpi_scale_trans)
        for columns in (2, 1):
            place = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "bbox_transform": below, "borderaxespad": 0.2}
            legend = axes.legend(fontsize=8, frameon=False, ncols=columns, **place)
            if legend.get_window_extent().width <= axes.get_window_extent().width:
                break


def _touches(line: Any, box: Any) -> bool:
    path = line.get_transform().transform_path(line.get_path())
    if line.get_linestyle() == "None":
        return any(box.contains(x, y) for x, y in path.vertices)
    return bool(path.intersects_bbox(box, filled=False))


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xlabel(panel.x_label + (f"\n{panel.note}" if panel.note else ""), fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    bars = [series for series in panel.series if series.kind == "bars"]
    for number, series in enumerate(panel.series):
        colour, y = _colour_of(panel.series, number), np.array(series.y, np.float64)
        if series.kind == "bars":
            _draw_bars(axes, series, bars.index(series), len(bars), colour)
        elif series.kind == "points" or series.is_published:
            face = "none" if series.is_published else colour
            axes.plot(series.x, y, "o", label=series.name, color=colour, markerfacecolor=face, markersize=5)
        else:
            width = _line_points(panel.series, number)
            axes.plot(series.x, y, "-", label=series.name, color=colour, marker=".", linewidth=width)
    _scale(axes, panel, has_bars=bool(bars))
    axes.legend(fontsize=8, frameon=False, ncols=2 if bars else 1)


def _scale(axes: Any, panel: Panel, *, has_bars: bool) -> None:
    if panel.x_log:
        axes.set_xscale("log")
        _name_ticks(axes, {float(x) for series in panel.series for x in series.x if x is not None})
    if panel.y_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if has_bars:  # bars leave no corner free for the legend
        low, high = axes.get_ylim()
        axes.set_ylim(top=high * (high / low) ** _HEADROOM if panel.y_log else high * (1 + _HEADROOM))


def _name_ticks(axes: Any, values: set[float]) -> None:
    """Label the values themselves on a logarithmic axis if they are few; powers of ten between them say little."""
    if 1 < len(values) <= _MAX_LABELLED_TICKS:
        axes.set_xticks(sorted(values), [f"{value:,.10g}" for value in sorted(values)])
        axes.minorticks_off()


def _draw_bars(axes: Any, series: Series, place: int, count: int, colour: str) -> None:
    width = 0.8 / count
    at = [index - 0.4 + width * (place + 0.5) for index in range(len(series.x))]
    style = {"facecolor": "none", "edgecolor": colour, "linewidth": 1.5} if series.is_published else {"color": colour}
    bars = axes.bar(at, np.array(series.y, np.float64), width * 0.9, label=series.name, **style)
    if count * len(series.x) <= _MAX_LABELLED_BARS:
        axes.bar_label(bars, [_format_figure(height) for height in series.y], fontsize=7, padding=1)
    axes.set_xticks(range(len(series.x)), [str(name) for name in series.x], fontsize=8)
    axes.set_xlim(-0.5, len(series.x) - 0.5)  # leave room for missing bars, too


def _format_figure(height: float | None) -> str:
    if height is None:
        return ""
    return f"{height:,.0f}" if height >= 1000 else f"{height:.3g}"


def _line_points(every: Sequence[Series], number: int) -> float:
    thinnest, thickest = _LINE_WIDTHS_POINTS
    behind = sum(series.kind == "line" and not series.is_published for series in every[number + 1 :])
    return thinnest + (thickest - thinnest) * behind / len(every)


def _colour_of(every: Sequence[Series], number: int) -> str:
    """Return the colour of a series; published figures have the colour of the preceding series of ours."""
    ours = sum(not series.is_published for series in every[: number + 1])
    return _COLOURS[max(0, ours - 1) % len(_COLOURS)]


def write_html(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw panels into a self-contained HTML page.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        raise ConfigError(_MISSING_EXTRA_MESSAGE) from None
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=[panel.title for panel in panels])
    for index, panel in enumerate(panels):
        row, column = index // columns + 1, index % columns + 1
        for number, series in enumerate(panel.series):
            trace = _trace(graph_objects, series, _colour_of(panel.series, number))
            figure.add_trace(trace, row=row, col=column)
        below = panel.x_label + (f"<br>{panel.note}" if panel.note else "")
        figure.update_xaxes(title_text=below, type="log" if panel.x_log else None, row=row, col=column)
        figure.update_yaxes(title_text=panel.y_label, type="log" if panel.y_log else None, row=row, col=column)
    figure.update_layout(title=title, height=480 * rows, template="plotly_white")
    path.write_text(html_page(figure, title), "utf-8")


def _trace(graph_objects: Any, series: Series, colour: str) -> Any:
    x, y = list(series.x), list(series.y)
    look: dict[str, Any]
    if series.kind == "bars":
        look = {"color": "rgba(0,0,0,0)" if series.is_published else colour, "line": {"color": colour, "width": 1.5}}
        return graph_objects.Bar(x=x, y=y, name=series.name, marker=look)
    is_points = series.kind == "points" or series.is_published
    look = {
        "color": colour,
        "symbol": "circle-open" if series.is_published else "circle",
        "size": 8 if is_points else 5,
    }
    mode = "markers" if is_points else "lines+markers"
    return graph_objects.Scatter(x=x, y=y, name=series.name, mode=mode, marker=look, line={"color": colour})
