"""Reads of a data set over some hours, and the bill of functions that keep it in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker._base.arguments import AtLeastOne, BoundedConfig, Finite, NotNegative, Positive
from stoker._base.meter import Egress
from stoker._cost.prices import FunctionPrices
from stoker._cost.usage import HOURS_PER_MONTH, BillLine, FunctionUsage
from stoker.errors import ConfigError

NODE_RESERVED_BYTES, SHARD_OVERHEAD_BYTES = 192 << 20, 768
"""Memory of a warm function that is not for shards; and memory of each shard in addition to its bytes."""
_MAX_CALL_SECONDS = 900.0
_WARM_CALL_SECONDS = 0.002
_MAX_EXPONENT = 700.0
"""Maximum argument of ``math.expm1``, which overflows above 709."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWorkload(BoundedConfig):
    """Reads of whole objects, evenly spread over some hours.

    Attributes:
        size_bytes: size of all objects, in bytes.
        reads: number of object reads by all trainers together.
        hours: time over which the reads are spread, in hours.
        object_bytes: size of one object, in bytes.
        trainers: number of machines that share the reads.
        egress: place of the trainers relative to the bucket.
    """

    size_bytes: Finite[Positive[float]]
    reads: Finite[Positive[float]]
    hours: Finite[Positive[float]]
    object_bytes: Finite[Positive[float]] = float(8 << 20)
    trainers: AtLeastOne[int] = 1
    egress: Egress = "same_region"

    @property
    def objects(self) -> int:
        """Number of objects."""
        return math.ceil(self.size_bytes / self.object_bytes)

    @property
    def read_bytes(self) -> float:
        """Bytes of all reads."""
        return self.reads * self.object_bytes

    @property
    def shared_fill_objects(self) -> float:
        """Number of reads from the bucket that fill a tier that all trainers share."""
        return min(self.objects, self.reads)

    @property
    def own_fill_objects(self) -> float:
        """Maximum number of reads from the bucket by which each trainer fills a tier of its own."""
        return min(self.objects, self.reads / self.trainers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFunctions(BoundedConfig):
    """Functions that keep erasure-coded shards in memory, called by the proxy of a warm tier.

    Requests are assumed to come at random times. A call lasts while requests follow within ``linger_seconds``, so busy
    nodes share one call among many reads. Instances that the platform reclaims are not considered: lost shards are
    written again, or the object is read from the bucket if too many are lost.

    Attributes:
        memory_bytes: memory of a function, in bytes.
        vcpus: CPUs of a function, if they are billed separately.
        linger_seconds: time for which a node runs on after its last request, in seconds.
        keep_warm_seconds: time without a request after which a node is called to keep it warm, in seconds.
        data_shards: number of data shards of an object.
        parity_shards: number of parity shards of an object.
        exchange_seconds: duration of a call in addition to transfers and the linger, in seconds.
        bytes_per_second: rate at which a node sends or receives.
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
        """Number of shards of an object, each on a different node."""
        return self.data_shards + self.parity_shards

    def nodes(self, work: ReadWorkload) -> int:
        """Return the number of functions that hold all objects.

        Raises:
            ConfigError: a function's memory has no room for shards.
        """
        room_bytes = self.memory_bytes - NODE_RESERVED_BYTES
        if room_bytes <= 0:
            raise ConfigError(
                f"a warm function of {self.memory_bytes / 2**20:g} MiB has no room for shards; give it at least 256MiB"
            )
        shard_bytes = work.object_bytes / self.data_shards + SHARD_OVERHEAD_BYTES
        return max(self.shards, math.ceil(work.objects * self.shards * shard_bytes / room_bytes))

    def bill_lines(self, work: ReadWorkload, prices: FunctionPrices) -> list[BillLine]:
        """Return the lines of the bill: calls that receive and send shards, and calls that keep functions warm."""
        nodes, seconds = self.nodes(work), work.hours * 3600
        rate = work.reads * self.shards / nodes / seconds  # requests per second to a node: one per read or write
        stay_seconds = self.linger_seconds + work.object_bytes / self.data_shards / self.bytes_per_second
        starts = nodes * seconds * rate * math.exp(-rate * stay_seconds)
        awake_seconds = nodes * seconds * -math.expm1(-rate * stay_seconds) + starts * self.exchange_seconds
        calls = max(starts, awake_seconds / _MAX_CALL_SECONDS)
        warm_calls = starts / math.expm1(min(_MAX_EXPONENT, rate * self.keep_warm_seconds))
        return [
            *self._call_lines(calls, awake_seconds / calls, work, prices, "serving"),
            *self._call_lines(warm_calls, _WARM_CALL_SECONDS, work, prices, "keeping warm"),
        ]

    def _call_lines(
        self, calls: float, seconds: float, work: ReadWorkload, prices: FunctionPrices, name: str
    ) -> list[BillLine]:
        vcpus = self.vcpus if prices.dollars_per_vcpu_second else 0.0
        months = max(1.0, work.hours / HOURS_PER_MONTH)
        use = FunctionUsage(calls=calls, seconds=seconds, memory_bytes=self.memory_bytes, vcpus=vcpus, months=months)
        return use.bill_lines(prices, f"warm tier, {name}")
