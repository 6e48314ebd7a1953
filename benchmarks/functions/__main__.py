"""Measures functions and puts the tables into docs/functions.md: `python -m benchmarks.functions [SECTION ...]`."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from statistics import median

from benchmarks.document import replace_between
from benchmarks.functions.quiet import Patience

DOCUMENT = Path(__file__).parents[2] / "docs" / "functions.md"
SECTIONS = ("packing", "latency", "scaling")


def measure(section: str, patience: Patience) -> str:
    """Measure a section and return its text: how, where, beside what, and the table."""
    before = os.getloadavg()[0]
    figures: str = asyncio.run(getattr(import_module(f"benchmarks.functions.{section}"), section)(patience))
    foreign = patience.foreign_processors
    machine = f"Python {platform.python_version()} on {os.cpu_count()} cores, niceness {os.nice(0)}"
    others = f"other programs used {median(foreign):.2f} of them meanwhile (at most {max(foreign):.2f})"
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"`python -m benchmarks.functions {section}`: {machine}; {others}; {load}.\n\n{figures}"


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.functions", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument(
        "--patience",
        type=float,
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
        replace_between(DOCUMENT, f"functions-{name}", found)


if __name__ == "__main__":
    main(sys.argv[1:])
