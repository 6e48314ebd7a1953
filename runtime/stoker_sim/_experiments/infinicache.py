"""InfiniCache: availability and cost of a cache in functions, and the effect of parity on latency.

A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory Cache" (FAST
2020). Figures that the paper does not give are fitted to its results: the life of instances and the fraction reclaimed
together with their back-up to the availability, the duration of back-up calls and the number of reads to the bills.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import BoundedConfig, Finite, NotNegative, Positive
from stoker._cost.prices import FunctionPrices, Prices
from stoker._cost.usage import FunctionUsage, total_dollars
from stoker_sim._experiments import ExperimentResult, Panel, Series, Table, create_series, difference, load_paper
from stoker_sim._warm_fleet import HOUR_SECONDS, FleetCost, ReclaimModel, Seconds, memory_losses, place_shards
from stoker_warm._erasure import ErasureCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep(BoundedConfig):
    """Measures that keep a function's memory.

    Attributes:
        warm_seconds: interval of calls that keep it warm, in seconds; None for none.
        backup_seconds: interval of its back-ups, in seconds; None for none.
        uses_per_second: mean rate of other calls, which come at random times.
    """

    warm_seconds: Positive[float] | None = 60.0
    backup_seconds: Positive[float] | None = 300.0
    uses_per_second: Finite[NotNegative[float]] = 0.0

    @property
    def max_idle_seconds(self) -> float:
        """Longest time without a call if there are no uses, in seconds."""
        return min(self.warm_seconds or math.inf, self.backup_seconds or math.inf)


def simulate_losses(reclaim: ReclaimModel, upkeep: Upkeep, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield the times, in seconds from 0 and rising, at which one function loses its memory.

    After a loss the function begins again at once, with one instance. The back-ups of different functions have
    different phases.
    """
    phase = rng.random()
    now_seconds, instances = 0.0, 1
    idle_seconds = _idle_seconds(reclaim, upkeep, seconds, rng)
    while True:
        wait_seconds, left = _next_reclaim(reclaim, rng, instances)
        reclaimed_seconds = now_seconds + wait_seconds
        backup_seconds = _next_backup_seconds(upkeep, phase, now_seconds) if instances == 1 else math.inf
        now_seconds = min(reclaimed_seconds, backup_seconds, idle_seconds)
        if now_seconds >= seconds:
            return
        if now_seconds == backup_seconds:
            instances = 2
            continue
        instances = left if now_seconds == reclaimed_seconds else 0
        if not instances:
            yield now_seconds
            instances = 1
            idle_seconds = now_seconds + _idle_seconds(reclaim, upkeep, seconds - now_seconds, rng)


def _next_reclaim(reclaim: ReclaimModel, rng: random.Random, instances: int) -> tuple[float, int]:
    """Return the time until the next reclaim of a function, in seconds, and the number of instances it leaves."""
    rate = 1.0 / reclaim.mean_life_seconds
    one_seconds = _exponential(rng, instances * rate * (1.0 - reclaim.whole_function_fraction))
    all_seconds = _exponential(rng, rate * reclaim.whole_function_fraction)
    return (all_seconds, 0) if all_seconds < one_seconds else (one_seconds, instances - 1)


def _next_backup_seconds(upkeep: Upkeep, phase: float, now_seconds: float) -> float:
    if upkeep.backup_seconds is None:
        return math.inf
    return (math.floor(now_seconds / upkeep.backup_seconds - phase) + 1 + phase) * upkeep.backup_seconds


def _idle_seconds(reclaim: ReclaimModel, upkeep: Upkeep, max_seconds: float, rng: random.Random) -> float:
    """Return the time until a function is reclaimed as idle, in seconds; times after ``max_seconds`` are inexact."""
    if upkeep.max_idle_seconds <= reclaim.idle_seconds:
        return math.inf
    since_seconds = 0.0
    while since_seconds <= max_seconds and (gap := _exponential(rng, upkeep.uses_per_second)) <= reclaim.idle_seconds:
        since_seconds += gap
    return since_seconds + reclaim.idle_seconds


def _exponential(rng: random.Random, rate: float) -> float:
    return rng.expovariate(rate) if rate > 0 else math.inf


def object_hours(
    code: ErasureCode, shard_functions: NDArray[np.int64], loss_seconds: Sequence[Iterable[float]], hours: int
) -> NDArray[np.bool_]:
    """Return ``bool [hours, objects]``: whether an object, whole when an hour began, could be restored at its end.

    Readers restore lost shards before the next hour.

    Args:
        code: erasure code of the objects.
        shard_functions: ``int64 [objects, shards]``, the function that holds each shard.
        loss_seconds: for each function the times at which it loses its memory, in seconds.
        hours: number of hours.
    """
    is_lost = memory_losses(loss_seconds, hours, HOUR_SECONDS)
    is_whole: NDArray[np.bool_] = is_lost[:, shard_functions].sum(axis=2) <= code.parity
    return is_whole


def read_seconds(code: ErasureCode, shard_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``float64 [reads]``, the time at which each read has enough shards; all are requested at once.

    Args:
        code: erasure code of the objects.
        shard_seconds: ``float64 [reads, shards]``, arrival time of each shard, in seconds.
    """
    arrived: NDArray[np.float64] = np.partition(shard_seconds, code.data - 1, axis=1)[:, code.data - 1]
    return arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Billing(BoundedConfig):
    """Billed durations of calls.

    Attributes:
        tick_seconds: unit to which the duration of a call is rounded up, in seconds.
        warm_call_seconds: duration of a call that only keeps a function warm, in seconds.
        backup_call_seconds: duration of each of the two calls of a back-up, in seconds.
        shard_call_seconds: duration of a call that serves a shard, in seconds.
    """

    tick_seconds: Positive[float] = 0.001
    warm_call_seconds: Seconds = 0.001
    backup_call_seconds: Seconds
    shard_call_seconds: Seconds

    def billed_seconds(self, seconds: float) -> float:
        """Return the billed duration of a call, rounded up to ticks, at least one, in seconds."""
        return max(1, math.ceil(seconds / self.tick_seconds - 1e-9)) * self.tick_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFleet:
    """Functions that hold erasure-coded objects.

    :class:`~stoker._cost.usage.WarmTierUsage` is given the number of calls; here it follows from the code and the
    upkeep, and calls are billed by the tick.

    Attributes:
        functions: number of functions.
        memory_bytes: memory of each function, in bytes.
        code: erasure code of the objects.
        upkeep: measures that keep the functions' memory.
        reads_per_hour: number of objects read in an hour.
    """

    functions: int
    memory_bytes: int
    code: ErasureCode = field(default_factory=ErasureCode)
    upkeep: Upkeep = field(default_factory=Upkeep)
    reads_per_hour: float = 0.0

    def cost(self, hours: float, prices: FunctionPrices, billing: Billing) -> FleetCost:
        """Return the cost of ``hours``."""

        def dollars(calls: float, seconds: float) -> float:
            used = FunctionUsage(calls=calls, seconds=billing.billed_seconds(seconds), memory_bytes=self.memory_bytes)
            return total_dollars(used.bill_lines(prices))

        def calls(every_seconds: float | None) -> float:
            return self.functions * hours * 3600.0 / every_seconds if every_seconds else 0.0

        return FleetCost(
            warm_dollars=dollars(calls(self.upkeep.warm_seconds), billing.warm_call_seconds),
            backup_dollars=dollars(2 * calls(self.upkeep.backup_seconds), billing.backup_call_seconds),
            read_dollars=dollars(self.reads_per_hour * hours * self.code.shards, billing.shard_call_seconds),
        )


_PAPER = load_paper("infinicache")
_CODE = ErasureCode(_PAPER["data_shards"], _PAPER["parity_shards"])
_READS_PER_HOUR = {"large objects": 692.0, "all objects": 3950.0}
"""Reads an hour, fitted to the published bills without upkeep."""
_FITTED_RECLAIM = ReclaimModel(
    mean_life_seconds=7.4 * 3600, whole_function_fraction=0.53, idle_seconds=_PAPER["idle_seconds"]
)  # both fitted, to the availability without and with back-ups
_BILLING_THEN = Billing(tick_seconds=0.1, warm_call_seconds=0.005, backup_call_seconds=0.9, shard_call_seconds=0.15)
_BILLING_NOW = replace(_BILLING_THEN, tick_seconds=0.001)
_SHARD_SECONDS = {"large objects": 0.15, "all objects": 0.1}
_LIVES_MINUTES = (10, 30, 60, 120, 240, 444, 960)
_ASKED_MINUTES = (10, 30, 60)
_CODES = (ErasureCode(10, 0), ErasureCode(10, 1), ErasureCode(10, 2), ErasureCode(10, 4))
_REFERENCE_LATENCY = {"10+0": (2.93, 6.9), "10+1": (2.02, 4.3), "10+2": (1.60, 3.2)}
"""Mean and 99th percentile of the first ten arrivals, in units of the mean shard's time."""
_BACKUP, _KEPT = {True: "5 min", False: "none"}, "part of object-hours kept"
_SEED = 1


@dataclass(frozen=True, slots=True)
class _SimulationSize:
    """Size of the simulation."""

    hours: int
    objects: int
    reads: int


_QUICK = _SimulationSize(hours=10, objects=300, reads=20_000)
_FULL = _SimulationSize(hours=_PAPER["hours"], objects=4_000, reads=1_000_000)


def _upkeep(*, backup: bool, warm: bool = True, reads_per_hour: float = _READS_PER_HOUR["large objects"]) -> Upkeep:
    return Upkeep(
        warm_seconds=_PAPER["warm_seconds"] if warm else None,
        backup_seconds=_PAPER["backup_seconds"] if backup else None,
        uses_per_second=reads_per_hour * _CODE.shards / _PAPER["functions"] / 3600.0,
    )


def _availability(reclaim: ReclaimModel, upkeep: Upkeep, size: _SimulationSize, code: ErasureCode = _CODE) -> float:
    """Return the fraction of object-hours in which the object is kept, 0 to 1."""
    functions, rng = _PAPER["functions"], random.Random(_SEED)  # noqa: S311 - a model's
    lost = [tuple(simulate_losses(reclaim, upkeep, size.hours * 3600.0, rng)) for _ in range(functions)]
    return float(object_hours(code, _shard_functions(code, size.objects), lost, size.hours).mean())


@lru_cache(maxsize=4)
def _shard_functions(code: ErasureCode, objects: int) -> NDArray[np.int64]:
    return place_shards(code, objects, _PAPER["functions"], np.random.default_rng(_SEED))


def _availability_table(size: _SimulationSize) -> Table:
    rates = _PAPER["availability"]
    ways = [
        ("the paper's", _FITTED_RECLAIM, _upkeep(backup=True), rates["with_backup"]),
        ("the paper's", _FITTED_RECLAIM, _upkeep(backup=False), rates["without_backup"]),
        ("the paper's", _FITTED_RECLAIM, _upkeep(backup=False, warm=False), None),
        ("the paper's, no reads", _FITTED_RECLAIM, _upkeep(backup=False, warm=False, reads_per_hour=0.0), None),
    ]
    ways += [
        (f"mean life {minutes} min", ReclaimModel(mean_life_seconds=60.0 * minutes), _upkeep(backup=backup), None)
        for minutes in _ASKED_MINUTES
        for backup in (True, False)
    ]
    table = Table("infinicache", ("reclaim", "back-up", "warm-up", "object-hours kept", "published", "difference"))
    for name, reclaim, upkeep, known in ways:
        rate = _availability(reclaim, upkeep, size)
        backup, warm = (_format_interval(seconds) for seconds in (upkeep.backup_seconds, upkeep.warm_seconds))
        table.add(name, backup, warm, rate, known, difference(rate, known))
    return table


def _format_interval(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.0f} s"


def _bills() -> tuple[Table, Panel]:
    bills = _PAPER["bills"]
    redis_dollars = _PAPER["elasticache_dollars"]
    prices = Prices.load().function("lambda")
    columns = (
        *("read", "back-up", "billed by", "warm-up $", "back-up $", "reads $"),
        *("all $", "published $", "difference $", "ElastiCache / all"),
    )
    table = Table("infinicache-dollars", columns)
    for (when, billing), known in product((("100 ms, as then", _BILLING_THEN), ("1 ms, as now", _BILLING_NOW)), bills):
        objects, reads_per_hour = known["objects"], _READS_PER_HOUR[known["objects"]]
        fleet = WarmFleet(
            functions=_PAPER["functions"],
            memory_bytes=_PAPER["memory_bytes"],
            code=_CODE,
            upkeep=_upkeep(backup=known["backup"], reads_per_hour=reads_per_hour),
            reads_per_hour=reads_per_hour,
        )
        bill = fleet.cost(_PAPER["hours"], prices, replace(billing, shard_call_seconds=_SHARD_SECONDS[objects]))
        dollars = known["dollars"] if billing is _BILLING_THEN else None
        parts = bill.warm_dollars, bill.backup_dollars, bill.read_dollars, bill.dollars, dollars
        more, fewer = difference(bill.dollars, dollars), redis_dollars / bill.dollars
        table.add(objects, _BACKUP[known["backup"]], when, *parts, more, fewer)
    names = [f"{known['objects']},\nback-up {_BACKUP[known['backup']]}" for known in bills] + ["ElastiCache"]
    theirs = [*(known["dollars"] for known in bills), redis_dollars]
    ours = table.cells("all $")
    bars = create_series(
        "simulated, billed by 100 ms", names, [*ours[: len(bills)], None], theirs, published_name="published"
    )
    bars.append(Series("simulated, billed by 1 ms", names, [*ours[len(bills) :], None], kind="bars"))
    return table, Panel("50 hours of 400 functions of 1.5 GB", "", "dollars", bars, y_log=True)


def _latencies(size: _SimulationSize) -> tuple[Table, Panel]:
    columns = ("code", "mean", "mean, exact", "mean, reference", "p99", "p99, reference", "room for data")
    table, series = Table("infinicache-latency", columns), []
    rng, quantiles = np.random.default_rng(_SEED), np.linspace(0.0, 1.0, 51)[1:-1]
    for code in _CODES:
        seconds = read_seconds(code, rng.exponential(size=(size.reads, code.shards)))
        mean, late = float(seconds.mean()), float(np.quantile(seconds, 0.99))
        exact = sum(1.0 / left for left in range(code.parity + 1, code.shards + 1))
        known = _REFERENCE_LATENCY.get(str(code), (None, None))
        table.add(str(code), mean, exact, known[0], late, known[1], code.data / code.shards)
        series.append(Series(str(code), np.quantile(seconds, quantiles).tolist(), quantiles.tolist()))
    title, part = "Reading the first 10 of n shards", "part of reads that is done"
    return table, Panel(title, "time / mean time of a shard", part, series, note="exponential times")


def _by_life(size: _SimulationSize, lives: Sequence[int]) -> tuple[Table, Panel]:
    table = Table("infinicache-lives", ("back-up", "together", "mean life min", "kept"))
    series = []
    for backup, together in product((True, False), (0.0, _FITTED_RECLAIM.whole_function_fraction)):
        upkeep, rates = _upkeep(backup=backup), []
        for minutes in lives:
            rates.append(
                _availability(
                    ReclaimModel(mean_life_seconds=60.0 * minutes, whole_function_fraction=together), upkeep, size
                )
            )
            table.add(_BACKUP[backup], together, minutes, rates[-1])
        if backup or not together:
            name = f"back-ups, {together:.0%} taken together" if backup else "no back-ups"
            series.append(Series(name, lives, rates))
    series.append(_published_rates(_FITTED_RECLAIM.mean_life_seconds / 60))
    title = "Objects that last an hour, 10+2 in 400 functions"
    note = "the published points are drawn at the mean life that was fitted to them"
    return table, Panel(title, "mean life of an instance (min)", _KEPT, series, x_log=True, note=note)


def _by_code(size: _SimulationSize) -> tuple[Table, Panel]:
    table, series = Table("infinicache-parity", ("back-up", "code", "kept")), []
    for name, backup in (("back-up every 5 min", True), ("no back-up", False)):
        rates = [_availability(_FITTED_RECLAIM, _upkeep(backup=backup), size, code) for code in _CODES]
        table.rows.extend((name, str(code), rate) for code, rate in zip(_CODES, rates, strict=True))
        series.append(Series(name, [code.parity for code in _CODES], rates))
    series.append(_published_rates(_CODE.parity))
    title = "Objects that last an hour, by parity, with the paper's reclaims"
    return table, Panel(title, "parity shards beside 10 of data", _KEPT, series)


def _published_rates(x: float) -> Series:
    rates = [_PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    return Series("published", [x, x], rates, is_published=True)


def run(quick: bool) -> ExperimentResult:
    """Run availability, cost and latency."""
    size = _QUICK if quick else _FULL
    bills, dollar_panel = _bills()
    latencies, latency_panel = _latencies(size)
    lives, life_panel = _by_life(size, _LIVES_MINUTES[1::2] if quick else _LIVES_MINUTES)
    parities, parity_panel = _by_code(size)
    return ExperimentResult(
        [_availability_table(size), bills, latencies, lives, parities],
        [life_panel, parity_panel, dollar_panel, latency_panel],
        _REMARKS,
    )


_REMARKS = (
    "An object-hour is kept if an object that is whole when the hour begins loses at most 2 of its 12 shards in it.",
    "Fitted: a mean life of 7.4 h to 81.4% without back-ups; 53% of reclaims that also take the back-up to 95.4%.",
    "If instances were reclaimed one by one, back-ups would keep all but a few of 100,000 object-hours.",
    "Fitted: 0.9 s for each of a back-up's two calls; 692 reads of large objects an hour, and 3,950 of all objects.",
    "The 3.24 dollars of calls that keep functions warm follow from the price list alone.",
    "The paper gives the bill of large objects with back-ups not in dollars, but as 1/31 of ElastiCache's.",
    "The bucket is durable: an object lost in the cache is read from the bucket again.",
)
