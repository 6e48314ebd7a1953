"""A circuit breaker, after M. Nygard, "Release It!" (2007), chapter 5: does no I/O and is given the time.

A place that fails three times in a row is left alone for a while, then tried with one read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FAILURES = 3
"""In a row, that open a breaker."""
PAUSE_SECONDS = 5.0
"""From opening to the first probe, and from a probe that failed to the next."""


class BreakerState(enum.StrEnum):
    """What a breaker does with the next read."""

    CLOSED = "closed"
    """Permits it."""
    OPEN = "open"
    """Refuses it, until the pause is over."""
    HALF_OPEN = "half-open"
    """Permits it, as the probe."""
    PROBING = "probing"
    """Refuses it, until the probe has ended."""


class Outcome(enum.Enum):
    """How a permitted read ended."""

    DELIVERED = enum.auto()
    FAILED = enum.auto()
    """It was late, raised an error, or brought wrong bytes."""
    UNDECIDED = enum.auto()
    """It says nothing of the place's health: the place lacks the object, or the read was cancelled."""


_AFTER_PROBE = {
    (BreakerState.PROBING, Outcome.DELIVERED): BreakerState.CLOSED,
    (BreakerState.PROBING, Outcome.FAILED): BreakerState.OPEN,
    (BreakerState.PROBING, Outcome.UNDECIDED): BreakerState.HALF_OPEN,
}
"""A probe that is reported twice is a missing key."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to read once; its holder reports the outcome, exactly once.

    Attributes:
        is_probe: whether the outcome decides if the breaker closes.
    """

    is_probe: bool


class Breaker:
    """Permits and refuses reads of one place.

    Attributes:
        state: now; the end of a pause is noticed at the next :meth:`permit`.
        openings: times that it went from closed to open.
    """

    __slots__ = ("_failures", "_opened_seconds", "openings", "state")

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.openings = 0
        self._failures = 0
        self._opened_seconds = 0.0

    def permit(self, now_seconds: float) -> Permit | None:
        """Return the right to read, or None if the place is to be left alone."""
        if self.state is BreakerState.OPEN and now_seconds >= self._opened_seconds + PAUSE_SECONDS:
            self.state = BreakerState.HALF_OPEN
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.PROBING
            return Permit(is_probe=True)
        return Permit(is_probe=False) if self.state is BreakerState.CLOSED else None

    def report(self, permit: Permit, outcome: Outcome, now_seconds: float) -> None:
        """Note how a read ended. One that was permitted before the breaker opened decides nothing any more."""
        if permit.is_probe:
            self._enter(_AFTER_PROBE[self.state, outcome], now_seconds)
        elif self.state is BreakerState.CLOSED and outcome is not Outcome.UNDECIDED:
            self._failures = self._failures + 1 if outcome is Outcome.FAILED else 0
            if self._failures == FAILURES:
                self.openings += 1
                self._enter(BreakerState.OPEN, now_seconds)

    def _enter(self, state: BreakerState, now_seconds: float) -> None:
        self.state = state
        if state is BreakerState.OPEN:
            self._failures, self._opened_seconds = 0, now_seconds

    def __repr__(self) -> str:
        return f"Breaker({self.state}, {self._failures} of {FAILURES} failures, opened {self.openings} times)"
