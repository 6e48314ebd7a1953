"""Runs the benchmarks of `make bench`, or the named ones; `--quick` compares on a small scale.

Caches, shared tiers, traces, predictions, processor time, emulated accelerators, the simulator, flat memory, `full`
beyond memory, all ways to mix, a GPU, the cache process of a machine and mounts are measured only if they are named.
"""

from __future__ import annotations

import sys
from importlib import import_module
from subprocess import run

from benchmarks.workloads import RESULTS

NAMES = (
    "planning",
    "virtual_clock",
    "shuffle_quality",
    "packed_order",
    "throughput",
    "materialized",
    "erasure",
    "functions",
    "compare",
    "targets",
    "plots",
    "report",
)
BY_NAME = (
    "cache_tiers",
    "tiers",
    "trace_overhead",
    "prediction",
    "processor_costs",
    "mlperf",
    "simulation",
    "deli_calibration",
    "flat_memory",
    "uniform",
    "units",
    "warm_tier",
    "gpu",
    "cluster",
    "mount",
)
QUICK = (("compare", "--quick"), ("targets", str(RESULTS / "quick.jsonl")))


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in (*NAMES, *BY_NAME)]
    if unknown and names != ["--quick"]:
        there_are = f"there are {', '.join(NAMES)}; by name only {', '.join(BY_NAME)}; or --quick"
        print(f"no benchmark {', '.join(unknown)}; {there_are}", file=sys.stderr)
        return 2
    chosen = QUICK if unknown else tuple((name,) for name in names or NAMES)
    for name, *arguments in chosen:
        title = (import_module(f"benchmarks.{name}").__doc__ or name).partition("\n")[0]
        print(f"\n## {title}\n", flush=True)
        run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
