"""What it costs to keep objects in functions: calls that keep them warm, back-ups, reads, and what is put back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import Calls, total_dollars
from stoker.errors import ConfigError
from stoker_sim._models.reclaim import Upkeep
from stoker_sim._models.warm_node import NodeLife
from stoker_warm._code import Code

__all__ = ["Bill", "Billing", "NodeCalls", "Served", "WarmFleet"]


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
