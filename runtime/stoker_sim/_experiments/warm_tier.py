"""Our warm tier beside InfiniCache: what lasts an hour, and what that costs, if a platform takes instances at random.

A. Wang et al., "InfiniCache: Exploiting Ephemeral Serverless Functions to Build a Cost-Effective Memory Cache" (FAST
2020), is what it stands beside: 400 functions of 1.5 GB for 50 hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stoker._cost.prices import Prices
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._experiments.warm_tier_runs import (
    LINGER_SECONDS,
    OBJECT_BYTES,
    OBJECTS,
    PAPER,
    Found,
    Lives,
    Load,
    Setting,
    found_of,
    node_calls,
)
from stoker_warm._code import Code

__all__ = ["EXPERIMENTS"]

_THEIR_DOLLARS = max(bill["dollars"] for bill in PAPER["bills"])
_THEIR_RATE = PAPER["availability"]["with_backup"]
_ASKED = (Lives(10), Lives(30), Lives(60))
_PAPERS = Lives(444, 0.53)
"""The lives with which InfiniCache's design has InfiniCache's availability: see the experiment ``infinicache``."""
_CODES = tuple(Code.parse(text) for text in ("4+2", "8+4", "10+2", "10+4", "10+6", "12+4", "4+4", "4+5"))
_Tried = dict[Lives, list[tuple[Setting, Found]]]
_SETTING_COLUMNS = ("code", "keep-warm s", "back-up s", "put back")
_FIGURE_COLUMNS = (
    *("object-hours kept", f"hours with none of {OBJECTS:,} lost"),
    *("warm-up $", "back-up $", "repair $", "bucket $", "reads $", "all $"),
    *("noticed after s", "back after s more", "bucket MB/s"),
)


def _settings(codes: Sequence[Code], *, quick: bool) -> Iterable[Setting]:
    for code in codes:
        for backup_seconds in (None, 300.0, 60.0):
            for warm_seconds in (60.0,) if quick else (60.0, 300.0):
                yield Setting(code=code, warm_seconds=warm_seconds, backup_seconds=backup_seconds)
        yield Setting(code=code, warm_seconds=_EAGER_SECONDS, put_back=_AT_ONCE)


def _by_setting(tried: _Tried) -> Table:
    rows = [
        (lives.minutes, lives.together, *_named(setting), *_figures(found))
        for lives, each in tried.items()
        for setting, found in each
    ]
    columns = ("mean life min", "together", *_SETTING_COLUMNS, *_FIGURE_COLUMNS)
    return Table(name="warm-tier", columns=columns, rows=rows)


def _named(setting: Setting) -> tuple[Cell, ...]:
    put_back = f"{setting.put_back} at once" if setting.put_back else "when read"
    return str(setting.code), setting.warm_seconds, setting.backup_seconds, put_back


def _figures(found: Found) -> tuple[Cell, ...]:
    bill, eager = found.bill, found.eager
    dollars = bill.warm_dollars, bill.backup_dollars, bill.repair_dollars, bill.bucket_dollars, bill.read_dollars
    took = (eager.notice_seconds, eager.back_seconds, eager.bytes_per_second / 1e6) if eager else (None, None, None)
    return found.object_hours, found.whole_hours, *dollars, bill.dollars, *took


def _cheapest(tried: _Tried, hours: int) -> Table:
    """Return what costs least of all that is above InfiniCache's availability, and what comes next to it if none is."""
    rows: list[tuple[Cell, ...]] = []
    their_dollars = _THEIR_DOLLARS * hours / PAPER["hours"]
    for lives, each in tried.items():
        for is_eager in (False, True):
            of = [(setting, found) for setting, found in each if bool(setting.put_back) == is_eager]
            for measure, rate in (
                ("object-hours", [found.object_hours for _, found in of]),
                ("hours with none lost", [found.whole_hours for _, found in of]),
            ):
                above = [at for at, each_rate in enumerate(rate) if each_rate > _THEIR_RATE]
                dollars = [found.bill.dollars for _, found in of]
                best = min(above, key=dollars.__getitem__) if above else max(range(len(of)), key=rate.__getitem__)
                is_better = bool(above) and dollars[best] < their_dollars
                figures = (rate[best], dollars[best], "yes" if is_better else "no")
                rows.append((lives.minutes, measure, *_named(of[best][0]), *figures))
    columns = (
        *("mean life min", "availability", *_SETTING_COLUMNS, "reached", "all $"),
        "above InfiniCache's for less",
    )
    return Table(name="warm-tier-cheapest", columns=columns, rows=rows)


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
    rows: list[tuple[Cell, ...]] = []
    for each in lives:
        setting, load = _BEST[each], Load(hours=hours)
        found = found_of(setting, each, load)
        dollars = found.bill.dollars / hours * PAPER["hours"]
        rows.append((each.minutes, *_named(setting), hours, found.object_hours, found.whole_hours, dollars))
    columns = ("mean life min", *_SETTING_COLUMNS, "hours", *_FIGURE_COLUMNS[:2], f"$ of {PAPER['hours']} h")
    return Table(name="warm-tier-best", columns=columns, rows=rows)


def _by_life(lives: Sequence[Lives], load: Load) -> list[Panel]:
    """Draw what is kept and what it costs by mean life; at InfiniCache's lives as points, since they are of a kind."""
    every = [[found_of(setting, each, load) for setting in _SHOWN] for each in (*lives, _PAPERS)]
    known = [PAPER["availability"][name] for name in ("with_backup", "without_backup")]

    def panel(title: str, label: str, value: Callable[[Found], float], theirs: list[float]) -> Panel:
        values = [[value(found) for found in of] for of in every]
        x = [each.minutes for each in lives]
        series = [Series(name=str(one), x=x, y=y) for one, *y in zip(_SHOWN, *values[:-1], strict=True)]
        name = "the same at InfiniCache's lives"
        series.append(Series(name=name, x=[_PAPERS.minutes] * len(_SHOWN), y=values[-1], kind="points"))
        if theirs:
            at = [_PAPERS.minutes] * len(theirs)
            series.append(Series(name="InfiniCache, published", x=at, y=theirs, is_published=True))
        return Panel(
            title=title,
            x_label="mean life of an instance (min)",
            y_label=label,
            series=series,
            x_log=True,
            note=f"InfiniCache's: {_PAPERS.minutes} min, {_PAPERS.together:.0%} of reclaims take the back-up, too",
        )

    paid = sorted(bill["dollars"] for bill in PAPER["bills"])
    whole, hours = f"Hours in which none of {load.objects:,} objects is lost", f"{load.hours} hours of {load.functions}"
    return [
        panel("Objects that last an hour", "part of object-hours kept", lambda found: found.object_hours, known),
        panel(whole, "part of hours", lambda found: found.whole_hours, []),
        panel(f"{hours} functions of 1.5 GB", "dollars", lambda found: found.bill.dollars, [paid[0], paid[-1]]),
    ]


def _by_objects(counts: Sequence[int], lives: Sequence[Lives], load: Load) -> tuple[Table, Panel]:
    """Return both availabilities, the bill and the least bill there can be, by how much the tier holds."""
    rows: list[tuple[Cell, ...]] = []
    series = []
    for each in lives:
        for setting in (_OFTEN, _BEST.get(each, _EAGER)):
            whole = []
            for objects in counts:
                of = Load(hours=load.hours, functions=load.functions, objects=objects)
                found = found_of(setting, each, of)
                whole.append(found.whole_hours)
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


def _by_reads(minutes: Sequence[int], lives: Sequence[Lives], hours: int) -> Table:
    """Return what is kept if objects are read more often, and lost shards put back as often."""
    rows: list[tuple[Cell, ...]] = []
    for each in lives:
        for setting in (_THEIRS, _OFTEN, Setting(code=Code(10, 4))):
            for every in minutes:
                found = found_of(setting, each, Load(hours=hours, read_seconds=60.0 * every))
                figures = found.object_hours, found.whole_hours, found.bill.upkeep_dollars
                rows.append((each.minutes, str(setting), every, *figures))
    columns = (
        *("mean life min", "setting", "read every min"),
        *("object-hours kept", f"hours with none of {OBJECTS:,} lost", "upkeep $"),
    )
    return Table(name="warm-tier-reads", columns=columns, rows=rows)


def _least_dollars(lives: Lives, load: Load) -> float:
    """Return what it takes at least to give every instance that is taken one successor with as many data bytes."""
    data_bytes = load.objects * OBJECT_BYTES / load.functions
    taken = load.functions * load.hours * 60.0 / lives.minutes
    return taken * node_calls().moving_dollars(data_bytes, Prices.load().function("lambda"))


def _run(quick: bool) -> Outcome:
    load = Load(hours=2 if quick else PAPER["hours"])
    all_lives = (*_ASKED[1 if quick else 0 :], _PAPERS)
    settings = list(_settings((Code(10, 2), Code(4, 4)) if quick else _CODES, quick=quick))
    tried = {lives: [(setting, found_of(setting, lives, load)) for setting in settings] for lives in all_lives}
    between = () if quick else (Lives(120), Lives(240))
    panels = _by_life((*all_lives[:-1], *between), load)
    by_objects, objects_panel = _by_objects((100, 1_000) if quick else _COUNTS, all_lives, load)
    by_reads = _by_reads((20, 60) if quick else (5, 10, 20, 30, 60), all_lives, load.hours)
    best = _best(all_lives[:-1], 2 if quick else _BEST_HOURS)
    return Outcome(
        tables=[_by_setting(tried), best, _cheapest(tried, load.hours), by_objects, by_reads],
        panels=[*panels, objects_panel],
        remarks=_REMARKS,
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

EXPERIMENTS = {
    "warm-tier": Experiment(
        name="warm-tier",
        title="Our warm tier beside InfiniCache: what lasts an hour, and dollars, if instances are taken at random",
        source=PAPER["source"],
        run=_run,
    )
}
"""By name."""
