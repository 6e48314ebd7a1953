"""What it costs to keep objects in functions: calls that keep them warm, back-ups, and reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stoker.costs.usage import Calls, total_dollars
from stoker.errors import ConfigError
from stoker.plan.reclaim import Upkeep
from stoker.prices import FunctionPrices
from stoker.warm.code import Code

__all__ = ["Bill", "Billing", "WarmFleet"]


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
    """Dollars, by what they are for."""

    warm_dollars: float
    backup_dollars: float
    read_dollars: float

    @property
    def dollars(self) -> float:
        """All together."""
        return self.warm_dollars + self.backup_dollars + self.read_dollars


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFleet:
    """Functions that hold erasure-coded objects.

    :class:`~stoker.costs.usage.WarmTier` reckons with calls that somebody has counted; here they follow from the code
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
