"""Constants that DELI's paper does not give, fitted to its measurements: `python -m benchmarks.deli_calibration [all]`.

The paper does not report the durations of a listing's page, of a fetched sample, of a look-up and of an insertion, nor
how much two concurrent fetches slow each other. It does report the duration of a read without a cache, but misses
beside fetches were faster, so that duration is fitted, too; the last model shows the result without that.

Several models are fitted, from most to fewest free constants, each to all published points at once. They minimise the
sum of the fourth powers of the errors, because the largest ones matter; an error of 0.03 in the miss rate weighs as
much as 15% in the wait. Each is also fitted to every other setting, and evaluated on the rest (two folds). The
simulator has rounded constants of :data:`CHOSEN` from another search; their errors are printed beside those of the
fits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from stoker_sim._experiments.deli import (
    WORKLOADS,
    DeliSetting,
    Measurement,
    SampleCosts,
    SampleEpoch,
    load_measurements,
    simulate_samples,
)

MAX_MISS_ERROR = 0.03
MAX_WAIT_ERROR = 0.15
EVALUATIONS = 120
STARTS = {
    "get_seconds": 0.0535,
    "list_page_seconds": 0.19,
    "fetch_seconds": 0.0036,
    "contention": 0.35,
    "hit_seconds": 0.00122,
    "insert_seconds": 0.0042,
}
_TYPICAL_BYTES = fmean(workload.sample_bytes for workload in WORKLOADS.values())

Costs = Mapping[str, SampleCosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: the constants that the two workloads share.

    Attributes:
        name: name of the model in tables.
        common: constants that are equal for both.
        by_size: constants in proportion to a sample's size.
        is_get_known: whether a read takes as long as without a cache. Each workload has its own values of all others.
    """

    name: str
    common: tuple[str, ...] = ()
    by_size: tuple[str, ...] = ()
    is_get_known: bool = False

    @property
    def own(self) -> tuple[str, ...]:
        """Constants with a value per workload."""
        known = ("get_seconds",) if self.is_get_known else ()
        return tuple(name for name in STARTS if name not in (*self.common, *self.by_size, *known))

    @property
    def free(self) -> int:
        """Number of fitted constants."""
        return len(self.common) + len(self.by_size) + len(self.own) * len(WORKLOADS)

    def costs(self, factors: NDArray[np.float64]) -> Costs:
        """Return the costs of samples if the constants are ``factors`` times their initial values."""
        left = iter(np.abs(factors).tolist())
        shared = {name: next(left) * STARTS[name] for name in (*self.common, *self.by_size)}
        found = {}
        for name, workload in WORKLOADS.items():
            sized = {each: shared[each] * workload.sample_bytes / _TYPICAL_BYTES for each in self.by_size}
            own = {each: next(left) * STARTS[each] for each in self.own}
            known = {"get_seconds": direct_seconds(name)} if self.is_get_known else {}
            found[name] = SampleCosts(**{**shared, **sized, **own, **known})
        return found


_ONE_BUCKET = ("list_page_seconds", "contention")
_BY_THE_BYTE = ("hit_seconds", "insert_seconds")
MODELS = (
    Model(name="each workload has its own constants"),
    Model(name="both have one bucket and machine", common=_ONE_BUCKET),
    Model(name="and a cache that takes time by the byte", common=_ONE_BUCKET, by_size=_BY_THE_BYTE),
    Model(name="and one cost of a sample of a fetch", common=(*_ONE_BUCKET, "fetch_seconds"), by_size=_BY_THE_BYTE),
    Model(name="or reads as without a cache", common=_ONE_BUCKET, by_size=_BY_THE_BYTE, is_get_known=True),
)
CHOSEN = MODELS[2]
"""The simulator's model. Two with fewer constants stay within the bounds, too."""


def direct_seconds(workload: str) -> float:
    """Return the duration of a direct read, in seconds: the wait without a cache over the number of reads."""
    direct = DeliSetting(cache_samples=0)
    waits = [each.wait_seconds for each in load_measurements() if (each.workload, each.setting) == (workload, direct)]
    return fmean(waits) / WORKLOADS[workload].node_samples


def by_setting() -> list[list[Measurement]]:
    """Return the published points that can be simulated, grouped by setting."""
    known = [each for each in load_measurements() if each.setting is not None]
    return [list(points) for _, points in groupby(known, key=lambda each: (each.workload, each.setting))]


def errors(costs: Costs, settings: Sequence[Sequence[Measurement]]) -> NDArray[np.float64]:
    """Return the error of each point, ``[points, 2]``: of the miss rate, and the relative error of the wait."""
    found = []
    for points in settings:
        workload, setting = points[0].workload, points[0].setting
        assert setting is not None
        epochs = simulate_samples(replace(WORKLOADS[workload], costs=costs[workload]), setting)
        found += [_error(point, epochs[point.epoch - 1]) for point in points]
    return np.array(found)


def _error(known: Measurement, ours: SampleEpoch) -> tuple[float, float]:
    miss = 0.0 if known.miss_rate is None else ours.miss_rate - known.miss_rate
    return miss, ours.wait_seconds / known.wait_seconds - 1


def fit_costs(model: Model, settings: Sequence[Sequence[Measurement]]) -> Costs:
    """Return the costs with which a model fits the points best."""

    def distance(factors: NDArray[np.float64]) -> float:
        scaled = errors(model.costs(factors), settings) / (MAX_MISS_ERROR, MAX_WAIT_ERROR)
        return float((scaled**4).sum())

    start = np.ones(model.free)
    simplex = np.vstack([start, start + 0.25 * np.eye(model.free)])
    limits = {"maxfev": EVALUATIONS, "initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-2}
    return model.costs(minimize(distance, start, method="Nelder-Mead", options=limits).x)


def _line(model: Model) -> str:
    settings = by_setting()
    costs = fit_costs(model, settings)
    folds = [(settings[::2], settings[1::2]), (settings[1::2], settings[::2])]
    unseen = np.vstack([errors(fit_costs(model, seen), rest) for seen, rest in folds])
    return f"| {model.name} | {model.free} | {_worst(errors(costs, settings))} | {_worst(unseen)} |"


def _worst(found: NDArray[np.float64]) -> str:
    miss, wait = np.abs(found).max(axis=0)
    return f"{miss:.3f} | {wait:.1%}"


def main(arguments: list[str]) -> int:
    """Print the constants of the chosen model, and with ``all`` the errors of all models."""
    settings = by_setting()
    costs = fit_costs(CHOSEN, settings)
    for name, each in costs.items():
        print(name, ", ".join(f"{field.name}={getattr(each, field.name):.4g}" for field in fields(each)))
    in_use = {name: workload.costs for name, workload in WORKLOADS.items()}
    for what, each_costs in (("fitted", costs), ("in use", in_use)):
        print(f"{what}, worst errors of miss rate and wait: {_worst(errors(each_costs, settings))}", flush=True)
    if arguments == ["all"]:
        print("| model | free constants | miss rate | wait | miss rate, not seen | wait, not seen |")
        print("|---|---|---|---|---|---|")
        for model in MODELS:
            print(_line(model), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
