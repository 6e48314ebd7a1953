"""How a bucket answers: distributions to draw a first byte's wait or a step's compute time from, rates and refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.errors import ConfigError

__all__ = [
    "LEAST_MEDIAN_SECONDS",
    "LONGEST_SECONDS",
    "BucketModel",
    "Constant",
    "Late",
    "Latency",
    "LogNormal",
    "Recorded",
]

LONGEST_SECONDS = 86400.0
"""Of a duration: what takes longer than a day is neither a first byte nor a step; rounding would lose the others."""

LEAST_MEDIAN_SECONDS = 1e-9
"""Of a median: a logarithm has none of 0."""
_LOG_LONGEST = math.log(LONGEST_SECONDS)
_Z_99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""


class Latency(Protocol):
    """A distribution of durations in seconds."""

    def draw(self, rng: random.Random) -> float:
        """Return one duration in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds, "seconds")

    def draw(self, rng: random.Random) -> float:
        """Return it."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class LogNormal:
    """What requests to stores look like when all is well: a sharp rise and a long tail, given by two percentiles."""

    median_seconds: float
    p99_seconds: float

    def __post_init__(self) -> None:
        _check(self.median_seconds, "median_seconds")
        _check(self.p99_seconds, "p99_seconds")
        if not self.p99_seconds >= self.median_seconds >= LEAST_MEDIAN_SECONDS:
            raise ConfigError(f"LogNormal needs p99_seconds >= median_seconds >= {LEAST_MEDIAN_SECONDS:g}, not {self}")

    def draw(self, rng: random.Random) -> float:
        """Return one of them, at most :data:`LONGEST_SECONDS`."""
        sigma = math.log(self.p99_seconds / self.median_seconds) / _Z_99
        return math.exp(min(rng.normalvariate(math.log(self.median_seconds), sigma), _LOG_LONGEST))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Durations that were measured; each is as likely as every other."""

    seconds: Sequence[float] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("a recorded distribution needs at least one duration")
        for each in self.seconds:
            _check(each, "a recorded duration")

    def draw(self, rng: random.Random) -> float:
        """Return one of them."""
        return self.seconds[rng.randrange(len(self.seconds))]


@dataclass(frozen=True, slots=True)
class Late:
    """Another distribution, of which a part is late: ``fraction`` of its durations are ``seconds`` longer."""

    usual: Latency
    fraction: float
    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds, "seconds")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"the fraction that is late must be in [0, 1], not {self.fraction}")

    def draw(self, rng: random.Random) -> float:
        """Return one of them."""
        return self.usual.draw(rng) + (self.seconds if rng.random() < self.fraction else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketModel:
    """How a bucket answers.

    Attributes:
        first_byte: from the request to the first byte.
        connection_bytes_per_second: of one transfer at most.
        total_bytes_per_second: of all transfers of all nodes together.
        requests_per_second: answered at most; what comes faster waits in line,
        longest_line_seconds: and is refused with 503 where it would have to wait longer than this.
        burst: requests that are answered at once, after a pause.
        error_fraction: of requests that end in a server's error, after the first byte's time.
    """

    first_byte: Latency = field(default_factory=lambda: LogNormal(0.02, 0.08))
    connection_bytes_per_second: float = 90e6
    total_bytes_per_second: float = math.inf
    requests_per_second: float = math.inf
    longest_line_seconds: float = math.inf
    burst: int = 1
    error_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("connection_bytes_per_second", "total_bytes_per_second", "requests_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        if not self.longest_line_seconds >= 0:
            raise ConfigError(f"longest_line_seconds must be at least 0, not {self.longest_line_seconds}")
        if self.burst < 1:
            raise ConfigError(f"burst must be at least 1, not {self.burst}")
        if not 0 <= self.error_fraction < 1:
            raise ConfigError(f"error_fraction must be in [0, 1), not {self.error_fraction}")


def _check(seconds: float, name: str) -> None:
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ConfigError(f"{name} must be a duration from 0 to {LONGEST_SECONDS:,.0f} seconds, not {seconds}")
