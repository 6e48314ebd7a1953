"""Runs the benchmarks: all of them, or those that are named."""

from __future__ import annotations

import sys
from importlib import import_module
from subprocess import run

NAMES = ("planning", "virtual_clock", "shuffle_quality", "throughput")


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in names or NAMES:
        title = (import_module(f"benchmarks.{name}").__doc__ or name).partition("\n")[0]
        print(f"\n## {title}\n", flush=True)
        run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
