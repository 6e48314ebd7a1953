"""How many requests to keep in flight: more while it helps, fewer where it does not, half when asked to slow down.

A pure controller in the manner of TCP's AIMD (Chiu and Jain, 1989) with throughput in the place of loss: a shared
link that is full does not drop object-store requests, it only makes each slower. So the limit is tried a step up and a
step down in turn, and a step is kept if throughput answers to it; a throttled request (503, 429) halves the limit.
Trying both ways matters: throughput is noisy, and steps up alone would be kept by luck until the limit is at its most.
"""

from __future__ import annotations

__all__ = ["Aimd"]

ROUND = 2
"""A round is this many completions for each request in flight: the more, the less noisy its throughput."""
ANSWERED = 0.1
"""A step up by a fraction f is kept if throughput rose by this part of f; one down, unless it fell by that. Well below
a half, since an idle link costs more than some connections too many."""
PATIENCE_ROUNDS = 8
"""After a step that was not kept: rounds before one the other way is tried."""


class Aimd:
    """Adapts :attr:`limit` between ``least`` and ``most`` from completions and throttles. Time is given, not read."""

    __slots__ = (
        "_baseline", "_completed", "_cut_seconds", "_least", "_limit", "_most", "_patience", "_previous",
        "_round_bytes", "_round_seconds", "_saturated", "_upwards",
    )  # fmt: skip

    def __init__(self, *, start: int, least: int, most: int) -> None:
        self._limit = start
        self._least = least
        self._most = most
        self._previous: int | None = None  # the limit before a step that is on trial
        self._upwards = True
        self._baseline = 0.0  # bytes per second at that limit
        self._patience = 0
        self._cut_seconds = float("-inf")
        self._round_seconds: float | None = None
        self._round_bytes = 0
        self._completed = 0
        self._saturated = 0

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._limit

    def completed(self, size_bytes: int, now_seconds: float, *, saturated: bool) -> None:
        """A request brought ``size_bytes``; ``saturated``: others were waiting for their turn meanwhile."""
        if self._round_seconds is None:
            self._begin_round(now_seconds)
            return
        self._completed += 1
        self._round_bytes += size_bytes
        self._saturated += saturated
        if self._completed < ROUND * max(4, self._limit) or now_seconds <= self._round_seconds:
            return
        # In a round without a queue, throughput says how much was wanted, not how much is possible.
        if 2 * self._saturated >= self._completed:
            self._judge(self._round_bytes / (now_seconds - self._round_seconds))
        self._begin_round(now_seconds)

    def throttled(self, sent_seconds: float, now_seconds: float) -> None:
        """A request sent at ``sent_seconds`` was refused; one cut answers all that were in flight together."""
        if sent_seconds < self._cut_seconds:
            return
        self._cut_seconds = now_seconds
        self._limit = max(self._least, self._limit // 2)
        self._previous = None
        self._upwards = True
        self._patience = 1
        self._begin_round(None)

    def _judge(self, rate: float) -> None:
        if self._previous is not None:
            step = (self._limit - self._previous) / self._previous
            if rate < self._baseline * (1.0 + ANSWERED * step):
                self._limit, self._previous = self._previous, None
                self._turn()
                return
        elif self._patience > 0:
            self._patience -= 1
            return
        self._baseline = rate
        self._previous = self._limit
        step_requests = max(1, self._limit // 4)
        stepped = self._limit + (step_requests if self._upwards else -step_requests)
        self._limit = min(self._most, max(self._least, stepped))
        if self._limit == self._previous:  # there is no way on
            self._previous = None
            self._turn()

    def _turn(self) -> None:
        self._upwards = not self._upwards
        self._patience = PATIENCE_ROUNDS

    def _begin_round(self, now_seconds: float | None) -> None:
        self._round_seconds = now_seconds
        self._round_bytes = 0
        self._completed = 0
        self._saturated = 0
