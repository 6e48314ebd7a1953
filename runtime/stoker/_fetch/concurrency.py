"""How many requests may be in flight, and how many bytes may be requested in a second.

:class:`Aimd` is a pure controller in the manner of TCP's AIMD (Chiu and Jain, 1989) with throughput in the place of
loss: a shared link that is full does not drop object-store requests, it only makes each slower. So the limit is tried a
step up and a step down in turn, and a step is kept if throughput answers to it; a throttled request (503, 429) halves
the limit.

Throughput is what one request moves in a second, the median of a round, times the limit (Little's law). Counting what
arrives in a while would be simpler and says less: requests of one size that share a link end in bunches, and a few
that are late by seconds would hide whatever a step did. Too many in flight is not free, even on a link that stays full:
each takes longer then, so one that is late is noticed later and waited for longer.

Near the fewest that fill a link throughput hardly answers to a step, though by chance so many wait for first bytes now
and then that the link idles. So no step leads below twice the bandwidth-delay product, the gain that BBR has for the
same reason (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016).
"""

from __future__ import annotations

import asyncio
import math
from statistics import median
from typing import NamedTuple

ROUND = 2
"""A round is this many completions for each request in flight: the more, the less noisy its throughput."""
ANSWERED = 0.2
"""A step up by a fraction f is kept if throughput rose by this part of f; one down, unless it fell by that. Below a
half, since an idle link costs more than some connections too many."""
GAIN = 2.0
"""Requests kept in flight, at least, for each that would fill the link if it had its connection's whole rate."""
PATIENCE_ROUNDS = 8
"""Where steps neither way were kept: rounds before one is tried again."""


class _Request(NamedTuple):
    size_bytes: int
    seconds: float
    first_byte_seconds: float


class Aimd:
    """Adapts :attr:`limit` between ``least`` and ``most`` from completions and throttles. Time is given, not read.

    Attributes:
        limit: requests that may be in flight now.
    """

    def __init__(self, *, start: int, least: int, most: int) -> None:
        self.limit = start
        self._least = least
        self._most = most
        self._previous: int | None = None  # the limit before a step that is on trial
        self._upwards = True
        self._baseline = 0.0  # bytes per second at that limit
        self._refused = 0  # steps in a row that were not kept
        self._patience = 0
        self._cut_seconds = float("-inf")
        self._round: list[_Request] = []
        self._saturated = 0
        self._byte_seconds = float("inf")  # of the fastest transfer
        self._first_byte_seconds = float("inf")  # the median of the round where it was least
        self._settling = start  # completions of requests that ran, in part, beside more or fewer than the limit

    def completed(
        self, size_bytes: int, seconds: float, *, saturated: bool, first_byte_seconds: float | None = None
    ) -> None:
        """A request brought ``size_bytes`` in ``seconds``.

        Args:
            size_bytes: that it brought.
            seconds: from sending it to its last byte.
            saturated: whether others were waiting for their turn then.
            first_byte_seconds: of these, until its answer began; None if the store does not tell.
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
        """A request sent at ``sent_seconds`` was refused; one cut answers all that were in flight together."""
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
        if self.limit == self._previous:  # there is no way on
            self._previous = None
            self._turn()

    def _turn(self) -> None:
        self._upwards = not self._upwards
        self._refused += 1
        if self._refused == 2:
            self._refused = 0
            self._patience = PATIENCE_ROUNDS

    def _stepped(self) -> int:
        """Return the limit a step further, as far as there is a way."""
        step = max(1, self.limit // 4)
        if self._upwards:
            return min(self._most, self.limit + step)
        return min(self.limit, max(self._least, self._fills(), self.limit - step))

    def _fills(self) -> int:
        """Return twice the bandwidth-delay product, in requests.

        By Little's law, as many fill the link as there are now, times the part of its time that a request would take
        with nobody beside it.
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
"""Of the rate, that may be requested at once after a pause."""


class RateLimit:
    """A token bucket that may be overdrawn by one request. Lives on one event loop; the first to come is the first.

    In any time, requests are sent for the rate times that time at most, a burst and one request aside. What cannot
    wait, such as a hedge or a retry, is charged, and delays those that come after it.

    Args:
        bytes_per_second: the rate; None does not limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_seconds = float("-inf")  # when all that was requested so far will have been allowed
        self._turn = asyncio.Lock()

    async def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes may be requested. A wait that is cancelled takes nothing."""
        if self._bytes_per_second is None:
            return
        async with self._turn:
            while (left_seconds := self._free_seconds - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - charges put it off
                await asyncio.sleep(left_seconds)
            self.charge(size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Count bytes that are requested without a wait."""
        if self._bytes_per_second is not None:
            earliest_seconds = asyncio.get_running_loop().time() - _BURST_SECONDS
            self._free_seconds = max(self._free_seconds, earliest_seconds) + size_bytes / self._bytes_per_second
