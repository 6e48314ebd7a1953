"""A permuted pack mixes a sorted source as a uniform permutation does, by every measure of the benchmark."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from benchmarks.packed_order import ORDERS, SAMPLES, OrderQuality, packed_order, quality

# Standard errors for 20 seeds of 16,384 samples: correlation 0.001, neighbours 1%, distance 0.1%, classes 0.4%.
UNIFORM = OrderQuality(uncorrelated=1, neighbours=1, distance=1, classes=1)
PERMUTED = [name for name in ORDERS if "--shuffle" in name]


@pytest.mark.parametrize("name", PERMUTED)
def test_every_measure_is_that_of_a_uniform_permutation(name: str) -> None:
    found = quality(name)
    assert astuple(found) == pytest.approx(astuple(UNIFORM), rel=0.04)
    assert (found.uncorrelated, found.distance, found.classes) == pytest.approx((1, 1, 1), rel=0.02)


def test_a_sorted_source_that_is_packed_as_it_is_stays_sorted_by_class_within_an_epoch() -> None:
    assert quality("packed, an epoch of `window` 8").classes > 10


def test_the_packed_order_has_every_sample_once() -> None:
    assert np.array_equal(np.sort(packed_order(3)), np.arange(SAMPLES))
    assert np.array_equal(packed_order(None), np.arange(SAMPLES))
