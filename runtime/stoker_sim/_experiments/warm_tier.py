"""Our warm tier beside InfiniCache: availability and cost if a platform reclaims instances at random.

Compared with A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory
Cache" (FAST 2020): 400 functions of 1.5 GB for 50 hours.

The history of a node is that of :mod:`stoker_sim._warm_fleet`, which is checked against the real proxy. Expected losses
follow from it without drawing objects, since these are on random nodes: each read rewrites the shards lost since the
last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

from stoker._base.meter import Operation
from stoker._cost.prices import Prices
from stoker_sim._experiments import Cell, ExperimentResult, Panel, Series, Table, load_paper
from stoker_sim._warm_fleet import (
    FleetCost,
    NodeCalls,
    NodeLife,
    draw_reclaims,
    loss_by_hour,
    loss_by_read,
    simulate_life,
)
from stoker_warm._erasure import ErasureCode

PAPER = load_paper("infinicache")
OBJECT_BYTES = 8 << 20
OBJECTS = 3_950
"""Number of objects; with one read an hour each, the reads are those of the paper's largest bill."""
LINGER_SECONDS = 0.05
KEEP_WARM_SECONDS = 60.0
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Size of a fleet, the objects it holds, the duration, and the interval of the reads of each object."""

    hours: int
    functions: int = PAPER["functions"]
    objects: int = OBJECTS
    read_seconds: float = 3600.0

    @property
    def reads(self) -> float:
        """Number of reads of objects."""
        return self.objects * self.hours * 3600.0 / self.read_seconds

    def shards_of_node(self, code: ErasureCode) -> float:
        """Return the mean number of shards on a node."""
        return self.objects * code.shards / self.functions

    def held_bytes(self, code: ErasureCode) -> float:
        """Return the mean number of bytes on a node."""
        return self.shards_of_node(code) * code.shard_bytes(OBJECT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """Availability and cost of a tier.

    Attributes:
        reads: fraction of reads whose object could be restored, 0 to 1.
        object_hours: fraction of object-hours in which the object could be restored at all times, 0 to 1.
        whole_hours: fraction of hours in which all objects could be restored, 0 to 1.
        cost: cost of the tier.
    """

    reads: float
    object_hours: float
    whole_hours: float
    cost: FleetCost


class TierCase(NamedTuple):
    """A simulated tier: mean life of an instance in minutes, erasure code, and load."""

    life_minutes: int
    code: ErasureCode
    load: Load


@lru_cache(maxsize=16)
def _reclaim_seconds(life_minutes: int, functions: int, hours: int) -> list[list[float]]:
    """Return for each function the times of its reclaims, in seconds; they are the same in all cases."""
    rng = random.Random(_SEED)  # noqa: S311 - a model's
    return [list(draw_reclaims(60.0 * life_minutes, hours * 3600.0, rng)) for _ in range(functions)]


def _simulate_lives(case: TierCase) -> list[NodeLife]:
    load, rng = case.load, random.Random(_SEED)  # noqa: S311 - a model's
    uses_per_second = load.shards_of_node(case.code) / load.read_seconds
    live = partial(
        simulate_life, KEEP_WARM_SECONDS, seconds=load.hours * 3600.0, uses_per_second=uses_per_second, rng=rng
    )
    reclaimed = enumerate(_reclaim_seconds(case.life_minutes, load.functions, load.hours), start=1)
    return [live(each, offset=number / load.functions) for number, each in reclaimed]


@lru_cache(maxsize=1024)
def simulate_case(case: TierCase) -> TierResult:
    """Simulate a tier and return its availability and cost; reclaims come at the same times in all cases."""
    code, load, histories = case.code, case.load, _simulate_lives(case)
    lost_seconds = [[at for at, _ in each.losses] for each in histories]
    lost = loss_by_hour(code, lost_seconds, load.hours, load.read_seconds)
    at_reads = loss_by_read(code, lost_seconds, round(load.hours * 3600.0 / load.read_seconds), load.read_seconds)
    # Shards that a node loses twice between two reads are rewritten once.
    refills = sum(len({int(at // load.read_seconds) for at in each}) for each in lost_seconds)
    rebuild = _CALLS.shard_calls(refills * load.shards_of_node(code), code.shard_bytes(OBJECT_BYTES))
    prices = Prices.load()
    get_dollars = prices.store("s3://any").request_dollars(Operation.GET)
    return TierResult(
        reads=1.0 - float(at_reads.mean()),
        object_hours=1.0 - float(lost.mean()),
        whole_hours=float(((1.0 - lost) ** load.objects).mean()),
        cost=_CALLS.cost(
            histories,
            prices.function("lambda"),
            read=_CALLS.shard_calls(load.reads * code.shards, code.shard_bytes(OBJECT_BYTES)),
            rebuild=rebuild,
            bucket_dollars=float(at_reads.sum()) * load.objects * get_dollars,
        ),
    )


_CALLS = NodeCalls(memory_bytes=PAPER["memory_bytes"], linger_seconds=LINGER_SECONDS)
"""Billed durations of calls, with the memory of the paper's functions."""
_THEIR_DOLLARS = max(bill["dollars"] for bill in PAPER["bills"])
_THEIR_RATE = PAPER["availability"]["with_backup"]
_LIFE_MINUTES = (10, 30, 60)
_FITTED_LIFE_MINUTES = 444
"""Mean life in minutes that fits InfiniCache's availability; see the experiment ``infinicache``."""
_CODES = tuple(ErasureCode.parse(text) for text in ("4+2", "8+4", "10+2", "10+4", "10+6", "12+4", "4+4", "4+5"))
_READ_MINUTES = (5, 10, 20, 60)
_NONE_LOST = f"hours with none of {OBJECTS:,} lost"
_FIGURES: dict[str, Callable[[TierCase], Cell]] = {
    "mean life min": lambda case: case.life_minutes,
    "code": lambda case: str(case.code),
    "read every min": lambda case: round(case.load.read_seconds / 60.0),
    "objects": lambda case: case.load.objects,
    "held by a node MB": lambda case: case.load.held_bytes(case.code) / 1e6,
    "reads served": lambda case: simulate_case(case).reads,
    "object-hours kept": lambda case: simulate_case(case).object_hours,
    _NONE_LOST: lambda case: simulate_case(case).whole_hours,
    "hours with none lost": lambda case: simulate_case(case).whole_hours,
    "warm-up $": lambda case: simulate_case(case).cost.warm_dollars,
    "greet $": lambda case: simulate_case(case).cost.inventory_dollars,
    "rebuild $": lambda case: simulate_case(case).cost.rebuild_dollars,
    "bucket $": lambda case: simulate_case(case).cost.bucket_dollars,
    "reads $": lambda case: simulate_case(case).cost.read_dollars,
    "upkeep $": lambda case: simulate_case(case).cost.upkeep_dollars,
    "all $": lambda case: simulate_case(case).cost.dollars,
}
"""Column name → function from a case to its cell."""


def _table(name: str, columns: tuple[str, ...], cases: Iterable[TierCase]) -> Table:
    return Table(name, columns, [tuple(_FIGURES[column](case) for column in columns) for case in cases])


def _by_case(cases: Iterable[TierCase]) -> Table:
    columns = (
        *("mean life min", "read every min", "code", "reads served", "object-hours kept", _NONE_LOST),
        *("warm-up $", "greet $", "rebuild $", "bucket $", "reads $", "upkeep $", "all $"),
    )
    return _table("warm-tier", columns, cases)


def _cheapest(cases: Sequence[TierCase], hours: int) -> Table:
    """Return the cheapest case above InfiniCache's availability, or else the one with the highest availability."""
    columns = ("mean life min", "read every min", "code", "object-hours kept", "all $", "upkeep $")
    table = Table("warm-tier-cheapest", (*columns, "above InfiniCache's for less"))
    their_dollars = _THEIR_DOLLARS * hours / PAPER["hours"]
    for minutes, read_seconds in dict.fromkeys((case.life_minutes, case.load.read_seconds) for case in cases):
        group = [case for case in cases if (case.life_minutes, case.load.read_seconds) == (minutes, read_seconds)]
        above = [case for case in group if simulate_case(case).object_hours > _THEIR_RATE]
        if above:
            best = min(above, key=lambda case: simulate_case(case).cost.dollars)
        else:
            best = max(group, key=lambda case: simulate_case(case).object_hours)
        result = simulate_case(best)
        is_better = "yes" if above and result.cost.dollars < their_dollars else "no"
        cells = minutes, round(read_seconds / 60.0), str(best.code), result.object_hours, result.cost.dollars
        table.add(*cells, result.cost.upkeep_dollars, is_better)
    return table


_DRAWN_CASES = (
    (ErasureCode(10, 2), 60),
    (ErasureCode(10, 4), 60),
    (ErasureCode(10, 4), 10),
    (ErasureCode(4, 4), 60),
    (ErasureCode(4, 4), 10),
    (ErasureCode(4, 5), 5),
)
"""Drawn codes, with minutes between reads."""


def _by_life(lives: Sequence[int], load: Load) -> list[Panel]:
    """Return panels of availability and cost by mean life."""
    loads = [(code, replace(load, read_seconds=60.0 * minutes)) for code, minutes in _DRAWN_CASES]
    names = [f"{code}, read every {minutes} min" for code, minutes in _DRAWN_CASES]
    known = [PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    paid = sorted(bill["dollars"] for bill in PAPER["bills"])

    def panel(title: str, label: str, value: Callable[[TierResult], float], theirs: list[float]) -> Panel:
        series = [
            Series(name, lives, [value(simulate_case(TierCase(life, *each))) for life in lives])
            for name, each in zip(names, loads, strict=True)
        ]
        if theirs:
            series.append(
                Series("InfiniCache, published", [_FITTED_LIFE_MINUTES] * len(theirs), theirs, is_published=True)
            )
        return Panel(title, "mean life of an instance (min)", label, series, x_log=True)

    whole = f"Hours in which none of {load.objects:,} objects is lost"
    hours = f"{load.hours} hours of {load.functions}"
    return [
        panel("Objects that last an hour", "part of object-hours kept", lambda result: result.object_hours, known),
        panel(whole, "part of hours", lambda result: result.whole_hours, []),
        panel(f"{hours} functions of 1.5 GB", "dollars", lambda result: result.cost.dollars, [paid[0], paid[-1]]),
    ]


def _by_objects(counts: Sequence[int], lives: Sequence[int], load: Load) -> tuple[Table, Panel]:
    """Return both availabilities and the cost by number of objects."""
    cases, series = list[TierCase](), []
    for life, code in product(lives, (ErasureCode(10, 4), ErasureCode(4, 4))):
        group = [TierCase(life, code, replace(load, objects=objects, read_seconds=600.0)) for objects in counts]
        cases += group
        whole = [simulate_case(case).whole_hours for case in group]
        series.append(Series(f"{code}, {life} min", counts, whole))
    columns = (
        *("mean life min", "code", "objects", "held by a node MB", "object-hours kept", "hours with none lost"),
        *("upkeep $", "all $"),
    )
    title = "Hours in which no object is lost, by how many there are, read every 10 min"
    panel = Panel(title, "objects of 8 MiB", "part of hours", series, x_log=True)
    return _table("warm-tier-objects", columns, cases), panel


def run(quick: bool) -> ExperimentResult:
    """Run our tier and return its availability and cost."""
    load = Load(hours=2 if quick else PAPER["hours"])
    lives = (*_LIFE_MINUTES[1 if quick else 0 :], _FITTED_LIFE_MINUTES)
    codes = (ErasureCode(10, 2), ErasureCode(4, 4)) if quick else _CODES
    read = [replace(load, read_seconds=60.0 * minutes) for minutes in _READ_MINUTES[1 if quick else 0 :]]
    cases = [TierCase(life, code, each) for life, each, code in product(lives, read, codes)]
    between = () if quick else (120, 240)
    panels = _by_life((*lives[:-1], *between, lives[-1]), load)
    by_objects, objects_panel = _by_objects((100, 1_000) if quick else _COUNTS, lives, load)
    return ExperimentResult(
        [_by_case(cases), _cheapest(cases, load.hours), by_objects], [*panels, objects_panel], _REMARKS
    )


_COUNTS = (100, 1_000, OBJECTS)
_REMARKS = (
    "Object-hours: an object that is whole when the hour begins can be restored throughout it, as in 'infinicache'.",
    f"Hours with none lost: all {OBJECTS:,} objects can be restored throughout. The fraction falls with their number.",
    "Reads served: by the tier. A lost object is read from the bucket by one GET and stored again.",
    "A read rewrites the shards that its object has lost since the last read. Nothing else does.",
    "Losses and calls of nodes are those of the real proxy in virtual time.",
    f"Assumed: {LINGER_SECONDS * 1000:.0f} ms of lingering, 75 MB/s per function, 0.3 s to start one, 25 ms per call.",
)
