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
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from stoker._base.meter import Egress, Operation
from stoker._cost.prices import GB_BYTES, FunctionPrices, StorePrices
from stoker._cost.usage import Part, total_dollars
from stoker.errors import ConfigError
from stoker_warm._events import Task


@dataclass(slots=True, kw_only=True)
class ProxyTally:
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
        pending_bytes: copies that wait to be written.
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

    def snapshot(self, *, objects: int, held_bytes: int, limit_bytes: int, nodes: Mapping[str, int]) -> ProxyStatistics:
        """Return what has been counted, with what there is now."""
        return ProxyStatistics(
            **asdict(self),
            objects=objects,
            held_bytes=held_bytes,
            limit_bytes=limit_bytes,
            nodes=MappingProxyType(dict(nodes)),
        )


@dataclass(slots=True, kw_only=True)
class ProxyStatistics(ProxyTally):
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
class Used:
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

    def parts(self, prices: FunctionPrices, name: str) -> list[Part]:
        """Return the lines of a bill: requests, and running."""
        running = self.gb_seconds * prices.dollars_per_gb_second + self.vcpu_seconds * prices.dollars_per_vcpu_second
        return [
            Part(f"{name}: requests", self.calls, "requests", self.calls * prices.dollars_per_request),
            Part(f"{name}: running", self.gb_seconds, "GB-s", running),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a stretch of time cost, beside what a bucket would have.

    Attributes:
        seconds: that it lasted.
        used: by task.
        reads: objects that the tier delivered.
        read_bytes: of these.
        serve_dollars: for calls to answer reads and writes.
        warm_dollars: for calls that keep nodes warm.
        bucket_dollars: for reading the same objects from the bucket, one GET each.
    """

    seconds: float
    used: dict[Task, Used]
    reads: int
    read_bytes: int
    serve_dollars: float
    warm_dollars: float
    bucket_dollars: float

    @property
    def dollars(self) -> float:
        """Of the tier, all together."""
        return self.serve_dollars + self.warm_dollars

    @property
    def standing_dollars_per_hour(self) -> float:
        """What keeping the data costs, read or not; NaN before any time has passed."""
        return self.warm_dollars / self.seconds * 3600 if self.seconds else math.nan

    @property
    def break_even_reads_per_hour(self) -> float | None:
        """From how many reads an hour on, of objects like these, the tier costs less than GETs.

        None: never, since a read from the tier costs no less than a GET; or nothing was read yet that would tell.
        """
        if not self.reads or not self.seconds:
            return None
        saved_dollars_per_read = (self.bucket_dollars - self.serve_dollars) / self.reads
        return self.standing_dollars_per_hour / saved_dollars_per_read if saved_dollars_per_read > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        used, per_hour = self.used.values(), self.standing_dollars_per_hour
        names = ("seconds", "serve_dollars", "warm_dollars", "dollars", "reads", "read_bytes", "bucket_dollars")
        return {
            **{name: getattr(self, name) for name in (*names, "break_even_reads_per_hour")},
            "requests": sum(each.calls for each in used),
            "cold_starts": sum(each.cold_starts for each in used),
            "gb_seconds": sum(each.gb_seconds for each in used),
            "dollars_per_hour": per_hour if math.isfinite(per_hour) else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """The prices of a bill.

    Attributes:
        functions: of the nodes.
        store: of the bucket behind the tier.
        egress: where its readers are, seen from the bucket.
    """

    functions: FunctionPrices
    store: StorePrices
    egress: Egress = "same_region"


class CostMeter:
    """Counts what a tier's functions are billed for, and what it delivers. Not thread-safe.

    Calls whose answer was lost are billed, too, but for how long is not known: they are only counted.
    """

    def __init__(self) -> None:
        self.unanswered = 0
        """Calls that may have run, and of which no bill came."""
        self._used = dict.fromkeys(Task, Used())
        self._reads = self._read_bytes = 0

    def called(
        self, task: Task, *, billed_seconds: float, memory_bytes: int, vcpus: float, is_cold: bool | None
    ) -> None:
        """A call was answered; the figures are those of its :class:`~stoker.abc.Answer`.

        Raises:
            ConfigError: a figure is not a number from 0: what a platform tells is not taken unseen.
        """
        for name, value in (("billed_seconds", billed_seconds), ("memory_bytes", memory_bytes), ("vcpus", vcpus)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a call is a number from 0, not {value!r}")
        before = self._used[task]
        self._used[task] = Used(
            calls=before.calls + 1,
            cold_starts=before.cold_starts + (is_cold is True),
            billed_seconds=before.billed_seconds + billed_seconds,
            gb_seconds=before.gb_seconds + billed_seconds * memory_bytes / GB_BYTES,
            vcpu_seconds=before.vcpu_seconds + billed_seconds * vcpus,
        )

    def lost(self) -> None:
        """A call ended with no answer."""
        self.unanswered += 1

    def delivered(self, size_bytes: int) -> None:
        """The tier delivered an object."""
        self._reads += 1
        self._read_bytes += size_bytes

    def bill(
        self, seconds: float, functions: FunctionPrices, store: StorePrices, egress: Egress = "same_region"
    ) -> Bill:
        """Return what was used in all, at some prices.

        Args:
            seconds: since the meter was made.
            functions: prices where the nodes are.
            store: prices of the bucket behind the tier.
            egress: where the reader is, seen from the bucket. The nodes are taken to be beside it: bytes between them
                are counted as free.
        """
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"seconds must be a duration from 0, not {seconds}")
        dollars = {task: total_dollars(used.parts(functions, task)) for task, used in self._used.items()}
        moved = store.transfer_dollars(read_bytes=self._read_bytes, written_bytes=0, egress=egress)
        return Bill(
            seconds=seconds,
            used=dict(self._used),
            reads=self._reads,
            read_bytes=self._read_bytes,
            serve_dollars=dollars[Task.SERVE],
            warm_dollars=dollars[Task.WARM],
            bucket_dollars=self._reads * store.request_dollars(Operation.GET) + moved,
        )
