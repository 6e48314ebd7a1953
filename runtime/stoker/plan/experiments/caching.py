"""What policies make of a cache of a given size: one node that reads everything, and several that share each epoch.

Beside ours: hits of uniform caching are the cache's share of the data (SiloD, EuroSys 2023; CoorDL, VLDB 2021); those
of LRU follow from random orders, share + (1 - share) ln(1 - share).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stoker.cache.fifo import Fifo
from stoker.cache.lru import Lru
from stoker.cache.next_use import NextUse
from stoker.cache.policy import Policy, Residents
from stoker.cache.uniform import Uniform
from stoker.plan.experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table

__all__ = ["CACHE_SHARES", "EXPERIMENTS", "PARTITIONED_HITS", "hit_rates"]

_NODES = 3
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


class _Epochs:
    """The objects that one node reads, epoch after epoch; and, of each reading, when the same object is read next."""

    def __init__(self, epochs: Sequence[NDArray[np.int64]]) -> None:
        self.sequence = np.concatenate(epochs)
        self.present = -1
        self._next = np.full(len(self.sequence), np.iinfo(np.int64).max)
        order = np.argsort(self.sequence, kind="stable")
        for before, after in pairwise(order.tolist()):
            if self.sequence[before] == self.sequence[after]:
                self._next[before] = after
        self._latest: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        for present, key in enumerate(self.sequence.tolist()):
            self.present = self._latest[key] = present
            yield key

    def next_use(self, key: int) -> int:
        """Return when a key that was read before is read next."""
        return int(self._next[self._latest[key]])


_POLICIES: dict[str, Callable[[_Epochs], Policy[int]]] = {
    "lru": lambda _: Lru(),
    "fifo": lambda _: Fifo(),
    "uniform": lambda _: Uniform(),
    "next-use": lambda epochs: NextUse(epochs.next_use, lambda: epochs.present),
}


def hit_rates(epochs: Sequence[NDArray[np.int64]], capacity: int, policy: str) -> list[float]:
    """Return the hit rate of each epoch of a node whose cache takes what it reads.

    Args:
        epochs: ``int64 [readings]``, the objects that are read in each.
        capacity: of the cache, in objects.
        policy: "lru", "fifo", "uniform" or "next-use".
    """
    known = _Epochs(epochs)
    residents: Residents[int] = Residents(_POLICIES[policy](known), capacity)
    hits = []
    for key in known:
        hits.append(residents.look_up(key))
        residents.offer(key)
    ends = np.cumsum([len(epoch) for epoch in epochs])
    return [float(np.mean(each)) for each in np.split(np.array(hits), ends[:-1])]


def _settled(epochs: Sequence[NDArray[np.int64]], capacity: int, policy: str) -> float:
    rates = hit_rates(epochs, capacity, policy)
    return float(np.mean(rates[int(len(rates) * _WARM_UP) :]))


def _run(quick: bool) -> Outcome:
    objects, epochs, rng = (300, 10, np.random.default_rng(7)) if quick else (3_000, 30, np.random.default_rng(7))
    alone = [rng.permutation(objects) for _ in range(epochs)]
    shared = [rng.permutation(objects)[: objects // _NODES] for _ in range(epochs)]
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for nodes, readings, names in ((1, alone, tuple(_POLICIES)), (_NODES, shared, tuple(_POLICIES))):
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
