from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker._order.random_words import FeistelPermutation, Purpose, words
from support.cases import for_each


def keys(seed: int) -> NDArray[np.uint64]:
    return words(FeistelPermutation.ROUNDS, seed=seed, purpose=Purpose.FULL, epoch=0)


@for_each("count", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4096, 4097, 70_000])
def test_every_value_of_the_range_is_reached_once(count: int) -> None:
    found = FeistelPermutation(count, keys(1))(np.arange(count))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(count))


def test_any_positions_can_be_asked_in_any_order_without_the_others() -> None:
    permutation = FeistelPermutation(1000, keys(1))
    whole = permutation(np.arange(1000))
    asked = np.array([999, 0, 500, 0, 3])
    assert np.array_equal(permutation(asked), whole[asked])
    assert permutation(np.empty(0, np.int64)).shape == (0,)


def test_the_positions_given_are_not_changed() -> None:
    asked = np.arange(100)
    FeistelPermutation(100, keys(2))(asked)
    assert np.array_equal(asked, np.arange(100))


@pytest.mark.parametrize("count", [10**9, 10**12 + 7, (1 << 47) - 1])
def test_a_range_too_large_to_store_is_permuted_within_it_and_without_a_collision(count: int) -> None:
    found = FeistelPermutation(count, keys(3))(np.arange(count - 5000, count))
    assert found.min() >= 0
    assert found.max() < count
    assert len(np.unique(found)) == 5000
    assert abs(float(found.mean()) / count - 0.5) < 0.02  # 5 standard errors of 5000 uniform values


def test_other_keys_give_another_permutation() -> None:
    first, second = (FeistelPermutation(1000, keys(seed))(np.arange(1000)) for seed in (1, 2))
    assert np.count_nonzero(first == second) < 20  # about one is expected


@for_each("round_index", range(FeistelPermutation.ROUNDS))
def test_every_round_key_matters(round_index: int) -> None:
    changed = keys(1)
    changed[round_index] ^= np.uint64(1)
    before, after = (FeistelPermutation(4096, each)(np.arange(4096)) for each in (keys(1), changed))
    assert not np.array_equal(before, after)


def test_small_ranges_are_permuted_uniformly() -> None:
    draws = 6000
    seen = [tuple(FeistelPermutation(3, keys(seed))(np.arange(3)).tolist()) for seed in range(draws)]
    counts = [seen.count(each) for each in sorted(set(seen))]
    assert len(counts) == 6
    assert sum((count - draws / 6) ** 2 / (draws / 6) for count in counts) < 25.7  # 0.9999 quantile, 5 degrees
