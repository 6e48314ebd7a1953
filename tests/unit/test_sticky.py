"""Sticky lanes: how much stays in a lane, that lanes stay equal and epochs independent, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare  # type: ignore[import-untyped]

from stoker import Order, OrderConfig
from stoker.errors import ConfigError

LANES = 8
EQUAL = np.full(2000, 50)
VARYING = np.maximum(1, np.random.default_rng(1).normal(50, 5, 2000)).astype(np.int64)


def samples_by_lane(counts: NDArray[np.integer], epoch: int, **config: Any) -> NDArray[np.int64]:
    """Return the number of samples of each super-sample in each lane, ``int64 [lanes, super-samples]``."""
    order = Order(counts, OrderConfig(**{"lanes": LANES, "seed": 3, **config}), epoch)
    held = np.zeros((order.lanes, len(counts)), np.int64)
    for number in range(order.lanes):
        lane = order.lane(number)
        held[number, lane.super_samples] = [len(lane.row_range(piece)) for piece in range(len(lane))]
    return held


def share_that_stays(counts: NDArray[np.integer], epoch: int, **config: Any) -> float:
    """Return the share of samples whose super-sample the lane had in the epoch before."""
    before, now = (samples_by_lane(counts, each, **config) for each in (epoch - 1, epoch))
    return float(now[before > 0].sum() / now.sum())


@pytest.mark.parametrize("sticky", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize(("counts", "loss"), [(EQUAL, 0.001), (VARYING, 0.01)], ids=["equal", "varying"])
def test_the_given_share_stays_in_its_lane_in_the_mean(sticky: float, counts: NDArray[np.int64], loss: float) -> None:
    epochs = round(1 / (1 - sticky)) * 2 + 1
    shares = [share_that_stays(counts, epoch, sticky=sticky) for epoch in range(1, epochs)]
    assert np.mean(shares) == pytest.approx(sticky + (1 - sticky) / LANES, abs=0.004 + loss)
    assert min(shares) >= sticky - 0.004 - 2 * loss


def test_without_it_lanes_share_what_chance_gives() -> None:
    assert share_that_stays(EQUAL, 5) == pytest.approx(1 / LANES, abs=0.03)


@pytest.mark.parametrize("counts", [EQUAL, VARYING], ids=["equal", "varying"])
def test_lanes_stay_equal(counts: NDArray[np.int64]) -> None:
    for epoch in (0, 1, 1000):
        sizes = samples_by_lane(counts, epoch, sticky=0.9).sum(axis=1)
        assert sizes.sum() == counts.sum()
        assert np.ptp(sizes) <= 1


def test_all_lanes_come_to_a_super_sample_equally_often() -> None:
    """In the long run: every tenth epoch of 0.9, in which all have moved once."""
    visits = np.zeros(LANES, np.int64)
    for seed in range(40):
        for epoch in range(0, 100, 10):
            visits += samples_by_lane(EQUAL[:80], epoch, seed=seed, sticky=0.9)[:, :3].sum(axis=1)
    assert chisquare(visits / 50).pvalue > 1e-4


def test_within_a_lane_the_order_of_super_samples_changes_from_epoch_to_epoch() -> None:
    first, second = (Order(EQUAL, OrderConfig(lanes=LANES, sticky=0.99), epoch).lane(2) for epoch in (4, 5))
    both, places, others = np.intersect1d(first.super_samples, second.super_samples, return_indices=True)
    assert len(both) > 200
    assert abs(np.corrcoef(places, others)[0, 1]) < 0.2


def test_more_lanes_than_super_samples_lose_nothing() -> None:
    held = samples_by_lane(np.array([5, 1, 9]), 3, lanes=12, sticky=0.9)
    assert held.sum(axis=0).tolist() == [5, 1, 9]
    assert np.ptp(held.sum(axis=1)) <= 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shuffle": "full"}, "sticky=0.9 cannot be used with shuffle 'full'"),
        ({"shuffle": "none"}, "sticky=0.9 cannot be used with shuffle 'none'"),
        ({"unit_bytes": 1000}, "sticky=0.9 cannot be used with units"),
        ({"sticky": 1.0}, "sticky must be at least 0 and at most 0.99, not 1.0"),
        ({"sticky": -0.1}, "sticky"),
        ({"sticky": float("nan")}, "sticky"),
    ],
)
def test_what_cannot_be_sticky_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrderConfig(**{"sticky": 0.9, **config})
