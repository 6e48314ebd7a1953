"""Limits on the number of requests in flight, and on the bytes requested per second.

:class:`AimdLimit` is a pure controller like TCP's AIMD (Chiu and Jain, 1989), with throughput in place of loss: a full
shared link does not drop object-store requests, it only slows them down. The limit is changed by a step up and a step
down in turn, and a step is kept if throughput follows it. A throttled request (503, 429) halves the limit.

Throughput is the rate of one request, as the median of a round, times the limit (Little's law). Counting the bytes that
arrive over some time would be less precise: requests of one size that share a link end in bunches, and a few that are
late by seconds would hide the effect of a step. Too many requests in flight have a cost even if the link stays full:
each takes longer, so a late one is noticed later and waited for longer.

Near the smallest number of requests that fills a link, throughput hardly changes with a step, but the link idles
whenever many requests happen to wait for first bytes at once. So no step leads below twice the bandwidth-delay product,
the gain that BBR has for the same reason (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

ROUND_COMPLETIONS = 2
"""Number of completions per request in flight that make a round; more of them make its throughput less noisy."""
STEP_THRESHOLD = 0.2
"""A step up by a fraction f is kept if throughput rises by at least this part of f, a step down unless it falls by as
much. Less than 0.5, since an idle link costs more than a few connections too many."""
BDP_GAIN = 2.0
"""Minimum limit as a multiple of the bandwidth-delay product in requests."""
_RECENT_REQUESTS = 8
PATIENCE_ROUNDS = 8
"""Number of rounds to wait after steps in both directions were rejected."""


class CompletedRequest(NamedTuple):
    size_bytes: int
    seconds: float
    first_byte_seconds: float


class AimdLimit:
    """Adapts :attr:`limit` between ``min_limit`` and ``max_limit`` to completions and throttles; callers pass the time.

    Args:
        start: initial limit.
        min_limit: minimum limit.
        max_limit: maximum limit.

    Attributes:
        limit: current maximum number of requests in flight.
    """

    def __init__(self, *, start: int, min_limit: int, max_limit: int) -> None:
        self.limit = start
        self._min_limit = min_limit
        self._max_limit = max_limit
        self._previous_limit: int | None = None  # the limit before the step being tried
        self._upwards = True
        self._baseline = 0.0  # bytes per second at that limit
        self._rejected_steps = 0  # consecutive steps that were not kept
        self._rounds_to_wait = 0
        self._last_cut_seconds = float("-inf")
        self._round: list[CompletedRequest] = []
        self._saturated = 0
        self._min_byte_seconds = float("inf")  # seconds per byte of the fastest transfer
        self._min_first_byte_seconds = float("inf")  # the smallest median of a round
        self._settling_completions = start  # completions to ignore: these requests ran partly under another limit

    def record_completion(
        self, size_bytes: int, seconds: float, *, saturated: bool, first_byte_seconds: float | None = None
    ) -> None:
        """Record a completed request.

        Args:
            size_bytes: number of bytes received.
            seconds: time from sending to the last byte, in seconds.
            saturated: whether other requests were waiting for the limit.
            first_byte_seconds: time from sending to the first byte; None if the store does not report it.
        """
        request = CompletedRequest(size_bytes, seconds, first_byte_seconds or 0.0)
        byte_seconds = (seconds - request.first_byte_seconds) / max(1, size_bytes)
        self._min_byte_seconds = min(self._min_byte_seconds, byte_seconds)
        if self._settling_completions > 0 or seconds <= 0.0:
            self._settling_completions -= 1
            return
        self._round.append(request)
        self._saturated += saturated
        if len(self._round) < ROUND_COMPLETIONS * max(4, self.limit):
            return
        # In a round without a queue, fewer than the limit were in flight.
        if 2 * self._saturated >= len(self._round):
            self._evaluate_round()
        self._begin_round()

    def record_throttle(self, sent_seconds: float, now_seconds: float) -> None:
        """Halve the limit for a throttled request, once for all requests that were in flight together."""
        if sent_seconds < self._last_cut_seconds:
            return
        self._last_cut_seconds = now_seconds
        self.limit = max(self._min_limit, self.limit // 2)
        self._previous_limit = None
        self._upwards = True
        self._rejected_steps = 0
        self._rounds_to_wait = 1
        self._begin_round()

    def _evaluate_round(self) -> None:
        rate = self.limit * median(request.size_bytes / request.seconds for request in self._round)
        first_byte_seconds = median(request.first_byte_seconds for request in self._round)
        self._min_first_byte_seconds = min(self._min_first_byte_seconds, first_byte_seconds)
        if self._previous_limit is not None:
            step = (self.limit - self._previous_limit) / self._previous_limit
            if rate < self._baseline * (1.0 + STEP_THRESHOLD * step):
                self.limit, self._previous_limit = self._previous_limit, None
                self._settling_completions = self.limit
                self._reverse_direction()
                return
            self._rejected_steps = 0
        elif self._rounds_to_wait > 0:
            self._rounds_to_wait -= 1
            return
        self._baseline = rate
        self._previous_limit = self.limit
        self.limit = self._next_limit()
        self._settling_completions = self.limit
        if self.limit == self._previous_limit:  # the limit is at a bound
            self._previous_limit = None
            self._reverse_direction()

    def _reverse_direction(self) -> None:
        self._upwards = not self._upwards
        self._rejected_steps += 1
        if self._rejected_steps == 2:
            self._rejected_steps = 0
            self._rounds_to_wait = PATIENCE_ROUNDS

    def _next_limit(self) -> int:
        """Return the limit after the next step, within its bounds."""
        step = max(1, self.limit // 4)
        if self._upwards:
            return min(self._max_limit, self.limit + step)
        return min(self.limit, max(self._min_limit, self._filling_requests(), self.limit - step))

    def _filling_requests(self) -> int:
        """Return twice the bandwidth-delay product, in requests.

        By Little's law, that product is the current limit times the ratio of a request's time alone on the link to its
        actual time.
        """
        alone = median(
            (self._min_first_byte_seconds + request.size_bytes * self._min_byte_seconds) / request.seconds
            for request in self._round
        )
        return math.ceil(BDP_GAIN * self.limit * alone)

    def _begin_round(self) -> None:
        self._round.clear()
        self._saturated = 0


class LinkUse:
    """Estimates which fraction of the requests in flight is enough to fill the link.

    By Little's law, that is the time that a request takes alone on the link, as a fraction of the time that it takes.
    The time alone is that of the first byte, and that of the others; each is the smallest median of 8 requests in
    succession so far, since a single request may be fast by chance.

    Attributes:
        on_request: called after every completed request; None for no call.
    """

    def __init__(self) -> None:
        self.on_request: Callable[[], None] | None = None
        self._recent: deque[CompletedRequest] = deque(maxlen=_RECENT_REQUESTS)
        self._min_first_byte_seconds = self._min_byte_seconds = math.inf

    def record(self, request: CompletedRequest) -> None:
        """Record a completed request."""
        if self.on_request is not None:
            self.on_request()
        if request.seconds <= 0.0 or not request.size_bytes:
            return
        self._recent.append(request)
        if len(self._recent) < _RECENT_REQUESTS:
            return
        first_byte_seconds = median(each.first_byte_seconds for each in self._recent)
        byte_seconds = median((each.seconds - each.first_byte_seconds) / each.size_bytes for each in self._recent)
        self._min_first_byte_seconds = min(self._min_first_byte_seconds, first_byte_seconds)
        self._min_byte_seconds = min(self._min_byte_seconds, byte_seconds)

    def alone_seconds(self, size_bytes: float) -> float:
        """Return the time that a request takes alone on the link, in seconds; infinity before 8 requests."""
        return self._min_first_byte_seconds + size_bytes * self._min_byte_seconds

    @property
    def useful_fraction(self) -> float:
        """The fraction, 0 to 1; 1 before 8 requests."""
        if len(self._recent) < _RECENT_REQUESTS:
            return 1.0
        return min(1.0, median(self.alone_seconds(each.size_bytes) / each.seconds for each in self._recent))


_BURST_SECONDS = 0.1
"""Size of the burst after a pause, in seconds of the rate."""


class RateLimit:
    """A first-in-first-out token bucket that may be overdrawn by one request. Belongs to one event loop.

    In any interval, the requested bytes are at most the rate times its length, plus a burst and one request. Requests
    that cannot wait, such as hedges and retries, are charged, and delay later ones.

    Args:
        bytes_per_second: maximum rate; None for no limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_seconds = float("-inf")  # when the rate will have allowed everything requested so far
        self._lock = asyncio.Lock()

    async def wait(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be requested. A cancelled wait is not charged."""
        if self._bytes_per_second is None:
            return
        async with self._lock:
            while (left_seconds := self._free_seconds - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - charges put it off
                await asyncio.sleep(left_seconds)
            self.charge(size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Charge bytes that are requested without a wait."""
        if self._bytes_per_second is not None:
            earliest_seconds = asyncio.get_running_loop().time() - _BURST_SECONDS
            self._free_seconds = max(self._free_seconds, earliest_seconds) + size_bytes / self._bytes_per_second
