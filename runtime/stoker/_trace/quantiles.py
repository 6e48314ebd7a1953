"""Quantiles of a stream in memory that does not grow with it."""

from __future__ import annotations

import math
from collections import Counter

__all__ = ["Quantiles"]

_ACCURACY = 0.005
_GROWTH = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
_LEAST, _MOST = 1e-9, 1e18


class Quantiles:
    """Counts positive numbers in classes that grow by a factor, so that any quantile is right within half a percent.

    C. Masson, J. Rim, H. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees",
    VLDB 2019, section 2. What lies outside 1e-9 to 1e18 counts as the nearer of them.
    """

    __slots__ = ("_classes", "count")

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self.count = 0

    def add(self, number: float) -> None:
        """Count a number."""
        self._classes[math.ceil(math.log(min(max(number, _LEAST), _MOST)) / _GROWTH)] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """Return what ``share``, 0 to 1, of the numbers are not above; there must be one."""
        rank = math.ceil(share * self.count)
        for place in sorted(self._classes):
            rank -= self._classes[place]
            if rank <= 0:
                break
        return math.exp(place * _GROWTH) * (1 - _ACCURACY)
