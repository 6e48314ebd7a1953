"""When a call is so late that the same event is sent once more, and how often that may be done.

Backup tasks after Dean and Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters" (OSDI 2004, section
3.6): only once nothing waits to be started, since until then an instance is better used by a task that nobody has.
A budget that calls fill bounds what an outage can cost, as with hedged reads.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["Stragglers"]

_LEAST_CALLS = 3
"""So many must have ended well before their median says what is late."""
_REMEMBERED_CALLS = 256
_LEAST_SECONDS = 1.0
"""Nothing is late before: what is over so soon is not worth a second call."""


class Stragglers:
    """What calls take, and what may be spent on late ones.

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
