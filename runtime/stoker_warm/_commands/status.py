"""A warm tier's figures as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker._base.sizes import format_bytes
from stoker.cli.output import counted

__all__ = ["dollars_of", "rows_of_status", "states_of"]

_STATES = {"awake": "awake", "sleeping": "asleep", "maybe": "in doubt", "gone": "gone"}
_PARTS = (("serve", "serve"), ("warm", "keep warm"), ("backup", "back up"), ("put_back", "put back"))
_HOUR_SECONDS = 3600.0


def rows_of_status(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table.

    Args:
        told: as :func:`~stoker_warm._server.overview` tells it.
    """
    bill, reads = told["bill"], told["hits"] + told["misses"] + told["losses"]
    rate = f" ({told['hits'] / reads:.1%} hits)" if reads else ""
    used, free = format_bytes(told["held_bytes"]), format_bytes(told["limit_bytes"])
    return [
        ("nodes", f"{states_of(told)}; objects cut {told['code']}"),
        ("held", f"{counted(told['objects'], 'object')}, {used} with parity, of {free}"),
        ("reads", f"{told['hits']:,} hits, {told['misses']:,} misses, {told['losses']:,} lost{rate}"),
        ("shards", _shards(told)),
        ("writes", _writes(told)),
        ("bill", f"{bill['gb_seconds']:,.1f} GB-s in {counted(bill['requests'], 'request')}, in {_time(bill)}"),
        ("", _dollars(bill)),
        ("bucket", f"{counted(bill['reads'], 'read')} would be {dollars_of(bill['bucket_dollars'])}"),
        ("pays", _pays(bill)),
    ]


def states_of(told: Mapping[str, Any]) -> str:
    """Return how many nodes are in which state."""
    nodes = told["nodes"]
    states = ", ".join(f"{nodes[state]:,} {word}" for state, word in _STATES.items() if nodes.get(state))
    return f"{counted(sum(nodes.values()), 'node')}: {states}"


def dollars_of(dollars: float) -> str:
    """Return an amount, of which small ones matter, too."""
    return f"${dollars:,.2f}" if dollars >= 100 else f"${dollars:.6f}"


def _shards(told: Mapping[str, Any]) -> str:
    restored, late = f"{told['restored']:,} reads restored from parity", f"{told['late']:,} not waited for"
    written = f"{told['rebuilt']:,} rebuilt, {told['put_back']:,} put back, {told['backed_up']:,} copied"
    return f"{restored}, {late}, {told['corrupt']:,} corrupt, {written}"


def _writes(told: Mapping[str, Any]) -> str:
    done = f"{told['stored']:,} stored, {told['declined']:,} declined, {told['evicted']:,} evicted"
    return f"{done}, {format_bytes(told['pending_bytes'])} pending"


def _time(bill: Mapping[str, Any]) -> str:
    hours = bill["seconds"] / _HOUR_SECONDS
    return f"{hours:,.1f} h" if hours >= 1 else f"{bill['seconds']:,.0f} s"


def _dollars(bill: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"{dollars_of(bill[f'{name}_dollars'])} to {what}"
        for name, what in _PARTS
        if name != "put_back" or bill["put_back_requests"]
    )
    lost = f"; {counted(bill['unanswered'], 'call')} without a bill" if bill["unanswered"] else ""
    return f"{dollars_of(bill['dollars'])}: {parts}{lost}"


def _pays(bill: Mapping[str, Any]) -> str:
    if not bill["reads"]:
        return "unknown before anything was read"
    reads = bill["break_even_reads_per_hour"]
    if reads is None:
        return "never in money: a read costs no less here than a GET of the bucket"
    return f"in money from {reads:,.0f} reads an hour on"
