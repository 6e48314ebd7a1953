"""A circuit breaker, after M. Nygard, "Release It!" (2007), chapter 5. Sans I/O: callers pass the time.

After three consecutive failures of a place, the breaker refuses reads for a while, and then permits one as a probe.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FAILURE_THRESHOLD = 3
"""Consecutive failures that open a breaker."""
PROBE_INTERVAL_SECONDS = 5.0
"""Time from opening to the first probe, and from a failed probe to the next, in seconds."""


class BreakerState(enum.StrEnum):
    """State of a breaker, which decides the next read."""

    CLOSED = "closed"
    """Reads are permitted."""
    OPEN = "open"
    """Reads are refused until the pause is over."""
    HALF_OPEN = "half-open"
    """The next read is permitted, as a probe."""
    PROBING = "probing"
    """Reads are refused until the probe has ended."""


class ReadOutcome(enum.Enum):
    """Outcome of a permitted read."""

    DELIVERED = enum.auto()
    FAILED = enum.auto()
    """The read was late, raised an error, or delivered wrong bytes."""
    UNDECIDED = enum.auto()
    """No evidence about the place's health: it lacks the object, or the read was cancelled."""


_AFTER_PROBE = {
    (BreakerState.PROBING, ReadOutcome.DELIVERED): BreakerState.CLOSED,
    (BreakerState.PROBING, ReadOutcome.FAILED): BreakerState.OPEN,
    (BreakerState.PROBING, ReadOutcome.UNDECIDED): BreakerState.HALF_OPEN,
}
"""Transitions after a probe; reporting a probe twice raises KeyError."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission for one read, whose outcome must be reported exactly once.

    Attributes:
        is_probe: whether the outcome decides if the breaker closes.
    """

    is_probe: bool


class CircuitBreaker:
    """Permits and refuses reads of one place.

    Attributes:
        state: current state; the end of a pause takes effect at the next :meth:`permit`.
        openings: number of transitions from closed to open.
    """

    __slots__ = ("_failures", "_opened_seconds", "openings", "state")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.openings = 0
        self._failures = 0
        self._opened_seconds = 0.0

    def permit(self, now_seconds: float) -> Permit | None:
        """Return a permit, or None if the read is refused."""
        if self.state is BreakerState.OPEN and now_seconds >= self._opened_seconds + PROBE_INTERVAL_SECONDS:
            self.state = BreakerState.HALF_OPEN
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.PROBING
            return Permit(is_probe=True)
        return Permit(is_probe=False) if self.state is BreakerState.CLOSED else None

    def report(self, permit: Permit, outcome: ReadOutcome, now_seconds: float) -> None:
        """Record the outcome of a read. If the breaker opened in the meantime, only that of a probe counts."""
        if permit.is_probe:
            self._enter(_AFTER_PROBE[self.state, outcome], now_seconds)
        elif self.state is BreakerState.CLOSED and outcome is not ReadOutcome.UNDECIDED:
            self._failures = self._failures + 1 if outcome is ReadOutcome.FAILED else 0
            if self._failures == FAILURE_THRESHOLD:
                self.openings += 1
                self._enter(BreakerState.OPEN, now_seconds)

    def _enter(self, state: BreakerState, now_seconds: float) -> None:
        self.state = state
        if state is BreakerState.OPEN:
            self._failures, self._opened_seconds = 0, now_seconds

    def __repr__(self) -> str:
        return f"Breaker({self.state}, {self._failures} of {FAILURE_THRESHOLD} failures, opened {self.openings} times)"
