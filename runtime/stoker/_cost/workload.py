"""Reads of a data set over some hours, and what functions that keep it in memory are billed for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker._base.arguments import AtLeastOne, Bounded, Finite, NotNegative, Positive
from stoker._base.meter import Egress
from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import HOURS_A_MONTH, Calls, Part
from stoker.errors import ConfigError

NODE_RESERVED_BYTES, SHARD_OVERHEAD_BYTES = 192 << 20, 768
"""Of a warm function, not for shards; and of each shard besides its bytes."""
_LONGEST_CALL_SECONDS = 900.0
_WARM_CALL_SECONDS = 0.002
_MOST_EXPONENT = 700.0
"""Of what can be raised to a power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Bounded):
    """Reads of whole objects, evenly spread over some hours.

    Attributes:
        size_bytes: of all objects.
        reads: of objects, by all trainers together.
        hours: that they take.
        object_bytes: of one object.
        trainers: machines that share the reads.
        egress: where the trainers are, seen from the bucket.
    """

    size_bytes: Finite[Positive[float]]
    reads: Finite[Positive[float]]
    hours: Finite[Positive[float]]
    object_bytes: Finite[Positive[float]] = float(8 << 20)
    trainers: AtLeastOne[int] = 1
    egress: Egress = "same_region"

    @property
    def objects(self) -> int:
        """How many there are."""
        return math.ceil(self.size_bytes / self.object_bytes)

    @property
    def read_bytes(self) -> float:
        """Of all reads."""
        return self.reads * self.object_bytes

    @property
    def filled(self) -> float:
        """Objects that are read from the bucket to fill a place that all trainers share."""
        return min(self.objects, self.reads)

    @property
    def filled_of_each(self) -> float:
        """Objects that each trainer reads from the bucket, at most, to fill a place of its own."""
        return min(self.objects, self.reads / self.trainers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFunctions(Bounded):
    """Functions that keep erasure-coded shards in memory, as a warm tier's proxy calls them.

    Requests come at random times. A call goes on for as long as the node is asked again within the linger, so nodes
    that are asked often share it among many reads. A platform that takes instances back is not reckoned with: what is
    lost is written again, and read from the bucket if too much is lost.

    Attributes:
        memory_bytes: of a function.
        vcpus: of a function, where they are billed apart.
        linger_seconds: that a node stays after the last request.
        keep_warm_seconds: after which a node that was not asked is called.
        data_shards: of an object.
        parity_shards: of an object.
        exchange_seconds: of a call, besides what it moves and the linger.
        bytes_per_second: that a node sends or takes.
    """

    memory_bytes: Finite[Positive[float]] = float(1536 << 20)
    vcpus: NotNegative[float] = 0.0
    linger_seconds: Finite[Positive[float]] = 0.25
    keep_warm_seconds: Finite[Positive[float]] = 60.0
    data_shards: AtLeastOne[int] = 10
    parity_shards: NotNegative[int] = 2
    exchange_seconds: Finite[NotNegative[float]] = 0.025
    bytes_per_second: Finite[Positive[float]] = 75e6

    @property
    def shards(self) -> int:
        """Of an object, each on a node of its own."""
        return self.data_shards + self.parity_shards

    def nodes(self, work: Workload) -> int:
        """Return how many functions hold all objects.

        Raises:
            ConfigError: a function's memory has no room for shards.
        """
        room_bytes = self.memory_bytes - NODE_RESERVED_BYTES
        if room_bytes <= 0:
            raise ConfigError(
                f"a warm function of {self.memory_bytes / 2**20:g} MiB has no room; give it 256MiB or more"
            )
        shard_bytes = work.object_bytes / self.data_shards + SHARD_OVERHEAD_BYTES
        return max(self.shards, math.ceil(work.objects * self.shards * shard_bytes / room_bytes))

    def parts(self, work: Workload, prices: FunctionPrices) -> list[Part]:
        """Return the lines: calls that take and hand out shards, and calls that keep functions warm."""
        nodes, seconds = self.nodes(work), work.hours * 3600
        rate = work.reads * self.shards / nodes / seconds  # of requests to a node: one for each read, or write, of it
        stay_seconds = self.linger_seconds + work.object_bytes / self.data_shards / self.bytes_per_second
        starts = nodes * seconds * rate * math.exp(-rate * stay_seconds)
        awake_seconds = nodes * seconds * -math.expm1(-rate * stay_seconds) + starts * self.exchange_seconds
        calls = max(starts, awake_seconds / _LONGEST_CALL_SECONDS)
        warm_calls = starts / math.expm1(min(_MOST_EXPONENT, rate * self.keep_warm_seconds))
        return [
            *self._lines(calls, awake_seconds / calls, work, prices, "serving"),
            *self._lines(warm_calls, _WARM_CALL_SECONDS, work, prices, "keeping warm"),
        ]

    def _lines(self, calls: float, seconds: float, work: Workload, prices: FunctionPrices, name: str) -> list[Part]:
        vcpus = self.vcpus if prices.dollars_per_vcpu_second else 0.0
        months = max(1.0, work.hours / HOURS_A_MONTH)
        use = Calls(calls=calls, seconds=seconds, memory_bytes=self.memory_bytes, vcpus=vcpus, months=months)
        return use.parts(prices, f"warm tier, {name}")
