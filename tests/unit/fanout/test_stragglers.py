from __future__ import annotations

import pytest

from stoker._fanout.concurrency import Stragglers


def stragglers(*seconds: float, calls: int = 100, fraction: float = 0.1, burst: int = 0) -> Stragglers:
    mine = Stragglers(factor=3.0, fraction=fraction, burst=burst)
    for each in seconds:
        mine.observe(each)
    for _ in range(calls):
        mine.earn()
    return mine


def test_a_call_is_late_after_a_multiple_of_the_median() -> None:
    assert stragglers(30.0, 10.0, 90.0, 20.0, 1000.0).late_seconds() == 90.0


def test_two_calls_do_not_tell_what_is_late() -> None:
    assert stragglers(10.0, 10.0).late_seconds() is None


def test_nothing_is_late_within_a_second() -> None:
    assert stragglers(0.01, 0.01, 0.01).late_seconds() == 1.0


@pytest.mark.parametrize(("calls", "burst", "allowed"), [(100, 0, 10), (19, 0, 1), (0, 2, 2), (100, 2, 12), (9, 0, 0)])
def test_second_calls_are_a_fraction_of_the_first_and_a_burst(calls: int, burst: int, allowed: int) -> None:
    mine = stragglers(1.0, 1.0, 1.0, calls=calls, burst=burst)
    spent = 0
    while mine.late_seconds() is not None:
        mine.spend()
        spent += 1
    assert spent == allowed


def test_what_is_late_follows_what_calls_took_of_late() -> None:
    mine = stragglers(*[100.0] * 1000)
    for _ in range(200):
        mine.observe(10.0)
    assert mine.late_seconds() == 30.0
