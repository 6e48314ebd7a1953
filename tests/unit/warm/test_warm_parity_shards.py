"""P and Q against arithmetic of polynomials, one bit after the other."""

from __future__ import annotations

from functools import reduce
from itertools import combinations
from operator import xor

import numpy as np
import pytest

from stoker_warm._erasure import Bytes, write_lost, write_p, write_p_and_q

LENGTHS = [(1,), (5, 5, 5), (5, 5, 2), (5, 3, 0, 0), (300_000, 300_000, 1), tuple([9] * 254)]


def product(a: int, b: int) -> int:
    """Return a product of polynomials over GF(2), modulo x^8 + x^4 + x^3 + x^2 + 1."""
    whole = reduce(xor, (a << bit for bit in range(8) if b >> bit & 1), 0)
    for bit in range(14, 7, -1):
        whole ^= 0x11D << bit - 8 if whole >> bit & 1 else 0
    return whole


def power(exponent: int) -> int:
    return reduce(product, [2] * exponent, 1)


def shards_of(lengths: tuple[int, ...]) -> list[Bytes]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 256, length, np.uint8) for length in lengths]


def parity_of(shards: list[Bytes]) -> tuple[Bytes, Bytes]:
    """Return P and Q, written over what was not zero."""
    p, q = np.full((2, len(shards[0])), 0xAA, np.uint8)
    write_p_and_q(shards, p, q)
    return p, q


def at(shards: list[Bytes], column: int) -> list[int]:
    return [int(shard[column]) if column < len(shard) else 0 for shard in shards]


def test_the_powers_of_two_are_all_elements() -> None:
    assert {power(exponent) for exponent in range(255)} == set(range(1, 256))


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_p_is_the_sum_and_q_the_sum_weighted_with_powers_of_two(lengths: tuple[int, ...]) -> None:
    shards = shards_of(lengths)
    p, q = parity_of(shards)
    for column in {0, lengths[0] // 2, lengths[0] - 1}:
        values = at(shards, column)
        assert p[column] == reduce(xor, values)
        assert q[column] == reduce(xor, (product(power(number), value) for number, value in enumerate(values)))


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_the_sum_alone_is_the_same(lengths: tuple[int, ...]) -> None:
    shards = shards_of(lengths)
    p = np.full(lengths[0], 0xAA, np.uint8)
    write_p(shards, p)
    assert (p == parity_of(shards)[0]).all()


@pytest.mark.parametrize("lengths", LENGTHS[:-1], ids=len)
def test_one_lost_shard_comes_from_either_parity_shard(lengths: tuple[int, ...]) -> None:
    shards = shards_of(lengths)
    parity = parity_of(shards)
    for lost, number in ((lost, number) for lost in range(len(shards)) for number in (0, 1)):
        damaged = [shard.copy() for shard in shards]
        damaged[lost][:] = 0x55
        write_lost(damaged, [lost], {number: parity[number]})
        assert all(map(np.array_equal, damaged, shards))


@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=len)
def test_any_two_lost_shards_come_from_both(lengths: tuple[int, ...]) -> None:
    shards = shards_of(lengths)
    parity = dict(enumerate(parity_of(shards)))
    pairs = list(combinations(range(len(shards)), 2))
    for pair in pairs[:: max(1, len(pairs) // 60)]:
        damaged = [shard.copy() for shard in shards]
        for lost in pair:
            damaged[lost][:] = 0x55
        write_lost(damaged, pair, parity)
        assert all(map(np.array_equal, damaged, shards))
