"""Quantiles of numbers in a trace, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

_ACCURACY = 0.005
_GROWTH = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
_MIN_NUMBER, _MAX_NUMBER = 1e-9, 1e18


class Quantiles:
    """A quantile sketch of positive numbers with a relative error of at most half a percent.

    C. Masson, J. Rim, H. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees",
    VLDB 2019, section 2. Numbers are clipped to 1e-9 to 1e18.
    """

    __slots__ = ("_classes", "count")

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self.count = 0

    def add(self, number: float) -> None:
        """Count a number."""
        self._classes[math.ceil(math.log(min(max(number, _MIN_NUMBER), _MAX_NUMBER)) / _GROWTH)] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """Return the quantile at ``share``, 0 to 1; at least one number must have been added."""
        rank = math.ceil(share * self.count)
        for index in sorted(self._classes):
            rank -= self._classes[index]
            if rank <= 0:
                break
        return math.exp(index * _GROWTH) * (1 - _ACCURACY)
