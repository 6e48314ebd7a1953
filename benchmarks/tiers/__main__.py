"""Tiers and stores compared with a plain TCP copy of the same bytes: `python -m benchmarks.tiers [PLACE …] [--quick]`.

One client reads objects of 8 MiB and of 1 MiB, one after the other, into mapped memory. All places take turns in each
round, so that other load on the machine affects all equally; ratios are within one round, and figures are medians of
the rounds. Each server has one core, if possible not the client's; nodes of the warm tier have all cores. The client's
processor time is that of all threads of this process; GB are 10^9 bytes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.document import table
from benchmarks.tiers.place import Objects, Place
from benchmarks.tiers.places import PLACES

SIZES = (8 << 20, 1 << 20)
BYTES = 48 << 20
"""Total size of the objects, larger than processor caches."""
PLAIN = "plain"
TARGETS = (("serve", "plain", 0.6), ("serve-tls", "tls", None))
"""Place, the place that it is compared with, and the minimum ratio of their rates for objects of 8 MiB, or None."""
_WARM_READS = 2
"""Reads at the beginning of a turn that do not count, since sockets and processes have been idle."""
_HEADER = ("read from", "p50 ms", "p99 ms", "GB/s", "of a plain copy", "CPU s/GB: client", "servers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Reads from one place in one round.

    Attributes:
        seconds: duration of each read.
        size_bytes: size of an object.
        client_seconds: processor time of this process.
        server_seconds: processor time of the servers.
    """

    seconds: tuple[float, ...]
    size_bytes: int
    client_seconds: float
    server_seconds: float

    @property
    def gigabytes(self) -> float:
        """Amount of read data, in GB."""
        return len(self.seconds) * self.size_bytes / 1e9

    @property
    def rate(self) -> float:
        """Rate, in GB/s."""
        return self.gigabytes / sum(self.seconds)


Turns = dict[str, list[Turn]]
"""Place → its turns, one per round."""


async def turn(place: Place, objects: Objects, reads: int, into: memoryview) -> Turn:
    """Read a number of objects, one after the other."""
    for number in range(_WARM_READS):
        await place.read(number % objects.count, into)
    seconds = []
    client_seconds, server_seconds = time.process_time(), place.server_seconds()
    for number in range(min(reads, place.max_reads or reads)):
        began = time.perf_counter()
        await place.read(number % objects.count, into)
        seconds.append(time.perf_counter() - began)
    return Turn(
        seconds=tuple(seconds),
        size_bytes=objects.size_bytes,
        client_seconds=time.process_time() - client_seconds,
        server_seconds=place.server_seconds() - server_seconds,
    )


async def measure(names: Sequence[str], objects: Objects, *, rounds: int, reads: int) -> tuple[dict[str, str], Turns]:
    """Return the places' titles, and their turns.

    Args:
        names: names of places in :data:`PLACES`.
        objects: objects that each place is filled with.
        rounds: number of rounds, in each of which every place has a turn.
        reads: number of reads in a turn.
    """
    cores = sorted(os.sched_getaffinity(0))
    into, bodies = memoryview(bytearray(objects.size_bytes)), objects.bodies()
    async with AsyncExitStack() as stack:
        server_core = cores[-1] if len(cores) > 1 else None
        places = {name: await stack.enter_async_context(PLACES[name](objects, server_core)) for name in names}
        for place in places.values():
            await place.read(1 % objects.count, into)
            if into != bodies[1 % objects.count]:
                raise RuntimeError(f"{place.name} delivers wrong bytes")
        turns: Turns = {name: [] for name in places}
        os.sched_setaffinity(0, cores[:1])
        try:
            for _ in range(rounds):
                for name, place in places.items():
                    turns[name].append(await turn(place, objects, reads, into))
        finally:
            os.sched_setaffinity(0, cores)
    return {name: place.name for name, place in places.items()}, turns


def ratio(turns: Turns, name: str, of: str) -> float:
    """Return the median ratio of the rates of two places in the same round."""
    return median(one.rate / other.rate for one, other in zip(turns[name], turns[of], strict=True))


def rows(titles: dict[str, str], turns: Turns) -> list[tuple[str, ...]]:
    """Return the rows of a table, one per place."""
    found = []
    for name, title in titles.items():
        seconds = [each for one in turns[name] for each in one.seconds]
        found.append(
            (
                title,
                *(f"{1000 * np.quantile(seconds, share):.2f}" for share in (0.5, 0.99)),
                f"{median(one.rate for one in turns[name]):.2f}",
                f"{ratio(turns, name, PLAIN):.0%}" if PLAIN in turns else "",
                f"{median(one.client_seconds / one.gigabytes for one in turns[name]):.2f}",
                f"{median(one.server_seconds / one.gigabytes for one in turns[name]):.2f}",
            )
        )
    return found


def verdicts(titles: dict[str, str], turns: Turns) -> list[str]:
    """Return a line for each comparison."""
    lines = []
    for name, of, least in TARGETS:
        if {name, of} <= turns.keys():
            found = ratio(turns, name, of)
            line = f"{titles[name]}: {found:.0%} of a {titles[of]}"
            lines.append(line if least is None else f"{line}, at least {least:.0%}: {_verdict(found >= least)}")
    return lines


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.tiers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="*", metavar="PLACE", help=f"{', '.join(PLACES)}; default all")
    parser.add_argument("--quick", action="store_true", help="fewer reads, to see that it runs")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.places if name not in PLACES]:
        parser.error(f"there is no place {', '.join(unknown)}")
    rounds, reads = (2, 6) if given.quick else (9, 60)
    for size_bytes in SIZES:
        objects = Objects(BYTES // size_bytes, size_bytes)
        titles, turns = asyncio.run(measure(given.places or tuple(PLACES), objects, rounds=rounds, reads=reads))
        print(f"\nobjects of {size_bytes >> 20} MiB, {reads} reads a round, medians of {rounds} rounds\n")
        print(table(_HEADER, rows(titles, turns)))
        if size_bytes == SIZES[0]:
            print("\n" + "\n".join(f"- {line}" for line in verdicts(titles, turns)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
