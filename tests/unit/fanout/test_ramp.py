from __future__ import annotations

import pytest

from stoker._fanout.concurrency import Ramp


def ramp(start: int = 8, most: int = 1000) -> Ramp:
    return Ramp(start=start, max_limit=most, period_seconds=1.0)


def filled(ramp: Ramp, periods: int, *, begin_seconds: float = 0.0) -> list[int]:
    """The limits after each of some periods in which it was reached."""
    ramp.grow(ramp.limit, begin_seconds)
    limits = []
    for period in range(1, periods + 1):
        ramp.grow(ramp.limit, begin_seconds + period)
        limits.append(ramp.limit)
    return limits


def test_it_doubles_with_each_period_in_which_it_is_reached_up_to_the_most() -> None:
    assert filled(ramp(8, 100), 5) == [16, 32, 64, 100, 100]


@pytest.mark.parametrize(("start", "most", "limit"), [(8, 2, 2), (1, 5, 1), (8, 8, 8)])
def test_it_begins_at_the_start_or_the_most(start: int, most: int, limit: int) -> None:
    assert ramp(start, most).limit == limit


def test_it_does_not_grow_before_a_period_has_passed() -> None:
    mine = ramp()
    mine.grow(8, 5.0)
    mine.grow(8, 5.999)
    assert (mine.limit, mine.next_growth_seconds()) == (8, 6.0)
    mine.grow(8, 6.0)
    assert mine.limit == 16


def test_it_does_not_grow_while_it_is_not_reached() -> None:
    mine = ramp()
    mine.grow(8, 0.0)
    mine.grow(7, 0.5)
    assert mine.next_growth_seconds() is None
    mine.grow(8, 1.0)
    mine.grow(8, 1.9)
    assert mine.limit == 8


def test_a_throttle_halves_what_runs_and_growth_continues_by_steps() -> None:
    mine = ramp(64, 1000)
    mine.record_throttle(0.0, 64, 3.0)
    assert mine.limit == 32
    assert filled(mine, 8, begin_seconds=3.0) == [36, 40, 44, 48, 52, 56, 60, 63]


def test_it_pauses_at_the_most_that_was_taken_before_more_is_tried() -> None:
    mine = ramp(64, 1000)
    mine.record_throttle(0.0, 64, 3.0)
    limits = filled(mine, 45, begin_seconds=3.0)
    assert limits[7:37] == [63] * 30
    assert limits[37:41] == [67, 71, 75, 79]


def test_throttles_of_calls_that_were_sent_before_the_cut_count_once() -> None:
    mine = ramp(64)
    for _ in range(40):
        mine.record_throttle(2.0, 64, 3.0)
    assert mine.limit == 32
    mine.record_throttle(3.5, 32, 4.0)
    assert mine.limit == 16


def test_a_throttle_below_the_limit_halves_what_ran() -> None:
    mine = ramp(64)
    mine.record_throttle(0.0, 10, 1.0)
    assert mine.limit == 5


def test_at_least_one_call_may_always_run() -> None:
    mine = ramp(1)
    for second in range(5):
        mine.record_throttle(second + 0.5, 1, second + 1.0)
    assert mine.limit == 1
    assert filled(mine, 31, begin_seconds=9.0)[-2:] == [2, 3]
