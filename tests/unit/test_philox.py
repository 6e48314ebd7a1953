from __future__ import annotations

import numpy as np
import pytest

from golden import make_order
from stoker._order import random_words
from stoker._order.random_words import Purpose, permutation, words
from support.cases import for_each

ONES = (1 << 64) - 1


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_the_golden_script_s_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], block: tuple[int, int, int, int]
) -> None:
    assert make_order.philox4x64(counter, key) == block


@for_each("purpose", list(Purpose))
@for_each(("seed", "epoch", "index", "part"), [(0, 0, 0, 0), (7, 3, 1_000_000, 65_535), (ONES, 1, 2, 3)])
def test_words_are_those_of_the_paper_at_the_documented_counter(
    purpose: Purpose, seed: int, epoch: int, index: int, part: int
) -> None:
    drawn = words(11, seed=seed, purpose=purpose, epoch=epoch, index=index, part=part)
    assert drawn.dtype == np.uint64
    assert drawn.tolist() == make_order.words(11, seed, purpose, epoch, index, part)


def test_the_numbers_of_the_purposes_are_part_of_the_format() -> None:
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "SUPER_SAMPLES": 1,
        "ROWS": 2,
        "BLOCK": 3,
        "FULL": 4,
        "SAMPLE": 5,
        "PACK": 6,
        "HOME": 7,
    }


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 1000])
def test_fewer_words_are_a_prefix_of_more(count: int) -> None:
    more = words(1001, seed=5, purpose=Purpose.ROWS, epoch=2)
    assert words(count, seed=5, purpose=Purpose.ROWS, epoch=2).tolist() == more[:count].tolist()


def test_every_part_of_an_address_gives_other_words() -> None:
    addresses = [
        {"seed": seed, "purpose": purpose, "epoch": epoch, "index": index, "part": part}
        for seed in (0, 1)
        for purpose in (Purpose.ROWS, Purpose.BLOCK)
        for epoch in (0, 1)
        for index in (0, 1)
        for part in (0, 1)
    ]
    drawn = {tuple(words(2, **address).tolist()) for address in addresses}  # type: ignore[arg-type]
    assert len(drawn) == len(addresses)


@pytest.mark.parametrize("count", [0, 1, 2, 37, 5000])
def test_a_permutation_has_every_index_once_and_is_the_stable_argsort_of_its_words(count: int) -> None:
    found = permutation(count, seed=9, purpose=Purpose.BLOCK, epoch=1, index=4, part=2)
    assert sorted(found.tolist()) == list(range(count))
    assert found.tolist() == make_order.permutation(count, 9, Purpose.BLOCK, 1, 4, 2)


def test_permutations_are_uniform() -> None:
    draws = 6000
    seen = [tuple(permutation(3, seed=3, purpose=Purpose.ROWS, epoch=0, index=i).tolist()) for i in range(draws)]
    counts = [seen.count(each) for each in sorted(set(seen))]
    expected = draws / 6
    chi_squared = sum((count - expected) ** 2 / expected for count in counts)
    assert len(counts) == 6
    assert chi_squared < 25.7  # the 0.9999 quantile for 5 degrees of freedom; the draw is seeded


@for_each("count", [0, 1, 2, 3, 255, 256, 257, 70_000])
@for_each("seed", [0, 1, 2])
def test_a_permutation_is_the_stable_argsort_of_its_words(count: int, seed: int) -> None:
    drawn = words(count, seed=seed, purpose=Purpose.BLOCK, epoch=3, index=1)
    order = permutation(count, seed=seed, purpose=Purpose.BLOCK, epoch=3, index=1)
    assert order.tolist() == np.argsort(drawn, kind="stable").tolist()


@pytest.mark.parametrize("drawn", [[5, 4, 3, 2, 1], [7, 7, 7, 7], [ONES, 0, ONES - 1, 0, ONES], [1 << 40, 1 << 40, 8]])
def test_words_that_differ_in_their_last_bits_only_are_ordered_as_by_argsort(
    monkeypatch: pytest.MonkeyPatch, drawn: list[int]
) -> None:
    found = np.array(drawn, np.uint64)
    monkeypatch.setattr(random_words, "words", lambda *_, **__: found)
    order = permutation(len(found), seed=0, purpose=Purpose.ROWS, epoch=0)
    assert order.tolist() == np.argsort(found, kind="stable").tolist()
    assert found.tolist() == drawn
