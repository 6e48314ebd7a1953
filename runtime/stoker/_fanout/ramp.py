"""How many calls may run at once: few at first, more while the platform takes them, half when it throttles.

In the manner of TCP (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988): doubling until the first throttle,
then growth by steps; with a pause at the last number that was taken before more is tried (Ha, Rhee and Xu, "CUBIC",
SIGOPS 2008). Unlike :class:`stoker._fetch.concurrency.Aimd`, which judges by throughput because requests share a
link, it grows with time alone: functions share nothing but their platform's limit, a call may take a quarter of an
hour, and a throttled one is refused at once.
"""

from __future__ import annotations

__all__ = ["Ramp"]

_STEPS = 8
"""After a throttle, the limit comes back to where it was in so many periods."""
_PAUSE_PERIODS = 30
"""For so long the limit stays where it was before more was refused."""


class Ramp:
    """The limit on calls at once. Time is given, not read.

    Args:
        start: the limit at first.
        most: which it never exceeds.
        period_seconds: between one growth and the next.
    """

    __slots__ = ("_cut_seconds", "_grown_seconds", "_limit", "_most", "_period_seconds", "_step", "_taken")

    def __init__(self, *, start: int, most: int, period_seconds: float) -> None:
        self._limit = min(start, most)
        self._most = most
        self._period_seconds = period_seconds
        self._step: int | None = None  # none before the first throttle: double
        self._taken: int | None = None  # the most that were known to be taken at once, until more is tried
        self._grown_seconds: float | None = None  # when the calls filled the limit first, or it grew last
        self._cut_seconds = float("-inf")

    @property
    def limit(self) -> int:
        """Calls that may run at once now."""
        return self._limit

    def grow(self, in_flight: int, now_seconds: float) -> None:
        """Raise the limit if a period has passed in which it was reached: what is not used says nothing."""
        if in_flight < self._limit or self._limit >= self._most:
            self._grown_seconds = None
        elif self._grown_seconds is None:
            self._grown_seconds = now_seconds
        elif now_seconds >= self._grown_seconds + self._wait_seconds():
            if self._taken is not None and self._limit >= self._taken:
                self._taken = None
            grown = self._limit + (self._limit if self._step is None else self._step)
            self._limit = min(self._most, grown if self._taken is None else min(grown, self._taken))
            self._grown_seconds = now_seconds

    def next_growth_seconds(self) -> float | None:
        """Return when the limit will grow if it stays reached; None if it will not."""
        return None if self._grown_seconds is None else self._grown_seconds + self._wait_seconds()

    def throttled(self, sent_seconds: float, in_flight: int, now_seconds: float) -> None:
        """A call sent at ``sent_seconds`` was refused; one cut answers all that were sent before it.

        ``in_flight``: calls that run, the refused one included.
        """
        if sent_seconds < self._cut_seconds:
            return
        reached = min(self._limit, in_flight)
        self._limit = max(1, reached // 2)
        self._step = max(1, reached // (2 * _STEPS))
        self._taken = max(1, reached - 1)
        self._cut_seconds = now_seconds
        self._grown_seconds = None

    def _wait_seconds(self) -> float:
        """Return how long the limit must be reached before it grows."""
        is_at_the_most_taken = self._taken is not None and self._limit >= self._taken
        return self._period_seconds * (_PAUSE_PERIODS if is_at_the_most_taken else 1)
