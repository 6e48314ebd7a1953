"""Figures of a loader: the plan of an epoch, computed before anything is fetched, and the statistics so far."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker._base.arguments import explain_arguments, rename_arguments
from stoker._base.meter import Egress, MeterReading, Operation
from stoker._base.recorder import Recorder, Wait
from stoker._base.sizes import format_bytes, format_count, format_dollars
from stoker._cache.index import CacheTierStatistics
from stoker._cost.prices import Prices
from stoker._fetch.batch_stream import Batch
from stoker._fetch.pipeline import BatchPipeline
from stoker._format.display import PLAIN_KEY, TableRows, html_table, text_table, to_plain
from stoker._order.order import format_window
from stoker._stores.object_store import price_key
from stoker.errors import MemoryBudgetError


@explain_arguments("LoaderPlan", renamed={"takers": "readers"})
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """The plan of one epoch on one rank; ``str(plan)`` is one line.

    Attributes:
        samples: samples of the epoch, over all ranks.
        steps: batches of the epoch on this rank.
        super_samples: super-samples of the data set.
        shuffle: name of the shuffle, as in :class:`StreamConfig`.
        window: super-samples, or units, mixed at a time, per lane.
        lanes: number of parts that the order is cut into.
        lanes_read: number of lanes that this rank reads.
        get_requests: expected GET requests of this rank, without hedges and retries.
        read_bytes: expected bytes read by this rank.
        dollars: price of these requests and bytes, from the price file.
        amplification: bytes read by all ranks together, divided by the size of the data set.
        memory_bytes: memory of the ring and the manifest; if the ring holds groups, also of heads and hedge buffers.
        slots: number of super-samples, units or groups of samples that the ring holds.
        by_groups: whether the ring holds groups of samples, read by ranges, instead of whole super-samples.
        readers: number of readers that share the epoch: ranks, or the workers of all ranks.
        unit_bytes: size of a unit, None if whole super-samples are mixed.
        sticky: probability that a super-sample stays in its lane of the epoch before.

    Example:
        >>> with Loader("s3://bucket/train", batch_size=64) as loader:
        ...     plan = loader.plan
        >>> plan.samples, plan.steps
        (128, 2)
        >>> dollars = plan.dollars * 90  # the price of 90 epochs on this rank
    """

    samples: int
    steps: int
    super_samples: int
    shuffle: str
    window: int
    lanes: int
    lanes_read: int
    get_requests: int
    read_bytes: int
    dollars: float
    amplification: float
    memory_bytes: int
    slots: int
    by_groups: bool
    readers: int
    unit_bytes: int | None = None
    sticky: float = 0.0

    @classmethod
    def of(cls, feed: BatchPipeline, prices: Prices, egress: Egress = "same_region") -> LoaderPlan:
        """Return the plan of a batch pipeline; its requests and bytes are expected values.

        Args:
            feed: pipeline of the epoch.
            prices: prices of the stores.
            egress: where this machine is, seen from the bucket, which decides the price of a transferred byte.
        """
        manifest, partition, order = feed.manifest, feed.partition, feed.config.order
        expected = feed.source.forecast()
        store = prices.store(price_key(feed.store))
        return cls(
            samples=partition.samples,
            steps=partition.count_steps(0),
            super_samples=len(manifest),
            shuffle=order.shuffle,
            window=order.window,
            lanes=partition.lanes,
            lanes_read=partition.max_open_lanes(),
            get_requests=expected.requests,
            read_bytes=expected.size_bytes,
            dollars=expected.requests * store.request_dollars(Operation.GET)
            + store.transfer_dollars(read_bytes=expected.size_bytes, written_bytes=0, egress=egress),
            amplification=expected.size_bytes * partition.readers / manifest.size_bytes,
            memory_bytes=feed.source.slots.size_bytes,
            slots=feed.source.slots.slots,
            by_groups=feed.source.slots.holds_groups,
            readers=partition.readers,
            unit_bytes=order.unit_bytes,
            sticky=order.sticky,
        )

    @rename_arguments("LoaderPlan.check_dollars", {"most_dollars": "max_dollars"})
    def check_dollars(self, max_dollars: float) -> None:
        """Check that the epoch costs at most ``max_dollars`` over all ranks.

        Raises:
            MemoryBudgetError: it costs more; the message has the figures.
        """
        dollars = self.dollars * self.readers
        if dollars > max_dollars:
            raise MemoryBudgetError(
                f"an epoch of shuffle {self.shuffle!r} would take {self.get_requests * self.readers:,} GETs and "
                f"{format_bytes(self.read_bytes * self.readers)} over all ranks, for ${dollars:.2f}: more than "
                f"Budget(max_dollars_per_epoch={max_dollars:g}) allows. Raise it, or use another shuffle or more "
                "memory"
            )

    @property
    def _slot_kind(self) -> str:
        if self.unit_bytes is not None:
            return " of units"
        return " of groups" if self.by_groups else ""

    def __str__(self) -> str:
        return (
            f"{format_count(self.samples, 'sample')} in {format_count(self.super_samples, 'super-sample')}, "
            f"{format_count(self.steps, 'step')} an epoch; "
            f"shuffle {self.shuffle}, {format_window(self.window, self.unit_bytes, self.sticky)}, "
            f"lanes {self.lanes_read} of {self.lanes}; "
            f"{format_count(self.get_requests, 'GET')}, {format_bytes(self.read_bytes)}, ${self.dollars:.6f} an epoch; "
            f"memory {format_bytes(self.memory_bytes)} ({self.slots} slots{self._slot_kind})"
        )


_MIN_SHOWN_SECONDS = 0.001
"""The table leaves out phases in which the loop waited less than this."""


@explain_arguments("LoaderStatistics", renamed={"look_ups": "lookups"})
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoaderStatistics:
    """Counts since the loader was constructed; ``str()`` makes a table, :meth:`to_dict` plain values.

    Loading a state with other lanes or of another version resets the counts of fetching. A forked child continues from
    its parent's figures, except for retries and hedges, which begin at zero when it fetches; the parent does not see
    the counts of its children. A spawned process constructs its own loader, with its own counts.

    Attributes:
        batches: batches yielded.
        samples: samples yielded.
        repeated_samples: samples that all ranks together delivered twice, so that each rank has one in a last batch.
        bad_samples: samples that failed in ``decode`` or ``transform`` and were replaced.
        wait_seconds: time that the training loop waited for batches: for the bucket and for the worker threads.
        bucket_wait_seconds: part of ``wait_seconds`` that the loop waited for super-samples.
        waits: ``wait_seconds`` by phase (:class:`~stoker.trace.Phase`).
        worst_waits: the ten batches with the longest waits, longest first, each with its phases.
        loop_seconds: time from the beginning of the first iteration to the last batch yielded.
        construction_seconds: time that constructing the loader took: opening the store and reading the manifest.
        first_batch_seconds: time from the beginning of the first iteration to the first batch; None before it.
        lookups: super-samples looked up in memory, each when a batch first needed it.
        misses: look-ups of super-samples that were not in memory yet.
        get_requests: GET requests sent, including hedges and retries.
        read_bytes: bytes received.
        retries: requests that were retried.
        hedges: second requests that were sent because the first was late.
        hedge_wins: hedges that were faster than the first request.
        tier_hits: super-samples read from a tier instead of the bucket, by the tier's name: ``"warm"``, or a name of
            ``caches``.
        tier_late: super-samples for which a tier was late, so that the bucket was read as well or instead, by name.
        tier_states: state of each tier's circuit breaker, by name: ``"closed"`` (the tier is read), ``"open"`` (it is
            not read for 5 s, after it was late or failed three times in a row), ``"half-open"`` or ``"probing"`` (one
            read tests it).
        device_samples: samples that ``gpu_cache`` had, and that were neither read nor copied.
        caches: statistics of each cache of this machine, by name: ``"memory"``, ``"disk:/mnt/nvme/stoker"``.
        dollars: price of the requests and bytes, from the price file.

    Example:
        >>> import json
        >>> with Loader("data", batch_size=64) as loader:
        ...     for batch in loader:
        ...         train_step(batch["image"], batch["label"])
        ...     statistics = loader.stats()
        >>> statistics.batches, statistics.samples
        (2, 128)
        >>> report = json.dumps(statistics.to_dict())
    """

    batches: int
    samples: int
    repeated_samples: int
    bad_samples: int
    wait_seconds: float
    bucket_wait_seconds: float
    waits: Mapping[str, float]
    worst_waits: tuple[Wait, ...]
    loop_seconds: float
    construction_seconds: float
    first_batch_seconds: float | None
    lookups: int = field(metadata={PLAIN_KEY: "look_ups"})
    misses: int
    get_requests: int
    read_bytes: int
    retries: int
    hedges: int
    hedge_wins: int
    dollars: float
    tier_hits: Mapping[str, int] = field(default_factory=dict)
    tier_late: Mapping[str, int] = field(default_factory=dict)
    tier_states: Mapping[str, str] = field(default_factory=dict)
    device_samples: int = 0
    caches: Mapping[str, CacheTierStatistics] = field(default_factory=dict)

    @property
    def stall(self) -> float:
        """Fraction of the loop's time that it waited for batches, 0 to 1."""
        return self.wait_seconds / self.loop_seconds if self.loop_seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples yielded per second of the loop's time."""
        return self.samples / self.loop_seconds if self.loop_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return every attribute, ``stall`` and ``samples_per_second`` as plain values, fit for JSON."""
        rates = {"stall": self.stall, "samples_per_second": self.samples_per_second}
        return {**to_plain(self), **rates}

    def __repr__(self) -> str:
        return (
            f"<LoaderStatistics {self._format_size()}: waited {self._format_wait()}, "
            f"{format_count(self.get_requests, 'GET')}, "
            f"{format_bytes(self.read_bytes)}, {format_dollars(self.dollars)}>"
        )

    def __str__(self) -> str:
        return text_table(self._format_size(), self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._format_size(), self._rows())

    def _format_size(self) -> str:
        batches = f"{self.batches:,} {'batch' if self.batches == 1 else 'batches'}"
        return f"{batches}, {format_count(self.samples, 'sample')}"

    def _format_wait(self) -> str:
        return f"{_format_seconds(self.wait_seconds)} of {_format_seconds(self.loop_seconds)} (stall {self.stall:.1%})"

    def _rows(self) -> TableRows:
        """Return the rows of the table; figures that are zero get a row only if a reader looks for them."""
        phases = sorted(self.waits.items(), key=lambda each: -each[1])
        rows = [("waited", self._format_wait())]
        rows += [(f"  {phase}", _format_seconds(seconds)) for phase, seconds in phases if seconds >= _MIN_SHOWN_SECONDS]
        rows += [("longest wait", str(self.worst_waits[0]))] if self.worst_waits else []
        first = "none yet" if self.first_batch_seconds is None else f"after {_format_seconds(self.first_batch_seconds)}"
        rows += [
            ("rate", f"{self.samples_per_second:,.0f} samples/s"),
            ("first batch", f"{first}, beside {_format_seconds(self.construction_seconds)} of construction"),
            ("GETs", f"{self.get_requests:,}"),
            ("bytes read", format_bytes(self.read_bytes)),
            ("retries", f"{self.retries:,}"),
            ("hedges", f"{self.hedges:,}, of which {self.hedge_wins:,} were faster"),
            ("dollars", format_dollars(self.dollars)),
        ]
        rows += [("there in time", f"{self.lookups - self.misses:,} of {self.lookups:,} super-samples")]
        tiers = [name for name in self.tier_hits if name not in self.caches]
        rows += [(f"from {name}", format_count(self.tier_hits[name], "super-sample")) for name in tiers]
        rows += [
            (f"cache {name}", f"{each.hits:,} of {each.lookups:,} hit, {format_bytes(each.used_bytes)} held")
            for name, each in self.caches.items()
        ]
        for name, samples in (
            ("on the device", self.device_samples),
            ("bad samples", self.bad_samples),
            ("repeated samples", self.repeated_samples),
        ):
            rows += [(name, f"{samples:,}")] if samples else []
        return rows

    def idle_dollars(self, dollars_per_hour: float) -> float:
        """Return the price of the time that an accelerator waited.

        Args:
            dollars_per_hour: price of the accelerator; :class:`~stoker.Prices` has some.
        """
        return self.wait_seconds / 3600 * dollars_per_hour


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:,.1f} s"


@dataclass(slots=True)
class LoopStatistics:
    """Counts the batches that a training loop got and the time that it waited, by ``time.perf_counter``.

    Attributes:
        recorder: receives each wait, and splits waits into phases.
        construction_seconds: time that constructing the loader took.
        batches: batches yielded.
        samples: samples yielded.
        wait_seconds: total time of beginning iterations, and from each request for a batch to its yield.
        loop_seconds: time from the beginning of the first iteration to the last batch.
        first_batch_seconds: time from the beginning of the first iteration to the first batch; None before it.
    """

    recorder: Recorder
    construction_seconds: float = 0.0
    batches: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    loop_seconds: float = 0.0
    first_batch_seconds: float | None = None
    _first_requested_at: float = math.inf
    _begin_seconds: float = 0.0  # seconds spent on beginning iterations that have not yielded yet

    def record_begin(self, requested_at: float) -> None:
        """Record the beginning of an iteration, which may read something first.

        Args:
            requested_at: when the loop asked for the iteration, in seconds of ``time.perf_counter``.
        """
        now = time.perf_counter()
        self._first_requested_at = min(self._first_requested_at, requested_at)
        self._begin_seconds += now - requested_at
        self.recorder.add_start(requested_at, now)

    def record_yield(self, batch: Batch, requested_at: float) -> None:
        """Record a batch that is being yielded.

        Args:
            batch: the batch.
            requested_at: when the loop asked for it, in seconds of ``time.perf_counter``.
        """
        self.batches += 1
        self.samples += len(batch)
        now = time.perf_counter()
        self.loop_seconds = now - self._first_requested_at
        if self.first_batch_seconds is None:
            self.first_batch_seconds = self.loop_seconds
        self.wait_seconds += self._begin_seconds + now - requested_at
        self._begin_seconds = 0.0
        self.recorder.add_batch(batch.epoch, requested_at, now)

    def snapshot(
        self, pipeline: BatchPipeline, reading: MeterReading, prices: Prices, bad_samples: int
    ) -> LoaderStatistics:
        """Return the counts of this object, of a batch pipeline and of a store's meter."""
        fetcher, counters = pipeline.source.fetcher, pipeline.counters
        fetched = fetcher.stats
        return LoaderStatistics(
            batches=self.batches,
            samples=self.samples,
            repeated_samples=counters.repeated,
            bad_samples=bad_samples,
            wait_seconds=self.wait_seconds,
            bucket_wait_seconds=counters.wait_seconds,
            waits=self.recorder.by_phase(),
            worst_waits=self.recorder.worst_waits(),
            loop_seconds=self.loop_seconds,
            construction_seconds=self.construction_seconds,
            first_batch_seconds=self.first_batch_seconds,
            lookups=counters.lookups,
            misses=counters.misses,
            get_requests=reading.requests[Operation.GET],
            read_bytes=reading.read_bytes,
            retries=sum(fetched.retries.values()),
            hedges=fetched.hedges,
            hedge_wins=fetched.hedge_wins,
            tier_hits=fetched.tier_hits,
            tier_late=fetched.tier_late,
            tier_states=fetcher.tiers.states(),
            device_samples=counters.resident,
            dollars=prices.dollars(reading),
            caches=pipeline.caches(),
        )
