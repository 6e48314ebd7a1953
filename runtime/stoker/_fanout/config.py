"""What a fan-out carries out, and how patiently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker._base.retry import RetryPolicy
from stoker.errors import ConfigError

__all__ = ["FanoutConfig", "Task"]


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
class FanoutConfig:
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

    start: int = 8
    most: int | None = None
    ramp_seconds: float = 1.0
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=8, first_seconds=0.5, longest_seconds=30.0))
    throttled_seconds: float = 600.0
    late_factor: float = 3.0
    late_fraction: float = 0.1
    late_burst: int = 2

    def __post_init__(self) -> None:
        if self.start < 1 or (self.most is not None and self.most < 1):
            raise ConfigError(f"start={self.start} and most={self.most} calls at once must be at least 1")
        if not self.ramp_seconds > 0 or not self.throttled_seconds > 0:
            raise ConfigError("ramp_seconds and throttled_seconds must be greater than zero")
        if not self.late_factor >= 1 or not 0 <= self.late_fraction <= 1 or self.late_burst < 0:
            raise ConfigError("late calls need late_factor >= 1, late_fraction from 0 to 1 and late_burst >= 0")
