"""Nodes of a warm tier through time: when one loses what it holds, and what a fleet of them costs.

The policy is the proxy's. A node is called when there was no contact with it for some time. At each of its turns a
second instance gets what is new to it, and is started if it is gone. Whoever is left is called next, so memory is
lost when the last instance goes; that shows at the next contact, and there is no instance before.

From one strike of the platform to the next the schedule is arithmetic, so that little is played. A fleet costs the
calls that keep it warm, back-ups, reads, and what is put back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import Calls, total_dollars
from stoker.errors import ConfigError
from stoker_sim._reclaim import Strike, Struck, Upkeep
from stoker_warm._code import Code
from stoker_warm._upkeep import UpkeepConfig

__all__ = [
    "Bill",
    "Billing",
    "NodeCalls",
    "NodeLife",
    "Served",
    "WarmFleet",
    "lived",
]

_ROUNDING = 1e-9
"""Parts of an interval that two times which are the same may differ by."""


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
class Billing:
    """How long calls are billed.

    Attributes:
        tick_seconds: what a call takes is rounded up to a multiple of it.
        warm_call_seconds: of a call that only keeps a function warm.
        backup_call_seconds: of each of the two instances that a back-up keeps busy.
        shard_call_seconds: of a function that serves a shard.
    """

    tick_seconds: float = 0.001
    warm_call_seconds: float = 0.001
    backup_call_seconds: float
    shard_call_seconds: float

    def __post_init__(self) -> None:
        if not self.tick_seconds > 0:
            raise ConfigError(f"tick_seconds must be more than 0, not {self.tick_seconds}")
        for name in ("warm_call_seconds", "backup_call_seconds", "shard_call_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a duration in seconds, not {getattr(self, name)}")

    def billed_seconds(self, seconds: float) -> float:
        """Return what is billed for a call; a part of a tick is a tick, and so is nothing."""
        return max(1, math.ceil(seconds / self.tick_seconds - 1e-9)) * self.tick_seconds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFleet:
    """Functions that hold erasure-coded objects.

    :class:`~stoker._cost.usage.WarmTier` reckons with calls that somebody has counted; here they follow from the code
    and the upkeep, and are billed by the tick.

    Attributes:
        functions: how many.
        memory_bytes: of each.
        code: of the objects.
        upkeep: what keeps them.
        reads_per_hour: objects that are read.
    """

    functions: int
    memory_bytes: int
    code: Code = field(default_factory=Code)
    upkeep: Upkeep = field(default_factory=Upkeep)
    reads_per_hour: float = 0.0

    def bill(self, hours: float, prices: FunctionPrices, billing: Billing) -> Bill:
        """Return what so many hours cost."""

        def dollars(calls: float, seconds: float) -> float:
            used = Calls(calls=calls, seconds=billing.billed_seconds(seconds), memory_bytes=self.memory_bytes)
            return total_dollars(used.parts(prices))

        def calls(every_seconds: float | None) -> float:
            return self.functions * hours * 3600.0 / every_seconds if every_seconds else 0.0

        return Bill(
            warm_dollars=dollars(calls(self.upkeep.warm_seconds), billing.warm_call_seconds),
            backup_dollars=dollars(2 * calls(self.upkeep.backup_seconds), billing.backup_call_seconds),
            read_dollars=dollars(self.reads_per_hour * hours * self.code.shards, billing.shard_call_seconds),
        )


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
        for name in ("warm_call_seconds", "exchange_seconds", "linger_seconds", "init_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a duration in seconds, not {getattr(self, name)}")
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
