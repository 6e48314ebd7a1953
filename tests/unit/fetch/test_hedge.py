from __future__ import annotations

import random
from itertools import combinations
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._fetch.config import FetchCounters
from stoker._fetch.hedge import (
    MIN_SIZE_SPREAD,
    MIN_TRANSFERS,
    SAVED_REQUESTS,
    START_HEDGES,
    WINDOW,
    HedgeBudget,
    TransferTimes,
)


@given(
    st.lists(st.sampled_from(["request", "hedge", "end of start"]), max_size=300),
    st.floats(0.0, 1.0),
    st.integers(1, 5),
)
def test_hedges_never_exceed_burst_plus_fraction_of_requests_and_two_for_each_of_a_start(
    events: list[str], fraction: float, burst: int
) -> None:
    counters = FetchCounters()
    budget = HedgeBudget(fraction, burst, counters, is_start=True)
    sent = of_start = hedged = of_this = 0
    is_start = True
    for event in events:
        if event == "request":
            budget.earn()
            sent, of_start, of_this = sent + 1, of_start + is_start, 0
        elif event == "hedge" and sent:
            is_granted = budget.spend(of_this)
            hedged, of_this = hedged + is_granted, of_this + is_granted
        elif event == "end of start":
            budget.is_start = False
            is_start = False
        assert counters.start_hedges <= START_HEDGES * of_start
        assert hedged - counters.start_hedges <= burst + fraction * sent + 1e-9


def test_a_budget_saves_what_a_hundred_requests_earn_and_no_more() -> None:
    budget = HedgeBudget(0.1, 2, FetchCounters())
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 2 + SAVED_REQUESTS // 10


def test_nothing_is_expected_before_four_transfers() -> None:
    times = TransferTimes()
    for seen in range(4):
        assert times.expected_seconds(100) is None, seen
        times.observe(100, 0.5)
    assert times.expected_seconds(100) == pytest.approx(0.5)


def test_first_byte_and_rate_are_estimated_separately_if_sizes_differ() -> None:
    times = TransferTimes()
    rng = random.Random(1)
    for _ in range(64):
        size_bytes = rng.choice([64 << 10, 1 << 20, 8 << 20])
        times.observe(size_bytes, 0.03 + size_bytes / 90e6)
    first_byte_seconds, half_seconds = times.expected_seconds(0), times.expected_seconds(4_500_000)
    assert first_byte_seconds is not None
    assert half_seconds is not None
    assert first_byte_seconds == pytest.approx(0.03, rel=0.01)
    assert half_seconds - first_byte_seconds == pytest.approx(0.05, rel=0.01)
    assert times.expected_seconds(4 << 20) == pytest.approx(0.03 + (4 << 20) / 90e6, rel=0.01)


def test_the_first_byte_is_what_stores_tell_where_they_do() -> None:
    times = TransferTimes()
    for seen in range(32):
        assert (times.expected_first_byte_seconds() is None) == (seen < 4), seen
        times.observe_first_byte(2.0 if seen % 3 == 0 else 0.02)
        times.observe(1000, 0.5)
    assert times.expected_first_byte_seconds() == pytest.approx(0.02)
    assert times.expected_seconds(1000) == pytest.approx(0.5)


def test_a_fifth_of_slow_transfers_does_not_move_the_expectation() -> None:
    times = TransferTimes()
    for number in range(32):
        size_bytes = (number % 4 + 1) << 20
        times.observe(size_bytes, (0.03 + size_bytes / 90e6) * (50.0 if number % 5 == 0 else 1.0))
    assert times.expected_seconds(2 << 20) == pytest.approx(0.03 + (2 << 20) / 90e6, rel=0.3)


def test_nearly_equal_sizes_do_not_make_up_a_rate() -> None:
    times = TransferTimes()
    rng = random.Random(2)
    for _ in range(32):
        times.observe(8_000_000 + rng.randrange(100), rng.uniform(0.09, 0.11))
    assert times.expected_seconds(0) == times.expected_seconds(8_000_000)
    assert times.expected_seconds(8_000_000) == pytest.approx(0.1, rel=0.1)
    assert times.expected_seconds(16_000_000) == pytest.approx(0.2, rel=0.1)


def test_the_expectation_follows_a_change_of_the_network() -> None:
    times = TransferTimes()
    for seconds in [0.1] * 40 + [1.0] * 40:
        times.observe(1000, seconds)
    assert times.expected_seconds(1000) == pytest.approx(1.0)


@given(
    transfers=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.floats(0.0, 100.0)), min_size=MIN_TRANSFERS, max_size=WINDOW + 10
    ),
    size_bytes=st.integers(0, 1 << 21),
)
def test_the_fit_is_that_of_theil_and_sen(transfers: list[tuple[int, float]], size_bytes: int) -> None:
    times = TransferTimes()
    for size, seconds in transfers:
        times.observe(size, seconds)
    recent = transfers[-WINDOW:]
    slopes = [
        (seconds - other_seconds) / (size - other_size)
        for (other_size, other_seconds), (size, seconds) in combinations(recent, 2)
        if abs(size - other_size) > MIN_SIZE_SPREAD * max(size, other_size)
    ]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    first_byte_seconds = max(0.0, median(seconds - slope * size for size, seconds in recent))
    factor = max(1.0, size_bytes / max(1, *(size for size, _ in recent)))
    expected = (first_byte_seconds + slope * size_bytes) * factor
    assert times.expected_seconds(size_bytes) == pytest.approx(expected, rel=1e-9, abs=1e-12)
