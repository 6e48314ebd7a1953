"""Model of the nodes of a warm tier over time: reclaimed instances, lost objects, and the cost of the fleet.

A node is a function with one **instance**. Objects are cut into shards, each on another node, by a Reed-Solomon code of
``data`` + ``parity`` shards (A. Wang et al., "InfiniCache" (FAST 2020), section 3): any ``data`` of them restore an
object.

The policy is the proxy's: it calls a node after some time without contact, and notices at the next contact that the
platform has reclaimed the instance. The next read of an object rewrites its lost shards.

Between two reclaims the schedule is computed in closed form. The cost of a fleet consists of calls that keep it warm,
calls that ask new instances for their contents, reads, and rewriting lost shards.
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

from stoker._base.arguments import BoundedConfig, Finite, Fraction, NotNegative, Positive
from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import FunctionUsage, total_dollars
from stoker.errors import ConfigError
from stoker_warm._erasure import ErasureCode

HOUR_SECONDS = 3600.0
_ROUNDING = 1e-9
"""Fraction of an interval by which two equal times may differ through rounding."""


Seconds = Finite[NotNegative[float]]
"""A duration in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimModel(BoundedConfig):
    """Model of how a platform reclaims instances; lives are exponential, so the age of an instance does not matter.

    Attributes:
        mean_life_seconds: mean life of an instance that is kept warm, in seconds.
        whole_function_fraction: fraction of reclaims that take all instances of a function at once, 0 to 1, as when its
            host fails.
        idle_seconds: time without a call after which an instance is reclaimed, in seconds.
    """

    mean_life_seconds: Positive[float]
    whole_function_fraction: Fraction[float] = 0.0
    idle_seconds: Positive[float] = math.inf


def draw_reclaims(mean_life_seconds: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield the rising times at which a platform reclaims the instance of one function, in seconds from 0.

    Lives are exponential, so a reclaim hits the instance that is there at that time. Idle functions are not modelled.
    """
    now_seconds = 0.0
    while (now_seconds := now_seconds + rng.expovariate(1.0 / mean_life_seconds)) < seconds:
        yield now_seconds


def place_shards(code: ErasureCode, objects: int, functions: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``int64 [objects, shards]``, the random function that holds each shard; those of an object differ.

    Raises:
        ConfigError: there are fewer functions than an object has shards.
    """
    if functions < code.shards:
        raise ConfigError(f"{code} needs {code.shards} functions, there are {functions}")
    return np.stack([rng.choice(functions, code.shards, replace=False) for _ in range(objects)])


def loss_by_read(
    code: ErasureCode, loss_seconds: Sequence[Iterable[float]], reads: int, read_seconds: float
) -> NDArray[np.float64]:
    """Return ``float64 [reads]``: the fraction of all objects that each read finds lost, if reads rewrite lost shards.

    Objects are on random functions, so the expected fraction follows from the number of functions that lose their
    memory between two reads; nothing is drawn.

    Args:
        code: erasure code of the objects.
        loss_seconds: for each function the times at which it loses its memory, in seconds.
        reads: number of consecutive reads of each object.
        read_seconds: time between two reads, in seconds.
    """
    is_lost = memory_losses(loss_seconds, reads, read_seconds)
    gone = np.array([_loss_probability(code, len(loss_seconds), down) for down in range(len(loss_seconds) + 1)])
    parts: NDArray[np.float64] = gone[is_lost.sum(axis=1)]
    return parts


def loss_by_hour(
    code: ErasureCode, loss_seconds: Sequence[Iterable[float]], hours: int, read_seconds: float
) -> NDArray[np.float64]:
    """Return ``float64 [hours]``: the fraction of all objects lost in each hour, if reads rewrite lost shards.

    The probability that none of n objects is lost in an hour is (1 - fraction) ** n.

    Args:
        code: erasure code of the objects.
        loss_seconds: for each function the times at which it loses its memory, in seconds.
        hours: number of hours.
        read_seconds: time between two reads of each object, in seconds.

    Raises:
        ConfigError: an hour is no multiple of ``read_seconds``.
    """
    reads = round(HOUR_SECONDS / read_seconds)
    if not reads or abs(reads * read_seconds - HOUR_SECONDS) > 1e-6:
        raise ConfigError(f"an hour must be a multiple of read_seconds, not of {read_seconds}")
    parts = loss_by_read(code, loss_seconds, hours * reads, read_seconds)
    survival: NDArray[np.float64] = (1.0 - parts).reshape(hours, reads).prod(axis=1)
    return 1.0 - survival


def memory_losses(loss_seconds: Sequence[Iterable[float]], periods: int, period_seconds: float) -> NDArray[np.bool_]:
    """Return ``bool [periods, functions]``: whether a function loses its memory in a period of ``period_seconds``."""
    is_lost = np.zeros((periods, len(loss_seconds)), np.bool_)
    for function, times in enumerate(loss_seconds):
        is_lost[[int(at // period_seconds) for at in times if at < periods * period_seconds], function] = True
    return is_lost


def _loss_probability(code: ErasureCode, functions: int, down: int) -> float:
    """Return the probability that more than ``parity`` shards of an object are on ``down`` given functions."""
    many = sum(comb(down, n) * comb(functions - down, code.shards - n) for n in range(code.parity + 1, code.shards + 1))
    return many / comb(functions, code.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """The simulated life of a node.

    Attributes:
        losses: for each loss of its memory the time of the loss and the time at which the proxy noticed, in seconds
            from 0 and rising.
        inventory_calls: number of calls that asked a new instance for its contents after a contact had found the old
            one gone.
        warm_calls: number of calls to keep it warm.
    """

    losses: tuple[tuple[float, float], ...]
    inventory_calls: int
    warm_calls: float


def simulate_life(
    warm_seconds: float,
    reclaim_seconds: Iterable[float],
    seconds: float,
    *,
    offset: float,
    uses_per_second: float,
    rng: random.Random,
) -> NodeLife:
    """Simulate the life of a node that always holds something.

    Args:
        warm_seconds: time after the last contact at which the node is called, in seconds.
        reclaim_seconds: rising times at which the platform reclaims the present instance, in seconds.
        seconds: duration of the simulation, in seconds.
        offset: fraction of the interval after which the first call comes, 0 to 1.
        uses_per_second: mean rate of reads and writes, which come at random times.
        rng: generator of these times.

    Raises:
        ConfigError: the interval, the offset or the rate is out of bounds.
    """
    if not 0 < warm_seconds < math.inf:
        raise ConfigError(f"warm_seconds must be a duration of more than 0 seconds, not {warm_seconds}")
    if not (0 <= offset <= 1 and 0 <= uses_per_second < math.inf):
        raise ConfigError(
            f"offset must be from 0 to 1 and uses_per_second at least 0, not {offset} and {uses_per_second}"
        )
    losses = list[tuple[float, float]]()
    contact_seconds = warm_seconds * (offset - 1)  # the contact from which the interval of calls is counted
    for lost_seconds in reclaim_seconds:
        if lost_seconds >= seconds:
            break
        if losses and lost_seconds < losses[-1][1]:
            continue  # until the loss is noticed there is no instance to reclaim
        contact_seconds = losses[-1][1] if losses else contact_seconds
        calls = math.floor((lost_seconds - contact_seconds) / warm_seconds + _ROUNDING) + 1
        used_seconds = lost_seconds + rng.expovariate(uses_per_second) if uses_per_second else math.inf
        losses.append((lost_seconds, min(contact_seconds + calls * warm_seconds, used_seconds)))
    return NodeLife(
        losses=tuple(losses),
        inventory_calls=sum(noticed_seconds <= seconds for _, noticed_seconds in losses),
        warm_calls=_warm_calls(warm_seconds, seconds, uses_per_second),
    )


def _warm_calls(warm_seconds: float, seconds: float, uses_per_second: float) -> float:
    """Return the expected number of calls to keep a node warm.

    With uses at random times with a rate r and an interval W, a call comes once in (exp(rW) - 1) / r seconds.
    """
    calls, uses = seconds / warm_seconds, uses_per_second * warm_seconds
    return calls * uses / math.expm1(uses) if uses else calls


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCost:
    """Cost of a fleet, in dollars.

    Attributes:
        warm_dollars: cost of calls that keep functions warm.
        backup_dollars: cost of backup calls, which only InfiniCache's nodes make.
        inventory_dollars: cost of calls that ask new instances for their contents.
        read_dollars: cost of calls that read or store objects.
        rebuild_dollars: cost of calls that rewrite lost shards.
        bucket_dollars: cost of reading lost objects from the bucket.
    """

    warm_dollars: float
    read_dollars: float
    backup_dollars: float = 0.0
    inventory_dollars: float = 0.0
    rebuild_dollars: float = 0.0
    bucket_dollars: float = 0.0

    @property
    def dollars(self) -> float:
        """Total cost."""
        return self.upkeep_dollars + self.read_dollars

    @property
    def upkeep_dollars(self) -> float:
        """Total cost without reads."""
        dollars = self.warm_dollars + self.backup_dollars + self.inventory_dollars
        return dollars + self.rebuild_dollars + self.bucket_dollars


class ShardCalls(NamedTuple):
    """Calls in which nodes send or receive shards.

    Attributes:
        calls: number of calls.
        seconds: total time of the transfers, in seconds.
    """

    calls: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCalls(BoundedConfig):
    """Billed durations of the calls of a node.

    Attributes:
        memory_bytes: configured memory of a node, in bytes.
        warm_call_seconds: duration of a call that only keeps the node warm, in seconds.
        exchange_seconds: duration of any other call without transfers: to connect and report its contents, in seconds.
        linger_seconds: time that a node stays after its last request, in seconds.
        init_seconds: time that an instance takes to start, which is billed, in seconds.
        bytes_per_second: rate at which a node sends or receives.
    """

    memory_bytes: Positive[int]
    warm_call_seconds: Seconds = 0.002
    exchange_seconds: Seconds = 0.025
    linger_seconds: Seconds
    init_seconds: Seconds = 0.3
    bytes_per_second: Positive[float] = 75e6

    def shard_calls(self, shards: float, shard_bytes: float) -> ShardCalls:
        """Return the calls that send or receive ``shards``, one call for each shard."""
        return ShardCalls(shards, shards * shard_bytes / self.bytes_per_second)

    def inventory_seconds(self, lives: Sequence[NodeLife]) -> float:
        """Return the billed time of calls that ask new instances for their contents, with their starts, in seconds."""
        greetings = sum(life.inventory_calls for life in lives)
        losses = sum(len(life.losses) for life in lives)
        return greetings * (self.exchange_seconds + self.linger_seconds) + losses * self.init_seconds

    def cost(
        self,
        lives: Sequence[NodeLife],
        prices: FunctionPrices,
        *,
        read: ShardCalls,
        rebuild: ShardCalls,
        bucket_dollars: float = 0.0,
    ) -> FleetCost:
        """Return the cost of the nodes.

        Args:
            lives: simulated lives of the nodes.
            prices: prices of functions.
            read: calls that read or store objects.
            rebuild: calls that rewrite lost shards.
            bucket_dollars: cost of reading lost objects from the bucket, in dollars.
        """
        greetings = sum(life.inventory_calls for life in lives)
        warm_calls = sum(life.warm_calls for life in lives)
        return FleetCost(
            warm_dollars=self._dollars(prices, warm_calls, warm_calls * self.warm_call_seconds),
            inventory_dollars=self._dollars(prices, greetings, self.inventory_seconds(lives)),
            read_dollars=self._shard_call_dollars(prices, read),
            rebuild_dollars=self._shard_call_dollars(prices, rebuild),
            bucket_dollars=bucket_dollars,
        )

    def _shard_call_dollars(self, prices: FunctionPrices, served: ShardCalls) -> float:
        seconds = served.calls * (self.exchange_seconds + self.linger_seconds) + served.seconds
        return self._dollars(prices, served.calls, seconds)

    def _dollars(self, prices: FunctionPrices, calls: float, seconds: float) -> float:
        if not calls:
            return 0.0
        return total_dollars(
            FunctionUsage(calls=calls, seconds=seconds / calls, memory_bytes=self.memory_bytes).bill_lines(prices)
        )
