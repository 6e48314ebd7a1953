"""Groups of samples read by ranges, under random faults: every value right or a typed error, nothing left behind."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter

import pytest

from stoker.errors import CopiedBucketWarning, CredentialsError, FetchError, ObjectChangedError
from stoker.testing import run_virtual
from support.fault_profiles import faulty_profile
from support.faulty_store import FAULTS, StoreProfile
from support.ranged_run import COUNTS, MANIFEST, OBJECTS, SAMPLES, BatchRun, Run, UnitRun, cancel_after

RUNS = 30


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
def test_random_faults_spoil_no_value_and_leave_nothing(kind: type[Run]) -> None:
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in range(RUNS):
        run = kind(seed, faulty_profile(seed), attempt_seconds=1.0, checksum_attempts=10)
        run_virtual(run.play())
        assert sorted(run.delivered) == list(range(len(SAMPLES)))
        assert run.leaves_nothing()
        stats = run.fetcher.stats
        faults.update(run.store.faults)
        totals["hedges"] += stats.hedges
        totals["hedge wins"] += stats.hedge_wins
        totals["checksum failures"] += stats.checksum_failures
        totals["retries"] += sum(stats.retries.values())
    print(f"\n{RUNS} runs: {dict(faults)}, {dict(totals)}")
    assert set(FAULTS) <= faults.keys()
    assert all(totals[name] for name in ("hedges", "hedge wins", "checksum failures", "retries"))


def test_the_ring_full_of_groups_does_not_keep_small_ranges_from_being_hedged() -> None:
    run = Run(0, StoreProfile(tail_sigma=0.0, probability={"stall": 0.01}))
    run_virtual(run.play())
    assert run.ring.statistics().peak_used == 4
    stats = run.fetcher.stats
    assert stats.hedges == stats.hedge_wins == run.store.faults["stall"] > 0
    assert not stats.retries


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "reset", "throttle", "stall"])
def test_heads_are_read_again_until_they_are_right(fault: str) -> None:
    run = Run(0)
    run.store.script = lambda number, key: fault if number < len(COUNTS) else None
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))
    assert run.store.faults[fault] == len(COUNTS)


def spoil(run: Run, row: int, place: int) -> str:
    """Change a byte of an object for good; return its key."""
    key = MANIFEST.key(row)
    body = bytearray(OBJECTS[key])
    body[place] ^= 1
    run.store.objects[key] = bytes(body)
    return key


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
def test_a_value_spoilt_at_rest_is_an_error_that_names_object_column_and_row(kind: type[Run]) -> None:
    run = kind(0)
    key = spoil(run, 2, -1)
    with pytest.raises(FetchError, match=rf"{key} is corrupt: .* \(column 'sound' of row 43 is not what was packed\)"):
        run_virtual(run.play())
    assert run.leaves_nothing()


def test_a_head_spoilt_at_rest_is_an_error_before_anything_is_delivered_and_can_be_tried_again() -> None:
    run = Run(0)
    key = spoil(run, 3, 100)
    with pytest.raises(FetchError, match=f"{key}.*its head"):
        run_virtual(run.play())
    assert run.leaves_nothing()
    assert run.delivered == []
    run.store.objects[key] = OBJECTS[key]
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))


def test_an_item_spoilt_at_rest_can_be_read_by_the_next_run_in_the_same_memory() -> None:
    run = UnitRun(0)
    key = spoil(run, 3, 100)
    with pytest.raises(FetchError, match=f"{key}.*its head"):
        run_virtual(run.play())
    assert run.leaves_nothing()
    run.store.objects[key] = OBJECTS[key]
    run.items, run.delivered = [], []
    run_virtual(run.play())
    assert sorted(run.delivered) == list(range(len(SAMPLES)))


def test_a_unit_that_fails_ahead_of_the_consumer_is_fetched_again_in_its_own_memory() -> None:
    """Seeds with outages at other times: whichever units fail, with or without memory, the rest waits in turn."""
    again = 0
    for first in range(2, 60, 3):
        run = UnitRun(first, StoreProfile(tail_sigma=0.0), attempts=1, hedge=False)
        run.store.script = lambda number, key, first=first: "reset" if first <= number < first + 6 else None
        with contextlib.suppress(FetchError):  # of a unit that the consumer waited for
            run_virtual(run.play())
            assert sorted(run.delivered) == list(range(len(SAMPLES)))
            again += run.fetcher.stats.failed > 0
        assert run.leaves_nothing()
    assert again > 5


def test_a_replaced_object_is_reported_or_accepted_on_its_checksums() -> None:
    copied = Run(0)
    copied.store.tags = dict.fromkeys(OBJECTS, "v2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_virtual(copied.play())
    assert [warning.category for warning in caught] == [CopiedBucketWarning]
    assert sorted(copied.delivered) == list(range(len(SAMPLES)))
    replaced = Run(0)
    key = spoil(replaced, 1, 150)
    replaced.store.tags[key] = "v2"
    with pytest.raises(ObjectChangedError, match=key):
        run_virtual(replaced.play())


def test_an_error_that_no_retry_helps_ends_the_run_at_once() -> None:
    run = Run(0, StoreProfile(credentials_expire_at=0.25))
    with pytest.raises(CredentialsError):
        run_virtual(run.play())
    assert 0 < len(run.delivered) < len(SAMPLES)
    assert run.leaves_nothing()


@pytest.mark.parametrize("kind", [Run, UnitRun, BatchRun])
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3])
def test_cancelling_at_any_time_leaves_nothing(kind: type[Run], seconds: float) -> None:
    run = kind(3, StoreProfile(closing_seconds=0.2, probability={"stall": 0.05}))
    run_virtual(cancel_after(seconds, run.play()))
    assert run.leaves_nothing()
