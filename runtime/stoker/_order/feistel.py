"""A keyed permutation of ``[0, n)`` that is computed, not stored: a Feistel network with cycle walking.

Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 4 (generalised Feistel) and section 2
(cycle walking): a Feistel network permutes ``[0, 4**h)``, the smallest such range that holds ``[0, n)``; a value that
lands outside is permuted again until it lands inside, fewer than four times on average.

``left`` is the high ``h`` bits (``h`` at least 1) and ``right`` the low ones. A round maps ``(left, right)`` to
``(right, left ^ (mix(right ^ key) & (2**h - 1)))``, with ``mix`` the finaliser of SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014); there are 12, each with a 64-bit key of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["FeistelPermutation"]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class FeistelPermutation:
    """A bijection of ``[0, count)``.

    Args:
        count: size of the range, at least 1.
        keys: one 64-bit word a round, ``uint64 [ROUNDS]``.
    """

    ROUNDS = 12

    def __init__(self, count: int, keys: NDArray[np.uint64]) -> None:
        self.count = count
        self._keys = keys
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each of ``positions`` (``int64 [n]``, each in ``[0, count)``) goes, ``int64 [n]``."""
        return self._walked(positions, self._network)

    def inverse(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which positions go to ``images`` (``int64 [n]``, each in ``[0, count)``), ``int64 [n]``."""
        return self._walked(images, self._inverse_network)

    def _walked(
        self, start: NDArray[np.int64], network: Callable[[NDArray[np.uint64]], NDArray[np.uint64]]
    ) -> NDArray[np.int64]:
        values = network(start.astype(np.uint64))
        outside = np.flatnonzero(values >= self.count)
        while len(outside):
            values[outside] = network(values[outside])
            outside = outside[values[outside] >= self.count]
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right

    def _inverse_network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys[::-1]:
            left, right = right ^ (_mix(left ^ key) & mask), left
        return (left << bits) | right
