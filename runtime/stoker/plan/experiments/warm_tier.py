"""Our warm tier beside InfiniCache: what lasts an hour, and what that costs, if a platform takes instances at random.

A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory Cache" (FAST
2020), is what it stands beside: 400 functions of 1.5 GB for 50 hours. A node's history is that of
:mod:`stoker.plan.warm_node`, which is checked against the real proxy; objects are on random nodes, so what part of them
is lost follows without drawing any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.plan.erasure import lost_between_reads, lost_while_down
from stoker.plan.experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker.plan.experiments.published import published
from stoker.plan.reclaim import Reclaim, Strike, strikes
from stoker.plan.warm_fleet import Bill, NodeCalls
from stoker.plan.warm_node import NodeLife, lived
from stoker.prices import Operation, Prices
from stoker.warm.code import Code
from stoker.warm.upkeep import UpkeepConfig

__all__ = ["EXPERIMENTS"]

_PAPER = published("infinicache")
_THEIR_DOLLARS = max(bill["dollars"] for bill in _PAPER["bills"])
_THEIR_RATE = _PAPER["availability"]["with_backup"]
_OBJECT_BYTES = 8 << 20
_OBJECTS = 3_950
"""Each is read once an hour, so as many reads as the paper's largest bill is for."""
_FULL_OBJECTS = 40_000
"""Cut into 10+4 shards they leave a quarter of the functions' memory to the process."""
_LINGER_SECONDS = 0.05
_SEED = 1


class _Lives(NamedTuple):
    """How long instances live on average, and what part of reclaims takes both of a function."""

    minutes: int
    together: float = 0.0


_ASKED = (_Lives(10), _Lives(30), _Lives(60))
_PAPERS = _Lives(444, 0.53)
"""The lives with which InfiniCache's design has InfiniCache's availability: see the experiment ``infinicache``."""
_CODES = (Code(4, 2), Code(10, 1), Code(10, 2), Code(10, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """How a tier is run.

    Attributes:
        code: of its objects.
        warm_seconds: a node is called so long after the last contact.
        backup_seconds: its second instance is called so often; None for no second instances.
        is_eager: whether lost shards are put back from the bucket when a loss is noticed; else by the next read.
    """

    code: Code = _CODES[2]
    warm_seconds: float = 60.0
    backup_seconds: float | None = 300.0
    is_eager: bool = False

    def __str__(self) -> str:
        backup = "no back-up" if self.backup_seconds is None else f"back-up {self.backup_seconds / 60:.0f} min"
        return f"{self.code}, {backup}{', put back at once' if self.is_eager else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a fleet holds for how long, and how often each object is read."""

    hours: int
    functions: int = _PAPER["functions"]
    objects: int = _OBJECTS
    read_seconds: float = 3600.0

    def held_bytes(self, code: Code) -> float:
        """Return what a node holds."""
        return self.objects * code.shards * code.shard_bytes(_OBJECT_BYTES) / self.functions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What came of it: ``float64 [hours]``, the part of objects that each hour loses; the bill, and bytes copied."""

    lost: NDArray[np.float64]
    bill: Bill
    copied_bytes: float

    @property
    def object_hours(self) -> float:
        """The part of object-hours in which the object could always be restored."""
        return 1.0 - float(self.lost.mean())

    def whole_hours(self, objects: int) -> float:
        """The part of hours in which every one of so many objects could."""
        return float(((1.0 - self.lost) ** objects).mean())


@lru_cache(maxsize=16)
def _strikes(lives: _Lives, functions: int, hours: int) -> list[list[Strike]]:
    """Return what the platform takes: the same for every setting."""
    reclaim, rng = Reclaim(mean_life_seconds=60.0 * lives.minutes, together=lives.together), random.Random(_SEED)  # noqa: S311 - a model's
    return [list(strikes(reclaim, hours * 3600.0, rng)) for _ in range(functions)]


def _histories(setting: _Setting, lives: _Lives, load: _Load) -> list[NodeLife]:
    upkeep = UpkeepConfig(
        warm_seconds=setting.warm_seconds, backup_seconds=setting.backup_seconds, peer_seconds=setting.backup_seconds
    )
    uses_per_second, rng = load.objects * setting.code.shards / load.functions / load.read_seconds, random.Random(_SEED)  # noqa: S311
    return [
        lived(
            upkeep,
            each,
            load.hours * 3600.0,
            offset=(node + 1) / load.functions,
            uses_per_second=uses_per_second,
            rng=rng,
        )
        for node, each in enumerate(_strikes(lives, load.functions, load.hours))
    ]


def _found(setting: _Setting, lives: _Lives, load: _Load) -> _Found:
    code, prices = setting.code, Prices.load()
    histories, held_bytes = _histories(setting, lives, load), load.held_bytes(code)
    calls = NodeCalls(memory_bytes=_PAPER["memory_bytes"], linger_seconds=_LINGER_SECONDS)
    shards_of_node = load.objects * code.shards / load.functions
    if setting.is_eager:
        back_seconds = held_bytes / calls.bytes_per_second
        down = [[(lost, noticed + back_seconds) for lost, noticed in each.losses] for each in histories]
        lost = lost_while_down(code, down, load.hours)
        gets = shards_of_node * prices.store("s3://any").request_dollars(Operation.GET)
    else:
        lost = lost_between_reads(
            code, [[at for at, _ in each.losses] for each in histories], load.hours, load.read_seconds
        )
        gets = 0.0
    read = load.objects * load.hours * 3600.0 / load.read_seconds * code.shards, float(code.shard_bytes(_OBJECT_BYTES))
    copies = sum(2 * each.copies + len(each.losses) for each in histories)
    bill = calls.bill(histories, held_bytes, prices.function("lambda"), gets=gets, read=read)
    return _Found(lost=lost, bill=bill, copied_bytes=copies * held_bytes)


def _settings(codes: Sequence[Code], warms: Sequence[float]) -> list[_Setting]:
    return [
        _Setting(code=code, warm_seconds=warm_seconds, backup_seconds=backup_seconds, is_eager=is_eager)
        for code in codes
        for is_eager in (False, True)
        for backup_seconds in (None, 300.0, 60.0)
        for warm_seconds in warms
    ]


_Tried = dict[_Lives, list[tuple[_Setting, _Found]]]


def _by_setting(tried: _Tried) -> Table:
    rows = [
        (lives.minutes, lives.together, *_named(setting), *_figures(found))
        for lives, each in tried.items()
        for setting, found in each
    ]
    columns = ("mean life min", "together", *_SETTING_COLUMNS, *_FIGURE_COLUMNS)
    return Table(name="warm-tier", columns=columns, rows=rows)


_SETTING_COLUMNS = ("code", "keep-warm s", "back-up s", "put back")
_FIGURE_COLUMNS = (
    *("object-hours kept", f"hours with none of {_OBJECTS:,} lost"),
    *("warm-up $", "back-up $", "repair $", "reads $", "all $"),
)


def _named(setting: _Setting) -> tuple[Cell, ...]:
    put_back = "at once" if setting.is_eager else "when read"
    return str(setting.code), setting.warm_seconds, setting.backup_seconds, put_back


def _figures(found: _Found) -> tuple[Cell, ...]:
    bill = found.bill
    parts = bill.warm_dollars, bill.backup_dollars, bill.repair_dollars, bill.read_dollars, bill.dollars
    return found.object_hours, found.whole_hours(_OBJECTS), *parts


def _cheapest(tried: _Tried, hours: int) -> Table:
    """Return what costs least of all that is above InfiniCache's availability, and what comes next to it if none is."""
    rows: list[tuple[Cell, ...]] = []
    their_dollars = _THEIR_DOLLARS * hours / _PAPER["hours"]
    for lives, each in tried.items():
        for put_back in ("when read", "at once"):
            of = [(setting, found) for setting, found in each if setting.is_eager == (put_back == "at once")]
            for measure, rate in (
                ("object-hours", [found.object_hours for _, found in of]),
                ("hours with none lost", [found.whole_hours(_OBJECTS) for _, found in of]),
            ):
                above = [at for at, each_rate in enumerate(rate) if each_rate > _THEIR_RATE]
                dollars = [found.bill.dollars for _, found in of]
                best = min(above, key=dollars.__getitem__) if above else max(range(len(of)), key=rate.__getitem__)
                is_better = bool(above) and dollars[best] < their_dollars
                figures = (rate[best], dollars[best], "yes" if is_better else "no")
                rows.append((lives.minutes, put_back, measure, *_named(of[best][0])[:3], *figures))
    columns = (
        *("mean life min", "put back", "availability", *_SETTING_COLUMNS[:3], "reached", "all $"),
        "above InfiniCache's for less",
    )
    return Table(name="warm-tier-cheapest", columns=columns, rows=rows)


_SHOWN = (
    _Setting(),
    _Setting(code=_CODES[3], backup_seconds=60.0),
    _Setting(backup_seconds=None, is_eager=True),
    _Setting(code=_CODES[3], backup_seconds=None, is_eager=True),
    _Setting(code=_CODES[3], is_eager=True),
)
"""InfiniCache's own; the best of what the proxy does; and what it would gain by putting shards back unasked."""


def _by_life(lives: Sequence[_Lives], load: _Load) -> list[Panel]:
    """Draw what is kept and what it costs by mean life; at InfiniCache's lives as points, since they are of a kind."""
    every = [[_found(setting, each, load) for setting in _SHOWN] for each in (*lives, _PAPERS)]
    known = [_PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    hours = f"{load.hours} hours of {load.functions} functions of 1.5 GB"

    def panel(title: str, label: str, value: Callable[[_Found], float], theirs: list[float]) -> Panel:
        values = [[value(found) for found in of] for of in every]
        x = [each.minutes for each in lives]
        series = [Series(name=str(one), x=x, y=y) for one, *y in zip(_SHOWN, *values[:-1], strict=True)]
        name = "the same at InfiniCache's lives"
        series.append(Series(name=name, x=[_PAPERS.minutes] * len(_SHOWN), y=values[-1], kind="points"))
        if theirs:
            at = [_PAPERS.minutes] * len(theirs)
            series.append(Series(name="InfiniCache, published", x=at, y=theirs, is_published=True))
        note = f"InfiniCache's lives: {_PAPERS.minutes} min, {_PAPERS.together:.0%} of reclaims take the back-up, too"
        return Panel(
            title=title,
            x_label="mean life of an instance (min)",
            y_label=label,
            series=series,
            x_log=True,
            note=note,
        )

    def whole(found: _Found) -> float:
        return found.whole_hours(load.objects)

    paid = sorted(bill["dollars"] for bill in _PAPER["bills"])
    return [
        panel("Objects that last an hour", "part of object-hours kept", lambda found: found.object_hours, known),
        panel(f"Hours in which none of {load.objects:,} objects is lost", "part of hours", whole, []),
        panel(hours, "dollars", lambda found: found.bill.dollars, [paid[0], paid[-1]]),
    ]


def _by_objects(counts: Sequence[int], lives: Sequence[_Lives], load: _Load) -> tuple[Table, Panel]:
    """Return both availabilities, the bill and the least bill there can be, by how much the tier holds."""
    rows: list[tuple[Cell, ...]] = []
    series = []
    for each in lives:
        for setting in (_SHOWN[1], _SHOWN[4]):
            whole = []
            for objects in counts:
                of = _Load(hours=load.hours, functions=load.functions, objects=objects)
                found = _found(setting, each, of)
                whole.append(found.whole_hours(objects))
                copied = found.copied_bytes / load.hours / 3600.0 / 1e6
                figures = (found.object_hours, whole[-1], found.bill.upkeep_dollars, _least_dollars(each, of), copied)
                rows.append((each.minutes, str(setting), objects, of.held_bytes(setting.code) / 1e6, *figures))
            if each is not _PAPERS:
                series.append(Series(name=f"{setting}, {each.minutes} min", x=counts, y=whole))
    columns = (
        *("mean life min", "setting", "objects", "held by a node MB"),
        *("object-hours kept", "hours with none lost", "upkeep $", "least upkeep $", "through the proxy MB/s"),
    )
    panel = Panel(
        title="Hours in which no object is lost, by how many there are",
        x_label="objects of 8 MiB",
        y_label="part of hours",
        series=series,
        x_log=True,
    )
    return Table(name="warm-tier-objects", columns=columns, rows=rows), panel


def _by_reads(minutes: Sequence[int], lives: Sequence[_Lives], hours: int) -> Table:
    """Return what is kept if objects are read more often, and lost shards put back as often."""
    rows: list[tuple[Cell, ...]] = []
    for each in lives:
        for setting in (_SHOWN[0], _SHOWN[1], _Setting(code=_CODES[3], backup_seconds=None)):
            for every in minutes:
                found = _found(setting, each, _Load(hours=hours, read_seconds=60.0 * every))
                figures = found.object_hours, found.whole_hours(_OBJECTS), found.bill.upkeep_dollars
                rows.append((each.minutes, str(setting), every, *figures))
    columns = (
        *("mean life min", "setting", "read every min"),
        *("object-hours kept", f"hours with none of {_OBJECTS:,} lost", "upkeep $"),
    )
    return Table(name="warm-tier-reads", columns=columns, rows=rows)


def _least_dollars(lives: _Lives, load: _Load) -> float:
    """Return what it takes at least to give every instance that is taken one successor with as many data bytes."""
    calls = NodeCalls(memory_bytes=_PAPER["memory_bytes"], linger_seconds=0.0)
    data_bytes = load.objects * _OBJECT_BYTES / load.functions
    taken = load.functions * load.hours * 60.0 / lives.minutes
    return taken * calls.moving_dollars(data_bytes, Prices.load().function("lambda"))


def _run(quick: bool) -> Outcome:
    load = _Load(hours=4 if quick else _PAPER["hours"])
    settings = _settings(_CODES[2:] if quick else _CODES, (60.0,) if quick else (60.0, 300.0))
    all_lives = (*_ASKED[1 if quick else 0 :], _PAPERS)
    tried = {lives: [(setting, _found(setting, lives, load)) for setting in settings] for lives in all_lives}
    between = () if quick else (_Lives(120), _Lives(240))
    panels = _by_life((*all_lives[:-1], *between), load)
    counts = (100, 3_950) if quick else (100, 1_000, _OBJECTS, 10_000, _FULL_OBJECTS)
    by_objects, objects_panel = _by_objects(counts, all_lives[-2:] if quick else all_lives, load)
    by_reads = _by_reads((20, 60) if quick else (5, 10, 20, 30, 60), all_lives, load.hours)
    return Outcome(
        tables=[_by_setting(tried), _cheapest(tried, load.hours), by_objects, by_reads],
        panels=[*panels, objects_panel],
        remarks=_REMARKS,
    )


_REMARKS = (
    "Object-hours: an object that is whole when the hour begins can be restored all through it, as in 'infinicache'.",
    f"Hours with none lost: the same of all {_OBJECTS:,} objects at once. It falls with their number.",
    "Put back when read: by the read of each object once an hour, which is what the proxy does.",
    "Put back at once: from the bucket, when the proxy notices a loss. The proxy does not do that.",
    "What nodes lose and are called for is that of the real proxy in virtual time, within 2%.",
    f"Assumed: {_LINGER_SECONDS * 1000:.0f} ms of lingering, 75 MB/s a function, 0.3 s to start one, 25 ms for a call.",
    "All that is copied is paid for at both ends.",
)

EXPERIMENTS = {
    "warm-tier": Experiment(
        name="warm-tier",
        title="Our warm tier beside InfiniCache: what lasts an hour, and dollars, if instances are taken at random",
        source=_PAPER["source"],
        run=_run,
    )
}
"""By name."""
