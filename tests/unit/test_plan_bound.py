"""The least that an epoch can take: three terms, of which the largest counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker import OrderConfig
from stoker._diagnostics.latency import Constant
from stoker._fetch.config import PipelineConfig
from stoker_sim import BucketModel
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._predict import epoch_bound
from stoker_sim._training import PlannedTraining

WORKLOAD = PlannedTraining(
    manifest=synthetic_manifest(super_samples=1000, samples=10, super_sample_bytes=1_000_000),
    feed=PipelineConfig(order=OrderConfig(), batch_size=10, memory_bytes=1 << 30),
    samples_per_second=1000.0,
    bucket=BucketModel(first_byte=Constant(0.1), connection_bytes_per_second=1e8),
    node_bytes_per_second=1e8,
)
AHEAD = 20


def test_each_term_is_what_the_formula_says() -> None:
    bound = epoch_bound(WORKLOAD, AHEAD, 0.25)
    assert bound.compute_seconds == 10.0
    assert bound.transfer_seconds == pytest.approx(0.75 * 1e9 / 1e8)
    assert bound.request_seconds == pytest.approx(0.75 * 1000 * 0.1 / 20)


def test_ranks_and_nodes_divide_what_is_asked_and_what_a_bucket_answers_is_for_all() -> None:
    bucket = replace(WORKLOAD.bucket, requests_per_second=50.0)
    feed = replace(WORKLOAD.feed, order=OrderConfig(lanes=4), world_size=4)
    bound = epoch_bound(replace(WORKLOAD, feed=feed, ranks_per_node=2, bucket=bucket), AHEAD, 0.0)
    assert bound.compute_seconds == pytest.approx(2.5)
    assert bound.transfer_seconds == pytest.approx(1e9 / 2 / 1e8)
    assert bound.request_seconds == pytest.approx(1000 / 2 * 0.1 / 40)
    assert bound.limit == "request rate"
    assert bound.seconds == pytest.approx(1000 / 50.0)


@pytest.mark.parametrize(
    ("rate", "ahead", "limit", "seconds"),
    [(1000.0, AHEAD, "compute", 10.0), (1111.0, AHEAD, "bandwidth", 10.0), (1000.0, 1, "requests", 100.0)],
)
def test_the_largest_term_is_the_bound_and_is_named(rate: float, ahead: int, limit: str, seconds: float) -> None:
    bound = epoch_bound(replace(WORKLOAD, samples_per_second=rate), ahead, 0.0)
    assert bound.limit == limit
    assert bound.seconds == pytest.approx(seconds)


def test_a_cache_that_has_everything_leaves_only_computing() -> None:
    assert epoch_bound(replace(WORKLOAD, samples_per_second=10_000.0), AHEAD, 1.0).seconds == 1.0
