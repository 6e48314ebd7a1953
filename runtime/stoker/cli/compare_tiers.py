"""``stoker cost --compare-tiers``: compares the cost of the same reads from each place that can hold the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stoker._base.meter import Operation
from stoker._base.sizes import format_bytes, format_count
from stoker._cost.prices import FunctionPrices, Prices, StorePrices
from stoker._cost.tiers import TierComparison, TierCost
from stoker._cost.usage import Traffic
from stoker._cost.workload import ReadWorkload, WarmFunctions
from stoker.cli.output import json_text, make_printable, table
from stoker.errors import ConfigError

APPLICABLE_FIGURES = (
    *("compare_tiers", "size", "gets", "hours", "object_size", "epochs", "nodes", "store", "egress"),
    *("disk", "machine", "function", "function_vcpus", "warm_memory", "linger"),
)
"""Names of the figures that the comparison takes."""
_REQUIRED_FIGURES = {"size": "size_bytes", "gets": "reads", "hours": "hours"}
"""Required figure → field of the workload; a data set gives the first two."""
_OBJECT_BYTES = 8 << 20
_PAGE = "docs/tiers.md"
_HEADER = ("place", "", "dollars", "a read", "what limits it")


def create_comparison(
    given: Mapping[str, Any],
    prices: Prices,
    store: StorePrices,
    *,
    super_samples: int,
    size_bytes: int,
    traffic: Traffic,
) -> TierComparison:
    """Return the comparison of places for the given figures.

    Args:
        given: figure → value.
        prices: the price list.
        store: prices of the bucket.
        super_samples: number of super-samples of the data set; 0 without a data set.
        size_bytes: size of the data set in bytes; 0 without a data set.
        traffic: requests to the bucket, as given and as the data set requires.

    Raises:
        ConfigError: a figure is missing or not applicable.
    """
    if unused := [name for name in given if name not in APPLICABLE_FIGURES]:
        raise ConfigError(
            f"{unused[0]} has no effect with compare_tiers, which takes {', '.join(APPLICABLE_FIGURES[1:])}"
        )
    size_bytes = given.get("size", size_bytes)
    work = {
        "size_bytes": size_bytes,
        "reads": traffic.requests.get(Operation.GET, 0),
        "hours": given.get("hours", 0),
        "object_bytes": given.get("object_size", size_bytes / super_samples if super_samples else _OBJECT_BYTES),
        "trainers": given.get("nodes", 1),
        "egress": traffic.egress,
    }
    for figure, name in _REQUIRED_FIGURES.items():
        if not work[name]:
            raise ConfigError(f"compare_tiers needs {figure} greater than 0")
    warm = {"memory_bytes": given.get("warm_memory"), "linger_seconds": given.get("linger")}
    return TierComparison(
        work=ReadWorkload(**work),
        prices=prices,
        store=store,
        functions=prices.function(given["function"]) if "function" in given else _choose_functions(store, prices),
        disk=prices.disk(given["disk"]) if "disk" in given else None,
        trainer=prices.machine(given["machine"]) if "machine" in given else None,
        warm=WarmFunctions(
            vcpus=given.get("function_vcpus", 1), **{name: value for name, value in warm.items() if value is not None}
        ),
    )


def _choose_functions(store: StorePrices, prices: Prices) -> FunctionPrices:
    """Return the first function platform in the bucket's region, else AWS Lambda."""
    beside = (each for each in prices.functions.values() if each.region == store.region)
    return next(beside, None) or prices.function("lambda")


def format_comparison(comparison: TierComparison, *, as_json: bool) -> str:
    """Return the places and their costs as a table, or as JSON."""
    costs, work, date = comparison.costs(), comparison.work, comparison.prices.date
    if as_json:
        products = dict.fromkeys(f"{each.of} ({each.region})" for each in costs if each.of)
        tiers = [_as_json(each) for each in costs]
        return json_text(
            {"prices": {"date": str(date), "of": list(products)}, "workload": asdict(work), "tiers": tiers}
        )
    reads = f"{work.reads:,.0f} reads by {format_count(work.trainers, 'trainer')} in {work.hours:,g} hours"
    lines = [
        table([_HEADER, *map(_format_row, costs)], indent="", right=(2, 3)),
        f"{reads}, of {format_count(work.objects, 'object')} of {format_bytes(work.object_bytes)}",
        "each place but the bucket includes one GET of each object that fills it, and is where the trainers are",
        f"latency, rate and processor time, measured: {_PAGE}",
        (
            f"list prices of {date}: "
            f"{make_printable(', '.join(dict.fromkeys(each.region for each in costs if each.region)))}"
        ),
    ]
    return "\n".join(lines)


def _as_json(cost: TierCost) -> dict[str, Any]:
    return {
        "place": cost.place,
        "of": cost.of,
        "count": cost.count,
        "dollars": cost.dollars,
        "dollars_per_read": cost.dollars_per_read,
        "limit": cost.limit,
        "parts": [asdict(part) for part in cost.parts or ()],
    }


def _format_row(cost: TierCost) -> tuple[str, ...]:
    product = f"{cost.count:,} x {cost.of}" if cost.of and cost.count > 1 else cost.of
    return (
        cost.place,
        make_printable(product),
        _format_dollars(cost.dollars),
        _format_dollars_per_read(cost.dollars_per_read),
        cost.limit,
    )


def _format_dollars(dollars: float | None) -> str:
    if dollars is None:
        return "no price"
    return f"${dollars:,.4f}" if 0 < dollars < 0.01 else f"${dollars:,.2f}"


def _format_dollars_per_read(dollars: float | None) -> str:
    if dollars is None:
        return ""
    return "<$0.0000001" if 0 < dollars < 1e-7 else f"${dollars:.7f}"
