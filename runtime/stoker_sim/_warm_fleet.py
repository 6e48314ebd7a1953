"""Nodes of a warm tier through time: when a platform takes them back, what is lost with them, and what a fleet costs.

A node is a function of one **instance**, or of two: a back-up starts a second one and copies what is new to it (A. Wang
et al., "InfiniCache" (FAST 2020), sections 4.2 and 4.3). Objects are cut into shards, each on a node of its own, by a
Reed-Solomon code of ``data`` + ``parity`` shards (section 3 there): any ``data`` of them restore an object.

The policy is the proxy's. A node is called when there was no contact with it for some time. At each of its turns a
second instance gets what is new to it, and is started if it is gone. Whoever is left is called next, so memory is
lost when the last instance goes; that shows at the next contact, and there is no instance before.

From one strike of the platform to the next the schedule is arithmetic, so that little is played. A fleet costs the
calls that keep it warm, back-ups, reads, and what is put back.
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

from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import Calls, total_dollars
from stoker.errors import ConfigError
from stoker_warm._code import Code
from stoker_warm._upkeep import UpkeepConfig

HOUR_SECONDS = 3600.0
_ROUNDING = 1e-9
"""Parts of an interval that two times which are the same may differ by."""


def check_durations(record: object, *names: str) -> None:
    """Raise ConfigError if one of a record's fields is no duration."""
    for name in names:
        if not 0 <= getattr(record, name) < math.inf:
            raise ConfigError(f"{name} must be a duration in seconds, not {getattr(record, name)}")


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


def placed(code: Code, objects: int, functions: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``int64 [objects, shards]``, the function that holds each shard; those of an object differ.

    Raises:
        ConfigError: there are fewer functions than an object has shards.
    """
    if functions < code.shards:
        raise ConfigError(f"{code} needs {code.shards} functions, there are {functions}")
    return np.stack([rng.choice(functions, code.shards, replace=False) for _ in range(objects)])


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
    reads = round(HOUR_SECONDS / read_seconds)
    if not reads or abs(reads * read_seconds - HOUR_SECONDS) > 1e-6:
        raise ConfigError(f"an hour must be a multiple of read_seconds, not of {read_seconds}")
    is_lost = lost_within(lost, hours * reads, read_seconds)
    gone = np.array([_too_many(code, len(lost), down) for down in range(len(lost) + 1)])
    kept: NDArray[np.float64] = (1.0 - gone[is_lost.sum(axis=1)]).reshape(hours, reads).prod(axis=1)
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
        greetings: calls that were made because another one had found the first instance gone, so that whoever is there
            instead says what it holds.
        copies: second instances that were started, and given all that the first one held.
        checks: turns at which the second instance was called, copies included.
        warm_calls: to keep it warm.
    """

    losses: tuple[tuple[float, float], ...]
    greetings: int
    copies: int
    checks: int
    warm_calls: float


class _Node:
    """The instances of a node, and what is due."""

    def __init__(self, upkeep: UpkeepConfig, offset: float, uses_per_second: float, rng: random.Random) -> None:
        self._warm_seconds, self._turn_seconds = upkeep.warm_seconds, upkeep.backup_seconds
        self._offset, self._uses_per_second, self._rng = offset, uses_per_second, rng
        self._has_first, self._has_second = True, False
        self._noticed_seconds = math.inf  # when the first one's absence will have been
        self._paired_seconds = self._turn(0.0, _ROUNDING)  # when a second one will be there
        self._contact_seconds = (upkeep.warm_seconds or 0.0) * (offset - 1)  # from which warm calls are counted
        self.losses: list[tuple[float, float]] = []
        self.greetings = self.copies = 0

    def pass_until(self, seconds: float) -> None:
        """Let happen what is due."""
        while (due_seconds := min(self._noticed_seconds, self._paired_seconds)) <= seconds:
            self._contact_seconds = due_seconds
            if due_seconds == self._noticed_seconds:
                # The second one, if it is there, serves from here on.
                self._has_first, self._has_second, self._noticed_seconds = True, False, math.inf
                self._paired_seconds = self._turn(due_seconds, -_ROUNDING)
                self.greetings += self._paired_seconds > due_seconds  # at a turn it is called anyway
            else:
                self._has_second, self._paired_seconds = True, math.inf
                self.copies += 1

    def struck(self, strike: Strike) -> None:
        """The platform takes instances, if they are there."""
        had_any = self._has_first or self._has_second
        if strike.takes is not Struck.SECOND and self._has_first:
            self._has_first = False
            self._noticed_seconds = self._contact(strike.seconds)
        if strike.takes is not Struck.FIRST and self._has_second:
            self._has_second = False
            self._paired_seconds = self._turn(strike.seconds, _ROUNDING)
        if had_any and not (self._has_first or self._has_second):
            self._paired_seconds = math.inf  # there is nothing to be copied
            self.losses.append((strike.seconds, self._noticed_seconds))

    def _turn(self, seconds: float, margin: float) -> float:
        """Return the node's first turn after that time, or from it on if the margin is negative."""
        if self._turn_seconds is None:
            return math.inf
        turns = max(0, math.ceil(seconds / self._turn_seconds - self._offset + margin))
        return (turns + self._offset) * self._turn_seconds

    def _contact(self, seconds: float) -> float:
        """Return when the node is called or used next."""
        turn_seconds, since_seconds = self._turn(seconds, _ROUNDING), self._contact_seconds
        if self._turn_seconds is not None:
            since_seconds = max(since_seconds, turn_seconds - self._turn_seconds)
        warm_seconds = math.inf
        if self._warm_seconds is not None:
            calls = math.floor((seconds - since_seconds) / self._warm_seconds + _ROUNDING) + 1
            warm_seconds = since_seconds + calls * self._warm_seconds
        used_seconds = seconds + self._rng.expovariate(self._uses_per_second) if self._uses_per_second else math.inf
        return min(warm_seconds, turn_seconds, used_seconds)


def lived(
    upkeep: UpkeepConfig,
    strikes: Iterable[Strike],
    seconds: float,
    *,
    offset: float,
    uses_per_second: float,
    rng: random.Random,
) -> NodeLife:
    """Return what becomes of a node that always holds something.

    Args:
        upkeep: how often it is called; the second instance at each turn.
        strikes: what the platform takes, in the order of time.
        seconds: that are looked at.
        offset: 0 to 1, of its turns: the first ones come when this part of each interval has passed.
        uses_per_second: how often it is read from or written to, at random times.
        rng: for these times.

    Raises:
        ConfigError: the offset or the rate is out of bounds, nothing ever calls the node, or its second instance is not
            called at each turn.
    """
    if not (0 <= offset <= 1 and 0 <= uses_per_second < math.inf):
        raise ConfigError(f"offset is 0 to 1, uses_per_second at least 0, not {offset} and {uses_per_second}")
    turn_seconds = upkeep.backup_seconds
    if upkeep.warm_seconds is None and turn_seconds is None and not uses_per_second:
        raise ConfigError("nothing ever calls the node: set warm_seconds or backup_seconds")
    if turn_seconds is not None and (upkeep.peer_seconds is None or upkeep.peer_seconds > turn_seconds):
        raise ConfigError(f"peer_seconds must be at most backup_seconds, {turn_seconds}, not {upkeep.peer_seconds}")
    node = _Node(upkeep, offset, uses_per_second, rng)
    for strike in strikes:
        if strike.seconds >= seconds:
            break
        node.pass_until(strike.seconds)
        node.struck(strike)
    node.pass_until(seconds)
    return NodeLife(
        losses=tuple(node.losses),
        greetings=node.greetings,
        copies=node.copies,
        checks=math.floor(seconds / turn_seconds) if turn_seconds is not None else 0,
        warm_calls=_warm_calls(upkeep, seconds, uses_per_second),
    )


def _warm_calls(upkeep: UpkeepConfig, seconds: float, uses_per_second: float) -> float:
    """Return how often the time since the last contact gets too long.

    Between uses at random times with a rate r a call comes once in (exp(rW) - 1) / r seconds. Of a node that has
    turns, too, this is up to a tenth short: its first call after a turn may come before the mean says.
    """
    if upkeep.warm_seconds is None:
        return 0.0
    calls = seconds / upkeep.warm_seconds
    if upkeep.backup_seconds is not None:  # turns are contacts
        calls = seconds / upkeep.backup_seconds * (math.ceil(upkeep.backup_seconds / upkeep.warm_seconds) - 1)
    uses = uses_per_second * upkeep.warm_seconds
    return calls * uses / math.expm1(uses) if uses else calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Dollars.

    Attributes:
        warm_dollars: for calls that keep functions warm.
        backup_dollars: for calls to back up, and to find out what a node holds.
        read_dollars: for calls in which objects are read or put away.
        repair_dollars: for calls in which lost shards are put back.
        bucket_dollars: for reading them from the bucket.
    """

    warm_dollars: float
    backup_dollars: float
    read_dollars: float
    repair_dollars: float = 0.0
    bucket_dollars: float = 0.0

    @property
    def dollars(self) -> float:
        """All together."""
        return self.upkeep_dollars + self.read_dollars

    @property
    def upkeep_dollars(self) -> float:
        """All but reads."""
        return self.warm_dollars + self.backup_dollars + self.repair_dollars + self.bucket_dollars


class Served(NamedTuple):
    """Calls in which nodes send or take shards.

    Attributes:
        calls: of nodes.
        seconds: that they are busy with shards, all together.
    """

    calls: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCalls:
    """What the calls of our nodes are billed for, by the millisecond.

    Attributes:
        memory_bytes: of a node.
        warm_call_seconds: of a call that only keeps it warm.
        exchange_seconds: of any other call, besides what it moves: to be there and to say what it holds.
        linger_seconds: that a node stays after the last request.
        init_seconds: that an instance takes to start, which is billed.
        bytes_per_second: that a node sends or takes.
    """

    memory_bytes: int
    warm_call_seconds: float = 0.002
    exchange_seconds: float = 0.025
    linger_seconds: float
    init_seconds: float = 0.3
    bytes_per_second: float = 75e6

    def __post_init__(self) -> None:
        check_durations(self, "warm_call_seconds", "exchange_seconds", "linger_seconds", "init_seconds")
        if not (self.memory_bytes > 0 and self.bytes_per_second > 0):
            raise ConfigError(f"memory_bytes and bytes_per_second must be more than 0, not {self}")

    def billed_seconds(self, lives: Sequence[NodeLife], held_bytes: float) -> tuple[float, float]:
        """Return what upkeep's calls to serve and calls to back up come to.

        A first instance stays for as long as its second one takes, and both for what is copied.
        """
        checks, copies = sum(life.checks for life in lives), sum(life.copies for life in lives)
        greetings, losses = sum(life.greetings for life in lives), sum(len(life.losses) for life in lives)
        served = self.exchange_seconds + self.linger_seconds
        copied = copies * (self.init_seconds + held_bytes / self.bytes_per_second)
        serve_seconds = (checks + greetings) * served + copied + losses * self.init_seconds
        return serve_seconds, checks * self.exchange_seconds + copied

    def moving(self, shards: float, shard_bytes: float) -> Served:
        """Return what it takes that nodes send or take shards, each in a call of its own."""
        return Served(shards, shards * shard_bytes / self.bytes_per_second)

    def bill(
        self,
        lives: Sequence[NodeLife],
        held_bytes: float,
        prices: FunctionPrices,
        *,
        read: Served,
        repair: Served,
        bucket_dollars: float = 0.0,
    ) -> Bill:
        """Return what nodes cost.

        Args:
            lives: of the nodes.
            held_bytes: by each.
            prices: of functions.
            read: what they do for objects that are read or put away.
            repair: for shards that are put back.
            bucket_dollars: for what is read from the bucket for these.
        """
        checks, greetings = sum(life.checks for life in lives), sum(life.greetings for life in lives)
        serve_seconds, backup_seconds = self.billed_seconds(lives, held_bytes)
        warm_calls = sum(life.warm_calls for life in lives)
        return Bill(
            warm_dollars=self._dollars(prices, warm_calls, warm_calls * self.warm_call_seconds),
            backup_dollars=self._dollars(prices, 2 * checks + greetings, serve_seconds + backup_seconds),
            read_dollars=self._served_dollars(prices, read),
            repair_dollars=self._served_dollars(prices, repair),
            bucket_dollars=bucket_dollars,
        )

    def moving_dollars(self, size_bytes: float, prices: FunctionPrices) -> float:
        """Return what it costs that a node sends or takes so much, its call aside."""
        return self._dollars(prices, 1.0, size_bytes / self.bytes_per_second) - prices.dollars_per_request

    def _served_dollars(self, prices: FunctionPrices, served: Served) -> float:
        seconds = served.calls * (self.exchange_seconds + self.linger_seconds) + served.seconds
        return self._dollars(prices, served.calls, seconds)

    def _dollars(self, prices: FunctionPrices, calls: float, seconds: float) -> float:
        if not calls:
            return 0.0
        return total_dollars(Calls(calls=calls, seconds=seconds / calls, memory_bytes=self.memory_bytes).parts(prices))
