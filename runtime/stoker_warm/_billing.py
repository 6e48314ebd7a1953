"""Counters and costs of a proxy, and the cost of the same reads as GET requests to the bucket.

At the bundled prices, a tier in functions beside a bucket of the same region never saves money, at any read rate:
sending 8 MiB from functions of 1.5 GB at 75 MB/s costs 8 times a GET, and requests and keeping the functions warm cost
extra. The tier saves latency. :meth:`WarmBill.break_even_reads_per_hour` computes the break-even rate from the measured
usage, and returns None in this case. If the nodes are in the reader's region, but not the bucket, the rate is finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker._base.meter import Egress, Operation
from stoker._cost.prices import GB_BYTES, FunctionPrices, Prices, StorePrices
from stoker.abc import Answer
from stoker.errors import ConfigError
from stoker_warm._events import NodeTask


@dataclass(slots=True, kw_only=True)
class ProxyCounters:
    """Counters of a proxy.

    Attributes:
        hits: Number of reads that returned the object.
        misses: Number of reads of objects that the tier does not hold.
        losses: Number of reads of objects with too few shards left, or too few that arrived in time.
        restored: Number of hits that computed lost or late data shards from parity.
        late: Number of shards that a read did not wait for, because enough others had arrived.
        corrupt: Number of shards that arrived with wrong bytes.
        rebuilt: Number of lost shards that a read of their object has written again.
        stored: Number of objects that were written.
        declined: Number of offers that were not written: too many were pending, there was no room, or nodes failed.
        evicted: Number of objects evicted in favour of others.
        pending_bytes: Bytes of copies that wait to be written, including reserved ones.
    """

    hits: int = 0
    misses: int = 0
    losses: int = 0
    restored: int = 0
    late: int = 0
    corrupt: int = 0
    rebuilt: int = 0
    stored: int = 0
    declined: int = 0
    evicted: int = 0
    pending_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class ProxyStatistics(ProxyCounters):
    """Snapshot of a proxy: its counters and its contents.

    Attributes:
        objects: Number of objects in the directory.
        held_bytes: Bytes that nodes are believed to hold, or that are being written to them.
        limit_bytes: Sum of the limits that nodes have reported, in bytes.
        nodes: State → number of nodes in it.
    """

    objects: int
    held_bytes: int
    limit_bytes: int
    nodes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUsage:
    """Billed usage of all calls for one task.

    Attributes:
        calls: Number of calls that returned.
        cold_starts: Number of those calls that started an instance, if the platform reports it; INIT time is billed.
        billed_seconds: Billed duration of all calls, including INIT, in seconds.
        gb_seconds: Configured memory times billed duration, in GB-seconds.
        vcpu_seconds: Configured vCPUs times billed duration, on platforms that bill vCPUs separately.
    """

    calls: int = 0
    cold_starts: int = 0
    billed_seconds: float = 0.0
    gb_seconds: float = 0.0
    vcpu_seconds: float = 0.0

    def cost_dollars(self, prices: FunctionPrices) -> float:
        """Return the cost of requests and duration, in dollars."""
        running = self.gb_seconds * prices.dollars_per_gb_second + self.vcpu_seconds * prices.dollars_per_vcpu_second
        return self.calls * prices.dollars_per_request + running


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrices:
    """Prices for a bill.

    Attributes:
        functions: Prices of the nodes' functions; None if they are free.
        store: Prices of the bucket behind the tier.
        egress: Location of the readers, relative to the bucket. The nodes are assumed to be in the readers' zone, so
            transfers between nodes and readers are counted as free.
    """

    functions: FunctionPrices | None = None
    store: StorePrices = field(default_factory=lambda: Prices.load().store("s3"))
    egress: Egress = "same_region"


@dataclass(slots=True, kw_only=True)
class WarmBill:
    """Cost of a tier so far, and of the same reads from the bucket. Not thread-safe.

    Attributes:
        prices: Prices to apply.
        usage: Task → usage of its calls.
        unanswered_calls: Number of calls that may have run, but returned no usage.
        reads: Number of objects that the tier delivered.
        read_bytes: Bytes of these objects.
    """

    prices: WarmPrices
    usage: dict[NodeTask, TaskUsage] = field(default_factory=lambda: dict.fromkeys(NodeTask, TaskUsage()))
    unanswered_calls: int = 0
    reads: int = 0
    read_bytes: int = 0

    def count_call(self, task: NodeTask, answer: Answer | None) -> None:
        """Count a call that returned, or, with ``answer`` None, one that may have run for an unknown time.

        Raises:
            ConfigError: A figure that the platform reported is negative or not finite.
        """
        if answer is None:
            self.unanswered_calls += 1
            return
        for name in ("billed_seconds", "memory_bytes", "vcpus"):
            if not 0 <= getattr(answer, name) < math.inf:
                raise ConfigError(f"{name} of a call must be finite and at least 0, not {getattr(answer, name)!r}")
        before = self.usage[task]
        self.usage[task] = TaskUsage(
            calls=before.calls + 1,
            cold_starts=before.cold_starts + (answer.is_cold is True),
            billed_seconds=before.billed_seconds + answer.billed_seconds,
            gb_seconds=before.gb_seconds + answer.billed_seconds * answer.memory_bytes / GB_BYTES,
            vcpu_seconds=before.vcpu_seconds + answer.billed_seconds * answer.vcpus,
        )

    def count_read(self, size_bytes: int) -> None:
        """Count an object that the tier delivered."""
        self.reads += 1
        self.read_bytes += size_bytes

    def dollars(self, *tasks: NodeTask) -> float:
        """Return the cost of the calls for some tasks, by default for all, in dollars."""
        prices = self.prices.functions
        return 0.0 if prices is None else math.fsum(self.usage[task].cost_dollars(prices) for task in tasks or NodeTask)

    @property
    def bucket_dollars(self) -> float:
        """Cost of reading the same objects from the bucket, with one GET each, in dollars."""
        store, egress = self.prices.store, self.prices.egress
        transfer_dollars = store.transfer_dollars(read_bytes=self.read_bytes, written_bytes=0, egress=egress)
        return self.reads * store.request_dollars(Operation.GET) + transfer_dollars

    def break_even_reads_per_hour(self, elapsed_seconds: float) -> float | None:
        """Return the number of reads per hour, of objects of the mean size, above which the tier costs less than GETs.

        None if a read from the tier costs at least as much as a GET, or nothing was read in ``elapsed_seconds``.
        """
        if not self.reads or not elapsed_seconds:
            return None
        saved_dollars_per_read = (self.bucket_dollars - self.dollars(NodeTask.SERVE)) / self.reads
        warm_dollars_per_hour = self.dollars(NodeTask.WARM) / elapsed_seconds * 3600
        return warm_dollars_per_hour / saved_dollars_per_read if saved_dollars_per_read > 0 else None

    def to_json(self, elapsed_seconds: float) -> dict[str, Any]:
        """Return the bill of the last ``elapsed_seconds``, since it was begun, as JSON values.

        Raises:
            ConfigError: ``elapsed_seconds`` is negative or not finite.
        """
        if not 0 <= elapsed_seconds < math.inf:
            raise ConfigError(f"seconds must be a finite duration of at least 0, not {elapsed_seconds}")
        used = self.usage.values()
        return {
            "seconds": elapsed_seconds,
            "requests": sum(each.calls for each in used),
            "unanswered": self.unanswered_calls,
            "cold_starts": sum(each.cold_starts for each in used),
            "gb_seconds": sum(each.gb_seconds for each in used),
            "serve_dollars": self.dollars(NodeTask.SERVE),
            "warm_dollars": self.dollars(NodeTask.WARM),
            "dollars": self.dollars(),
            "dollars_per_hour": self.dollars(NodeTask.WARM) / elapsed_seconds * 3600 if elapsed_seconds else None,
            "reads": self.reads,
            "read_bytes": self.read_bytes,
            "bucket_dollars": self.bucket_dollars,
            "break_even_reads_per_hour": self.break_even_reads_per_hour(elapsed_seconds),
        }
