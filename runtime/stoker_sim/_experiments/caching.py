"""What policies make of a cache of a given size: one node that reads everything, and several that share each epoch.

Beside ours: hits of uniform caching are the cache's share of the data (SiloD, EuroSys 2023; CoorDL, VLDB 2021); those
of LRU follow from random orders, share + (1 - share) ln(1 - share). The experiment ``caching`` asks the policies alone.
In ``ddp`` three nodes train together and partition each epoch anew: the whole fetcher asks them as it looks ahead, and
what a cache has not comes from a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.pipeline import PipelineConfig
from stoker._order.order import Order, OrderConfig
from stoker_sim._bucket import described
from stoker_sim._caches import TierModel, hit_rates
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._scenario import Run, Scenario, simulate

__all__ = [
    "CACHE_SHARES",
    "EXPERIMENTS",
    "PARTITIONED_HITS",
]

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


def _caching(quick: bool) -> Outcome:
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


_DDP_POLICIES = ("fifo", "uniform", "next-use")
_WARM_UP_EPOCHS = 8
"""Are not counted: caches fill, and next-use learns what to keep. Nor is the last one, a part of which is fetched
before it begins, while nothing is fetched for the next."""
_SAMPLES = 64
_SUPER_SAMPLE_BYTES = 8 << 20
_SLOTS = 20
_ORDER = OrderConfig(seed=1, window=4, lanes=_NODES)


def _run_with(policy: str, share: float, super_samples: int, epochs: int) -> Run:
    manifest = described(
        super_samples=super_samples, samples=_SAMPLES, super_sample_bytes=_SUPER_SAMPLE_BYTES, head_bytes=64
    )
    scenario = Scenario(
        manifest=manifest,
        feed=PipelineConfig(
            order=_ORDER,
            batch_size=_SAMPLES,
            world_size=_NODES,
            memory_bytes=manifest.file_bytes + _SLOTS * _SUPER_SAMPLE_BYTES,
        ),
        bucket=BucketModel(first_byte=LogNormal(0.02, 0.08)),
        compute=Constant(0.1),
        caches=[TierModel(limit_bytes=_held(share, super_samples) * _SUPER_SAMPLE_BYTES, policy=policy)],
        epochs=epochs,
        in_step=True,
    )
    return simulate(scenario)


def _held(share: float, super_samples: int) -> int:
    return round(share * super_samples / _NODES)


def _by_policy_alone(policy: str, share: float, super_samples: int, epochs: int) -> float:
    """Return the hit rate of a policy that is asked for the same objects in the same order, one after the other."""
    samples = np.full(super_samples, _SAMPLES)
    orders = [Order(samples, _ORDER, epoch) for epoch in range(epochs)]
    rates = [
        hit_rates([order.lane(node).super_samples for order in orders], _held(share, super_samples), policy)
        for node in range(_NODES)
    ]
    return fmean(rate for of_node in rates for rate in of_node[_WARM_UP_EPOCHS : epochs - 1])


def _row(policy: str, share: float, super_samples: int, epochs: int) -> tuple[Cell, ...]:
    run = _run_with(policy, share, super_samples, epochs)
    settled = [each for each in run.epochs if _WARM_UP_EPOCHS <= each.epoch < epochs - 1]
    later = [each for each in run.epochs if each.epoch]
    hits = sum(each.tier_hits["disk"] for each in settled) / sum(each.look_ups for each in settled)
    known = PARTITIONED_HITS[policy][CACHE_SHARES.index(share)]
    misses = sum(each.misses for each in later) / sum(each.look_ups for each in later)
    wait_seconds = fmean(each.wait_seconds for each in later)
    read_bytes = sum(each.read_bytes for each in settled) / sum(each.look_ups for each in settled)
    alone = _by_policy_alone(policy, share, super_samples, epochs)
    read = read_bytes / _SUPER_SAMPLE_BYTES
    return policy, share, hits, known, hits - known, alone, misses, wait_seconds, read


def _ddp(quick: bool) -> Outcome:
    super_samples, epochs = (240, _WARM_UP_EPOCHS + 5) if quick else (3_000, _WARM_UP_EPOCHS + 9)
    shares = (0.5,) if quick else CACHE_SHARES
    rows = [_row(policy, share, super_samples, epochs) for policy in _DDP_POLICIES for share in shares]
    table = Table(
        name="ddp",
        columns=(
            "policy",
            "cache share",
            "hit rate",
            "reference",
            "difference",
            "policy alone",
            "miss rate of the loop",
            "wait s of an epoch",
            "read of what is used",
        ),
        rows=rows,
    )
    series = []
    for policy in _DDP_POLICIES:
        ours = [float(str(row[2])) for row in rows if row[0] == policy]
        series.append(Series(name=policy, x=shares, y=ours))
        known = [PARTITIONED_HITS[policy][CACHE_SHARES.index(share)] for share in shares]
        series.append(Series(name=f"{policy}, reference", x=shares, y=known, is_published=True))
    panel = Panel(
        title=f"{_NODES} nodes, each epoch partitioned anew",
        x_label="cache / what the node reads in an epoch",
        y_label="hit rate of the cache",
        series=series,
    )
    figures = [[float(str(cell)) for cell in row[2:]] for row in rows]
    error, missed = (max(abs(row[place]) for row in figures) for place in (2, 4))
    lost = max(abs(hits - alone) for hits, _, _, alone, *_ in figures)
    remarks = (
        f"{super_samples:,} super-samples, {epochs} epochs; hits are counted from the {_WARM_UP_EPOCHS + 1}th on.",
        f"Hit rates differ from the reference by at most {error:.3f}.",
        f"A policy that is asked alone, in the same order, has the same hit rates but for {lost:.4f}.",
        f"After the first epoch the loop misses at most {missed:.2%} of its look-ups, whatever the cache holds.",
    )
    return Outcome(tables=[table], panels=[panel], remarks=remarks)


EXPERIMENTS = (
    Experiment(
        name="caching",
        title="Hit rate by policy and size of the cache",
        source="uniform: SiloD (EuroSys 2023), CoorDL (VLDB 2021); next-use: Belady (1966), NoPFS (SC'21)",
        run=_caching,
    ),
    Experiment(
        name="ddp",
        title="Caches of nodes that train together",
        source="next-use: Belady (1966), NoPFS (SC'21); figures simulated for policies alone",
        run=_ddp,
    ),
)
