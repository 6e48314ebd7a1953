"""How many requests to keep in flight: additive increase while it helps, halved when the store asks to slow down.

A pure controller in the manner of TCP's AIMD (Chiu and Jain, 1989) with throughput in the place of loss: a shared
link that is full does not drop object-store requests, it only makes each slower, so "more did not help" is the signal
to step back, and a throttled request (503, 429) is the signal to halve.
"""

from __future__ import annotations

__all__ = ["Aimd"]

LEAST_ROUND = 8
"""Completions in a round, at least; a round's throughput is noisy, and more so the fewer it averages."""
HELPED = 0.4
"""An increase by a fraction f helped if throughput rose by at least this part of f."""
PATIENCE_ROUNDS = 8
"""After an increase that did not help: rounds before the next one is tried."""


class Aimd:
    """Adapts :attr:`limit` between ``least`` and ``most`` from completions and throttles. Time is given, not read."""

    __slots__ = (
        "_baseline", "_completed", "_cut_seconds", "_least", "_limit", "_most", "_patience", "_previous",
        "_round_bytes", "_round_seconds", "_saturated",
    )  # fmt: skip

    def __init__(self, *, start: int, least: int, most: int) -> None:
        self._limit = start
        self._least = least
        self._most = most
        self._previous: int | None = None  # the limit before an increase that is on trial
        self._baseline = 0.0  # bytes per second at that limit
        self._patience = 0
        self._cut_seconds = float("-inf")
        self._round_seconds: float | None = None
        self._round_bytes = 0
        self._completed = 0
        self._saturated = True

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
        self._saturated = self._saturated and saturated
        if self._completed < max(LEAST_ROUND, self._limit) or now_seconds <= self._round_seconds:
            return
        if self._saturated:  # otherwise the round shows how much was wanted, not how much is possible
            self._judge(self._round_bytes / (now_seconds - self._round_seconds))
        self._begin_round(now_seconds)

    def throttled(self, sent_seconds: float, now_seconds: float) -> None:
        """A request sent at ``sent_seconds`` was refused; one cut answers all that were in flight together."""
        if sent_seconds < self._cut_seconds:
            return
        self._cut_seconds = now_seconds
        self._limit = max(self._least, self._limit // 2)
        self._previous = None
        self._patience = 1
        self._begin_round(None)

    def _judge(self, rate: float) -> None:
        if self._previous is not None:
            gain_wanted = HELPED * (self._limit - self._previous) / self._previous
            if rate < self._baseline * (1.0 + gain_wanted):
                self._limit, self._previous = self._previous, None
                self._patience = PATIENCE_ROUNDS
                return
        elif self._patience > 0:
            self._patience -= 1
            return
        self._baseline = rate
        raised = min(self._most, self._limit + max(1, self._limit // 4))
        self._previous = self._limit if raised > self._limit else None
        self._limit = raised

    def _begin_round(self, now_seconds: float | None) -> None:
        self._round_seconds = now_seconds
        self._round_bytes = 0
        self._completed = 0
        self._saturated = True
