"""Our warm tier beside InfiniCache: what lasts an hour, and what that costs, if a platform takes instances at random.

A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory Cache" (FAST
2020), is what it stands beside: 400 functions of 1.5 GB for 50 hours.

A node's history is that of :mod:`stoker_sim._warm_fleet`. What is lost if reads put lost shards back follows
from it without drawing objects, since these are on random nodes; if they are put back at once it is played by
:mod:`stoker_sim._put_back`. Both are checked against the real proxy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product, starmap
from typing import NamedTuple

import numpy as np

from stoker._base.meter import Operation
from stoker._cost.prices import Prices
from stoker_sim._experiments import Cell, Experiment, Outcome, Panel, Series, Table, published
from stoker_sim._put_back import PutBackModel, put_back
from stoker_sim._warm_fleet import (
    Bill,
    NodeCalls,
    NodeLife,
    Reclaim,
    Served,
    Strike,
    lived,
    lost_between_reads,
    placed,
    strikes,
)
from stoker_warm._code import Code
from stoker_warm._upkeep import UpkeepConfig

PAPER = published("infinicache")
OBJECT_BYTES = 8 << 20
OBJECTS = 3_950
"""Each is read once an hour, so as many reads as the paper's largest bill is for."""
LINGER_SECONDS = 0.05
_SEED = 1


class Lives(NamedTuple):
    """How long instances live on average, and what part of reclaims takes both of a function."""

    minutes: int
    together: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a tier is run.

    Attributes:
        code: of its objects.
        warm_seconds: a node is called so long after the last contact.
        backup_seconds: its second instance is called so often; None for no second instances.
        put_back: objects at a time whose lost shards are put back from the bucket when a loss is noticed; 0: they are
            put back by the next read.
    """

    code: Code
    warm_seconds: float = 60.0
    backup_seconds: float | None = None
    put_back: int = 0

    def __str__(self) -> str:
        kept: list[str] = []
        if self.backup_seconds is not None:
            kept.append(f"back-up {self.backup_seconds / 60:.0f} min")
        if self.put_back:
            kept.append(f"put back, called every {self.warm_seconds:.0f} s")
        return ", ".join([str(self.code), *(kept or ["no back-up"])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a fleet holds for how long, and how often each object is read."""

    hours: int
    functions: int = PAPER["functions"]
    objects: int = OBJECTS
    read_seconds: float = 3600.0

    @property
    def reads(self) -> float:
        """Of objects."""
        return self.objects * self.hours * 3600.0 / self.read_seconds

    def shards_of_node(self, code: Code) -> float:
        """Return how many shards a node holds."""
        return self.objects * code.shards / self.functions

    def held_bytes(self, code: Code) -> float:
        """Return what a node holds."""
        return self.shards_of_node(code) * code.shard_bytes(OBJECT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of it.

    Attributes:
        object_hours: the part of object-hours in which the object could always be restored.
        whole_hours: the part of hours in which every object could.
        bill: for all.
        copied_bytes: that went through the proxy to put shards back and for back-ups.
        notice_seconds: the mean time until a loss was noticed, if shards are put back at once,
        back_seconds: and until they were back,
        bucket_bytes_per_second: and what was read for it.
    """

    object_hours: float
    whole_hours: float
    bill: Bill
    copied_bytes: float
    notice_seconds: float | None = None
    back_seconds: float | None = None
    bucket_bytes_per_second: float | None = None


class Case(NamedTuple):
    """A tier on a platform."""

    lives: Lives
    setting: Setting
    load: Load


@lru_cache(maxsize=16)
def _strikes(lives: Lives, functions: int, hours: int) -> list[list[Strike]]:
    """Return what the platform takes: the same for every setting."""
    reclaim, rng = Reclaim(mean_life_seconds=60.0 * lives.minutes, together=lives.together), random.Random(_SEED)  # noqa: S311 - a model's
    return [list(strikes(reclaim, hours * 3600.0, rng)) for _ in range(functions)]


def _histories(case: Case) -> list[NodeLife]:
    lives, setting, load = case
    upkeep = UpkeepConfig(
        warm_seconds=setting.warm_seconds, backup_seconds=setting.backup_seconds, peer_seconds=setting.backup_seconds
    )
    uses_per_second, rng = load.shards_of_node(setting.code) / load.read_seconds, random.Random(_SEED)  # noqa: S311
    live = partial(lived, upkeep, seconds=load.hours * 3600.0, uses_per_second=uses_per_second, rng=rng)
    struck = enumerate(_strikes(lives, load.functions, load.hours), start=1)
    return [live(strikes=each, offset=number / load.functions) for number, each in struck]


@lru_cache(maxsize=1024)
def found_of(case: Case) -> Found:
    """Return what comes of a tier; the platform takes the same instances at the same times from each."""
    histories = _histories(case)
    return _put_back_at_once(case, histories) if case.setting.put_back else _read(case, histories)


def _read(case: Case, histories: Sequence[NodeLife]) -> Found:
    """Return what comes of lost shards that the next read of their object puts back, each in a call of its own."""
    code, load = case.setting.code, case.load
    lost_seconds = [[at for at, _ in each.losses] for each in histories]
    lost = lost_between_reads(code, lost_seconds, load.hours, load.read_seconds)
    # What a node loses twice between two reads is put back once.
    refills = sum(len({int(at // load.read_seconds) for at in each}) for each in lost_seconds)
    repair = _CALLS.moving(refills * load.shards_of_node(code), code.shard_bytes(OBJECT_BYTES))
    copies = sum(2 * each.copies for each in histories) + refills
    return Found(
        object_hours=1.0 - float(lost.mean()),
        whole_hours=float(((1.0 - lost) ** load.objects).mean()),
        bill=_bill(case, histories, repair, gets=float(lost.sum()) * load.objects),
        copied_bytes=copies * load.held_bytes(code),
    )


def _put_back_at_once(case: Case, histories: Sequence[NodeLife]) -> Found:
    """Return what comes of lost shards that are put back from the bucket when a loss is noticed."""
    code, load = case.setting.code, case.load
    model = PutBackModel(at_once=case.setting.put_back, linger_seconds=LINGER_SECONDS)
    places = placed(code, load.objects, load.functions, np.random.default_rng(_SEED))
    played = put_back(model, code, places, histories, OBJECT_BYTES, load.hours * 3600.0)
    lost = played.lost_objects(load.hours)
    copied_bytes = played.shards * code.shard_bytes(OBJECT_BYTES)
    return Found(
        object_hours=1.0 - float(lost.mean()) / load.objects,
        whole_hours=float((lost == 0).mean()),
        bill=_bill(case, histories, Served(played.calls, played.write_seconds), gets=played.requests),
        copied_bytes=copied_bytes + 2 * sum(each.copies for each in histories) * load.held_bytes(code),
        notice_seconds=played.notice_seconds,
        back_seconds=played.back_seconds,
        bucket_bytes_per_second=played.read_bytes / load.hours / 3600.0,
    )


_CALLS = NodeCalls(memory_bytes=PAPER["memory_bytes"], linger_seconds=LINGER_SECONDS)
"""What calls of the paper's functions are billed for."""


def _bill(case: Case, histories: Sequence[NodeLife], repair: Served, gets: float) -> Bill:
    prices, code = Prices.load(), case.setting.code
    return _CALLS.bill(
        histories,
        case.load.held_bytes(code),
        prices.function("lambda"),
        read=_CALLS.moving(case.load.reads * code.shards, code.shard_bytes(OBJECT_BYTES)),
        repair=repair,
        bucket_dollars=gets * prices.store("s3://any").request_dollars(Operation.GET),
    )


def _least_dollars(case: Case) -> float:
    """Return what it takes at least to give every instance that is taken one successor with as many data bytes."""
    load = case.load
    data_bytes = load.objects * OBJECT_BYTES / load.functions
    taken = load.functions * load.hours * 60.0 / case.lives.minutes
    return taken * _CALLS.moving_dollars(data_bytes, Prices.load().function("lambda"))


_THEIR_DOLLARS = max(bill["dollars"] for bill in PAPER["bills"])
_THEIR_RATE = PAPER["availability"]["with_backup"]
_ASKED = (Lives(10), Lives(30), Lives(60))
_PAPERS = Lives(444, 0.53)
"""The lives with which InfiniCache's design has InfiniCache's availability: see the experiment ``infinicache``."""
_CODES = tuple(Code.parse(text) for text in ("4+2", "8+4", "10+2", "10+4", "10+6", "12+4", "4+4", "4+5"))
_NONE_LOST = f"hours with none of {OBJECTS:,} lost"
_DOLLARS = f"$ of {PAPER['hours']} h"
_FIGURES: dict[str, Callable[[Case], Cell]] = {
    "mean life min": lambda case: case.lives.minutes,
    "together": lambda case: case.lives.together,
    "setting": lambda case: str(case.setting),
    "code": lambda case: str(case.setting.code),
    "keep-warm s": lambda case: case.setting.warm_seconds,
    "back-up s": lambda case: case.setting.backup_seconds,
    "put back": lambda case: f"{case.setting.put_back} at once" if case.setting.put_back else "when read",
    "hours": lambda case: case.load.hours,
    "objects": lambda case: case.load.objects,
    "held by a node MB": lambda case: case.load.held_bytes(case.setting.code) / 1e6,
    "read every min": lambda case: round(case.load.read_seconds / 60.0),
    "object-hours kept": lambda case: found_of(case).object_hours,
    _NONE_LOST: lambda case: found_of(case).whole_hours,
    "hours with none lost": lambda case: found_of(case).whole_hours,
    "warm-up $": lambda case: found_of(case).bill.warm_dollars,
    "back-up $": lambda case: found_of(case).bill.backup_dollars,
    "repair $": lambda case: found_of(case).bill.repair_dollars,
    "bucket $": lambda case: found_of(case).bill.bucket_dollars,
    "reads $": lambda case: found_of(case).bill.read_dollars,
    "all $": lambda case: found_of(case).bill.dollars,
    _DOLLARS: lambda case: found_of(case).bill.dollars / case.load.hours * PAPER["hours"],
    "upkeep $": lambda case: found_of(case).bill.upkeep_dollars,
    "least upkeep $": _least_dollars,
    "through the proxy MB/s": lambda case: found_of(case).copied_bytes / case.load.hours / 3600.0 / 1e6,
    "noticed after s": lambda case: found_of(case).notice_seconds,
    "back after s more": lambda case: found_of(case).back_seconds,
    "bucket MB/s": lambda case: None if (rate := found_of(case).bucket_bytes_per_second) is None else rate / 1e6,
}
"""What tables tell of a case, by the name of its column."""
_SETTING = ("code", "keep-warm s", "back-up s", "put back")


def _table(name: str, columns: tuple[str, ...], cases: Iterable[Case]) -> Table:
    return Table(name, columns, [tuple(_FIGURES[column](case) for column in columns) for case in cases])


def _settings(codes: Sequence[Code], *, quick: bool) -> Iterable[Setting]:
    for code in codes:
        for backup_seconds in (None, 300.0, 60.0):
            for warm_seconds in (60.0,) if quick else (60.0, 300.0):
                yield Setting(code=code, warm_seconds=warm_seconds, backup_seconds=backup_seconds)
        yield Setting(code=code, warm_seconds=_EAGER_SECONDS, put_back=_AT_ONCE)


def _by_setting(cases: Iterable[Case]) -> Table:
    columns = (
        *("mean life min", "together", *_SETTING, "object-hours kept", _NONE_LOST),
        *("warm-up $", "back-up $", "repair $", "bucket $", "reads $", "all $"),
        *("noticed after s", "back after s more", "bucket MB/s"),
    )
    return _table("warm-tier", columns, cases)


def _cheapest(cases: Sequence[Case], hours: int) -> Table:
    """Return what costs least of all that is above InfiniCache's availability, and what comes next to it if none is."""
    rows: list[tuple[Cell, ...]] = []
    their_dollars = _THEIR_DOLLARS * hours / PAPER["hours"]
    measures: dict[str, Callable[[Case], float]] = {
        "object-hours": lambda case: found_of(case).object_hours,
        "hours with none lost": lambda case: found_of(case).whole_hours,
    }
    for lives, is_eager in product(dict.fromkeys(case.lives for case in cases), (False, True)):
        of = [case for case in cases if case.lives == lives and bool(case.setting.put_back) == is_eager]
        for measure, rate in measures.items():
            above = [case for case in of if rate(case) > _THEIR_RATE]
            best = min(above, key=lambda case: found_of(case).bill.dollars) if above else max(of, key=rate)
            dollars = found_of(best).bill.dollars
            named = [_FIGURES[column](best) for column in _SETTING]
            is_better = "yes" if above and dollars < their_dollars else "no"
            rows.append((lives.minutes, measure, *named, rate(best), dollars, is_better))
    columns = ("mean life min", "availability", *_SETTING, "reached", "all $", "above InfiniCache's for less")
    return Table("warm-tier-cheapest", columns, rows)


_EAGER_SECONDS = 20.0
"""Nodes are called so often where a loss is to be noticed soon."""
_AT_ONCE = 32
_THEIRS = Setting(code=Code(10, 2), backup_seconds=300.0)
_OFTEN = Setting(code=Code(10, 4), backup_seconds=60.0)
_EAGER = Setting(code=Code(10, 4), warm_seconds=_EAGER_SECONDS, put_back=_AT_ONCE)
_BEST = {
    Lives(10): Setting(code=Code(4, 5), warm_seconds=15.0, put_back=2 * _AT_ONCE),
    Lives(30): Setting(code=Code(4, 4), warm_seconds=_EAGER_SECONDS, put_back=_AT_ONCE),
    Lives(60): Setting(code=Code(4, 4), put_back=_AT_ONCE),
}
"""What costs little and loses next to nothing."""
_SHOWN = (_THEIRS, _OFTEN, *_BEST.values())


def _best(lives: Iterable[Lives], hours: int) -> Table:
    """Return the best settings over so many hours that their availability is sure; dollars as for the paper's hours."""
    columns = ("mean life min", *_SETTING, "hours", "object-hours kept", _NONE_LOST, _DOLLARS)
    return _table("warm-tier-best", columns, [Case(each, _BEST[each], Load(hours=hours)) for each in lives])


def _by_life(lives: Sequence[Lives], load: Load) -> list[Panel]:
    """Draw what is kept and what it costs by mean life; at InfiniCache's lives as points, since they are of a kind."""
    every = [[found_of(Case(each, setting, load)) for setting in _SHOWN] for each in (*lives, _PAPERS)]
    known = [PAPER["availability"][name] for name in ("with_backup", "without_backup")]
    note = f"InfiniCache's: {_PAPERS.minutes} min, {_PAPERS.together:.0%} of reclaims take the back-up, too"

    def panel(title: str, label: str, value: Callable[[Found], float], theirs: list[float]) -> Panel:
        values = [[value(found) for found in of] for of in every]
        x = [each.minutes for each in lives]
        series = [Series(str(one), x, y) for one, *y in zip(_SHOWN, *values[:-1], strict=True)]
        name = "the same at InfiniCache's lives"
        series.append(Series(name, [_PAPERS.minutes] * len(_SHOWN), values[-1], kind="points"))
        if theirs:
            at = [_PAPERS.minutes] * len(theirs)
            series.append(Series("InfiniCache, published", at, theirs, is_published=True))
        return Panel(title, "mean life of an instance (min)", label, series, x_log=True, note=note)

    paid = sorted(bill["dollars"] for bill in PAPER["bills"])
    whole, hours = f"Hours in which none of {load.objects:,} objects is lost", f"{load.hours} hours of {load.functions}"
    return [
        panel("Objects that last an hour", "part of object-hours kept", lambda found: found.object_hours, known),
        panel(whole, "part of hours", lambda found: found.whole_hours, []),
        panel(f"{hours} functions of 1.5 GB", "dollars", lambda found: found.bill.dollars, [paid[0], paid[-1]]),
    ]


def _by_objects(counts: Sequence[int], lives: Sequence[Lives], load: Load) -> tuple[Table, Panel]:
    """Return both availabilities, the bill and the least bill there can be, by how much the tier holds."""
    cases, series = list[Case](), []
    for each in lives:
        for setting in (_OFTEN, _BEST.get(each, _EAGER)):
            of = [Case(each, setting, replace(load, objects=objects)) for objects in counts]
            cases += of
            if each is not _PAPERS:
                whole = [found_of(case).whole_hours for case in of]
                series.append(Series(f"{setting}, {each.minutes} min", counts, whole))
    columns = (
        *("mean life min", "setting", "objects", "held by a node MB", "object-hours kept", "hours with none lost"),
        *("upkeep $", "least upkeep $", "through the proxy MB/s"),
    )
    title = "Hours in which no object is lost, by how many there are"
    panel = Panel(title, "objects of 8 MiB", "part of hours", series, x_log=True)
    return _table("warm-tier-objects", columns, cases), panel


def _by_reads(minutes: Sequence[int], lives: Sequence[Lives], hours: int) -> Table:
    """Return what is kept if objects are read more often, and lost shards put back as often."""
    settings = (_THEIRS, _OFTEN, Setting(code=Code(10, 4)))
    loads = [Load(hours=hours, read_seconds=60.0 * every) for every in minutes]
    columns = ("mean life min", "setting", "read every min", "object-hours kept", _NONE_LOST, "upkeep $")
    return _table("warm-tier-reads", columns, starmap(Case, product(lives, settings, loads)))


def _run(quick: bool) -> Outcome:
    load = Load(hours=2 if quick else PAPER["hours"])
    all_lives = (*_ASKED[1 if quick else 0 :], _PAPERS)
    settings = list(_settings((Code(10, 2), Code(4, 4)) if quick else _CODES, quick=quick))
    tried = [Case(lives, setting, load) for lives, setting in product(all_lives, settings)]
    between = () if quick else (Lives(120), Lives(240))
    panels = _by_life((*all_lives[:-1], *between), load)
    by_objects, objects_panel = _by_objects((100, 1_000) if quick else _COUNTS, all_lives, load)
    by_reads = _by_reads((20, 60) if quick else (5, 10, 20, 30, 60), all_lives, load.hours)
    best = _best(all_lives[:-1], 2 if quick else _BEST_HOURS)
    return Outcome(
        [_by_setting(tried), best, _cheapest(tried, load.hours), by_objects, by_reads],
        [*panels, objects_panel],
        _REMARKS,
    )


_COUNTS = (100, 1_000, OBJECTS)
_BEST_HOURS = 100
_REMARKS = (
    "Object-hours: an object that is whole when the hour begins can be restored all through it, as in 'infinicache'.",
    f"Hours with none lost: the same of all {OBJECTS:,} objects at once. It falls with their number.",
    "Put back when read: by the read of each object once an hour.",
    "Put back at once: so many objects at a time, from the bucket, when the proxy notices a loss.",
    "What nodes lose and are called for, and what is put back when, is that of the real proxy in virtual time.",
    f"Assumed: {LINGER_SECONDS * 1000:.0f} ms of lingering, 75 MB/s a function, 0.3 s to start one, 25 ms for a call.",
    "Assumed of the bucket: 20 ms to the first byte, 90 MB/s a connection.",
    "All that is copied is paid for at both ends.",
)


EXPERIMENTS = (
    Experiment(
        "warm-tier",
        "Our warm tier beside InfiniCache: what lasts an hour, and dollars, if instances are taken at random",
        PAPER["source"],
        _run,
    ),
)
