"""The warm tier in the local function cloud: `python -m benchmarks.warm_tier [rate|tail|memory] [--quick]`."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from benchmarks.document import table
from benchmarks.warm_tier.memory import memory
from benchmarks.warm_tier.rate import Rates, measure, measure_program
from benchmarks.warm_tier.tail import tails
from stoker_warm._erasure import ErasureCode

CODES = (ErasureCode(10, 1), ErasureCode(4, 2), ErasureCode(10, 2))


def show_rate(quick: bool) -> None:
    rounds, reads = (2, 20) if quick else (9, 60)
    rows = [_row(str(code), asyncio.run(measure(code, rounds, reads))) for code in CODES]
    rows.append(_row(f"{CODES[0]}, a proxy of its own", asyncio.run(measure_program(CODES[0], rounds, reads))))
    print("8 MiB, one read after the other; rate and processor time over those of a plain TCP copy in the same round;")
    print("medians of", rounds, "rounds")
    print(table(("code", "GB/s", "plain copy GB/s", "rate", "processor time", "read"), rows))


def _row(name: str, found: Rates) -> Sequence[str]:
    return (
        name,
        f"{found.bytes_per_second / 1e9:.2f}",
        f"{found.plain_bytes_per_second / 1e9:.2f}",
        f"{found.rate:.0%}",
        f"{found.processor:.1f}x",
        f"{1000 * found.median_seconds:.1f} ms",
    )


def show_tail(quick: bool) -> None:
    found = asyncio.run(tails(60 if quick else 1000))
    rows = [
        (each.name, f"{1000 * each.median_seconds:.0f} ms", f"{1000 * each.p99_seconds:.0f} ms", f"{each.requests:.2f}")
        for each in found
    ]
    print(f"8 MiB, {found[0].reads} reads, 5% of the bucket's requests late by 2 s")
    print(table(("read from", "median", "p99", "requests to the bucket, a read"), rows))


def show_memory(quick: bool) -> None:
    found = asyncio.run(memory(1000 if quick else 10_000))
    rows = [(f"{each.reads:,}", f"{each.resident_bytes / 1e6:.0f} MB") for each in found]
    print("resident memory of the proxy's process, with the objects and the function cloud")
    print(table(("reads", "memory"), rows))


PARTS = {"rate": show_rate, "tail": show_tail, "memory": show_memory}


def main() -> int:
    parser = ArgumentParser(prog="python -m benchmarks.warm_tier", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--quick", action="store_true", help="fewer reads, to see that it runs")
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}")
    for name in given.parts or PARTS:
        PARTS[name](given.quick)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
