from __future__ import annotations

import random
from statistics import mean

import pytest

from stoker._base.retry import backoff_seconds


def waits(failures: int, *, retry_after_seconds: float | None = None) -> list[float]:
    rng = random.Random(failures)
    return [
        backoff_seconds(failures, base_seconds=0.1, cap_seconds=5.0, rng=rng, retry_after_seconds=retry_after_seconds)
        for _ in range(2000)
    ]


@pytest.mark.parametrize(("failures", "bound"), [(1, 0.1), (2, 0.2), (5, 1.6), (7, 5.0), (10_000, 5.0)])
def test_waits_are_spread_evenly_from_zero_to_a_doubling_bound(failures: int, bound: float) -> None:
    drawn = waits(failures)
    assert 0.0 <= min(drawn) < 0.01 * bound
    assert 0.99 * bound < max(drawn) <= bound
    assert mean(drawn) == pytest.approx(bound / 2, rel=0.05)


def test_retry_after_is_waited_out_in_full_with_jitter_on_top() -> None:
    drawn = waits(2, retry_after_seconds=7.0)
    assert min(drawn) >= 7.0
    assert max(drawn) <= 7.2
    assert len(set(drawn)) > 1000


def test_a_negative_retry_after_does_not_shorten_the_wait() -> None:
    assert min(waits(1, retry_after_seconds=-3.0)) >= 0.0
