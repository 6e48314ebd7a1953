"""As many random fault schedules, and lives of a loader, as asked for:
``PYTHONPATH=tests python -m soak --schedules 100000 --lives 5000``.

Exits with 1 if any failed, and prints for each the command that plays it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from support import cluster_schedules, many_schedules, warm_schedules
from support.fault_profiles import Tables
from support.fault_schedules import LEVELS as FETCH_LEVELS
from support.fault_schedules import play
from support.loader_lives import live, pack_wide

_OF_TIERS: dict[str, Callable[[int], many_schedules.Played]] = {
    "warm": warm_schedules.play,
    "cluster": cluster_schedules.play,
}
LEVELS = (*FETCH_LEVELS, *_OF_TIERS)
_SEEDS_A_TASK = 50
_TRACEBACK_LINES = 12
LIVES = "lives"


@dataclass(slots=True)
class Played:
    """What some schedules of one level came to."""

    tables: Tables = field(default_factory=Tables)
    failed: dict[int, str] = field(default_factory=dict)


def tables_of(level: str, seed: int) -> Tables:
    """Play a schedule and return what happened in it."""
    if level in _OF_TIERS:
        return Tables(counted=_OF_TIERS[level](seed).counts)
    return play(level, seed).tables()


def play_all(level: str, seeds: range) -> Played:
    played = Played()
    for seed in seeds:
        try:
            played.tables.merge(tables_of(level, seed))
        except Exception:  # noqa: BLE001 - whatever fails is the find; the next seed does not depend on it
            played.failed[seed] = traceback.format_exc()
    return played


def _expect_warnings() -> None:
    """Have warnings about faults go nowhere; where no handler is, they would be printed."""
    logging.getLogger("stoker").addHandler(logging.NullHandler())


def soak(level: str, seeds: range, processes: int) -> Played:
    """Play the schedules, report progress and failures as they come, and return all of it."""
    total, begun_seconds, done = Played(), time.monotonic(), 0
    tasks = [seeds[start : start + _SEEDS_A_TASK] for start in range(0, len(seeds), _SEEDS_A_TASK)]
    with ProcessPoolExecutor(processes, initializer=_expect_warnings) as pool:
        for task, played in zip(tasks, pool.map(play_all, [level] * len(tasks), tasks), strict=True):
            total.tables.merge(played.tables)
            total.failed.update(played.failed)
            for seed, trace in played.failed.items():
                print(
                    f"\n{level} {seed} FAILED:\n", *trace.splitlines(True)[-_TRACEBACK_LINES:], sep="", file=sys.stderr
                )
            done += len(task)
            rate = done / (time.monotonic() - begun_seconds)
            print(f"\r{level}: {done} of {len(seeds)}, {rate:.0f} a second", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return total


def live_all(seeds: range) -> list[tuple[str, int]]:
    """Live the lives of a loader, one after the other, and return those that failed."""
    url, failed = pack_wide("memory://lives/ds"), []
    for seed in seeds:
        try:
            live(url, seed)
        except Exception:  # noqa: BLE001 - whatever fails is the find; the next seed does not depend on it
            print(f"\n{LIVES} {seed} FAILED:\n{traceback.format_exc()}", file=sys.stderr)
            failed.append((LIVES, seed))
        print(f"\r{LIVES}: {seed - seeds.start + 1} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000, help="how many, of each level")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--level", choices=[*LEVELS, LIVES], action="append", help="only this one")
    parser.add_argument("--lives", type=int, default=1000, help="how many lives of a loader, in real time")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.schedules)
    failed: list[tuple[str, int]] = []
    levels = chosen.level or [*LEVELS, LIVES]
    if LIVES in levels:
        levels.remove(LIVES)
        failed += live_all(range(chosen.first_seed, chosen.first_seed + chosen.lives))
    for level in levels:
        played = soak(level, seeds, chosen.processes)
        print(f"{len(seeds)} random fault schedules, {level}:\n{played.tables}")
        failed += [(level, seed) for seed in played.failed]
    again = f"play it again: PYTHONPATH=tests {sys.executable} -m soak --schedules 1 --lives 1"
    for level, seed in failed:
        print(f"{again} --level {level} --first-seed {seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
