"""Comparison of stoker with its peers and with limits: `python -m benchmarks.compare [--quick] [--workload NAME] ...`.

`python -m benchmarks.compare --workload images --only stoker,spdl --shape none --kind cold --rounds 3` answers one
question: it measures these cells only, and prints each loader's medians and stoker's ratios to them.

Every cell is a child process that reads from a local bucket in another process, measured from outside. A round measures
all loaders and limits of a workload and network one after the other, so that ratios hold although the machine's speed
drifts. Results are written after each cell, to ``benchmarks/results/NAME.jsonl``; an interrupted run is resumed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from subprocess import CalledProcessError
from typing import Any, TextIO

from benchmarks.bench import BUCKET, Bench, Program
from benchmarks.cells import KINDS, LIMITS, LOADERS, OURS, PROFILES, Cell, Selection
from benchmarks.ratios import ratios
from benchmarks.results import Record, Results
from benchmarks.workloads import RESULTS, WORKLOADS
from stoker_local import BucketConfig, BucketSpec, bucket_process

CELL_TIMEOUT_SECONDS = 90.0
ALIASES = {"stoker": "ours"}
QUICK = {"rounds": 1, "scale": 0.2}
# Seconds of a cell on 2 cores at scale 1, for the first estimate; by loader, otherwise by kind.
USUAL_SECONDS = {"perobject": 25.0, "steady": 10.0, "cold": 8.0, "stall": 30.0, "starts": 40.0, "limit": 4.0}


Programs = tuple[dict[str, Program], dict[str, str]]
"""Loader → program, and missing loader → reason."""


class Estimate:
    """Estimates the duration of the remaining cells from earlier cells of the same kind, or from typical times."""

    def __init__(self, scale: float) -> None:
        self._share = 0.5 + 0.5 * scale  # starting programs takes half of it, at any scale
        self._seen: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(self, cell: Cell, seconds: float) -> None:
        self._seen[_alike(cell)].append(seconds)

    def seconds(self, cells: Sequence[Cell]) -> float:
        return sum(
            mean(self._seen[_alike(cell)])
            if self._seen[_alike(cell)]
            else USUAL_SECONDS.get(cell.loader, USUAL_SECONDS[cell.kind]) * self._share
            for cell in cells
        )


def _alike(cell: Cell) -> tuple[str, ...]:
    return cell.workload, cell.mode, cell.profile, cell.loader, cell.kind


def summary(record: Record) -> str:
    """Return a cell's main figure as text."""
    if record.error:
        return record.error
    if record.cell.kind == "starts":
        return f"median {median(record.start_seconds) * 1e3:.0f} ms, longest {max(record.start_seconds):.2f} s"
    if record.cell.kind == "stall":
        return f"stall {record.stall:.1%}"
    return f"{record.rate:,.0f} samples/s, {record.bytes_per_second / 1e6:,.0f} MB/s"


class Comparison:
    """A run over all cells of a selection.

    Args:
        selection: selected cells.
        timeout_seconds: time limit of a cell.
        path: file of the results.
        afresh: whether to discard the results of an interrupted run.

    Attributes:
        left: cells that are not measured yet.
    """

    def __init__(self, selection: Selection, timeout_seconds: float, path: Path, *, afresh: bool) -> None:
        self._selection, self._timeout_seconds, self._path = selection, timeout_seconds, path
        self._unfinished = path.with_suffix(".unfinished")
        self._settings = {"selection": asdict(selection), "machine": _machine()}
        self._estimate = Estimate(selection.scale)
        done = Results()
        if self._unfinished.exists() and not afresh:
            done = Results.load(self._unfinished)
            if done.settings != json.loads(json.dumps(self._settings)):
                done = Results()
        self._done = done
        self.left = [cell for cell in selection.cells() if cell not in done]

    def run(self) -> None:
        """Measure the remaining cells."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        total = len(list(self._selection.cells()))
        minutes = self._estimate.seconds(self.left) / 60
        print(f"{len(self.left)} of {total} cells to be measured, about {minutes:.0f} minutes", flush=True)
        self.begin_file()
        with self._unfinished.open("a") as file:
            if self.left:
                programs, broken = _programs(self.left)
                for workload, cells in groupby(list(self.left), key=lambda cell: cell.workload):
                    self._measure(workload, list(cells), (programs, broken), file)
        self._unfinished.rename(self._path)
        print(f"\nresults: {self._path}")

    def begin_file(self) -> None:
        """Begin the file with the results of an interrupted run, without an incomplete last line."""
        whole = self._path.with_suffix(".whole")
        with whole.open("w") as file:
            _write(file, self._settings)
            for record in self._done:
                _write(file, asdict(record))
        whole.replace(self._unfinished)

    def _measure(self, workload: str, cells: list[Cell], programs: Programs, file: TextIO) -> None:
        samples = WORKLOADS[workload].scaled(self._selection.scale)
        WORKLOADS[workload].generate(samples)
        with bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET, anonymous=True),))) as bucket:
            bench = Bench(
                workload=workload,
                samples=samples,
                bucket=bucket,
                programs=programs[0],
                timeout_seconds=self._timeout_seconds,
                connections=self._connections(workload),
                broken=dict(programs[1]),
            )
            for loader in [loader for loader in _packers(cells) if loader not in bench.broken]:
                print(f"{workload}: packing for {loader}", flush=True)
                bench.pack(loader, self._selection.samples(workload, loader))
            for cell in cells:
                started = time.perf_counter()
                record = bench.measure(cell)
                _write(file, asdict(record))
                self.left.remove(cell)
                self._estimate.add(cell, time.perf_counter() - started)
                minutes = self._estimate.seconds(self.left) / 60
                print(f"{cell}: {summary(record)} ({minutes:.0f} min left)", flush=True)

    def _connections(self, workload: str) -> dict[str, int]:
        """Return profile → number of connections of our loader, from the results of an interrupted run."""
        found = self._done.measured(workload=workload, loader="ours")
        return {record.cell.profile: record.counts["peak_connections"] for record in found}


def _programs(cells: Sequence[Cell]) -> Programs:
    """Return the programs of the cells, and why some are not available, such as no network or no compiler."""
    programs, broken = {}, {}
    for loader in dict.fromkeys([*_packers(cells), *(cell.loader for cell in cells)]):
        print(f"{loader}: finding its program", flush=True)
        try:
            programs[loader] = Program.of(loader)
        except (RuntimeError, CalledProcessError) as error:
            print(error, flush=True)
            broken[loader] = str(error)
    return programs, broken


def _packers(cells: Sequence[Cell]) -> list[str]:
    """Return the loaders that must pack for the cells; ours also packs for the limits."""
    named = ("ours" if cell.loader in (*OURS, *LIMITS) else cell.loader for cell in cells)
    return list(dict.fromkeys(named))


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}


def _write(file: TextIO, values: dict[str, Any]) -> None:
    file.write(json.dumps(values) + "\n")
    file.flush()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round at a fifth of the size")
    parser.add_argument("--workload", **_names(WORKLOADS))
    parser.add_argument("--profile", "--shape", **_names(PROFILES))
    parser.add_argument("--loader", "--only", **_names((*LOADERS, *LIMITS)))
    parser.add_argument("--kind", **_names(KINDS))
    parser.add_argument("--rounds", type=int, help=f"default: {Selection().rounds}")
    parser.add_argument("--scale", type=float, help="of the workloads; default: 1")
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT_SECONDS, help="of a cell, in seconds")
    parser.add_argument("--output", type=Path, help="default: results/full.jsonl, quick.jsonl or selection.jsonl")
    parser.add_argument("--afresh", action="store_true", help="discard the results of an interrupted run")
    return parser


def _names(known: Iterable[str]) -> dict[str, Any]:
    """Return the settings of an option whose values are some of the known names, separated by commas."""
    there_are = tuple(known)

    def parse(text: str) -> list[str]:
        names = [ALIASES.get(name, name) for name in text.split(",")]
        unknown = [name for name in names if name not in there_are]
        if unknown:
            raise ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(there_are)}")
        return names

    names = f"some of {', '.join(there_are)}, separated by commas; may be repeated; default: all"
    return {"action": "extend", "type": parse, "metavar": "NAME", "help": names}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    chosen: dict[str, Any] = {
        "workloads": options.workload and tuple(dict.fromkeys(options.workload)),
        "profiles": options.profile and tuple(dict.fromkeys(options.profile)),
        "loaders": options.loader and tuple(dict.fromkeys(options.loader)),
        "kinds": options.kind and tuple(dict.fromkeys(options.kind)),
        "rounds": options.rounds,
        "scale": options.scale,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    name = "selection" if chosen else "quick" if options.quick else "full"
    selection = replace(Selection(), **{**(QUICK if options.quick else {}), **chosen})
    path = options.output or RESULTS / f"{name}.jsonl"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an interrupt: no process is left
    Comparison(selection, options.timeout, path, afresh=options.afresh).run()
    print(ratios(Results.load(path)))


if __name__ == "__main__":
    main()
