"""Hundreds of random fault schedules: every item and sample right, exactly once, or a typed error in time.

The mutation tests at the end show that the net holds: with the checksum off, or with a slot released twice, the same
run fails.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from stoker._fetch import fetcher as fetch_module
from stoker._fetch.hedge import HedgePolicy
from stoker._memory.ring import Ring, RingStateError
from stoker.testing import VirtualClockError
from support.fault_profiles import Tables
from support.fault_schedules import LEVELS, play
from support.faulty_store import FAULTS

SCHEDULES = {"objects": range(200), "samples": range(100, 225)}
"""Seeds that together have every kind of fault and of failure; ``make soak`` plays more."""
INJECTED = {
    *FAULTS,
    "outage",
    "storm",
    "late",
    "lost",
    "clock jump",
    "expired",
    "expired, renewed",
    "missing",
    "changed",
}
RETRIED = {
    "ThrottledError", "ServerError", "ConnectionLostError", "TruncatedError", "ChecksumError", "DeadlineError",
}  # fmt: skip
RAISED = {"FetchError", "NotFoundError", "ObjectChangedError", "ObjectDamagedError", "ExpiredCredentialsError"}


@pytest.mark.parametrize("level", LEVELS)
def test_no_weather_delivers_wrong_bytes_loses_anything_or_leaves_anything_behind(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = Tables()
    for seed in SCHEDULES[level]:
        tables.merge(play(level, seed).tables())
    with capsys.disabled():
        print(f"\n{len(SCHEDULES[level])} random fault schedules, {level}:\n{tables}")
    assert set(tables.injected) == INJECTED
    assert set(tables.retried) == RETRIED
    assert set(tables.raised) == RAISED
    assert all(count > 0 for table in (tables.injected, tables.counted) for count in table.values()), tables


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_seed_takes_the_same_course(level: str) -> None:
    first, second = play(level, 77), play(level, 77)
    assert first.store.sent_seconds == second.store.sent_seconds
    assert first.tables() == second.tables()


@pytest.mark.parametrize("level", LEVELS)
def test_without_the_checksum_the_net_catches_wrong_bytes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_check_crc32c", lambda ref, checksum: None)
    for seed in range(150):
        try:
            play(level, seed)
        except BaseExceptionGroup as errors:
            if "wrong bytes were delivered" in str(errors.exceptions):
                return
    pytest.fail("the net has a hole")


def test_a_consumer_that_releases_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Ring.release

    def twice(ring: Ring, slot: int) -> None:
        release(ring, slot)
        release(ring, slot)

    monkeypatch.setattr(Ring, "release", twice)
    with pytest.raises(BaseExceptionGroup) as caught:
        play("objects", 1)
    assert caught.group_contains(RingStateError, match="is free: cannot release")


def test_a_slot_freed_before_its_transport_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetcher that does not wait for the losers of a race."""
    lend = HedgePolicy.borrow_buffer

    def not_for_long(hedging: HedgePolicy, size_bytes: int, lent: ExitStack, hedges: int = 0) -> memoryview | None:
        with ExitStack() as at_once:
            return lend(hedging, size_bytes, at_once, hedges)

    monkeypatch.setattr(HedgePolicy, "borrow_buffer", not_for_long)
    for seed in range(100):
        try:
            play("objects", seed)
        except (BaseExceptionGroup, AssertionError, VirtualClockError):
            return
    pytest.fail("the net has a hole")
