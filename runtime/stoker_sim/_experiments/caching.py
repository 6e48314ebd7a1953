"""What policies make of a cache of a given size: one node that reads everything, and several that share each epoch.

Beside ours: hits of uniform caching are the cache's share of the data (SiloD, EuroSys 2023; CoorDL, VLDB 2021); those
of LRU follow from random orders, share + (1 - share) ln(1 - share).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._models.hit_rates import hit_rates

__all__ = ["CACHE_SHARES", "EXPERIMENTS", "PARTITIONED_HITS"]

_NODES = 3
_POLICIES = ("lru", "fifo", "uniform", "next-use")
CACHE_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of what a node reads in an epoch."""
_WARM_UP = 0.6
"""The part of the epochs that is not counted: caches fill, and next-use learns what to keep."""
PARTITIONED_HITS = {
    "fifo": (0.011, 0.048, 0.112, 0.207),
    "uniform": (0.083, 0.167, 0.249, 0.332),
    "next-use": (0.250, 0.416, 0.539, 0.627),
    "cooperative bound": CACHE_SHARES,
}
"""Hit rates of three nodes that partition each epoch anew, by cache over partition."""


def _settled(epochs: Sequence[NDArray[np.int64]], capacity: int, policy: str) -> float:
    rates = hit_rates(epochs, capacity, policy)
    return float(np.mean(rates[int(len(rates) * _WARM_UP) :]))


def _run(quick: bool) -> Outcome:
    objects, epochs, rng = (300, 10, np.random.default_rng(7)) if quick else (3_000, 30, np.random.default_rng(7))
    alone = [rng.permutation(objects) for _ in range(epochs)]
    shared = [rng.permutation(objects)[: objects // _NODES] for _ in range(epochs)]
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for nodes, readings, names in ((1, alone, _POLICIES), (_NODES, shared, _POLICIES)):
        series = []
        for policy in names:
            ours = [_settled(readings, int(share * len(readings[0])), policy) for share in CACHE_SHARES]
            theirs = _theirs(nodes, policy)
            rows += [
                (nodes, policy, share, rate, known, None if known is None else rate - known)
                for share, rate, known in zip(CACHE_SHARES, ours, theirs, strict=True)
            ]
            series.append(Series(name=policy, x=CACHE_SHARES, y=ours))
            if None not in theirs:
                y = [float(known) for known in theirs if known is not None]
                series.append(Series(name=f"{policy}, reference", x=CACHE_SHARES, y=y, is_published=True))
        title = "one node" if nodes == 1 else f"{nodes} nodes, each epoch partitioned anew"
        panels.append(
            Panel(title=title, x_label="cache / what the node reads in an epoch", y_label="hit rate", series=series)
        )
    table = Table(
        name="caching",
        columns=("nodes", "policy", "cache share", "hit rate", "reference", "difference"),
        rows=rows,
    )
    errors = [abs(row[5]) for row in rows if isinstance(row[5], float)]
    counted = f"{objects:,} objects, {epochs} epochs, of which the last {1 - _WARM_UP:.0%} count"
    remarks = (
        f"{counted}; ours differ from the reference by at most {max(errors):.3f}.",
        "A cache that nodes share can reach its whole share; a node by itself keeps what will come back to it.",
    )
    return Outcome(tables=[table], panels=panels, remarks=remarks)


def _theirs(nodes: int, policy: str) -> Sequence[float | None]:
    if nodes > 1:
        return PARTITIONED_HITS.get(policy, (None,) * len(CACHE_SHARES))
    if policy in ("uniform", "next-use"):
        return CACHE_SHARES
    if policy == "fifo":
        return (None,) * len(CACHE_SHARES)
    return [share + (1 - share) * math.log(1 - share) if share < 1 else 1.0 for share in CACHE_SHARES]


EXPERIMENTS = {
    "caching": Experiment(
        name="caching",
        title="Hit rate by policy and size of the cache",
        source="uniform: SiloD (EuroSys 2023), CoorDL (VLDB 2021); next-use: Belady (1966), NoPFS (SC'21)",
        run=_run,
    )
}
"""By name."""
