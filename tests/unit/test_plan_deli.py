"""DELI in virtual time: its rule as it is written, and its measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker_sim._experiments.deli import (
    DeliSetting,
    DeliWorkload,
    Measurement,
    SampleCosts,
    load_measurements,
    simulate_samples,
    simulate_setting,
)

COSTS = SampleCosts(get_seconds=0.05, fetch_seconds=0.001)
WORKLOAD = DeliWorkload(
    name="w", title="", dataset_samples=3000, node_samples=1000, compute_seconds=10.0, sample_bytes=1, costs=COSTS
)
SETTING = DeliSetting(batch_size=100)
KNOWN = [each for each in load_measurements() if each.setting is not None]


@pytest.mark.parametrize(
    "known", KNOWN, ids=lambda each: f"{each.workload}-{each.experiment}-{each.setting}-{each.epoch}"
)
def test_every_published_point_is_met(known: Measurement) -> None:
    assert known.setting is not None
    ours = simulate_setting(known.workload, known.setting)[known.epoch - 1]
    if known.miss_rate is not None:
        assert ours.miss_rate == pytest.approx(known.miss_rate, abs=0.03)
    assert ours.wait_seconds == pytest.approx(known.wait_seconds, rel=0.15)


def test_there_are_as_many_points_as_were_published() -> None:
    assert len(load_measurements()) == 52
    assert len(KNOWN) == 48


def test_without_a_cache_every_sample_is_read_from_the_bucket() -> None:
    for epoch in simulate_samples(WORKLOAD, replace(SETTING, cache_samples=0)):
        assert epoch.miss_rate == 1.0
        assert epoch.wait_seconds == pytest.approx(1000 * 0.05)
        assert epoch.seconds == pytest.approx(1000 * 0.05 + 10.0)


def test_a_fetch_is_requested_when_the_queue_is_empty_and_never_crosses_an_epoch() -> None:
    first, second = simulate_samples(WORKLOAD, replace(SETTING, fetch_size=300))
    assert first.fetches == second.fetches == 4


def test_a_cache_without_room_for_threshold_fetch_and_batch_evicts_what_was_not_read() -> None:
    enough, less = (
        simulate_samples(WORKLOAD, DeliSetting(200, 200, room, batch_size=100))[0].miss_rate for room in (500, 200)
    )
    assert enough < 0.05 < less


@pytest.mark.parametrize(("processors", "share"), [(1, 1 / 2), (2, 2 / 3), (8, 8 / 9)])
def test_a_fetch_beside_a_step_has_its_share_of_the_processors(processors: int, share: float) -> None:
    """A fetch of both batches begins with the first, which takes 1 s; a step of 3 s follows, then the second."""
    two = replace(WORKLOAD, node_samples=200, compute_seconds=6.0, processors=processors)
    work_seconds = 1.0 + 3.0 * share
    in_time, late = (
        simulate_samples(
            replace(two, costs=SampleCosts(get_seconds=0.01, fetch_seconds=(work_seconds + slack_seconds) / 200)),
            replace(SETTING, fetch_size=200),
        )
        for slack_seconds in (-0.005, 0.005)
    )
    assert in_time[0].misses == 100
    assert late[0].misses == 101
