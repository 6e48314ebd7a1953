"""The controller against a model of a link: each request gets its connection's rate or its share of the whole."""

from __future__ import annotations

import random
from statistics import median

from stoker._fetch.concurrency import AimdLimit

SIZE_BYTES = 8_000_000
CONNECTION_RATE = 90e6


def drive(
    aimd: AimdLimit,
    *,
    link_rate: float,
    completions: int,
    saturated: bool = True,
    noise: random.Random | None = None,
    late_fraction: float = 0.0,
) -> list[int]:
    """Complete requests in the time that each takes beside ``aimd.limit`` others; return the limit after each."""
    limits = []
    rng = random.Random(0)
    for _ in range(completions):
        seconds = SIZE_BYTES / min(CONNECTION_RATE, link_rate / aimd.limit)
        seconds *= noise.lognormvariate(0.0, 0.5) if noise else 1.0
        seconds += 2.0 * (rng.random() < late_fraction)
        aimd.record_completion(SIZE_BYTES, seconds, saturated=saturated)
        limits.append(aimd.limit)
    return limits


def test_grows_while_more_requests_bring_more_bytes() -> None:
    aimd = AimdLimit(start=4, min_limit=1, max_limit=64)
    limits = drive(aimd, link_rate=1e12, completions=10_000)
    assert max(limits) == 64
    assert median(limits) == 64


def test_settles_near_what_fills_the_link() -> None:
    aimd = AimdLimit(start=4, min_limit=1, max_limit=64)
    limits = drive(aimd, link_rate=10 * CONNECTION_RATE, completions=5000)
    assert 8 <= min(limits[1000:]) <= max(limits[1000:]) <= 15


def test_noise_does_not_drive_it_to_its_most() -> None:
    for seed in range(5):
        aimd = AimdLimit(start=16, min_limit=1, max_limit=64)
        limits = drive(aimd, link_rate=10 * CONNECTION_RATE, completions=20_000, noise=random.Random(seed))
        assert 8 <= median(limits[2000:]) <= 24


def test_grows_again_when_the_link_does() -> None:
    aimd = AimdLimit(start=4, min_limit=1, max_limit=64)
    drive(aimd, link_rate=10 * CONNECTION_RATE, completions=1000)
    limits = drive(aimd, link_rate=1e12, completions=10_000)
    assert max(limits) == 64


def test_the_limit_does_not_grow_without_waiters() -> None:
    aimd = AimdLimit(start=4, min_limit=1, max_limit=64)
    drive(aimd, link_rate=1e12, completions=2000, saturated=False)
    assert aimd.limit == 4


def test_one_burst_of_throttles_halves_once() -> None:
    aimd = AimdLimit(start=16, min_limit=1, max_limit=64)
    for late in range(10):
        aimd.record_throttle(sent_seconds=1.0, now_seconds=2.0 + late / 10)
    assert aimd.limit == 8
    aimd.record_throttle(sent_seconds=3.0, now_seconds=3.1)
    assert aimd.limit == 4


def test_never_leaves_its_bounds() -> None:
    aimd = AimdLimit(start=4, min_limit=3, max_limit=5)
    limits = drive(aimd, link_rate=1e12, completions=2000)
    assert (min(limits), max(limits)) == (4, 5)
    limits = drive(aimd, link_rate=CONNECTION_RATE, completions=2000)
    assert (min(limits), max(limits)) == (3, 5)
    for second in range(5):
        aimd.record_throttle(2000.0 + second, 2000.0 + second)
    assert aimd.limit == 3


def test_recovers_after_throttling_ends() -> None:
    aimd = AimdLimit(start=16, min_limit=1, max_limit=64)
    aimd.record_throttle(0.0, 0.0)
    aimd.record_throttle(1.0, 1.0)
    assert max(drive(aimd, link_rate=1e12, completions=500)) >= 16


def test_completions_in_no_time_do_not_divide_by_zero() -> None:
    aimd = AimdLimit(start=4, min_limit=1, max_limit=64)
    for _ in range(100):
        aimd.record_completion(SIZE_BYTES, 0.0, saturated=True)
    assert aimd.limit == 4


def test_a_few_requests_that_are_late_by_seconds_do_not_mislead_it() -> None:
    for link_rate, least, most in ((1e12, 64, 64), (10 * CONNECTION_RATE, 8, 20)):
        aimd = AimdLimit(start=16, min_limit=1, max_limit=64)
        limits = drive(aimd, link_rate=link_rate, completions=5000, late_fraction=0.05)
        assert least <= median(limits[2500:]) <= most


def test_comes_down_within_a_few_rounds_where_fewer_do_as_well() -> None:
    aimd = AimdLimit(start=64, min_limit=1, max_limit=64)
    aimd.record_completion(SIZE_BYTES, SIZE_BYTES / CONNECTION_RATE, saturated=False)  # the first one of all
    assert drive(aimd, link_rate=10 * CONNECTION_RATE, completions=1200)[-1] <= 20


def test_goes_no_lower_than_twice_what_fills_the_link_however_little_a_step_seems_to_cost() -> None:
    first_byte_seconds, transfer_seconds = 0.1, SIZE_BYTES / CONNECTION_RATE
    fills = 10 * (first_byte_seconds + transfer_seconds) / transfer_seconds
    for seed in range(5):
        rng = random.Random(seed)
        aimd = AimdLimit(start=64, min_limit=1, max_limit=64)
        for _ in range(10_000):
            seconds = SIZE_BYTES / CONNECTION_RATE * rng.lognormvariate(0.0, 0.5) * max(1.0, aimd.limit / fills)
            waited = first_byte_seconds * rng.lognormvariate(0.0, 0.5)
            aimd.record_completion(SIZE_BYTES, waited + seconds, saturated=True, first_byte_seconds=waited)
            assert aimd.limit >= fills


def test_what_ran_beside_more_or_fewer_than_the_limit_is_not_judged() -> None:
    aimd = AimdLimit(start=8, min_limit=1, max_limit=64)
    for _ in range(8):
        aimd.record_completion(SIZE_BYTES, 1e-6, saturated=True)  # a start with the link to itself
    assert max(drive(aimd, link_rate=1e12, completions=2000)) == 64


def test_transfers_that_take_no_time_behind_their_first_byte_are_judged_by_it() -> None:
    aimd = AimdLimit(start=8, min_limit=1, max_limit=64)
    for _ in range(1000):
        aimd.record_completion(1, 0.1, saturated=True, first_byte_seconds=0.1)
    assert aimd.limit == 64
