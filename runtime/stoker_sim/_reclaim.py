"""Functions as memory: when a platform takes them back, and when what they hold is lost with them.

A function is one **instance**, or two: a back-up starts a second one of the same function and copies what is new to
it (A. Wang et al., "InfiniCache" (FAST 2020), sections 4.2 and 4.3). Whichever instance is left is invoked next, so
memory is lost only when the last one is taken.

Objects are cut into shards, each in a function of its own, by a Reed-Solomon code of ``data`` + ``parity`` shards
(section 3 there): any ``data`` of them restore an object.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker_warm._code import Code

__all__ = [
    "Reclaim",
    "Strike",
    "Struck",
    "Upkeep",
    "first_arrivals",
    "kept_hours",
    "losses",
    "lost_between_reads",
    "placed",
    "strikes",
]


class Struck(enum.Enum):
    """Which instances of a function are taken: the one that is called, the one behind it, or both."""

    FIRST = enum.auto()
    SECOND = enum.auto()
    BOTH = enum.auto()


class Strike(NamedTuple):
    """A platform takes what is there of a function at that time, in seconds from 0."""

    seconds: float
    takes: Struck


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """How a platform takes instances back. Lives have no memory: an old instance is as safe as a young one.

    Attributes:
        mean_life_seconds: of an instance that is kept warm.
        together: the part of all reclaims, 0 to 1, that take every instance of a function at once: when its host goes.
        idle_seconds: an instance that nobody invokes for so long is taken.
    """

    mean_life_seconds: float
    together: float = 0.0
    idle_seconds: float = math.inf

    def __post_init__(self) -> None:
        if not (self.mean_life_seconds > 0 and self.idle_seconds > 0):
            raise ConfigError(f"mean_life_seconds and idle_seconds must be more than 0, not {self}")
        if not 0 <= self.together <= 1:
            raise ConfigError(f"the part that is taken together must be in [0, 1], not {self.together}")

    def next(self, rng: random.Random, instances: int) -> tuple[float, int]:
        """Return how many seconds pass until the next reclaim of a function, and how many instances it leaves."""
        rate = 1.0 / self.mean_life_seconds
        one_seconds = _exponential(rng, instances * rate * (1.0 - self.together))
        all_seconds = _exponential(rng, rate * self.together)
        return (all_seconds, 0) if all_seconds < one_seconds else (one_seconds, instances - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """What is done to keep a function's memory.

    Attributes:
        warm_seconds: it is invoked so often; None never.
        backup_seconds: it is backed up so often; None never.
        uses_per_second: how often it is invoked besides, at random times.
    """

    warm_seconds: float | None = 60.0
    backup_seconds: float | None = 300.0
    uses_per_second: float = 0.0

    def __post_init__(self) -> None:
        for name in ("warm_seconds", "backup_seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, or None, not {value}")
        if not 0 <= self.uses_per_second < math.inf:
            raise ConfigError(f"uses_per_second must be at least 0, not {self.uses_per_second}")

    @property
    def longest_rest_seconds(self) -> float:
        """The longest that a function is not invoked, uses aside."""
        return min(self.warm_seconds or math.inf, self.backup_seconds or math.inf)


def losses(reclaim: Reclaim, upkeep: Upkeep, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield the times, in seconds from 0 and rising, at which one function loses its memory.

    A function that has lost it begins anew at once, with one instance. Back-ups of different functions fall at
    different times.
    """
    phase = rng.random()
    now_seconds, instances = 0.0, 1
    idle_seconds = _idle_seconds(reclaim, upkeep, seconds, rng)
    while True:
        wait_seconds, left = reclaim.next(rng, instances)
        reclaimed_seconds = now_seconds + wait_seconds
        backup_seconds = _next_backup_seconds(upkeep, phase, now_seconds) if instances == 1 else math.inf
        now_seconds = min(reclaimed_seconds, backup_seconds, idle_seconds)
        if now_seconds >= seconds:
            return
        if now_seconds == backup_seconds:
            instances = 2
            continue
        instances = left if now_seconds == reclaimed_seconds else 0
        if not instances:
            yield now_seconds
            instances, idle_seconds = 1, now_seconds + _idle_seconds(reclaim, upkeep, seconds - now_seconds, rng)


def strikes(reclaim: Reclaim, seconds: float, rng: random.Random) -> Iterator[Strike]:
    """Yield when a platform would take instances of one function, in the order of time.

    Each instance lives for ``mean_life_seconds`` on average; since lives have no memory, a strike hits whichever is
    there. That nobody invokes a function for too long is not looked at here.
    """
    rate, now_seconds = 1.0 / reclaim.mean_life_seconds, 0.0
    alone = 1.0 - reclaim.together
    kinds, weights = (Struck.FIRST, Struck.SECOND, Struck.BOTH), (alone, alone, reclaim.together)
    while (now_seconds := now_seconds + rng.expovariate(rate * sum(weights))) < seconds:
        yield Strike(now_seconds, rng.choices(kinds, weights)[0])


def _next_backup_seconds(upkeep: Upkeep, phase: float, now_seconds: float) -> float:
    if upkeep.backup_seconds is None:
        return math.inf
    return (math.floor(now_seconds / upkeep.backup_seconds - phase) + 1 + phase) * upkeep.backup_seconds


def _idle_seconds(reclaim: Reclaim, upkeep: Upkeep, most_seconds: float, rng: random.Random) -> float:
    """Return after how long a function will have been idle for too long; if that is later than most, anything later."""
    if upkeep.longest_rest_seconds <= reclaim.idle_seconds:
        return math.inf
    since_seconds = 0.0
    while since_seconds <= most_seconds and (gap := _exponential(rng, upkeep.uses_per_second)) <= reclaim.idle_seconds:
        since_seconds += gap
    return since_seconds + reclaim.idle_seconds


def _exponential(rng: random.Random, rate: float) -> float:
    return rng.expovariate(rate) if rate > 0 else math.inf


_HOUR_SECONDS = 3600.0


def placed(code: Code, objects: int, functions: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``int64 [objects, shards]``, the function that holds each shard; those of an object differ.

    Raises:
        ConfigError: there are fewer functions than an object has shards.
    """
    if functions < code.shards:
        raise ConfigError(f"{code} needs {code.shards} functions, there are {functions}")
    return np.stack([rng.choice(functions, code.shards, replace=False) for _ in range(objects)])


def kept_hours(code: Code, places: NDArray[np.int64], lost: Sequence[Iterable[float]], hours: int) -> NDArray[np.bool_]:
    """Return ``bool [hours, objects]``: whether an object, whole when an hour began, could be restored at its end.

    Shards that are lost are made again by the next hour, by whoever reads the object.

    Args:
        code: of the objects.
        places: ``int64 [objects, shards]``, the function that holds each shard.
        lost: of each function, when it loses its memory, in seconds.
        hours: that are looked at.
    """
    is_lost = np.zeros((hours, len(lost)), np.bool_)
    for function, times in enumerate(lost):
        for seconds in times:
            if seconds < hours * _HOUR_SECONDS:
                is_lost[int(seconds // _HOUR_SECONDS), function] = True
    kept: NDArray[np.bool_] = is_lost[:, places].sum(axis=2) <= code.parity
    return kept


def lost_between_reads(
    code: Code, lost: Sequence[Iterable[float]], hours: int, read_seconds: float
) -> NDArray[np.float64]:
    """Return ``float64 [hours]``: what part of all objects is lost in each hour if a read puts lost shards back.

    Objects are on random functions, so the part follows from how many functions lose their memory between two reads:
    nothing is drawn, and the hours of any number of objects follow: of n, none is lost with (1 - part) ** n.

    Args:
        code: of the objects.
        lost: of each function, when it loses its memory, in seconds.
        hours: that are looked at.
        read_seconds: every object is read so often; an hour is a multiple of it.

    Raises:
        ConfigError: it is not.
    """
    reads = round(_HOUR_SECONDS / read_seconds)
    if not reads or abs(reads * read_seconds - _HOUR_SECONDS) > 1e-6:
        raise ConfigError(f"an hour must be a multiple of read_seconds, not of {read_seconds}")
    is_lost = np.zeros((hours * reads, len(lost)), np.bool_)
    for function, times in enumerate(lost):
        for seconds in times:
            if seconds < hours * _HOUR_SECONDS:
                is_lost[int(seconds // read_seconds), function] = True
    gone = np.array([_too_many(code, len(lost), down) for down in range(len(lost) + 1)])
    kept: NDArray[np.float64] = (1.0 - gone[is_lost.sum(axis=1)]).reshape(hours, reads).prod(axis=1)
    return 1.0 - kept


def _too_many(code: Code, functions: int, down: int) -> float:
    """Return the probability that an object has more of its shards on so many functions than it has parity."""
    many = sum(comb(down, n) * comb(functions - down, code.shards - n) for n in range(code.parity + 1, code.shards + 1))
    return many / comb(functions, code.shards)


def first_arrivals(code: Code, shard_seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``float64 [reads]``, when each read has enough shards: all are asked for at once, the last are dropped.

    Args:
        code: of the objects.
        shard_seconds: ``float64 [reads, shards]``, when each shard arrives.
    """
    arrived: NDArray[np.float64] = np.partition(shard_seconds, code.data - 1, axis=1)[:, code.data - 1]
    return arrived
