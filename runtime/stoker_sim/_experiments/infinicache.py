"""InfiniCache: how much of a cache in functions survives an hour, what it costs, and what parity does to latency.

A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory Cache" (FAST
2020). What is open in the paper is fitted to its results: how long instances live and how many of them go together with
their back-up to the availability, how long a back-up's calls take and how much is read to the bills.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stoker._cost.prices import Prices
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table, published
from stoker_sim._reclaim import Reclaim, Upkeep, first_arrivals, kept_hours, losses, placed
from stoker_sim._warm_fleet import Billing, WarmFleet
from stoker_warm._code import Code

__all__ = ["EXPERIMENTS"]

_PAPER = published("infinicache")
_CODE = Code(_PAPER["data_shards"], _PAPER["parity_shards"])
_READS_PER_HOUR = {"large objects": 692.0, "all objects": 3950.0}
"""Fitted: to what the published bills leave beside upkeep."""
_PAPERS_RECLAIM = Reclaim(
    mean_life_seconds=7.4 * 3600, together=0.53, idle_seconds=_PAPER["idle_seconds"]
)  # both fitted, to the availability without and with back-ups
_THEN = Billing(tick_seconds=0.1, warm_call_seconds=0.005, backup_call_seconds=0.9, shard_call_seconds=0.15)
_NOW = replace(_THEN, tick_seconds=0.001)
_SHARD_SECONDS = {"large objects": 0.15, "all objects": 0.1}
_LIVES_MINUTES = (10, 30, 60, 120, 240, 444, 960)
_ASKED_MINUTES = (10, 30, 60)
_CODES = (Code(10, 0), Code(10, 1), Code(10, 2), Code(10, 4))
_REFERENCE_LATENCY = {"10+0": (2.93, 6.9), "10+1": (2.02, 4.3), "10+2": (1.60, 3.2)}
"""Mean and 99th percentile of the first ten arrivals, in units of the mean shard's time."""
_SEED = 1


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is simulated."""

    hours: int
    objects: int
    reads: int


_QUICK = _Size(hours=10, objects=300, reads=20_000)
_FULL = _Size(hours=_PAPER["hours"], objects=4_000, reads=1_000_000)


def _upkeep(*, backup: bool, warm: bool = True, reads_per_hour: float = _READS_PER_HOUR["large objects"]) -> Upkeep:
    return Upkeep(
        warm_seconds=_PAPER["warm_seconds"] if warm else None,
        backup_seconds=_PAPER["backup_seconds"] if backup else None,
        uses_per_second=reads_per_hour * _CODE.shards / _PAPER["functions"] / 3600.0,
    )


def _kept(reclaim: Reclaim, upkeep: Upkeep, size: _Size, code: Code = _CODE) -> NDArray[np.bool_]:
    """Return ``bool [hours, objects]``."""
    functions, rng = _PAPER["functions"], random.Random(_SEED)  # noqa: S311 - a model's
    lost = [tuple(losses(reclaim, upkeep, size.hours * 3600.0, rng)) for _ in range(functions)]
    return kept_hours(code, _places(code, size.objects), lost, size.hours)


@lru_cache(maxsize=4)
def _places(code: Code, objects: int) -> NDArray[np.int64]:
    return placed(code, objects, _PAPER["functions"], np.random.default_rng(_SEED))


def _survivals(size: _Size) -> Table:
    ways = [
        ("the paper's", _PAPERS_RECLAIM, _upkeep(backup=True), _PAPER["availability"]["with_backup"]),
        ("the paper's", _PAPERS_RECLAIM, _upkeep(backup=False), _PAPER["availability"]["without_backup"]),
        ("the paper's", _PAPERS_RECLAIM, _upkeep(backup=False, warm=False), None),
        ("the paper's, no reads", _PAPERS_RECLAIM, _upkeep(backup=False, warm=False, reads_per_hour=0.0), None),
    ]
    ways += [
        (f"mean life {minutes} min", Reclaim(mean_life_seconds=60.0 * minutes), _upkeep(backup=backup), None)
        for minutes in _ASKED_MINUTES
        for backup in (True, False)
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, reclaim, upkeep, known in ways:
        rate = float(_kept(reclaim, upkeep, size).mean())
        difference = None if known is None else rate - known
        backup, warm = (_every(seconds) for seconds in (upkeep.backup_seconds, upkeep.warm_seconds))
        rows.append((name, backup, warm, rate, known, difference))
    columns = (
        "reclaim",
        "back-up",
        "warm-up",
        "object-hours kept",
        "published",
        "difference",
    )
    return Table("infinicache", columns, rows)


def _every(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.0f} s"


def _bills() -> Table:
    prices = Prices.load().function("lambda")
    rows: list[tuple[Cell, ...]] = []
    for when, billing in (("100 ms, as then", _THEN), ("1 ms, as now", _NOW)):
        for known in _PAPER["bills"]:
            objects, reads_per_hour = known["objects"], _READS_PER_HOUR[known["objects"]]
            fleet = WarmFleet(
                functions=_PAPER["functions"],
                memory_bytes=_PAPER["memory_bytes"],
                code=_CODE,
                upkeep=_upkeep(backup=known["backup"], reads_per_hour=reads_per_hour),
                reads_per_hour=reads_per_hour,
            )
            bill = fleet.bill(_PAPER["hours"], prices, replace(billing, shard_call_seconds=_SHARD_SECONDS[objects]))
            dollars = known["dollars"] if billing is _THEN else None
            difference = None if dollars is None else bill.dollars - dollars
            parts = bill.warm_dollars, bill.backup_dollars, bill.read_dollars, bill.dollars
            fewer = _PAPER["elasticache_dollars"] / bill.dollars
            rows.append((objects, "5 min" if known["backup"] else "none", when, *parts, dollars, difference, fewer))
    columns = (
        *("read", "back-up", "billed by", "warm-up $", "back-up $", "reads $"),
        *("all $", "published $", "difference $", "ElastiCache / all"),
    )
    return Table("infinicache-dollars", columns, rows)


def _latencies(size: _Size) -> tuple[Table, Panel]:
    rng = np.random.default_rng(_SEED)
    rows: list[tuple[Cell, ...]] = []
    series = []
    shown = np.linspace(0.0, 1.0, 51)[1:-1]
    for code in _CODES:
        seconds = first_arrivals(code, rng.exponential(size=(size.reads, code.shards)))
        mean, late = float(seconds.mean()), float(np.quantile(seconds, 0.99))
        exact = sum(1.0 / left for left in range(code.parity + 1, code.shards + 1))
        known = _REFERENCE_LATENCY.get(str(code), (None, None))
        rows.append((str(code), mean, exact, known[0], late, known[1], code.data / code.shards))
        series.append(Series(str(code), np.quantile(seconds, shown).tolist(), shown.tolist()))
    columns = ("code", "mean", "mean, exact", "mean, reference", "p99", "p99, reference", "room for data")
    panel = Panel(
        "Reading the first 10 of n shards",
        "time / mean time of a shard",
        "part of reads that is done",
        series,
        note="exponential times",
    )
    return Table("infinicache-latency", columns, rows), panel


def _by_life(size: _Size, lives: Sequence[int]) -> tuple[Table, Panel]:
    rows: list[tuple[Cell, ...]] = []
    series = []
    for backup in (True, False):
        for together in (0.0, _PAPERS_RECLAIM.together):
            rates = []
            for minutes in lives:
                reclaim = Reclaim(mean_life_seconds=60.0 * minutes, together=together)
                rates.append(float(_kept(reclaim, _upkeep(backup=backup), size).mean()))
                rows.append(("5 min" if backup else "none", together, minutes, rates[-1]))
            if backup or not together:
                name = f"back-ups, {together:.0%} taken together" if backup else "no back-ups"
                series.append(Series(name, lives, rates))
    known = [_PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    papers_minutes = _PAPERS_RECLAIM.mean_life_seconds / 60
    series.append(Series("published", [papers_minutes] * 2, known, is_published=True))
    panel = Panel(
        "Objects that last an hour, 10+2 in 400 functions",
        "mean life of an instance (min)",
        "part of object-hours kept",
        series,
        x_log=True,
        note="the published points stand at the life that was fitted to them",
    )
    table = Table("infinicache-lives", ("back-up", "together", "mean life min", "kept"), rows)
    return table, panel


def _by_code(size: _Size) -> tuple[Table, Panel]:
    rows: list[tuple[Cell, ...]] = []
    series = []
    for backup in (True, False):
        rates = [float(_kept(_PAPERS_RECLAIM, _upkeep(backup=backup), size, code).mean()) for code in _CODES]
        name = "back-up every 5 min" if backup else "no back-up"
        rows += [(name, str(code), rate) for code, rate in zip(_CODES, rates, strict=True)]
        series.append(Series(name, [code.parity for code in _CODES], rates))
    known = [_PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    series.append(Series("published", [_CODE.parity] * 2, known, is_published=True))
    panel = Panel(
        "Objects that last an hour, by parity, with the paper's reclaims",
        "parity shards beside 10 of data",
        "part of object-hours kept",
        series,
    )
    return Table("infinicache-parity", ("back-up", "code", "kept"), rows), panel


def _dollar_panel(bills: Table) -> Panel:
    known = len(_PAPER["bills"])
    names = [f"{row[0]},\nback-up {row[1]}" for row in bills.rows[:known]] + ["ElastiCache"]
    dollars, theirs = _numbers(bills, 6), _numbers(bills, 7)[:known]
    series = [
        Series("simulated, billed by 100 ms", names, [*dollars[:known], math.nan], kind="bars"),
        Series("published", names, [*theirs, _PAPER["elasticache_dollars"]], is_published=True, kind="bars"),
        Series("simulated, billed by 1 ms", names, [*dollars[known:], math.nan], kind="bars"),
    ]
    return Panel("50 hours of 400 functions of 1.5 GB", "", "dollars", series, y_log=True)


def _numbers(table: Table, column: int) -> list[float]:
    cells = [row[column] for row in table.rows]
    return [float(cell) if isinstance(cell, float) else math.nan for cell in cells]


def _run(quick: bool) -> Outcome:
    size = (
        _Size(hours=10, objects=300, reads=20_000)
        if quick
        else _Size(hours=_PAPER["hours"], objects=4_000, reads=1_000_000)
    )
    survivals, bills = _survivals(size), _bills()
    latencies, latency_panel = _latencies(size)
    lives, life_panel = _by_life(size, _LIVES_MINUTES[1::2] if quick else _LIVES_MINUTES)
    parities, parity_panel = _by_code(size)
    return Outcome(
        [survivals, bills, latencies, lives, parities],
        [life_panel, parity_panel, _dollar_panel(bills), latency_panel],
        _REMARKS,
    )


_REMARKS = (
    "An object-hour is kept if an object that is whole when the hour begins loses at most 2 of its 12 shards in it.",
    "Fitted: a mean life of 7.4 h to 81.4% without back-ups; that 53% of reclaims take the back-up, too, to 95.4%.",
    "If instances went one by one, back-ups would keep all but a few of 100,000 object-hours.",
    "Fitted: 0.9 s for each of a back-up's two calls; 692 reads of large objects an hour, and 3,950 of all objects.",
    "The 3.24 dollars of calls that keep functions warm follow from the price list alone.",
    "The bill of large objects with back-ups is not in dollars in the paper: it is ElastiCache's over its 31 times.",
    "The bucket is durable: an object that is lost is read from it again.",
)

EXPERIMENTS = (
    Experiment(
        "infinicache",
        "A cache in functions: what lasts an hour, dollars, and latency by parity",
        _PAPER["source"],
        _run,
    ),
)
