"""What a fan-out runs and how much at once: tasks, limits on calls, which calls are late. Time is given, not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stoker._base.arguments import AtLeastOne, Bounded, Fraction, NotNegative, Positive
from stoker._base.retry import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work: a function and its event, which may be delivered more than once.

    It is done when the function's result has the state ``complete`` or none. After ``packing`` it is called again.

    Attributes:
        name: what to call it in messages; no two tasks of a fan-out share one.
        function: to run.
        event: what it gets, a JSON object.
        size_bytes: how much work it is, for the progress shown.
    """

    name: str
    function: str
    event: Mapping[str, Any]
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutConfig(Bounded):
    """How many calls run at once, and what is done about those that fail or are late.

    Attributes:
        start: calls at once at first; while nothing throttles, their number doubles every ``ramp_seconds``.
        most: calls at once, at most; None is what the executor holds sensible.
        ramp_seconds: see ``start``.
        retry: of calls that were lost or ended with a transient error. A throttled call does not count as an attempt.
        throttled_seconds: the run ends when nothing else but throttles has come for so long.
        late_factor: a call is late after this many times the median of those that ended well.
        late_fraction: late calls, at most, of all that get a second one beside them.
        late_burst: second calls that are free besides.
    """

    start: AtLeastOne[int] = 8
    most: AtLeastOne[int] | None = None
    ramp_seconds: Positive[float] = 1.0
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=8, first_seconds=0.5, longest_seconds=30.0))
    throttled_seconds: Positive[float] = 600.0
    late_factor: AtLeastOne[float] = 3.0
    late_fraction: Fraction[float] = 0.1
    late_burst: NotNegative[int] = 2


_STEPS = 8
"""After a throttle, the limit comes back to where it was in so many periods."""
_PAUSE_PERIODS = 30
"""For so long the limit stays where it was before more was refused."""


class Ramp:
    """The limit on calls at once: few at first, more while the platform takes them, half when it throttles.

    In the manner of TCP (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988): doubling until the first
    throttle, then growth by steps; with a pause at the last number that was taken before more is tried (Ha, Rhee and
    Xu, "CUBIC", SIGOPS 2008). Unlike the limit on requests, which follows throughput because requests share a link, it
    grows with time alone: functions share nothing but their platform's limit, a call may take a quarter of an hour, and
    a throttled one is refused at once.

    Args:
        start: the limit at first.
        most: which it never exceeds.
        period_seconds: between one growth and the next.

    Attributes:
        limit: calls that may run at once now.
    """

    __slots__ = ("_cut_seconds", "_grown_seconds", "_most", "_period_seconds", "_step", "_taken", "limit")

    def __init__(self, *, start: int, most: int, period_seconds: float) -> None:
        self.limit = min(start, most)
        self._most = most
        self._period_seconds = period_seconds
        self._step: int | None = None  # none before the first throttle: double
        self._taken: int | None = None  # the most that were known to be taken at once, until more is tried
        self._grown_seconds: float | None = None  # when the calls filled the limit first, or it grew last
        self._cut_seconds = float("-inf")

    def grow(self, in_flight: int, now_seconds: float) -> None:
        """Raise the limit if a period has passed in which it was reached: what is not used says nothing."""
        if in_flight < self.limit or self.limit >= self._most:
            self._grown_seconds = None
        elif self._grown_seconds is None:
            self._grown_seconds = now_seconds
        elif now_seconds >= self._grown_seconds + self._wait_seconds():
            if self._taken is not None and self.limit >= self._taken:
                self._taken = None
            grown = self.limit + (self.limit if self._step is None else self._step)
            self.limit = min(self._most, grown if self._taken is None else min(grown, self._taken))
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
        reached = min(self.limit, in_flight)
        self.limit = max(1, reached // 2)
        self._step = max(1, reached // (2 * _STEPS))
        self._taken = max(1, reached - 1)
        self._cut_seconds = now_seconds
        self._grown_seconds = None

    def _wait_seconds(self) -> float:
        """Return how long the limit must be reached before it grows."""
        is_at_the_most_taken = self._taken is not None and self.limit >= self._taken
        return self._period_seconds * (_PAUSE_PERIODS if is_at_the_most_taken else 1)


_LEAST_CALLS = 3
"""So many must have ended well before their median says what is late."""
_REMEMBERED_CALLS = 256
_LEAST_SECONDS = 1.0
"""Nothing is late before: what is over so soon is not worth a second call."""


class Stragglers:
    """What calls take, and what may be spent on late ones.

    Backup tasks after Dean and Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters" (OSDI 2004, section
    3.6): only once nothing waits to be started, since until then an instance is better used by a task that nobody has.
    A budget that calls fill bounds what an outage can cost, as with hedged reads.

    Args:
        factor: a call is late after this many times the median.
        fraction: second calls, at most, of all first ones.
        burst: second calls that are free besides.
    """

    __slots__ = ("_burst", "_calls", "_factor", "_fraction", "_seconds", "_spent")

    def __init__(self, *, factor: float, fraction: float, burst: int) -> None:
        self._factor, self._fraction, self._burst = factor, fraction, burst
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_CALLS)
        self._calls = 0
        self._spent = 0

    def observe(self, seconds: float) -> None:
        """A call ended well after so long."""
        self._seconds.append(seconds)

    def earn(self) -> None:
        """A call was started that is no second one."""
        self._calls += 1

    def late_seconds(self) -> float | None:
        """Return after how long a call is late and a second one allowed; None while that is not known or not so."""
        if len(self._seconds) < _LEAST_CALLS or self._spent + 1 > self._burst + self._fraction * self._calls:
            return None
        return max(_LEAST_SECONDS, self._factor * median(self._seconds))

    def spend(self) -> None:
        """A second call is started."""
        self._spent += 1
