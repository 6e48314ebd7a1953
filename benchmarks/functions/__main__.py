"""Measures functions and puts the tables into docs/functions.md, or only prints them."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import sys
from argparse import ArgumentParser, ArgumentTypeError
from importlib import import_module
from pathlib import Path
from statistics import median

from benchmarks.document import replace_between
from benchmarks.functions.quiet import Patience

DOCUMENT = Path(__file__).parents[2] / "docs" / "functions.md"
SECTIONS = {"packing": "1 minute", "latency": "1 minute", "scaling": "6 minutes"}
"""Name → duration on two idle processors, without waits."""


def measure(section: str, patience: Patience) -> str:
    """Measure a section and return its text: the method, the machine, its other load, and the table."""
    before = os.getloadavg()[0]
    figures: str = asyncio.run(getattr(import_module(f"benchmarks.functions.{section}"), section)(patience))
    foreign = patience.foreign_processors
    machine = f"Python {platform.python_version()} on {os.cpu_count()} cores, niceness {os.nice(0)}"
    others = f"other programs used {median(foreign):.2f} of them meanwhile (at most {max(foreign):.2f})"
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"`python -m benchmarks.functions {section}`: {machine}; {others}; {load}.\n\n{figures}"


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.functions", description=__doc__)
    takes = ", ".join(f"{name} ({time})" for name, time in SECTIONS.items())
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"sections to run, with the time of each on an idle machine: {takes} (default: all)",
    )
    parser.add_argument("--print", action="store_true", dest="only_prints", help="leave docs/functions.md as it is")
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=Patience().seconds,
        metavar="SECONDS",
        help="for each section, to wait for quiet moments and to repeat what was disturbed (default: %(default).0f)",
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.sections) - set(SECTIONS)):
        parser.error(f"there is no section {', '.join(unknown)}")
    for name in args.sections or SECTIONS:
        found = measure(name, Patience(args.patience))
        print(f"\n{found}\n", flush=True)
        if not args.only_prints:
            replace_between(DOCUMENT, f"functions-{name}", found)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ArgumentTypeError(f"{text} is not a number of seconds from 0")
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
