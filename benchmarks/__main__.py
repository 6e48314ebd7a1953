"""Runs the benchmarks: all of them, or those that are named; `--quick` compares on a small scale, for a first look."""

from __future__ import annotations

import sys
from importlib import import_module
from subprocess import run

from benchmarks.workloads import RESULTS

NAMES = (
    "planning",
    "virtual_clock",
    "shuffle_quality",
    "throughput",
    "materialized",
    "functions",
    "compare",
    "targets",
    "plots",
    "report",
)
QUICK = (("compare", "--quick"), ("targets", str(RESULTS / "quick.jsonl")))


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown and names != ["--quick"]:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}, or --quick", file=sys.stderr)
        return 2
    chosen = QUICK if unknown else tuple((name,) for name in names or NAMES)
    for name, *arguments in chosen:
        title = (import_module(f"benchmarks.{name}").__doc__ or name).partition("\n")[0]
        print(f"\n## {title}\n", flush=True)
        run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
