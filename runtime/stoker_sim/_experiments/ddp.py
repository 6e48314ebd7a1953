"""Three nodes that train together and partition each epoch anew, each with a cache: the whole fetcher, in virtual time.

:mod:`~stoker_sim._experiments.caching` asks policies alone. Here they are asked by the fetcher as it looks ahead, and
what a cache has not comes from a bucket.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np

from stoker._diagnostics.latency import BucketModel, Constant, LogNormal
from stoker._fetch.feed import FeedConfig
from stoker._order.order import Order, OrderConfig
from stoker_sim._experiments.caching import CACHE_SHARES, PARTITIONED_HITS
from stoker_sim._experiments.outcome import Cell, Experiment, Outcome, Panel, Series, Table
from stoker_sim._models.dataset import described
from stoker_sim._models.hit_rates import hit_rates
from stoker_sim._models.tier_model import TierModel
from stoker_sim._scenarios.scenario import Run, Scenario, simulate

__all__ = ["EXPERIMENTS"]

_NODES = 3
_POLICIES = ("fifo", "uniform", "next-use")
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
        feed=FeedConfig(
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


def _run(quick: bool) -> Outcome:
    super_samples, epochs = (240, _WARM_UP_EPOCHS + 5) if quick else (3_000, _WARM_UP_EPOCHS + 9)
    shares = (0.5,) if quick else CACHE_SHARES
    rows = [_row(policy, share, super_samples, epochs) for policy in _POLICIES for share in shares]
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
    for policy in _POLICIES:
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


EXPERIMENTS = {
    "ddp": Experiment(
        name="ddp",
        title="Caches of nodes that train together",
        source="next-use: Belady (1966), NoPFS (SC'21); figures simulated for policies alone",
        run=_run,
    )
}
"""By name."""
