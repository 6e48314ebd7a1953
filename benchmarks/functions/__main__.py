"""Measures functions and puts the tables into docs/functions.md: `python -m benchmarks.functions [SECTION ...]`."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

from benchmarks.document import replace_between
from benchmarks.functions.quiet import Patience

DOCUMENT = Path(__file__).parents[2] / "docs" / "functions.md"
SECTIONS = ("packing", "latency", "scaling")


def measure(section: str) -> str:
    """Measure a section and return its text: how, where, beside what, and the table."""
    patience, before = Patience(), os.getloadavg()[0]
    figures: str = asyncio.run(getattr(import_module(f"benchmarks.functions.{section}"), section)(patience))
    foreign = patience.foreign_processors
    machine = f"Python {platform.python_version()} on {os.cpu_count()} cores"
    others = f"other programs used {median(foreign):.2f} of them meanwhile (at most {max(foreign):.2f})"
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"`python -m benchmarks.functions {section}`: {machine}; {others}; {load}.\n\n{figures}"


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(SECTIONS)):
        print(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    for name in names or SECTIONS:
        found = measure(name)
        print(f"\n{found}\n", flush=True)
        replace_between(DOCUMENT, f"functions-{name}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
