"""``stoker simulate``: run a paper's experiment again, in virtual time."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from stoker.cli.command import Command
from stoker.cli.output import table
from stoker.errors import ConfigError
from stoker.plan import experiments
from stoker.plan.experiments.outcome import Cell, Experiment, Outcome
from stoker.plan.figures import write_html, write_png

__all__ = ["command"]

_SHOWN_ROWS = 60


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="of an experiment, or 'all'")
    parser.add_argument("--list", action="store_true", help="show the experiments and whose figures they stand beside")
    where = "where NAME.csv, NAME.png and NAME.html go (default: experiments)"
    parser.add_argument("--out", type=Path, default=Path("experiments"), metavar="FOLDER", help=where)
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--no-html", action="store_true", help="no pages, which are 5 MB each")


def _run(args: Namespace) -> int:
    if args.list or not args.names:
        print(table([(name, (found := experiments.load(name)).title, found.source) for name in experiments.NAMES]))
        return 0
    names = experiments.NAMES if args.names == ["all"] else args.names
    for experiment in [experiments.load(name) for name in names]:
        begun = time.perf_counter()
        outcome = experiment.run(args.quick)
        _show(experiment, outcome, time.perf_counter() - begun)
        _write(experiment, outcome, args.out, with_html=not args.no_html)
    return 0


def _show(experiment: Experiment, outcome: Outcome, seconds: float) -> None:
    print(f"{experiment.name}: {experiment.title} ({experiment.source}); {seconds:.1f} s")
    for each in outcome.tables:
        rows = [each.columns, *([_shown(cell) for cell in row] for row in each.rows[:_SHOWN_ROWS])]
        print(table(rows))
        if len(each.rows) > _SHOWN_ROWS:
            print(f"  … and {len(each.rows) - _SHOWN_ROWS} more rows")
    for remark in outcome.remarks:
        print(f"  {remark}")


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _write(experiment: Experiment, outcome: Outcome, folder: Path, *, with_html: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, each in enumerate(outcome.tables):
            name = experiment.name if place == 0 else each.name
            (folder / f"{name}.csv").write_text(each.to_csv(), "utf-8")
        write_png(outcome.panels, experiment.title, folder / f"{experiment.name}.png")
        if with_html:
            write_html(outcome.panels, experiment.title, folder / f"{experiment.name}.html")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}; name another folder with --out") from None
    print(f"  written to {folder}/{experiment.name}.*")


command = Command(
    name="simulate", help="run the papers' experiments again, in virtual time", configure=_configure, run=_run
)
