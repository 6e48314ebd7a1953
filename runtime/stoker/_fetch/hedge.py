"""When to send a second request for bytes that are late, and how many such requests there may be.

Hedging after Dean and Barroso, "The Tail at Scale" (CACM 2013), with two guards: the delay follows what transfers
of that size take lately, and a token bucket bounds the extra requests, so an outage cannot double the load.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import ExitStack
from statistics import median

from stoker._fetch.config import FetchConfig, FetchCounters
from stoker._memory.ring import Ring

LOOK_SECONDS = 0.02
"""How often a request that is late looks whether it may be hedged: about a first byte's time."""
TIMER_SECONDS = 0.001
"""Timers are no finer: what is due sooner than this is due."""
START_LATE_SECONDS, START_FACTOR = 0.08, 2.5
"""In a start, when a request without a byte is late: in seconds while no answer has begun, and then in times of the
shortest wait for one: a median of few is as late as they are."""
GUESSED_BYTES_PER_SECOND = 100e6
"""Of one transfer, while none was seen."""

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

    While a start is under way, each request may besides be hedged twice: a start sends few requests, and waits for all.

    Args:
        fraction: hedges per request.
        burst: hedges beyond that.
        counters: of hedges outside the budget.
        is_start: whether a start begins.

    Attributes:
        is_start: whether a start is under way; False from the first batch on.
    """

    def __init__(self, fraction: float, burst: int, counters: FetchCounters, *, is_start: bool = False) -> None:
        self._fraction = fraction
        self._tokens = float(burst)
        self._most = burst + fraction * SAVED_REQUESTS
        self.is_start = is_start
        self._counters = counters

    def earn(self) -> None:
        """A request that is neither a hedge nor a retry was sent."""
        self._tokens = min(self._most, self._tokens + self._fraction)

    def spend(self, hedges: int = START_HEDGES) -> bool:
        """Take a token for a hedge of a request that was hedged ``hedges`` times; False if there is none."""
        if self.is_start and hedges < START_HEDGES:
            self._counters.start_hedges += 1
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
        return median(self._first_bytes) if len(self._first_bytes) >= LEAST_TRANSFERS else None

    def least_first_byte_seconds(self) -> float | None:
        """Return the shortest time until an answer began, lately; None if none has."""
        return min(self._first_bytes, default=None)

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


class Hedges:
    """Says when a request is late, and lends memory for a second one: of one fetcher, for all of its requests.

    A hedge has memory of its own, out of what ``hedge_burst`` small buffers hold, else a free slot of the ring.

    Args:
        config: when something is late, and how many hedges there may be.
        ring: whose free slots are lent.
        counters: of hedges.
        small_bytes: the size of a small buffer.
        is_start: whether a start begins.

    Attributes:
        budget: how many there may be.
        times: what transfers take lately.
    """

    def __init__(
        self, config: FetchConfig, ring: Ring, counters: FetchCounters, *, small_bytes: int, is_start: bool
    ) -> None:
        self._config, self._ring, self._counters = config, ring, counters
        self.budget = HedgeBudget(config.hedge_fraction, config.hedge_burst, counters, is_start=is_start)
        self.times = TransferTimes()
        self._small_bytes = small_bytes
        self._small_used_bytes = 0

    def expected_seconds(self, size_bytes: int) -> tuple[float, float]:
        """Return what a transfer of ``size_bytes`` takes lately, and what of it its bytes take.

        While too few were seen: no end, and what the bytes take at 100 MB/s.
        """
        whole_seconds = self.times.expected_seconds(size_bytes)
        if whole_seconds is None:
            return math.inf, size_bytes / GUESSED_BYTES_PER_SECOND
        return whole_seconds, whole_seconds - (self.times.expected_first_byte_seconds() or whole_seconds)

    def look_seconds(self, size_bytes: int, *, sent_seconds: float, has_begun: bool, now_seconds: float) -> float:
        """Return in how many seconds to look again whether a request is late; 0 if it is.

        Args:
            size_bytes: that were asked for.
            sent_seconds: when the request, or the last of its hedges, was sent.
            has_begun: whether the answer to any of them has begun.
            now_seconds: the time.
        """
        config, expected_seconds = self._config, self.times.expected_seconds(size_bytes)
        if expected_seconds is None:
            late_seconds = config.hedge_first_seconds
        else:
            late_seconds = config.hedge_after_factor * expected_seconds
        if not has_begun:
            late_seconds = min(late_seconds, self._first_byte_late_seconds())
        late_seconds = max(late_seconds, config.hedge_least_seconds)
        left_seconds = sent_seconds + late_seconds - now_seconds
        if left_seconds < TIMER_SECONDS:
            return 0.0
        # While nothing is expected, others that were sent at the same time may yet teach it.
        return left_seconds if expected_seconds is not None else min(LOOK_SECONDS, left_seconds)

    def _first_byte_late_seconds(self) -> float:
        """Return when a request without a byte is late; in a start, the first answer of another is judge enough."""
        if self.budget.is_start:
            least_seconds = self.times.least_first_byte_seconds()
            return START_LATE_SECONDS if least_seconds is None else START_FACTOR * least_seconds
        first_byte_seconds = self.times.expected_first_byte_seconds()
        return math.inf if first_byte_seconds is None else self._config.hedge_first_byte_factor * first_byte_seconds

    def borrow_buffer(self, size_bytes: int, borrowed: ExitStack, hedges: int = START_HEDGES) -> memoryview | None:
        """Return memory for a hedge, until ``borrowed`` is closed; None if budget or memory allow none.

        Args:
            size_bytes: of the memory.
            borrowed: gives it back.
            hedges: of the same request, so far.
        """
        room_bytes = self._config.hedge_burst * self._small_bytes - self._small_used_bytes
        is_small = size_bytes <= min(self._small_bytes, room_bytes)
        has_memory = is_small or (self._ring.spare and size_bytes <= self._ring.slot_bytes)
        if not has_memory or not self.budget.spend(hedges):
            return None
        self._counters.hedges += 1
        if is_small:
            self._small_used_bytes += size_bytes
            borrowed.callback(self._return_small, size_bytes)
            return memoryview(bytearray(size_bytes))
        slot = self._ring.acquire()
        assert slot is not None  # noqa: S101 - it has a spare slot, and nothing ran in between
        borrowed.callback(self._ring.abort, slot)
        return self._ring.view(slot, size_bytes)

    def _return_small(self, size_bytes: int) -> None:
        self._small_used_bytes -= size_bytes
