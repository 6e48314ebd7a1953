"""The least that an epoch can take: three terms, of which the largest counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.errors import ConfigError
from stoker_sim._predict import Demand, bound_of

DEMAND = Demand(
    compute_seconds=10.0, size_bytes=1e9, gets=1000, bytes_per_second=1e8, latency_seconds=0.1, concurrency=20
)


def test_each_term_is_what_the_formula_says() -> None:
    bound = bound_of(replace(DEMAND, hit_rate=0.25))
    assert bound.compute_seconds == 10.0
    assert bound.transfer_seconds == pytest.approx(0.75 * 1e9 / 1e8)
    assert bound.request_seconds == pytest.approx(0.75 * 1000 * 0.1 / 20)


@pytest.mark.parametrize(
    ("change", "limit", "seconds"),
    [
        ({}, "compute", 10.0),
        ({"compute_seconds": 9.0}, "bandwidth", 10.0),
        ({"concurrency": 1}, "requests", 100.0),
    ],
)
def test_the_largest_term_is_the_bound_and_is_named(change: dict[str, float], limit: str, seconds: float) -> None:
    bound = bound_of(replace(DEMAND, **change))  # type: ignore[arg-type]
    assert (bound.limit, bound.seconds) == (limit, seconds)


def test_the_least_stall_is_what_is_left_of_the_bound_beside_computing() -> None:
    assert bound_of(DEMAND).stall == 0.0
    assert bound_of(replace(DEMAND, compute_seconds=2.5)).stall == pytest.approx(0.75)
    assert bound_of(replace(DEMAND, compute_seconds=0.0, size_bytes=0.0, gets=0.0)).stall == 0.0


def test_a_cache_that_has_everything_leaves_only_computing() -> None:
    assert bound_of(replace(DEMAND, compute_seconds=1.0, hit_rate=1.0)).seconds == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"hit_rate": 1.01},
        {"hit_rate": -0.1},
        {"bytes_per_second": 0.0},
        {"concurrency": 0},
        {"gets": -1},
        {"latency_seconds": float("nan")},
        {"size_bytes": float("inf")},
    ],
)
def test_what_no_epoch_can_ask_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(DEMAND, **change)  # type: ignore[arg-type]
