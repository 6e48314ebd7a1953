"""Thousands of random fault schedules of a warm tier: always the right bytes, or word that there are none, in time."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from support.warm_schedules import FAULTS, LIES, play

SCHEDULES = int(os.environ.get("STOKER_WARM_SCHEDULES", "2000"))


def test_no_fault_delivers_wrong_bytes_takes_for_ever_or_leaves_anything_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        counts.update(play(seed).counts)
    with capsys.disabled():
        print(f"\n{SCHEDULES} random fault schedules of a warm tier:\n  {dict(counts.most_common())}")
    assert {*FAULTS, *(f"lie: {lie}" for lie in LIES)} <= set(counts)
    assert min(counts[name] for name in ("found", "restored", "rebuilt", "backed_up", "evicted", "corrupt")) > 0


def test_the_same_seed_takes_the_same_course() -> None:
    assert play(77).counts == play(77).counts
