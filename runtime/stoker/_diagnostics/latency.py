"""Distributions of durations: what a model draws a first byte's wait or a step's compute time from."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.errors import ConfigError

__all__ = ["LEAST_MEDIAN_SECONDS", "LONGEST_SECONDS", "Constant", "Late", "Latency", "LogNormal", "Recorded"]

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


def _check(seconds: float, name: str) -> None:
    if not 0 <= seconds <= LONGEST_SECONDS:
        raise ConfigError(f"{name} must be a duration from 0 to {LONGEST_SECONDS:,.0f} seconds, not {seconds}")
