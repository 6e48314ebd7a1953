"""What a proxy has done so far, what it costs, and what the same reads would have cost as GETs.

With today's prices a tier that keeps data in functions beside a bucket of the same region never pays in money, however
much it is read: handing out 8 MiB from functions of 1.5 GB at 75 MB/s costs 8 times a GET, and requests and keeping
warm come on top. It buys latency. :meth:`Bill.break_even_reads_per_hour` computes that from what was measured, and says
None then. Where the bucket is in another region than the reader, and the nodes are not, there is a rate from which it
pays.
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
    """What a proxy counts.

    Attributes:
        hits: objects that were read.
        misses: objects that are not here.
        losses: objects that were here, and of which too many shards are lost.
        restored: hits for which lost or late data shards were computed from parity.
        late: shards that were not waited for, since others were first.
        corrupt: shards that arrived and are not what they should be.
        rebuilt: lost shards that were written again by a read of their object.
        stored: objects that were put away.
        declined: objects that were offered and not taken: too many waited, there is no room, or nodes failed.
        evicted: objects that went for others.
        pending_bytes: copies that wait to be written, those that are announced among them.
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
    """A snapshot of a proxy: a copy of what it has counted, and what there is.

    Attributes:
        objects: that are known.
        held_bytes: that nodes are believed to hold, or are being sent.
        limit_bytes: that those nodes can hold that have said so.
        nodes: how many are in which state.
    """

    objects: int
    held_bytes: int
    limit_bytes: int
    nodes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUsage:
    """What calls for one task used.

    Attributes:
        calls: that were answered.
        cold_starts: of them, those that started an instance, as far as the platform tells; their INIT is billed.
        billed_seconds: of all, INIT included.
        gb_seconds: of configured memory.
        vcpu_seconds: of configured processors, where they are billed apart.
    """

    calls: int = 0
    cold_starts: int = 0
    billed_seconds: float = 0.0
    gb_seconds: float = 0.0
    vcpu_seconds: float = 0.0

    def cost_dollars(self, prices: FunctionPrices) -> float:
        """Return what requests and running cost."""
        running = self.gb_seconds * prices.dollars_per_gb_second + self.vcpu_seconds * prices.dollars_per_vcpu_second
        return self.calls * prices.dollars_per_request + running


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrices:
    """The prices of a bill.

    Attributes:
        functions: of the nodes; None where they cost nothing.
        store: of the bucket behind the tier.
        egress: where its readers are, seen from the bucket. The nodes are taken to be beside them: bytes between them
            are counted as free.
    """

    functions: FunctionPrices | None = None
    store: StorePrices = field(default_factory=lambda: Prices.load().store("s3"))
    egress: Egress = "same_region"


@dataclass(slots=True, kw_only=True)
class WarmBill:
    """What a tier has cost so far, beside what a bucket would have. Not thread-safe.

    Attributes:
        prices: the prices.
        usage: by task, what calls used.
        unanswered_calls: calls that may have run, and of which no bill came.
        reads: objects that the tier delivered.
        read_bytes: of these.
    """

    prices: WarmPrices
    usage: dict[NodeTask, TaskUsage] = field(default_factory=lambda: dict.fromkeys(NodeTask, TaskUsage()))
    unanswered_calls: int = 0
    reads: int = 0
    read_bytes: int = 0

    def count_call(self, task: NodeTask, answer: Answer | None) -> None:
        """Count a call that was answered, or that may have run and has no answer: how long is not known then.

        Raises:
            ConfigError: a figure is not a number from 0: what a platform tells is not taken unseen.
        """
        if answer is None:
            self.unanswered_calls += 1
            return
        for name in ("billed_seconds", "memory_bytes", "vcpus"):
            if not 0 <= getattr(answer, name) < math.inf:
                raise ConfigError(f"{name} of a call is a number from 0, not {getattr(answer, name)!r}")
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
        """Return what calls for some tasks cost, for all by default."""
        prices = self.prices.functions
        return 0.0 if prices is None else math.fsum(self.usage[task].cost_dollars(prices) for task in tasks or NodeTask)

    @property
    def bucket_dollars(self) -> float:
        """For reading the same objects from the bucket, one GET each."""
        store = self.prices.store
        moved = store.transfer_dollars(read_bytes=self.read_bytes, written_bytes=0, egress=self.prices.egress)
        return self.reads * store.request_dollars(Operation.GET) + moved

    def break_even_reads_per_hour(self, elapsed_seconds: float) -> float | None:
        """Return from how many reads an hour on, of objects like these, the tier costs less than GETs.

        None: never, since a read from the tier costs no less than a GET; or nothing was read in these
            ``elapsed_seconds``.
        """
        if not self.reads or not elapsed_seconds:
            return None
        saved_dollars_per_read = (self.bucket_dollars - self.dollars(NodeTask.SERVE)) / self.reads
        warm_dollars_per_hour = self.dollars(NodeTask.WARM) / elapsed_seconds * 3600
        return warm_dollars_per_hour / saved_dollars_per_read if saved_dollars_per_read > 0 else None

    def to_json(self, elapsed_seconds: float) -> dict[str, Any]:
        """Return it as JSON values, ``elapsed_seconds`` after it was begun.

        Raises:
            ConfigError: that is no duration.
        """
        if not 0 <= elapsed_seconds < math.inf:
            raise ConfigError(f"seconds must be a duration from 0, not {elapsed_seconds}")
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
