"""What a run in virtual time took, as a table by epochs, with its totals, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from stoker._base.meter import Operation
from stoker._base.sizes import counted
from stoker._cost.prices import Prices
from stoker_sim._experiments.outcome import Cell, Outcome, Panel, Series, Table
from stoker_sim._models.simulated_warm import WarmTally
from stoker_sim._scenarios.node import EpochResult
from stoker_sim._scenarios.scenario import Run, Scenario

__all__ = ["outcome"]

_PLATFORM = "lambda"
"""Whose prices functions have."""
_COLUMNS = (
    "epoch",
    "seconds",
    "wait s, mean",
    "wait s, least",
    "wait s, most",
    "stall",
    "look-ups",
    "misses",
    "requests",
    "hedges",
    "read GB",
    "request dollars",
)


def outcome(name: str, scenario: Scenario, run: Run, *, prices: Prices, url: str) -> Outcome:
    """Return a run's table, a line an epoch and one for all, and its picture.

    Args:
        name: of the table.
        scenario: what was simulated.
        run: what it took.
        prices: of requests,
        url: to a store like this one.
    """
    dollars = prices.request_dollars(url, Operation.GET)
    tiers = sorted({tier for each in run.epochs for tier in each.tier_hits})
    epochs = [run.of_epoch(epoch) for epoch in range(scenario.epochs)]
    rows = [_row(epoch, results, tiers, dollars) for epoch, results in enumerate(epochs)]
    rows.append(_row("all", run.epochs, tiers, dollars, seconds=run.seconds))
    first = max(each.first_batch_seconds for each in run.of_epoch(0) if each.first_batch_seconds is not None)
    nodes = counted(scenario.feed.world_size, "node")
    remarks: tuple[str, ...] = (
        f"{nodes}, {counted(len(scenario.manifest), 'super-sample')}; waits are of a node.",
        f"The first batch was there after {first:.3g} s on the last of the nodes.",
        f"A GET costs ${dollars:.3g} ({url}, {prices.date}); look-ups, requests and bytes are of all nodes together.",
    )
    if run.warm is not None:
        remarks = (*remarks, *_warm_remarks(run.warm, run.seconds, prices, dollars))
    table = Table(name=name, columns=(*_COLUMNS, *(f"from {tier}" for tier in tiers)), rows=rows)
    return Outcome(tables=[table], panels=_panels(epochs, tiers), remarks=remarks)


def _warm_remarks(warm: WarmTally, seconds: float, prices: Prices, get_dollars: float) -> tuple[str, ...]:
    config, bill = warm.model.config, warm.bill(prices.function(_PLATFORM), get_dollars)
    gone = sum(len(each.losses) for each in warm.lives)
    reads, dollars = counted(warm.hits + warm.losses, "read"), f"${bill.dollars:.3g} at {_PLATFORM}'s prices"
    parts = f"reads and writes ${bill.read_dollars:.3g}, upkeep ${bill.upkeep_dollars:.3g}"
    rate = warm.bucket_bytes / 1e6 / max(1e-12, seconds)
    gets = f"by {counted(warm.bucket_requests, 'GET')}, ${bill.bucket_dollars:.3g}, {rate:.3g} MB/s on average"
    return (
        f"The warm tier: {counted(config.nodes, 'function')}, {config.code} shards; {warm.evicted} went for others.",
        f"Of {reads} of what it held, {warm.losses} found too many shards lost; {warm.rebuilt} were put back by reads.",
        *([f"{counted(warm.put_back, 'shard')} went back from the bucket {gets}."] if config.put_back else []),
        f"Its functions lost their memory {gone} times in {seconds / 3600:.3g} h. All costs {dollars}: {parts}.",
    )


def _row(
    epoch: int | str, nodes: Sequence[EpochResult], tiers: Sequence[str], dollars: float, seconds: float | None = None
) -> tuple[Cell, ...]:
    waits = [each.wait_seconds for each in nodes]
    requests = sum(each.requests for each in nodes)
    hits = sum((each.tier_hits for each in nodes), Counter[str]())
    return (
        epoch,
        max(each.seconds for each in nodes) if seconds is None else seconds,
        fmean(waits),
        min(waits),
        max(waits),
        sum(waits) / max(1e-12, sum(each.seconds for each in nodes)),
        sum(each.look_ups for each in nodes),
        sum(each.misses for each in nodes),
        requests,
        sum(each.hedges for each in nodes),
        sum(each.read_bytes for each in nodes) / 1e9,
        requests * dollars,
        *(hits[tier] for tier in tiers),
    )


def _panels(epochs: Sequence[Sequence[EpochResult]], tiers: Sequence[str]) -> list[Panel]:
    numbers = list(range(len(epochs)))
    waits = [[each.wait_seconds for each in nodes] for nodes in epochs]
    sources = {"the bucket, in requests": [sum(each.requests for each in nodes) for nodes in epochs]}
    sources |= {tier: [sum(each.tier_hits[tier] for each in nodes) for nodes in epochs] for tier in tiers}
    return [
        Panel(
            title="Wait for data",
            x_label="epoch",
            y_label="seconds of a node",
            series=[
                Series(name="slowest node", x=numbers, y=[max(each) for each in waits]),
                Series(name="mean", x=numbers, y=[fmean(each) for each in waits]),
            ],
        ),
        Panel(
            title="Where super-samples came from",
            x_label="epoch",
            y_label="number, of all nodes",
            series=[Series(name=name, x=numbers, y=numbers_of) for name, numbers_of in sources.items()],
        ),
    ]
