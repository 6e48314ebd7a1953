"""The permutation behind ``full``, from sample to position."""

from __future__ import annotations

import numpy as np
import pytest

from stoker import Order, OrderConfig


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 70_001])
def test_the_inverse_finds_the_position_of_every_sample(samples: int) -> None:
    permuted = Order(np.array([samples]), OrderConfig(shuffle="full", seed=11), epoch=2).feistel()
    positions = np.arange(samples)
    assert (permuted.inverse(permuted(positions)) == positions).all()
    assert (permuted(permuted.inverse(positions)) == positions).all()
