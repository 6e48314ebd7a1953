"""When to send a second request for bytes that are late, and how many such requests there may be.

Hedging after Dean and Barroso, "The Tail at Scale" (CACM 2013), with two guards: the delay follows what transfers
of that size take lately, and a token bucket bounds the extra requests, so an outage cannot double the load.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["START_HEDGES", "HedgeBudget", "TransferTimes"]

WINDOW = 32
"""Transfers remembered: a few seconds of a busy fetcher; a fit looks at 496 pairs (about 0.1 ms)."""
LEAST_TRANSFERS = 4
REFIT_EVERY = 8
LEAST_SPREAD = 0.25
"""Sizes closer than this fraction of the larger say nothing about the rate: noise over almost nothing."""


SAVED_REQUESTS = 120
"""Late requests come in clusters. What so many requests earned is kept for them, and no more: after a long calm, the
hedges that a store that turns slow is met with are few."""


START_HEDGES = 2
"""Of each request in a start, outside the budget."""


class HedgeBudget:
    """A token bucket filled by requests, not by time: hedges <= ``burst`` + ``fraction`` x requests, always.

    Until :meth:`end_start`, each request may besides be hedged twice: a start sends few requests, and waits for all.

    Args:
        fraction: hedges per request.
        burst: hedges beyond that.
        is_start: whether a start begins.

    Attributes:
        start_hedges: hedges outside the budget, so far.
    """

    __slots__ = ("_fraction", "_is_start", "_most", "_tokens", "start_hedges")

    def __init__(self, fraction: float, burst: int, *, is_start: bool = False) -> None:
        self._fraction = fraction
        self._tokens = float(burst)
        self._most = burst + fraction * SAVED_REQUESTS
        self._is_start = is_start
        self.start_hedges = 0

    @property
    def is_start(self) -> bool:
        """Whether a start is under way."""
        return self._is_start

    def end_start(self) -> None:
        """The first batch is there. Idempotent; from any thread."""
        self._is_start = False

    def earn(self) -> None:
        """A request that is neither a hedge nor a retry was sent."""
        self._tokens = min(self._most, self._tokens + self._fraction)

    def spend(self, hedges: int = START_HEDGES) -> bool:
        """Take a token for a hedge of a request that was hedged ``hedges`` times; False if there is none."""
        if self._is_start and hedges < START_HEDGES:
            self.start_hedges += 1
            return True
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class TransferTimes:
    """What a transfer of a given size takes, from the last 32 that ended well, and its first byte, from the last 32.

    Not every store tells when an answer begins, so time = first byte + size x slope is fitted to (size, time) of whole
    transfers by Theil and Sen's estimator: the median slope over all pairs of different size, then the median rest.
    Up to 29% outliers, such as slow tails, do not move it. Where all sizes are alike the slope is unknown and is not
    needed: the median time is the answer.
    """

    __slots__ = ("_first_byte_seconds", "_first_bytes", "_largest_bytes", "_per_byte_seconds", "_recent", "_unfitted")

    def __init__(self) -> None:
        self._first_bytes: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._unfitted = 0
        self._first_byte_seconds = 0.0
        self._per_byte_seconds = 0.0
        self._largest_bytes = 1

    def observe(self, size_bytes: int, seconds: float) -> None:
        """A transfer of ``size_bytes`` ended well after ``seconds``."""
        self._recent.append((size_bytes, seconds))
        self._unfitted += 1

    def observe_first_byte(self, seconds: float) -> None:
        """An answer began after ``seconds``."""
        self._first_bytes.append(seconds)

    def expected_first_byte_seconds(self) -> float | None:
        """Return the median time until an answer begins; None before four were seen, or if the store does not tell."""
        recent = list(self._first_bytes)  # in one step: other threads ask for statistics
        return median(recent) if len(recent) >= LEAST_TRANSFERS else None

    def least_first_byte_seconds(self) -> float | None:
        """Return the shortest time until an answer began, lately; None if none has."""
        return min(list(self._first_bytes), default=None)

    def expected_seconds(self, size_bytes: int) -> float | None:
        """Return the median time of a transfer of ``size_bytes``; None before four transfers were seen.

        Beyond the largest size seen, time is assumed to grow with size at least in proportion: better late than a
        needless hedge.
        """
        if len(self._recent) < LEAST_TRANSFERS:
            return None
        self._refit()
        expected = self._first_byte_seconds + self._per_byte_seconds * size_bytes
        return expected * max(1.0, size_bytes / self._largest_bytes)

    def fit(self) -> tuple[float, float]:
        """Return (first byte in seconds, bytes per second); the rate is 0 while sizes are too alike to tell."""
        self._refit()
        slope = self._per_byte_seconds
        first_byte_seconds = self.expected_first_byte_seconds()
        if first_byte_seconds is None:
            first_byte_seconds = self._first_byte_seconds
        return first_byte_seconds, 1.0 / slope if slope > 0.0 else 0.0

    def median_seconds(self) -> float:
        """Return the median time of the transfers remembered, whatever their size; 0 if there are none."""
        recent = list(self._recent)  # in one step: other threads ask for statistics
        return median(seconds for _, seconds in recent) if recent else 0.0

    def _refit(self) -> None:
        if not self._recent or self._unfitted < min(REFIT_EVERY, len(self._recent)):
            return
        self._unfitted = 0
        recent = list(self._recent)
        sizes = [size for size, _ in recent]
        is_alike = max(sizes) - min(sizes) <= LEAST_SPREAD * max(sizes)  # as most are: no pair needs to be looked at
        slopes = [
            (seconds - other_seconds) / (size - other_size)
            for position, (size, seconds) in enumerate(() if is_alike else recent)
            for other_size, other_seconds in recent[:position]
            if abs(size - other_size) > LEAST_SPREAD * max(size, other_size)
        ]
        self._largest_bytes = max(1, *sizes)
        self._per_byte_seconds = max(0.0, median(slopes)) if slopes else 0.0
        rests = (seconds - self._per_byte_seconds * size for size, seconds in recent)
        self._first_byte_seconds = max(0.0, median(rests))
