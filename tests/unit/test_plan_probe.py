"""A probe finds out what a bucket is like: asked of models, it says what they were made of."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from stoker._diagnostics.latency import Constant, LateTail, LogNormal
from stoker._diagnostics.probe import Probe, ProbeLimits, probe
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, DeadlineError, ServerError
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import BucketView, SimulatedBucket, create_size_lookup, synthetic_manifest

TAILS = {"none": (0.0, 0.0), "5% of 2 s": (0.05, 2.0), "1% of 10 s": (0.01, 10.0)}


@cache
def probed(
    model: BucketModel,
    node: float = math.inf,
    size: int = 8 << 20,
    limits: ProbeLimits | None = None,
    seed: int = 1,
) -> Probe:
    """Return what a probe finds out; what is the same finds out the same."""
    manifest = synthetic_manifest(super_samples=20, samples=10, super_sample_bytes=size)

    async def main() -> Probe:
        view = BucketView(
            SimulatedBucket(model, create_size_lookup(manifest)), random.Random(seed), bytes_per_second=node
        )
        return await probe(view, [manifest.ref(row) for row in range(len(manifest))], limits)

    return run_virtual(main())


def model(first_byte: float = 0.03, rate: float = 50e6, errors: float = 0.0) -> BucketModel:
    return BucketModel(first_byte=Constant(first_byte), connection_bytes_per_second=rate, error_fraction=errors)


@pytest.mark.parametrize("rate", [5e6, 50e6, 500e6])
@pytest.mark.parametrize("first_byte", [0.002, 0.1])
def test_first_byte_and_rate_of_a_connection_are_estimated_separately(rate: float, first_byte: float) -> None:
    found = probed(model(first_byte, rate))
    assert found.median_seconds == pytest.approx(first_byte, rel=0.2)
    assert found.connection_bytes_per_second == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("node", [30e6, 60e6, 120e6, 300e6])
def test_a_full_link_is_measured(node: float) -> None:
    found = probed(model(), node)
    assert found.is_saturated
    assert found.total_bytes_per_second == pytest.approx(node, rel=0.05)


def test_an_unsaturated_link_is_estimated_at_least_at_the_observed_rate() -> None:
    found = probed(model(rate=5e6))
    assert not found.is_saturated
    assert found.total_bytes_per_second == pytest.approx(found.connections * 5e6, rel=0.02)


@pytest.mark.parametrize("seed_shift", [1.0, 3.0])
def test_scattered_answers_are_not_taken_for_a_full_link(seed_shift: float) -> None:
    scattered = BucketModel(first_byte=LogNormal(0.05 * seed_shift, 0.4), connection_bytes_per_second=30e6)
    found = probed(scattered)
    assert not found.is_saturated
    assert found.connection_bytes_per_second == pytest.approx(30e6, rel=0.02)


def test_objects_that_are_too_small_to_tell_a_rate_are_not_believed() -> None:
    found = probed(model(rate=900e6), size=64 << 10)
    assert found.connection_bytes_per_second == 90e6
    assert not found.is_saturated


def test_a_probe_keeps_to_its_limits() -> None:
    limits = ProbeLimits(requests=60, size_bytes=20 << 20)
    found = probed(model(), 60e6, limits=limits)
    assert found.requests <= 60
    assert found.read_bytes <= 20 << 20
    small = probed(model(), 60e6, limits=ProbeLimits(size_bytes=1 << 20))
    assert small.read_bytes <= 1 << 20


def late(tail: str, usual_seconds: float = 0.02, rate: float = 90e6) -> BucketModel:
    usual = LogNormal(usual_seconds, 1.26 * usual_seconds)
    return BucketModel(first_byte=LateTail(usual, *TAILS[tail]), connection_bytes_per_second=rate)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("node", "usual_seconds", "rate"), [(600e6, 0.02, 90e6), (150e6, 0.1, 50e6), (200e6, 0.05, 30e6)]
)
def test_late_answers_hide_neither_a_full_link_nor_the_rate_of_a_connection(
    tail: str, node: float, usual_seconds: float, rate: float
) -> None:
    for seed in range(4):
        found = probed(late(tail, usual_seconds, rate), node, seed=seed)
        assert found.is_saturated
        assert found.total_bytes_per_second == pytest.approx(node, rel=0.2), seed
        assert found.connection_bytes_per_second == pytest.approx(rate, rel=0.2), seed
        assert found.median_seconds == pytest.approx(usual_seconds, rel=0.2), seed


@pytest.mark.parametrize("tail", TAILS)
def test_late_answers_do_not_fill_a_link(tail: str) -> None:
    for seed in range(4):
        found = probed(late(tail, rate=20e6), seed=seed)
        assert not found.is_saturated, seed
        assert found.total_bytes_per_second == pytest.approx(found.connections * 20e6, rel=0.02), seed


@pytest.mark.parametrize("tail", TAILS)
def test_late_answers_cost_a_probe_neither_its_limits_nor_a_tail_of_time(tail: str) -> None:
    limits = ProbeLimits(requests=200, size_bytes=128 << 20, seconds=20.0)
    for seed in range(6):
        found = probed(late(tail), 600e6, limits=limits, seed=seed)
        assert found.requests <= 200
        assert found.seconds < 15.0, seed


def test_the_fraction_of_late_responses_is_estimated_from_all_requests() -> None:
    found = [probed(late("5% of 2 s"), 600e6, seed=seed) for seed in range(20)]
    counted = [len(each.first_byte_seconds) for each in found]
    assert min(counted) > 50
    assert sum(each.late for each in found) / sum(counted) == pytest.approx(0.05, rel=0.2)
    slow = [seconds for each in found for seconds in each.first_byte_seconds if seconds > 1]
    assert len(slow) == sum(each.late for each in found)
    assert slow == pytest.approx([2.02] * len(slow), rel=0.01)


def test_an_answer_that_is_not_waited_for_counts_with_what_was_waited() -> None:
    found = next(each for each in (probed(late("1% of 10 s"), 600e6, seed=seed) for seed in range(20)) if each.late)
    assert found.slowest_seconds > 3.0


def test_a_store_that_answers_after_seconds_as_a_rule_is_not_late() -> None:
    found = probed(model(first_byte=1.5, rate=20e6), limits=ProbeLimits(seconds=60.0))
    assert found.late == 0
    assert found.median_seconds == pytest.approx(1.5, rel=0.01)
    assert found.connection_bytes_per_second == pytest.approx(20e6, rel=0.02)


def test_a_bucket_that_hardly_moves_ends_the_probe_in_time() -> None:
    with pytest.raises(DeadlineError, match="30 seconds"):
        probed(model(rate=1000.0))


def test_errors_that_pass_are_counted_and_not_measured() -> None:
    found = probed(model(errors=0.2))
    assert found.failed > 0
    assert found.connection_bytes_per_second == pytest.approx(50e6, rel=0.02)


def test_a_bucket_that_always_fails_is_an_error() -> None:
    with pytest.raises(ServerError):
        probed(model(errors=0.999999))


def test_the_model_made_of_it_answers_as_it_did() -> None:
    made = probed(model()).bucket()
    assert made.first_byte.draw(random.Random(0)) == pytest.approx(0.03, rel=0.01)
    assert made.connection_bytes_per_second == pytest.approx(50e6, rel=0.02)


def test_nothing_to_read_is_refused() -> None:
    async def main() -> None:
        view = BucketView(SimulatedBucket(model(), lambda key: 0), random.Random(1))
        await probe(view, [ObjectRef(key="empty", size_bytes=0, crc32c=0)])

    with pytest.raises(ConfigError, match="nothing to read"):
        run_virtual(main())


@pytest.mark.parametrize("bad", [{"requests": 5}, {"size_bytes": 1}, {"seconds": 0.0}, {"first_bytes": 1}])
def test_limits_that_leave_nothing_to_measure_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ProbeLimits(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_queue_seconds", "tolerance"), [(math.inf, 0.1), (0.0, 0.1)])
@pytest.mark.parametrize("rate", [20.0, 50.0, 100.0])
def test_a_limit_on_requests_is_found_whether_more_are_refused_or_wait(
    rate: float, max_queue_seconds: float, tolerance: float
) -> None:
    limited = BucketModel(
        first_byte=LogNormal(0.02, 0.03),
        requests_per_second=rate,
        burst=20,
        max_queue_seconds=max_queue_seconds,
        connection_bytes_per_second=50e6,
    )
    found = probed(limited, 400e6)
    assert found.limit is not None
    assert found.limit.requests_per_second == pytest.approx(rate, rel=tolerance)
    assert found.limit.max_queue_seconds == max_queue_seconds
    assert found.bucket().requests_per_second == found.limit.requests_per_second
    assert (found.throttled > 0) == (max_queue_seconds == 0)
    assert found.bucket().error_fraction == 0.0
    assert found.connection_bytes_per_second == pytest.approx(50e6, rel=0.05)
    assert found.median_seconds < 0.06


@pytest.mark.parametrize("tail", TAILS)
def test_no_limit_on_requests_is_found_where_there_is_none(tail: str) -> None:
    for seed in range(8):
        assert probed(late(tail), 600e6, seed=seed).limit is None, seed
