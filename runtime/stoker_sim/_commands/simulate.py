"""``stoker simulate``: run a paper's experiment, or a scenario of one's own, in virtual time."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker._cost.prices import Prices
from stoker._trace.chrome import MOST_RANKS, rank_traces
from stoker.cli.output import json_text, printable, table
from stoker.errors import ConfigError
from stoker_sim import _experiments as experiments
from stoker_sim._experiments.outcome import Cell, Outcome, write_html, write_png
from stoker_sim._scenario import Run, Scenario, simulate
from stoker_sim._scenario_file import outcome, read_scenario

__all__ = ["configure", "run"]

_SHOWN_ROWS = 60
_SCENARIO = ".toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was simulated: its name, what it is, whose figures stand beside it, its outcome, and how long it took."""

    name: str
    title: str
    source: str
    outcome: Outcome
    seconds: float


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="an experiment, 'all' of them, or a SCENARIO.toml")
    parser.add_argument("--list", action="store_true", help="show the experiments and whose figures they stand beside")
    where = "where NAME.csv, NAME.png and NAME.html go (default: experiments)"
    parser.add_argument("--out", type=Path, default=Path("experiments"), metavar="FOLDER", help=where)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--no-html", action="store_true", help="no pages, which are 5 MB each")
    parser.add_argument("--json", action="store_true", help="write JSON, and no files")
    trace = f"write waits and fetches of a SCENARIO.toml's first {MOST_RANKS} ranks, for 'stoker trace' and Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.list or not args.names:
        print(table([(name, (found := experiments.load(name)).title, found.source) for name in experiments.NAMES]))
        return 0
    names = experiments.NAMES if args.names == ["all"] else args.names
    for name in names:  # before any of them is run
        if not name.endswith(_SCENARIO):
            experiments.load(name)
    if args.trace is not None and (len(names) > 1 or not names[0].endswith(_SCENARIO)):
        raise ConfigError("--trace is for one SCENARIO.toml: name that alone")
    if args.json:
        print(json_text([_as_json(_simulated(name, args.quick, args.trace)) for name in names]))
        return 0
    _check_places(names, args.out)
    for each in (_simulated(name, args.quick, args.trace) for name in names):
        _show(each)
        _write(each, args.out, with_html=not args.no_html)
    return 0


def _check_places(names: Sequence[str], folder: Path) -> None:
    """Find out before minutes of work whether what comes of them has a place, each its own."""
    for stem, count in Counter(map(_stem, names)).items():
        if count > 1:
            raise ConfigError(
                f"{stem}.csv would be written {count} times: give each once, and files of different names"
            )
    with _saying(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith(_SCENARIO) else name


def _simulated(name: str, quick: bool, trace: Path | None) -> _Found:
    begun = time.perf_counter()
    if not name.endswith(_SCENARIO):
        experiment = experiments.load(name)
        title, source, result = experiment.title, experiment.source, experiment.run(quick)
    else:
        file, prices = read_scenario(Path(name)), Prices.load()
        title, source = file.title, name
        prices.store(file.url)  # before it is run
        result = outcome(_stem(name), file.scenario, _traced(file.scenario, trace), prices=prices, url=file.url)
    return _Found(name=_stem(name), title=title, source=source, outcome=result, seconds=time.perf_counter() - begun)


def _traced(scenario: Scenario, trace: Path | None) -> Run:
    if trace is None:
        return simulate(scenario)
    with rank_traces(trace) as sinks_of:
        return simulate(scenario, sinks_of)


def _as_json(found: _Found) -> dict[str, object]:
    tables = [{"name": each.name, "columns": each.columns, "rows": each.rows} for each in found.outcome.tables]
    of = {"name": found.name, "title": found.title, "source": found.source}
    return {**of, "tables": tables, "remarks": found.outcome.remarks}


def _show(found: _Found) -> None:
    print(f"{printable(f'{found.name}: {found.title} ({found.source})')}; {found.seconds:.1f} s")
    for each in found.outcome.tables:
        rows = [
            [printable(column) for column in each.columns],
            *([_shown(cell) for cell in row] for row in each.rows[:_SHOWN_ROWS]),
        ]
        print(table(rows))
        if len(each.rows) > _SHOWN_ROWS:
            print(f"  … and {len(each.rows) - _SHOWN_ROWS} more rows")
    for remark in found.outcome.remarks:
        print(f"  {printable(remark)}")


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else printable(str(cell))


def _write(found: _Found, folder: Path, *, with_html: bool) -> None:
    title = printable(found.title)
    with _saying(folder):
        for place, each in enumerate(found.outcome.tables):
            name = found.name if place == 0 else each.name
            (folder / f"{name}.csv").write_text(each.to_csv(), "utf-8")
        write_png(found.outcome.panels, title, folder / f"{found.name}.png")
        if with_html:
            write_html(found.outcome.panels, title, folder / f"{found.name}.html")
    print(f"  written to {printable(f'{folder}/{found.name}')}.*")


@contextmanager
def _saying(folder: Path) -> Iterator[None]:
    """Say of an error of the operating system which folder it is about, and what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}; name another folder with --out") from None
