"""The bytes that `stoker plan --cluster` predicts are those that the ranks of two machines read from the bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.prediction_cluster import Configuration, compare_bytes

SMALL = Configuration(
    name="", limit_share=1.2, samples=3_000, memory=24_000_000, samples_per_second=1e6, ranks_per_machine=1
)
TOLERANCE = 0.07


@pytest.mark.parametrize(
    "configuration",
    [
        replace(SMALL, name="half fits", limit_share=0.25),
        replace(SMALL, name="full", shuffle="full"),
    ],
    ids=lambda configuration: configuration.name,
)
def test_the_bytes_of_each_epoch_are_predicted(configuration: Configuration) -> None:
    first, later = compare_bytes(configuration)
    assert first == pytest.approx(1.0, abs=TOLERANCE)
    assert later == pytest.approx(1.0, abs=TOLERANCE)
