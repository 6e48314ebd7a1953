"""The circuit breaker against its table, and against a model of what it promises."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stoker._base.breaker import (
    FAILURE_THRESHOLD,
    PROBE_INTERVAL_SECONDS,
    BreakerState,
    CircuitBreaker,
    Permit,
    ReadOutcome,
)
from support.cases import for_each

FAIL, DELIVER, NEITHER = ReadOutcome.FAILED, ReadOutcome.DELIVERED, ReadOutcome.UNDECIDED


def opened() -> CircuitBreaker:
    """Return a breaker that has opened at second 0."""
    breaker = CircuitBreaker()
    for _ in range(FAILURE_THRESHOLD):
        report(breaker, FAIL, 0.0)
    return breaker


def report(breaker: CircuitBreaker, outcome: ReadOutcome, now: float) -> None:
    permit = breaker.permit(now)
    assert permit is not None
    breaker.report(permit, outcome, now)


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([FAIL] * 2, "closed"),
        ([FAIL] * 3, "open"),
        ([FAIL, FAIL, DELIVER, FAIL, FAIL], "closed"),
        ([FAIL, FAIL, NEITHER, FAIL], "open"),
        ([NEITHER] * 9, "closed"),
    ],
)
def test_three_failures_in_a_row_open_it(outcomes: list[ReadOutcome], state: str) -> None:
    breaker = CircuitBreaker()
    for outcome in outcomes:
        report(breaker, outcome, 0.0)
    assert breaker.state == state
    assert breaker.openings == (state == "open")


@pytest.mark.parametrize(
    ("outcome", "state", "next_seconds"),
    [(DELIVER, "closed", 0.0), (FAIL, "open", PROBE_INTERVAL_SECONDS), (NEITHER, "half-open", 0.0)],
)
def test_after_the_pause_one_probe_decides(outcome: ReadOutcome, state: str, next_seconds: float) -> None:
    breaker = opened()
    assert breaker.permit(PROBE_INTERVAL_SECONDS - 0.01) is None
    probe = breaker.permit(PROBE_INTERVAL_SECONDS)
    assert probe == Permit(is_probe=True)
    assert breaker.permit(PROBE_INTERVAL_SECONDS + 100.0) is None
    breaker.report(probe, outcome, PROBE_INTERVAL_SECONDS)
    assert (breaker.state, breaker.openings) == (state, 1)
    if next_seconds:
        assert breaker.permit(PROBE_INTERVAL_SECONDS + next_seconds - 0.01) is None
    assert breaker.permit(PROBE_INTERVAL_SECONDS + next_seconds) == Permit(is_probe=outcome is not DELIVER)


@pytest.mark.parametrize("outcome", ReadOutcome)
def test_reads_from_before_it_opened_decide_nothing_any_more(outcome: ReadOutcome) -> None:
    breaker = CircuitBreaker()
    old = [breaker.permit(0.0) for _ in range(2)]
    for _ in range(FAILURE_THRESHOLD):
        report(breaker, FAIL, 0.0)
    for at_seconds, state in ((1.0, BreakerState.OPEN), (PROBE_INTERVAL_SECONDS, BreakerState.PROBING)):
        permit = old.pop()
        assert permit is not None
        if state is BreakerState.PROBING:
            breaker.permit(at_seconds)
        breaker.report(permit, outcome, at_seconds)
        assert breaker.state is state


def test_a_second_report_of_a_probe_is_a_named_error() -> None:
    breaker = opened()
    probe = breaker.permit(PROBE_INTERVAL_SECONDS)
    assert probe is not None
    breaker.report(probe, DELIVER, PROBE_INTERVAL_SECONDS)
    with pytest.raises(KeyError):
        breaker.report(probe, DELIVER, PROBE_INTERVAL_SECONDS)


@for_each("seed", range(20))
def test_whatever_comes_at_most_one_read_in_a_pause_is_permitted_while_all_fail(seed: int) -> None:
    rng, now, breaker = random.Random(seed), 0.0, CircuitBreaker()
    held: list[Permit] = []
    given: list[float] = []
    for _ in range(2000):
        now += rng.expovariate(20.0)
        if (permit := breaker.permit(now)) is not None:
            assert permit.is_probe == (breaker.state is BreakerState.PROBING)
            held.append(permit)
            given.append(now)
        if held and rng.random() < 0.5:
            breaker.report(held.pop(rng.randrange(len(held))), FAIL, now)
    probes = given[-5:]
    assert all(later - before >= PROBE_INTERVAL_SECONDS for before, later in pairwise(probes))
    assert breaker.openings == 1
