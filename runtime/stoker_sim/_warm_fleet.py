"""Nodes of a warm tier through time: when a platform takes them back, what is lost with them, and what a fleet costs.

A node is a function of one **instance**. Objects are cut into shards, each on a node of its own, by a Reed-Solomon code
of ``data`` + ``parity`` shards (A. Wang et al., "InfiniCache" (FAST 2020), section 3): any ``data`` of them restore an
object.

The policy is the proxy's. A node is called when there was no contact with it for some time; that the platform has taken
its instance shows at the next contact. Lost shards are written again by the next read of their object.

Between two reclaims the schedule is arithmetic, so that little is played. A fleet costs the calls that keep it warm,
calls to find out what new instances hold, reads, and writing lost shards again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import Bounded, Finite, Fraction, NotNegative, Positive
from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import Calls, total_dollars
from stoker.errors import ConfigError
from stoker_warm._erasure import Code

HOUR_SECONDS = 3600.0
_ROUNDING = 1e-9
"""Parts of an interval that two times which are the same may differ by."""


Seconds = Finite[NotNegative[float]]
"""A duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim(Bounded):
    """How a platform takes instances back. Lives have no memory: an old instance is as safe as a young one.

    Attributes:
        mean_life_seconds: of an instance that is kept warm.
        together: the part of all reclaims, 0 to 1, that take every instance of a function at once: when its host goes.
        idle_seconds: an instance that nobody invokes for so long is taken.
    """

    mean_life_seconds: Positive[float]
    together: Fraction[float] = 0.0
    idle_seconds: Positive[float] = math.inf


def reclaims(mean_life_seconds: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield when a platform would take the instance of one function, in seconds from 0 and rising.

    Lives have no memory, so a reclaim hits whichever instance is there. That nobody invokes a function for too long is
    not looked at here.
    """
    now_seconds = 0.0
    while (now_seconds := now_seconds + rng.expovariate(1.0 / mean_life_seconds)) < seconds:
        yield now_seconds


def placed(code: Code, objects: int, functions: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``int64 [objects, shards]``, the function that holds each shard; those of an object differ.

    Raises:
        ConfigError: there are fewer functions than an object has shards.
    """
    if functions < code.shards:
        raise ConfigError(f"{code} needs {code.shards} functions, there are {functions}")
    return np.stack([rng.choice(functions, code.shards, replace=False) for _ in range(objects)])


def lost_at_reads(code: Code, lost: Sequence[Iterable[float]], reads: int, read_seconds: float) -> NDArray[np.float64]:
    """Return ``float64 [reads]``: what part of all objects each read finds lost, if a read writes lost shards again.

    Objects are on random functions, so the part follows from how many functions lose their memory between two reads:
    nothing is drawn.

    Args:
        code: of the objects.
        lost: of each function, when it loses its memory, in seconds.
        reads: of each object, one behind the other.
        read_seconds: from one to the next.
    """
    is_lost = lost_within(lost, reads, read_seconds)
    gone = np.array([_too_many(code, len(lost), down) for down in range(len(lost) + 1)])
    parts: NDArray[np.float64] = gone[is_lost.sum(axis=1)]
    return parts


def lost_between_reads(
    code: Code, lost: Sequence[Iterable[float]], hours: int, read_seconds: float
) -> NDArray[np.float64]:
    """Return ``float64 [hours]``: what part of all objects is lost in each hour if a read writes lost shards again.

    The hours of any number of objects follow: of n, none is lost with (1 - part) ** n.

    Args:
        code: of the objects.
        lost: of each function, when it loses its memory, in seconds.
        hours: that are looked at.
        read_seconds: every object is read so often; an hour is a multiple of it.

    Raises:
        ConfigError: it is not.
    """
    reads = round(HOUR_SECONDS / read_seconds)
    if not reads or abs(reads * read_seconds - HOUR_SECONDS) > 1e-6:
        raise ConfigError(f"an hour must be a multiple of read_seconds, not of {read_seconds}")
    parts = lost_at_reads(code, lost, hours * reads, read_seconds)
    kept: NDArray[np.float64] = (1.0 - parts).reshape(hours, reads).prod(axis=1)
    return 1.0 - kept


def lost_within(lost: Sequence[Iterable[float]], periods: int, seconds: float) -> NDArray[np.bool_]:
    """Return ``bool [periods, functions]``: whether a function loses its memory in each of so many periods."""
    is_lost = np.zeros((periods, len(lost)), np.bool_)
    for function, times in enumerate(lost):
        is_lost[[int(at // seconds) for at in times if at < periods * seconds], function] = True
    return is_lost


def _too_many(code: Code, functions: int, down: int) -> float:
    """Return the probability that an object has more of its shards on so many functions than it has parity."""
    many = sum(comb(down, n) * comb(functions - down, code.shards - n) for n in range(code.parity + 1, code.shards + 1))
    return many / comb(functions, code.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """What became of a node.

    Attributes:
        losses: when its memory was lost, and when the proxy noticed, in seconds from 0 and rising.
        greetings: calls that were made because another contact had found the instance gone, so that whoever is there
            instead says what it holds.
        warm_calls: to keep it warm.
    """

    losses: tuple[tuple[float, float], ...]
    greetings: int
    warm_calls: float


def lived(
    warm_seconds: float,
    reclaimed: Iterable[float],
    seconds: float,
    *,
    offset: float,
    uses_per_second: float,
    rng: random.Random,
) -> NodeLife:
    """Return what becomes of a node that always holds something.

    Args:
        warm_seconds: it is called this long after the last contact.
        reclaimed: when the platform takes the instance that is there, rising.
        seconds: that are looked at.
        offset: 0 to 1: the first call comes when this part of the interval has passed.
        uses_per_second: how often it is read from or written to, at random times.
        rng: for these times.

    Raises:
        ConfigError: the interval, the offset or the rate is out of bounds.
    """
    if not 0 < warm_seconds < math.inf:
        raise ConfigError(f"warm_seconds must be a duration of more than 0 seconds, not {warm_seconds}")
    if not (0 <= offset <= 1 and 0 <= uses_per_second < math.inf):
        raise ConfigError(f"offset is 0 to 1, uses_per_second at least 0, not {offset} and {uses_per_second}")
    losses = list[tuple[float, float]]()
    contact_seconds = warm_seconds * (offset - 1)  # from which calls are counted
    for lost_seconds in reclaimed:
        if lost_seconds >= seconds:
            break
        if losses and lost_seconds < losses[-1][1]:
            continue  # there is no instance before the loss is noticed
        contact_seconds = losses[-1][1] if losses else contact_seconds
        calls = math.floor((lost_seconds - contact_seconds) / warm_seconds + _ROUNDING) + 1
        used_seconds = lost_seconds + rng.expovariate(uses_per_second) if uses_per_second else math.inf
        losses.append((lost_seconds, min(contact_seconds + calls * warm_seconds, used_seconds)))
    return NodeLife(
        losses=tuple(losses),
        greetings=sum(noticed_seconds <= seconds for _, noticed_seconds in losses),
        warm_calls=_warm_calls(warm_seconds, seconds, uses_per_second),
    )


def _warm_calls(warm_seconds: float, seconds: float, uses_per_second: float) -> float:
    """Return how often the time since the last contact gets too long.

    Between uses at random times with a rate r a call comes once in (exp(rW) - 1) / r seconds.
    """
    calls, uses = seconds / warm_seconds, uses_per_second * warm_seconds
    return calls * uses / math.expm1(uses) if uses else calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Dollars.

    Attributes:
        warm_dollars: for calls that keep functions warm.
        backup_dollars: for calls to back up; our nodes have none.
        greet_dollars: for calls to find out what a new instance holds.
        read_dollars: for calls in which objects are read or put away.
        rebuild_dollars: for calls in which lost shards are written again.
        bucket_dollars: for reading lost objects from the bucket.
    """

    warm_dollars: float
    read_dollars: float
    backup_dollars: float = 0.0
    greet_dollars: float = 0.0
    rebuild_dollars: float = 0.0
    bucket_dollars: float = 0.0

    @property
    def dollars(self) -> float:
        """All together."""
        return self.upkeep_dollars + self.read_dollars

    @property
    def upkeep_dollars(self) -> float:
        """All but reads."""
        kept = self.warm_dollars + self.backup_dollars + self.greet_dollars
        return kept + self.rebuild_dollars + self.bucket_dollars


class Served(NamedTuple):
    """Calls in which nodes send or take shards.

    Attributes:
        calls: of nodes.
        seconds: that they are busy with shards, all together.
    """

    calls: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCalls(Bounded):
    """What the calls of our nodes are billed for, by the millisecond.

    Attributes:
        memory_bytes: of a node.
        warm_call_seconds: of a call that only keeps it warm.
        exchange_seconds: of any other call, besides what it moves: to be there and to say what it holds.
        linger_seconds: that a node stays after the last request.
        init_seconds: that an instance takes to start, which is billed.
        bytes_per_second: that a node sends or takes.
    """

    memory_bytes: Positive[int]
    warm_call_seconds: Seconds = 0.002
    exchange_seconds: Seconds = 0.025
    linger_seconds: Seconds
    init_seconds: Seconds = 0.3
    bytes_per_second: Positive[float] = 75e6

    def moving(self, shards: float, shard_bytes: float) -> Served:
        """Return what it takes that nodes send or take shards, each in a call of its own."""
        return Served(shards, shards * shard_bytes / self.bytes_per_second)

    def greet_seconds(self, lives: Sequence[NodeLife]) -> float:
        """Return what calls to find out what new instances hold are billed, their starts included."""
        greetings, losses = sum(life.greetings for life in lives), sum(len(life.losses) for life in lives)
        return greetings * (self.exchange_seconds + self.linger_seconds) + losses * self.init_seconds

    def bill(
        self,
        lives: Sequence[NodeLife],
        prices: FunctionPrices,
        *,
        read: Served,
        rebuild: Served,
        bucket_dollars: float = 0.0,
    ) -> Bill:
        """Return what nodes cost.

        Args:
            lives: of the nodes.
            prices: of functions.
            read: what they do for objects that are read or put away.
            rebuild: for lost shards that are written again.
            bucket_dollars: for what is read from the bucket for these.
        """
        greetings, warm_calls = sum(life.greetings for life in lives), sum(life.warm_calls for life in lives)
        return Bill(
            warm_dollars=self._dollars(prices, warm_calls, warm_calls * self.warm_call_seconds),
            greet_dollars=self._dollars(prices, greetings, self.greet_seconds(lives)),
            read_dollars=self._served_dollars(prices, read),
            rebuild_dollars=self._served_dollars(prices, rebuild),
            bucket_dollars=bucket_dollars,
        )

    def _served_dollars(self, prices: FunctionPrices, served: Served) -> float:
        seconds = served.calls * (self.exchange_seconds + self.linger_seconds) + served.seconds
        return self._dollars(prices, served.calls, seconds)

    def _dollars(self, prices: FunctionPrices, calls: float, seconds: float) -> float:
        if not calls:
            return 0.0
        return total_dollars(Calls(calls=calls, seconds=seconds / calls, memory_bytes=self.memory_bytes).parts(prices))
