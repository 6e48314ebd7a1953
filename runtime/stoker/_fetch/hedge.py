"""Decides when to hedge, that is, to send a second request for late bytes, and limits the number of hedges.

Hedging after Dean and Barroso, "The Tail at Scale" (CACM 2013), with two guards: the delay follows recent transfers of
that size, and a token bucket bounds the extra requests, so an outage cannot double the load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import numpy as np
from numpy.typing import NDArray

from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._memory.ring import Ring

POLL_SECONDS = 0.02
"""Minimum time between two hedges of a request, about the time to a first byte."""
TIMER_SECONDS = 0.001
"""Resolution of timers: anything due sooner counts as due."""
START_HEDGE_SECONDS, START_HEDGE_FACTOR = 0.08, 2.5
"""Before the first batch, when a request without a byte is late: seconds while no response has begun, then multiple of
the shortest time to a first byte, because the median of a few late responses is late, too."""
DEFAULT_BYTES_PER_SECOND = 100e6
"""Assumed rate of one transfer before any is measured."""

WINDOW = 32
"""Number of recent transfers to use: a few seconds of a busy fetcher; a fit compares 496 pairs (about 0.03 ms)."""
_PAIRS = np.tril_indices(WINDOW, -1)
MIN_TRANSFERS = 4
REFIT_EVERY = 8
MIN_SIZE_SPREAD = 0.25
"""Minimum difference of two sizes, as a fraction of the larger, from which to estimate a rate in spite of noise."""


SAVED_REQUESTS = 120
"""Number of requests whose earned hedges may be saved up: enough for a cluster of late requests, but few hedges if the
store slows down after a long calm."""


START_HEDGES = 2
"""Maximum number of hedges of each request outside the budget, before the first batch."""


class HedgeBudget:
    """A token bucket filled by requests, not by time: hedges <= ``burst`` + ``fraction`` x requests, always.

    Before the first batch, each request may also be hedged twice outside the budget: a start sends few requests and
    waits for all of them.

    Args:
        fraction: hedges per request.
        burst: number of hedges in excess of that.
        counters: counters of the hedges outside the budget.
        is_start: whether hedges outside the budget are allowed.

    Attributes:
        is_start: whether hedges outside the budget are allowed; False from the first batch on.
    """

    def __init__(self, fraction: float, burst: int, counters: FetchCounters, *, is_start: bool = False) -> None:
        self._fraction = fraction
        self._tokens = float(burst)
        self._max_tokens = burst + fraction * SAVED_REQUESTS
        self.is_start = is_start
        self._counters = counters

    @property
    def is_spent(self) -> bool:
        """Whether there is no token for a hedge."""
        return self._tokens < 1.0

    def earn(self) -> None:
        """Add to the budget for a request that is neither a hedge nor a retry."""
        self._tokens = min(self._max_tokens, self._tokens + self._fraction)

    def spend(self, hedges: int = START_HEDGES) -> bool:
        """Take a token for a hedge of a request that was hedged ``hedges`` times; return False if there is none."""
        if self.is_start and hedges < START_HEDGES:
            self._counters.start_hedges += 1
            return True
        if self.is_spent:
            return False
        self._tokens -= 1.0
        return True


class TransferTimes:
    """Expected time of a transfer of a given size and of its first byte, from the last 32 measurements of each.

    Not every store reports when a response begins, so time = first byte + size x slope is fitted to (size, time) of
    whole transfers by the Theil-Sen estimator: the median slope over all pairs of different sizes, then the median
    remainder. Up to 29% of outliers, such as slow tails, do not change it. If all sizes are similar, the slope is
    unknown and not needed: the estimate is the median time.
    """

    def __init__(self) -> None:
        self._first_bytes: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._new_transfers = 0
        self._first_byte_seconds = 0.0
        self._per_byte_seconds = 0.0
        self._largest_bytes = 1

    def observe(self, size_bytes: int, seconds: float) -> bool:
        """Record a successful transfer of ``size_bytes`` that took ``seconds``; return whether an estimate is new."""
        self._recent.append((size_bytes, seconds))
        self._new_transfers += 1
        return len(self._recent) == MIN_TRANSFERS

    def observe_first_byte(self, seconds: float) -> bool:
        """Record a response that began after ``seconds``; return whether an estimate is new."""
        self._first_bytes.append(seconds)
        return len(self._first_bytes) in (1, MIN_TRANSFERS)

    def expected_first_byte_seconds(self) -> float | None:
        """Return the median time to the first byte; None before four were measured, as in stores that report none."""
        return median(self._first_bytes) if len(self._first_bytes) >= MIN_TRANSFERS else None

    def min_first_byte_seconds(self) -> float | None:
        """Return the shortest recent time to a first byte; None without measurements."""
        return min(self._first_bytes, default=None)

    def expected_seconds(self, size_bytes: int) -> float | None:
        """Return the median time of a transfer of ``size_bytes``; None before four measurements.

        Beyond the largest measured size, time is assumed to grow at least in proportion to size: a late hedge is better
        than a needless one.
        """
        if len(self._recent) < MIN_TRANSFERS:
            return None
        self._refit()
        expected = self._first_byte_seconds + self._per_byte_seconds * size_bytes
        return expected * max(1.0, size_bytes / self._largest_bytes)

    def _refit(self) -> None:
        if not self._recent or self._new_transfers < min(REFIT_EVERY, len(self._recent)):
            return
        self._new_transfers = 0
        sizes, seconds = np.array(self._recent, np.float64).T
        later, earlier = _PAIRS if len(sizes) == WINDOW else np.tril_indices(len(sizes), -1)
        differences = sizes[later] - sizes[earlier]
        differ = np.abs(differences) > MIN_SIZE_SPREAD * np.maximum(sizes[later], sizes[earlier])
        slopes = (seconds[later] - seconds[earlier])[differ] / differences[differ]
        self._largest_bytes = max(1, int(sizes.max()))
        self._per_byte_seconds = max(0.0, _median(slopes)) if len(slopes) else 0.0
        self._first_byte_seconds = max(0.0, _median(seconds - self._per_byte_seconds * sizes))


def _median(values: NDArray[np.float64]) -> float:
    """Return the median of a few values; ``numpy.median`` takes five times as long."""
    ordered, count = np.sort(values), len(values)
    return float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2


class HedgePolicy:
    """Decides for all requests of one fetcher when they are late, and provides memory for hedges.

    A hedge has its own memory: one of ``hedge_burst`` small buffers, or else free slots of the ring.

    Args:
        config: settings of hedges.
        ring: ring whose free slots hedges may use.
        counters: counters of hedges.
        small_bytes: size of a small buffer, in bytes.
        is_start: whether hedges outside the budget are allowed.

    Attributes:
        budget: budget of hedges.
        times: expected times of transfers.
        on_chance: function that is called when the budget or memory may allow a hedge that they did not allow before.
    """

    def __init__(
        self, config: FetchConfig, ring: Ring, counters: FetchCounters, *, small_bytes: int, is_start: bool
    ) -> None:
        self._config, self._ring, self._counters = config, ring, counters
        self.budget = HedgeBudget(config.hedge_fraction, config.hedge_burst, counters, is_start=is_start)
        self.times = TransferTimes()
        self.on_chance: Callable[[], object] = lambda: None
        ring.on_free = self._on_room
        self._small_bytes = small_bytes
        self._small_used_bytes = 0

    def earn(self) -> None:
        """Add to the budget for a request that is neither a hedge nor a retry."""
        was_spent = self.budget.is_spent
        self.budget.earn()
        if was_spent and not self.budget.is_spent:
            self.on_chance()

    def expected_seconds(self, size_bytes: int) -> tuple[float, float]:
        """Return the expected time of a transfer of ``size_bytes``, and the part after the first byte, in seconds.

        With too few measurements: infinity, and the time of the bytes at 100 MB/s.
        """
        whole_seconds = self.times.expected_seconds(size_bytes)
        if whole_seconds is None:
            return math.inf, size_bytes / DEFAULT_BYTES_PER_SECOND
        return whole_seconds, whole_seconds - (self.times.expected_first_byte_seconds() or whole_seconds)

    def usual_seconds(self, size_bytes: int) -> float:
        """Return the expected time of a transfer of ``size_bytes``; with too few measurements, that of the first."""
        expected_seconds = self.times.expected_seconds(size_bytes)
        return self._config.hedge_first_seconds if expected_seconds is None else expected_seconds

    def late_seconds(self, size_bytes: int) -> float:
        """Return how long a transfer of ``size_bytes`` takes before it is late, if its bytes have begun to arrive."""
        expected_seconds = self.times.expected_seconds(size_bytes)
        if expected_seconds is None:
            return self._config.hedge_first_seconds
        return self._config.hedge_after_factor * expected_seconds

    def seconds_until_late(self, size_bytes: int, *, sent_seconds: float, has_begun: bool, now_seconds: float) -> float:
        """Return in how many seconds a request is late by the present estimates; 0 if it is late.

        Args:
            size_bytes: number of bytes requested.
            sent_seconds: time at which the request, or the last of its hedges, was sent.
            has_begun: whether the response to any of them has begun.
            now_seconds: current time.
        """
        late_seconds = self.late_seconds(size_bytes)
        if not has_begun:
            late_seconds = min(late_seconds, self._first_byte_late_seconds())
        late_seconds = max(late_seconds, self._config.hedge_min_seconds)
        left_seconds = sent_seconds + late_seconds - now_seconds
        return left_seconds if left_seconds >= TIMER_SECONDS else 0.0

    def _first_byte_late_seconds(self) -> float:
        """Return when a request without a byte is late; before the first batch, one other response is enough."""
        if self.budget.is_start:
            least_seconds = self.times.min_first_byte_seconds()
            return START_HEDGE_SECONDS if least_seconds is None else START_HEDGE_FACTOR * least_seconds
        first_byte_seconds = self.times.expected_first_byte_seconds()
        return math.inf if first_byte_seconds is None else self._config.hedge_first_byte_factor * first_byte_seconds

    def borrow_buffer(self, size_bytes: int, borrowed: ExitStack, hedges: int = START_HEDGES) -> memoryview | None:
        """Return memory for a hedge, until ``borrowed`` is closed; None if budget or memory do not allow a hedge.

        Args:
            size_bytes: size of the memory, in bytes.
            borrowed: stack that returns the memory when it is closed.
            hedges: number of hedges of the same request so far.
        """
        room_bytes = self._config.hedge_burst * self._small_bytes - self._small_used_bytes
        is_small = size_bytes <= min(self._small_bytes, room_bytes)
        if not (is_small or self._ring.can_spare(size_bytes)) or not self.spend(hedges):
            return None
        if is_small:
            self._small_used_bytes += size_bytes
            borrowed.callback(self._return_small, size_bytes)
            return memoryview(bytearray(size_bytes))
        slot = self._ring.acquire(size_bytes)
        assert slot is not None  # noqa: S101 - the ring has spare slots, and no other task ran since the check
        borrowed.callback(self._ring.abort, slot)
        return self._ring.view(slot, size_bytes)

    def spend(self, hedges: int) -> bool:
        """Take a hedge of a request that was hedged ``hedges`` times from the budget; return False if it has none."""
        is_allowed = self.budget.spend(hedges)
        self._counters.hedges += is_allowed
        return is_allowed

    def _return_small(self, size_bytes: int) -> None:
        self._small_used_bytes -= size_bytes
        self._on_room()

    def _on_room(self) -> None:
        if self.budget.is_start or not self.budget.is_spent:
            self.on_chance()
