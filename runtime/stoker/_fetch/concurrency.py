"""Limits on the number of requests in flight, and on the bytes requested per second.

:class:`Aimd` is a pure controller like TCP's AIMD (Chiu and Jain, 1989), with throughput in place of loss: a full
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
from statistics import median
from typing import NamedTuple

ROUND = 2
"""Number of completions per request in flight that make a round; more of them make its throughput less noisy."""
ANSWERED = 0.2
"""A step up by a fraction f is kept if throughput rises by at least this part of f, a step down unless it falls by as
much. Less than 0.5, since an idle link costs more than a few connections too many."""
GAIN = 2.0
"""Minimum limit as a multiple of the bandwidth-delay product in requests."""
PATIENCE_ROUNDS = 8
"""Number of rounds to wait after steps in both directions were rejected."""


class _Request(NamedTuple):
    size_bytes: int
    seconds: float
    first_byte_seconds: float


class Aimd:
    """Adapts :attr:`limit` between ``least`` and ``most`` to completions and throttles; callers pass the time.

    Args:
        start: initial limit.
        least: minimum limit.
        most: maximum limit.

    Attributes:
        limit: current maximum number of requests in flight.
    """

    def __init__(self, *, start: int, least: int, most: int) -> None:
        self.limit = start
        self._least = least
        self._most = most
        self._previous: int | None = None  # the limit before the step being tried
        self._upwards = True
        self._baseline = 0.0  # bytes per second at that limit
        self._refused = 0  # consecutive steps that were not kept
        self._patience = 0
        self._cut_seconds = float("-inf")
        self._round: list[_Request] = []
        self._saturated = 0
        self._byte_seconds = float("inf")  # seconds per byte of the fastest transfer
        self._first_byte_seconds = float("inf")  # the smallest median of a round
        self._settling = start  # completions to ignore: these requests ran partly under another limit

    def completed(
        self, size_bytes: int, seconds: float, *, saturated: bool, first_byte_seconds: float | None = None
    ) -> None:
        """Record a completed request.

        Args:
            size_bytes: number of bytes received.
            seconds: time from sending to the last byte, in seconds.
            saturated: whether other requests were waiting for the limit.
            first_byte_seconds: time from sending to the first byte; None if the store does not report it.
        """
        request = _Request(size_bytes, seconds, first_byte_seconds or 0.0)
        byte_seconds = (seconds - request.first_byte_seconds) / max(1, size_bytes)
        self._byte_seconds = min(self._byte_seconds, byte_seconds)
        if self._settling > 0 or seconds <= 0.0:
            self._settling -= 1
            return
        self._round.append(request)
        self._saturated += saturated
        if len(self._round) < ROUND * max(4, self.limit):
            return
        # In a round without a queue, fewer than the limit were in flight.
        if 2 * self._saturated >= len(self._round):
            self._judge()
        self._begin_round()

    def throttled(self, sent_seconds: float, now_seconds: float) -> None:
        """Halve the limit for a throttled request, once for all requests that were in flight together."""
        if sent_seconds < self._cut_seconds:
            return
        self._cut_seconds = now_seconds
        self.limit = max(self._least, self.limit // 2)
        self._previous = None
        self._upwards = True
        self._refused = 0
        self._patience = 1
        self._begin_round()

    def _judge(self) -> None:
        rate = self.limit * median(request.size_bytes / request.seconds for request in self._round)
        first_byte_seconds = median(request.first_byte_seconds for request in self._round)
        self._first_byte_seconds = min(self._first_byte_seconds, first_byte_seconds)
        if self._previous is not None:
            step = (self.limit - self._previous) / self._previous
            if rate < self._baseline * (1.0 + ANSWERED * step):
                self.limit, self._previous = self._previous, None
                self._settling = self.limit
                self._turn()
                return
            self._refused = 0
        elif self._patience > 0:
            self._patience -= 1
            return
        self._baseline = rate
        self._previous = self.limit
        self.limit = self._stepped()
        self._settling = self.limit
        if self.limit == self._previous:  # the limit is at a bound
            self._previous = None
            self._turn()

    def _turn(self) -> None:
        self._upwards = not self._upwards
        self._refused += 1
        if self._refused == 2:
            self._refused = 0
            self._patience = PATIENCE_ROUNDS

    def _stepped(self) -> int:
        """Return the limit after the next step, within its bounds."""
        step = max(1, self.limit // 4)
        if self._upwards:
            return min(self._most, self.limit + step)
        return min(self.limit, max(self._least, self._fills(), self.limit - step))

    def _fills(self) -> int:
        """Return twice the bandwidth-delay product, in requests.

        By Little's law, that product is the current limit times the ratio of a request's time alone on the link to its
        actual time.
        """
        alone = median(
            (self._first_byte_seconds + request.size_bytes * self._byte_seconds) / request.seconds
            for request in self._round
        )
        return math.ceil(GAIN * self.limit * alone)

    def _begin_round(self) -> None:
        self._round.clear()
        self._saturated = 0


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
        self._turn = asyncio.Lock()

    async def wait(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be requested. A cancelled wait is not charged."""
        if self._bytes_per_second is None:
            return
        async with self._turn:
            while (left_seconds := self._free_seconds - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - charges put it off
                await asyncio.sleep(left_seconds)
            self.charge(size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Charge bytes that are requested without a wait."""
        if self._bytes_per_second is not None:
            earliest_seconds = asyncio.get_running_loop().time() - _BURST_SECONDS
            self._free_seconds = max(self._free_seconds, earliest_seconds) + size_bytes / self._bytes_per_second
