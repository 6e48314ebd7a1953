"""How a moment of the functions' demo looks: a block for terminals, a line for elsewhere, and tables for the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker._base.operations import Operation
from stoker._cost.prices import Prices
from stoker_local._demo.functions.bill import one_by_one
from stoker_local._demo.functions.config import DATASET, MEMORY_MB
from stoker_local._demo.functions.images import Epoch
from stoker_local._demo.functions.snapshot import Snapshot
from stoker_local._demo.screen import bar
from stoker_local.functions import FunctionStatistics, Happening, total

__all__ = ["bill_table", "block", "function_table", "how_counted", "line"]

_HAPPENINGS = 5
_WORDS = {
    "cold-start": "starts cold",
    "kill": "is killed in mid-invocation",
    "freeze": "freezes in mid-invocation",
    "duplicate": "gets one event twice",
    "reclaim": "is taken back while idle",
    "error": "fails: {detail}",
    "throttle": "is throttled",
    "dropped": "loses an event: {detail}",
}


def block(now: Snapshot, prices: Prices) -> list[str]:
    """Return the lines of a block that is redrawn: nowhere wider than 78 columns."""
    bill = now.bill
    put_one_by_one = one_by_one(now.visible, prices, Operation.GET, Operation.PUT)
    return [
        f"{now.seconds:5.1f} s  {now.phase}",
        "",
        f"put      {bar(now.put / now.images)} {now.put:,} of {now.images:,} raw images",
        f"queue    {now.waiting:,} messages waiting, {now.delivered:,} delivered, {now.dead:,} given up",
        "",
        *function_table(now.functions),
        "",
        f"packed   {now.super_samples:,} super-samples, {now.visible_super_samples:,} of them in version {now.version}",
        f"visible  {bar(now.visible / now.images)} {now.visible:,} samples",
        f"bill     ${bill.dollars:.6f}: functions ${bill.function_dollars:.6f}, requests ${bill.bucket_dollars:.6f};",
        f"         a GET and a PUT for each visible sample: ${put_one_by_one:.6f}",
        "",
        *_news(now.happenings),
    ]


def line(now: Snapshot) -> str:
    """Return the moment in a line."""
    all_of_them = total(now.functions)
    killed, frozen = (all_of_them.faults.get(kind, 0) for kind in ("kill", "freeze"))
    return (
        f"{now.seconds:3.0f} s: {now.put:,} put, {now.waiting + now.delivered:,} queued; "
        f"{all_of_them.busy} of {all_of_them.instances} busy, {killed} killed, {frozen} frozen; "
        f"v{now.version}: {now.visible:,}"
    )


def function_table(functions: Mapping[str, FunctionStatistics]) -> list[str]:
    """Return a table of what each function has done."""
    head = ["", "alive", "busy", "cold starts", "calls", "errors", "killed", "frozen", "twice", "GB-s"]
    rows = [[name, *_cells(figures)] for name, figures in functions.items()]
    return _aligned([head, *rows])


def _cells(figures: FunctionStatistics) -> list[str]:
    faults = figures.faults
    counts = [figures.instances, figures.busy, figures.cold_starts, figures.invocations, figures.errors]
    counts += [faults.get(kind, 0) for kind in ("kill", "freeze", "duplicate")]
    return [*(f"{count:,}" for count in counts), f"{figures.gb_seconds:,.0f}"]


def _news(happenings: Sequence[Happening]) -> list[str]:
    """Return the newest happenings in words, always as many lines."""
    worth_telling = [each for each in happenings if each.what in _WORDS and (each.instance or each.what != "reclaim")]
    lines = [
        f"{each.seconds:5.1f} s  {each.instance or each.function} {_WORDS[each.what].format(detail=each.detail)}"
        for each in worth_telling[-_HAPPENINGS:]
    ]
    return lines + [""] * (_HAPPENINGS - len(lines))


def bill_table(packed: Snapshot, epoch: Epoch, prices: Prices) -> list[str]:
    """Return a table of what both ways cost.

    Args:
        packed: the moment when everything was packed.
        epoch: that was read then.
        prices: to use.
    """
    samples, bill, gets, puts = packed.images, packed.bill, Operation.GET, Operation.PUT
    each = one_by_one(samples, prices, gets, puts)
    rows = [
        ["", "packed by functions", "an object a sample"],
        ["objects to train from", f"{packed.visible_super_samples:,}", f"{samples:,}"],
        ["GETs until they are there", f"{bill.requests[gets]:,}", f"{samples:,}"],
        ["PUTs and LISTs", f"{bill.requests[puts] + bill.requests[Operation.LIST]:,}", f"{samples:,}"],
        ["dollars for requests", f"${bill.bucket_dollars:.6f}", f"${each:.6f}"],
        [f"dollars for {bill.gb_seconds:.1f} GB-s", f"${bill.function_dollars:.6f}", "not counted"],
        ["GETs of an epoch", f"{epoch.gets:,}", f"{samples:,}"],
        ["dollars of an epoch", f"${epoch.dollars:.6f}", f"${one_by_one(samples, prices, gets):.6f}"],
    ]
    return _aligned(rows)


def how_counted(prices: Prices) -> str:
    """Return where the figures of the tables come from."""
    store, function = prices.store(DATASET), prices.functions["lambda"]
    return (
        "requests by the bucket, but for those that brought the raw images, which are the same either way, and an "
        f"epoch's by the loader; seconds of {MEMORY_MB:,} MB by the function cloud, start-ups included, as many as it "
        f"took on this machine, which runs all the rest as well. List prices of {store.name} and {function.name}, "
        f"{store.region}, {prices.date}."
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with a line below the first, the first column to the left and the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([f"{label:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True))])
        for label, *cells in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
