"""Tasks and settings of a fan-out, its limit on concurrent calls and its detection of late calls.

Nothing here reads a clock: callers pass the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stoker._base.arguments import AtLeastOne, BoundedConfig, Fraction, NotNegative, Positive, explain_arguments
from stoker._base.retry import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of a function; the event may be delivered more than once, so the function must be idempotent.

    A task is complete if the function's result has the state ``complete`` or no state. After the state ``packing``, the
    function is called again.

    Example:
        >>> from stoker.fanout import Task
        >>> task = Task(name="part 0", function="pack", event={"part": 0}, size_bytes=256 << 20)

    Attributes:
        name: name in messages, unique in the fan-out.
        function: name of the function to call.
        event: event to call it with, a JSON object.
        size_bytes: amount of work, in bytes, for the progress display.
    """

    name: str
    function: str
    event: Mapping[str, Any]
    size_bytes: int = 0


@explain_arguments("FanoutConfig", renamed={"start": "start_concurrency", "most": "max_concurrency"})
@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutConfig(BoundedConfig):
    """Concurrency of a fan-out, and its handling of failed and late calls.

    A late call gets a second one; the first answer wins.

    Example:
        >>> from stoker.fanout import FanoutConfig
        >>> config = FanoutConfig(start_concurrency=4, max_concurrency=200)

    Attributes:
        start_concurrency: initial limit of concurrent calls; it doubles every ``ramp_seconds`` until the platform
            throttles.
        max_concurrency: maximum number of concurrent calls; None for the executor's own limit.
        ramp_seconds: time between two increases of the limit, in seconds.
        retry: policy for calls that were lost or failed with a transient error; throttled calls are not attempts.
        throttled_seconds: time after which a run fails if every call is throttled, in seconds.
        late_factor: multiple of the median duration of successful calls after which a call is late.
        late_fraction: maximum number of second calls, as a fraction of the first ones.
        late_burst: number of second calls allowed in excess of ``late_fraction``.
    """

    start_concurrency: AtLeastOne[int] = 8
    max_concurrency: AtLeastOne[int] | None = None
    ramp_seconds: Positive[float] = 1.0
    retry: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(attempts=8, backoff_base_seconds=0.5, backoff_cap_seconds=30.0)
    )
    throttled_seconds: Positive[float] = 600.0
    late_factor: AtLeastOne[float] = 3.0
    late_fraction: Fraction[float] = 0.1
    late_burst: NotNegative[int] = 2


_RECOVERY_PERIODS = 8
"""Number of periods in which the limit returns to its value before a throttled call."""
_PAUSE_PERIODS = 30
"""Number of periods for which the limit stays just below the value at which calls were throttled."""


class Ramp:
    """Limit of concurrent calls: it starts low, grows while the platform accepts calls, and halves on a throttle.

    Like TCP (Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988), it doubles until the first throttle and then
    grows by steps, with a pause at the last accepted number of calls (Ha, Rhee and Xu, "CUBIC", SIGOPS 2008). The limit
    on requests follows throughput, because requests share a link; this one grows with time alone: functions share only
    their platform's limit, a call may take 15 minutes, and a throttled call is refused at once.

    Args:
        start: initial limit.
        max_limit: maximum limit.
        period_seconds: time between two increases, in seconds.

    Attributes:
        limit: current maximum number of concurrent calls.
    """

    __slots__ = (
        "_growth_base_seconds",
        "_last_cut_seconds",
        "_max_accepted",
        "_max_limit",
        "_period_seconds",
        "_step",
        "limit",
    )

    def __init__(self, *, start: int, max_limit: int, period_seconds: float) -> None:
        self.limit = min(start, max_limit)
        self._max_limit = max_limit
        self._period_seconds = period_seconds
        self._step: int | None = None  # None before the first throttle: double
        self._max_accepted: int | None = None  # the largest number of calls known to be accepted, until more is tried
        self._growth_base_seconds: float | None = None  # when the calls reached the limit, or it last grew
        self._last_cut_seconds = float("-inf")

    def grow(self, in_flight: int, now_seconds: float) -> None:
        """Raise the limit if it was reached throughout a period; an unused limit shows nothing."""
        if in_flight < self.limit or self.limit >= self._max_limit:
            self._growth_base_seconds = None
        elif self._growth_base_seconds is None:
            self._growth_base_seconds = now_seconds
        elif now_seconds >= self._growth_base_seconds + self._wait_seconds():
            if self._max_accepted is not None and self.limit >= self._max_accepted:
                self._max_accepted = None
            grown = self.limit + (self.limit if self._step is None else self._step)
            self.limit = min(self._max_limit, grown if self._max_accepted is None else min(grown, self._max_accepted))
            self._growth_base_seconds = now_seconds

    def next_growth_seconds(self) -> float | None:
        """Return when the limit will grow if it stays reached; None if it will not."""
        return None if self._growth_base_seconds is None else self._growth_base_seconds + self._wait_seconds()

    def record_throttle(self, sent_seconds: float, in_flight: int, now_seconds: float) -> None:
        """Halve the limit for a refused call, once for all calls that were sent before the cut.

        Args:
            sent_seconds: time at which the refused call was sent.
            in_flight: number of calls in flight, including the refused one.
            now_seconds: current time.
        """
        if sent_seconds < self._last_cut_seconds:
            return
        reached = min(self.limit, in_flight)
        self.limit = max(1, reached // 2)
        self._step = max(1, reached // (2 * _RECOVERY_PERIODS))
        self._max_accepted = max(1, reached - 1)
        self._last_cut_seconds = now_seconds
        self._growth_base_seconds = None

    def _wait_seconds(self) -> float:
        """Return for how many seconds the limit must be reached before it grows."""
        is_at_accepted_limit = self._max_accepted is not None and self.limit >= self._max_accepted
        return self._period_seconds * (_PAUSE_PERIODS if is_at_accepted_limit else 1)


_MIN_CALLS = 3
"""Minimum number of successful calls before their median decides which calls are late."""
_RECENT_CALLS = 256
_MIN_LATE_SECONDS = 1.0
"""Minimum time before a call is late: a shorter one is not worth a second call."""


class Stragglers:
    """Durations of calls, and the budget of second calls for late ones.

    Backup tasks after Dean and Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters" (OSDI 2004, section
    3.6): only once no task waits to be started, since until then an instance is better used for a new task. As with
    hedged reads, each first call adds to the budget of second ones, which bounds the cost of an outage.

    Args:
        factor: multiple of the median duration after which a call is late.
        fraction: maximum number of second calls, as a fraction of the first ones.
        burst: number of second calls allowed in excess of that.
    """

    __slots__ = ("_burst", "_calls", "_factor", "_fraction", "_seconds", "_spent")

    def __init__(self, *, factor: float, fraction: float, burst: int) -> None:
        self._factor, self._fraction, self._burst = factor, fraction, burst
        self._seconds: deque[float] = deque(maxlen=_RECENT_CALLS)
        self._calls = 0
        self._spent = 0

    def observe(self, seconds: float) -> None:
        """Record the duration of a successful call."""
        self._seconds.append(seconds)

    def earn(self) -> None:
        """Count a first call."""
        self._calls += 1

    def late_seconds(self) -> float | None:
        """Return the time after which a call may get a second one; None if that is unknown or the budget is spent."""
        if len(self._seconds) < _MIN_CALLS or self._spent + 1 > self._burst + self._fraction * self._calls:
            return None
        return max(_MIN_LATE_SECONDS, self._factor * median(self._seconds))

    def spend(self) -> None:
        """Count a second call."""
        self._spent += 1
