from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from benchmarks.shuffle_quality import BATCH, SAMPLES_EACH, SUPER_SAMPLES, Quality, quality, table, uniform_share_within

from stoker._order.order import Shuffle

WINDOWS = (1, 2, 4, 8, 16, 32)
TOTAL = SUPER_SAMPLES * SAMPLES_EACH
MIXING: list[Shuffle] = ["block", "window"]


@cache
def measured(shuffle: Shuffle, window: int = 1) -> Quality:
    return quality(shuffle, window)


def test_the_table_has_every_shuffle(capsys: pytest.CaptureFixture[str]) -> None:
    text = table()
    with capsys.disabled():
        print(f"\n{text}")
    assert all(f"| `{shuffle}` |" in text for shuffle in ("none", "block", "window", "full"))


def test_the_share_of_a_uniform_permutation_is_what_numpy_s_permutations_have() -> None:
    rng = np.random.default_rng(0)
    shares = [np.mean(np.abs(np.diff(rng.permutation(TOTAL))) <= 2000) for _ in range(20)]
    assert np.mean(shares) == pytest.approx(uniform_share_within(2000, TOTAL), rel=0.02)
    assert uniform_share_within(TOTAL, TOTAL) == pytest.approx(1)


def test_none_does_not_mix() -> None:
    assert measured("none").rank_correlation == pytest.approx(1)
    assert measured("none").neighbours_in_batch == 1


def test_full_is_within_2_percent_of_a_uniform_permutation() -> None:
    # Standard errors for 5 seeds of 16,384 samples: correlation 0.002, distance 0.25%, share in a batch 3%.
    found = measured("full")
    assert found.rank_correlation < 0.02
    assert found.distance == pytest.approx(1, rel=0.02)
    assert found.neighbours_in_batch == pytest.approx(uniform_share_within(BATCH, TOTAL), rel=0.15)


@pytest.mark.parametrize("window", WINDOWS)
def test_inside_a_group_block_is_a_uniform_permutation(window: int) -> None:
    # Of a super-sample's neighbours only those inside it count: the next super-sample is anywhere.
    inside = uniform_share_within(BATCH, window * SAMPLES_EACH)
    assert measured("block", window).neighbours_in_batch == pytest.approx(inside, rel=0.03, abs=0.005)


@pytest.mark.parametrize("shuffle", MIXING)
def test_super_samples_are_permuted_so_that_early_in_the_epoch_says_little(shuffle: Shuffle) -> None:
    # A permutation of 64 has a rank correlation of 0.126 by chance (one standard deviation).
    assert all(measured(shuffle, window).rank_correlation < 0.3 for window in WINDOWS)


@pytest.mark.parametrize("shuffle", MIXING)
def test_a_larger_window_always_mixes_better_and_full_best(shuffle: Shuffle) -> None:
    found = [*(measured(shuffle, window) for window in WINDOWS), measured("full")]
    for smaller, larger in pairwise(found):
        assert larger.neighbours_in_batch < smaller.neighbours_in_batch
        assert larger.distance > 1.2 * smaller.distance
        assert larger.super_samples_in_memory > smaller.super_samples_in_memory


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_window_has_no_borders_for_the_memory_of_block_and_nearly_its_distance(window: int) -> None:
    window_, block = measured("window", window), measured("block", window)
    assert window_.super_samples_in_memory == block.super_samples_in_memory
    assert block.borders == SUPER_SAMPLES / window - 1
    assert window_.borders == 0
    assert window_.distance > 0.8 * block.distance  # its first and last blocks are smaller than the others


def test_none_closes_every_super_sample_before_the_next_and_full_closes_none() -> None:
    assert measured("none").borders == SUPER_SAMPLES - 1
    assert measured("full").borders == 0
