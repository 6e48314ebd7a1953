"""``stoker simulate``: run a paper's experiment or a scenario file in virtual time."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from stoker._base.meter import Operation
from stoker._base.sizes import format_count
from stoker._cost.prices import Prices
from stoker._trace.chrome import MAX_RANKS, rank_traces
from stoker.cli.output import json_text, make_printable, table
from stoker.errors import ConfigError
from stoker_sim import _experiments as experiments
from stoker_sim._experiments import Cell, Experiment, ExperimentResult, Panel, Row, Series, Table, write_html, write_png
from stoker_sim._scenario import EpochResult, Scenario, SimulationResult, simulate
from stoker_sim._scenario_file import read_scenario
from stoker_sim._simulated_warm import WarmCounters

_MAX_SHOWN_ROWS = 60
_SCENARIO_SUFFIX = ".toml"


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="name of an experiment, 'all', or a SCENARIO.toml")
    parser.add_argument("--list", action="store_true", help="list the experiments with the papers they compare to")
    where = "folder for NAME.csv, NAME.png and NAME.html (default: experiments)"
    parser.add_argument("--out", type=Path, default=Path("experiments"), metavar="FOLDER", help=where)
    parser.set_defaults(example="stoker simulate all --quick --out figures")
    parser.add_argument("--quick", action="store_true", help="simulate fewer points")
    parser.add_argument("--no-html", action="store_true", help="write no HTML pages (5 MB each)")
    parser.add_argument("--json", action="store_true", help="print JSON and write no files")
    trace = f"write a trace of a SCENARIO.toml's first {MAX_RANKS} ranks, for 'stoker trace' and Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    if args.list or not args.names:
        print(
            table(
                [
                    (name, (listed := experiments.load_experiment(name)).title, listed.source)
                    for name in experiments.NAMES
                ]
            )
        )
        return 0
    names = experiments.NAMES if args.names == ["all"] else args.names
    for name in names:  # report unknown names before any experiment runs
        if not name.endswith(_SCENARIO_SUFFIX):
            experiments.load_experiment(name)
    if args.trace is not None and (len(names) > 1 or not names[0].endswith(_SCENARIO_SUFFIX)):
        raise ConfigError(f"--trace needs a single SCENARIO.toml, not {' '.join(names)}")
    if args.json:
        print(json_text([_as_json(_load_experiment(name, args.trace), args.quick) for name in names]))
        return 0
    _check_output_files(names, args.out)
    for name in names:
        begun = time.perf_counter()
        experiment = _load_experiment(name, args.trace)
        outcome = experiment.run(args.quick)
        _print_outcome(experiment, outcome, time.perf_counter() - begun)
        _write_files(experiment, outcome, args.out, with_html=not args.no_html)
    return 0


def _check_output_files(names: Sequence[str], folder: Path) -> None:
    """Check before minutes of work that the results can be written, each to its own file."""
    for stem, count in Counter(map(_stem, names)).items():
        if count > 1:
            raise ConfigError(
                f"{stem}.csv would be written {count} times: name each experiment once, and rename files of equal name"
            )
    with _name_folder_in_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _stem(name: str) -> str:
    return Path(name).stem if name.endswith(_SCENARIO_SUFFIX) else name


def _load_experiment(name: str, trace: Path | None) -> Experiment:
    """Return the experiment with this name, or the one that a scenario file describes."""
    if not name.endswith(_SCENARIO_SUFFIX):
        return experiments.load_experiment(name)
    file, prices = read_scenario(Path(name)), Prices.load()
    prices.store(file.url)  # report an unknown store before the run

    def run(quick: bool) -> ExperimentResult:
        ran = _simulate_with_trace(file.scenario, trace)
        return scenario_outcome(_stem(name), file.scenario, ran, prices=prices, url=file.url)

    return Experiment(_stem(name), file.title, name, run)


def _simulate_with_trace(scenario: Scenario, trace: Path | None) -> SimulationResult:
    if trace is None:
        return simulate(scenario)
    with rank_traces(trace) as sinks_of:
        return simulate(scenario, sinks_of)


def _as_json(experiment: Experiment, quick: bool) -> dict[str, object]:
    result = experiment.run(quick)
    tables = [{"name": each.name, "columns": each.columns, "rows": each.rows} for each in result.tables]
    facts = {"name": experiment.name, "title": experiment.title, "source": experiment.source}
    return {**facts, "tables": tables, "remarks": result.remarks}


def _print_outcome(experiment: Experiment, result: ExperimentResult, seconds: float) -> None:
    print(f"{make_printable(f'{experiment.name}: {experiment.title} ({experiment.source})')}; {seconds:.1f} s")
    for each in result.tables:
        rows = [
            [make_printable(column) for column in each.columns],
            *([_format_cell(cell) for cell in row] for row in each.rows[:_MAX_SHOWN_ROWS]),
        ]
        print(table(rows))
        if len(each.rows) > _MAX_SHOWN_ROWS:
            print(f"  … and {len(each.rows) - _MAX_SHOWN_ROWS} more rows")
    for remark in result.remarks:
        print(f"  {make_printable(remark)}")


def _format_cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else make_printable(str(cell))


def _write_files(experiment: Experiment, result: ExperimentResult, folder: Path, *, with_html: bool) -> None:
    name, title = experiment.name, make_printable(experiment.title)
    with _name_folder_in_errors(folder):
        for number, each in enumerate(result.tables):
            (folder / f"{each.name if number else name}.csv").write_text(each.to_csv(), "utf-8")
        write_png(result.panels, title, folder / f"{name}.png")
        if with_html:
            write_html(result.panels, title, folder / f"{name}.html")
    print(f"  written to {make_printable(f'{folder}/{name}')}.*")


@contextmanager
def _name_folder_in_errors(folder: Path) -> Iterator[None]:
    """Translate an error of the operating system into one that names the folder and the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}; name another folder with --out") from None


_PLATFORM = "lambda"
"""Platform whose prices are used for functions."""


def scenario_outcome(
    name: str, scenario: Scenario, run: SimulationResult, *, prices: Prices, url: str
) -> ExperimentResult:
    """Return the table of a run, with a row for each epoch and a total, and its figure.

    Args:
        name: name of the table.
        scenario: the simulated scenario.
        run: result of the simulation.
        prices: price list of requests and functions.
        url: URL of the store whose request prices are used.
    """
    dollars = prices.request_dollars(url, Operation.GET)
    tiers = sorted({tier for each in run.epochs for tier in each.tier_hits})
    rows = [_epoch_row(epoch, run.of_epoch(epoch), tiers, dollars) for epoch in range(scenario.epochs)]
    panels = _panels(Table.from_rows(name, rows), tiers)
    rows.append(_epoch_row("all", run.epochs, tiers, dollars, seconds=run.seconds))
    first = max(each.first_batch_seconds for each in run.of_epoch(0) if each.first_batch_seconds is not None)
    nodes = format_count(scenario.feed.world_size, "node")
    remarks: tuple[str, ...] = (
        f"{nodes}, {format_count(len(scenario.manifest), 'super-sample')}; waits are per node.",
        f"The last node had its first batch after {first:.3g} s.",
        f"A GET costs ${dollars:.3g} ({url}, {prices.date}); look-ups, requests and bytes are sums over all nodes.",
    )
    if run.warm is not None:
        remarks = (*remarks, *_warm_remarks(run.warm, run.seconds, prices))
    return ExperimentResult([Table.from_rows(name, rows)], panels, remarks)


def _warm_remarks(warm: WarmCounters, seconds: float, prices: Prices) -> tuple[str, ...]:
    config, bill = warm.model.config, warm.cost(prices.function(_PLATFORM))
    gone = sum(len(each.losses) for each in warm.lives)
    reads = format_count(warm.hits + warm.losses, "read")
    dollars = f"${bill.dollars:.3g} at {_PLATFORM}'s prices"
    parts = f"reads and writes ${bill.read_dollars:.3g}, upkeep ${bill.upkeep_dollars:.3g}"
    return (
        (
            f"The warm tier: {format_count(config.nodes, 'function')}, {config.code} shards; {warm.evicted} objects "
            f"evicted."
        ),
        f"Of {reads} of objects it held, {warm.losses} found too many shards lost; {warm.rebuilt} shards rewritten.",
        f"Its functions lost their memory {gone} times in {seconds / 3600:.3g} h. In all it costs {dollars}: {parts}.",
    )


def _epoch_row(
    epoch: int | str, nodes: Sequence[EpochResult], tiers: Sequence[str], dollars: float, seconds: float | None = None
) -> Row:
    waits = [each.wait_seconds for each in nodes]
    requests = sum(each.requests for each in nodes)
    hits = sum((each.tier_hits for each in nodes), Counter[str]())
    return {
        "epoch": epoch,
        "seconds": max(each.seconds for each in nodes) if seconds is None else seconds,
        "wait s, mean": fmean(waits),
        "wait s, least": min(waits),
        "wait s, most": max(waits),
        "stall": sum(waits) / max(1e-12, sum(each.seconds for each in nodes)),
        "look-ups": sum(each.lookups for each in nodes),
        "misses": sum(each.misses for each in nodes),
        "requests": requests,
        "hedges": sum(each.hedges for each in nodes),
        "read GB": sum(each.read_bytes for each in nodes) / 1e9,
        "request dollars": requests * dollars,
        **{f"from {tier}": hits[tier] for tier in tiers},
    }


def _panels(table: Table, tiers: Sequence[str]) -> list[Panel]:
    """Return the figure of a table of epochs."""

    def series(columns: Mapping[str, str]) -> list[Series]:
        return [Series(name, table.cells("epoch"), table.cells(column)) for name, column in columns.items()]

    waits = series({"slowest node": "wait s, most", "mean": "wait s, mean"})
    sources = series({"the bucket, in requests": "requests", **{tier: f"from {tier}" for tier in tiers}})
    return [
        Panel("Wait for data", "epoch", "seconds of a node", waits),
        Panel("Where super-samples came from", "epoch", "number, of all nodes", sources),
    ]
