"""The cache processes of four machines in virtual time: whatever happens, every rank gets its samples once, in time."""

from __future__ import annotations

import pytest

from support.cluster_schedules import EPOCHS, FAULTS, OBJECTS, RANGES, play
from support.many_schedules import play_all

SCHEDULES = 16
"""All faults, with ranks that have twins and that have none; ``make soak`` plays more."""


def test_no_fault_loses_repeats_or_spoils_a_sample_or_stalls_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    counts, wrong = play_all(play, SCHEDULES, chunk=5)
    with capsys.disabled():
        print(f"\n{SCHEDULES} random fault schedules of a cluster:\n  {dict(counts.most_common())}")
    assert not wrong, f"{len(wrong)} went wrong, the first of them {min(wrong)}:\n{wrong[min(wrong)]}"
    assert set(FAULTS) <= set(counts)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 8])  # each another kind of run
def test_without_faults_the_bucket_is_read_once(seed: int) -> None:
    run = play(seed, faults=0)
    requests = [run.counts[name] for name in ("requests", f"requests of epoch {EPOCHS + 1}")]
    if run.holds_all:
        assert requests == [OBJECTS, 0]
    elif run.reads_ranges:  # of what has no place, each range is read by itself
        assert requests[0] < EPOCHS * RANGES * OBJECTS * run.twins
    elif run.twins == 1:  # half of the objects stay
        assert requests[0] < 0.75 * EPOCHS * OBJECTS
    else:  # each group has its super-samples read once an epoch, at most
        assert requests[0] < EPOCHS * OBJECTS


def test_the_same_seed_takes_the_same_course() -> None:
    assert play(5).counts == play(5).counts
