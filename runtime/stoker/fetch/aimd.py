"""How many requests to keep in flight: more while it helps, fewer where it does not, half when asked to slow down.

A pure controller in the manner of TCP's AIMD (Chiu and Jain, 1989) with throughput in the place of loss: a shared
link that is full does not drop object-store requests, it only makes each slower. So the limit is tried a step up and a
step down in turn, and a step is kept if throughput answers to it; a throttled request (503, 429) halves the limit.

Throughput is what one request moves in a second, the median of a round, times the limit (Little's law). Counting what
arrives in a while would be simpler and says less: requests of one size that share a link end in bunches, and a few
that are late by seconds would hide whatever a step did. Too many in flight is not free, even on a link that stays full:
each takes longer then, so one that is late is noticed later and waited for longer.
"""

from __future__ import annotations

from statistics import median

__all__ = ["Aimd"]

ROUND = 2
"""A round is this many completions for each request in flight: the more, the less noisy its throughput."""
ANSWERED = 0.2
"""A step up by a fraction f is kept if throughput rose by this part of f; one down, unless it fell by that. Below a
half, since an idle link costs more than some connections too many."""
PATIENCE_ROUNDS = 8
"""Where steps neither way were kept: rounds before one is tried again."""


class Aimd:
    """Adapts :attr:`limit` between ``least`` and ``most`` from completions and throttles. Time is given, not read."""

    __slots__ = (
        "_baseline", "_cut_seconds", "_least", "_limit", "_most", "_patience", "_previous", "_rates", "_refused",
        "_saturated", "_settling", "_upwards",
    )  # fmt: skip

    def __init__(self, *, start: int, least: int, most: int) -> None:
        self._limit = start
        self._least = least
        self._most = most
        self._previous: int | None = None  # the limit before a step that is on trial
        self._upwards = True
        self._baseline = 0.0  # bytes per second at that limit
        self._refused = 0  # steps in a row that were not kept
        self._patience = 0
        self._cut_seconds = float("-inf")
        self._rates: list[float] = []
        self._saturated = 0
        self._settling = start  # completions of requests that ran, in part, beside more or fewer than the limit

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._limit

    def completed(self, size_bytes: int, seconds: float, *, saturated: bool) -> None:
        """A request brought ``size_bytes`` in ``seconds``; ``saturated``: others were waiting for their turn then."""
        if self._settling > 0 or seconds <= 0.0:
            self._settling -= 1
            return
        self._rates.append(size_bytes / seconds)
        self._saturated += saturated
        if len(self._rates) < ROUND * max(4, self._limit):
            return
        # In a round without a queue, fewer than the limit were in flight.
        if 2 * self._saturated >= len(self._rates):
            self._judge(self._limit * median(self._rates))
        self._begin_round()

    def throttled(self, sent_seconds: float, now_seconds: float) -> None:
        """A request sent at ``sent_seconds`` was refused; one cut answers all that were in flight together."""
        if sent_seconds < self._cut_seconds:
            return
        self._cut_seconds = now_seconds
        self._limit = max(self._least, self._limit // 2)
        self._previous = None
        self._upwards = True
        self._refused = 0
        self._patience = 1
        self._begin_round()

    def _judge(self, rate: float) -> None:
        if self._previous is not None:
            step = (self._limit - self._previous) / self._previous
            if rate < self._baseline * (1.0 + ANSWERED * step):
                self._limit, self._previous = self._previous, None
                self._settling = self._limit
                self._turn()
                return
            self._refused = 0
        elif self._patience > 0:
            self._patience -= 1
            return
        self._baseline = rate
        self._previous = self._limit
        step_requests = max(1, self._limit // 4)
        stepped = self._limit + (step_requests if self._upwards else -step_requests)
        self._limit = min(self._most, max(self._least, stepped))
        self._settling = self._limit
        if self._limit == self._previous:  # there is no way on
            self._previous = None
            self._turn()

    def _turn(self) -> None:
        self._upwards = not self._upwards
        self._refused += 1
        if self._refused == 2:
            self._refused = 0
            self._patience = PATIENCE_ROUNDS

    def _begin_round(self) -> None:
        self._rates.clear()
        self._saturated = 0
