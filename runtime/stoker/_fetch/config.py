"""Settings and counters of the data path: what to deliver, how far ahead to fetch, and how to retry.

A schedule never changes what is fetched or in which order, only when. It is a pure function of how far the prefetcher
and the consumer have come. Two rules hold for every schedule: an item that the consumer is waiting for is issued, and
no item is issued without a free slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from stoker._base.arguments import (
    AtLeastOne,
    BoundedConfig,
    Finite,
    Fraction,
    NotNegative,
    Positive,
    explain_arguments,
)
from stoker._order.order import OrderConfig
from stoker._order.sharding import RankSharding, Sharding, WorkerSharding
from stoker.errors import ConfigError

LARGE_REQUEST_BYTES = 8 << 20
"""Size of a request for a whole super-sample of the usual size."""
_START_REQUESTS = 16
GAP_BYTES = 128 << 10
"""Largest gap that is read to merge two ranges into one request: about what arrives within one first-byte latency."""


@explain_arguments(
    "FetchConfig",
    renamed={
        "concurrency_start": "start_concurrency",
        "concurrency_least": "min_concurrency",
        "concurrency_most": "max_concurrency",
        "hedge_least_seconds": "hedge_min_seconds",
        "least_bytes_per_second": "min_bytes_per_second",
        "split_least_bytes": "split_min_bytes",
    },
)
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig(BoundedConfig):
    """Retries, hedged requests and concurrency of the fetcher.

    A hedge is a second request for bytes that are late; the first answer wins.

    Example:
        >>> from stoker import FetchConfig
        >>> fetch = FetchConfig(deadline_seconds=30, max_bytes_per_second=200e6)  # Loader(url, fetch=fetch)
        >>> fetch.attempt_limit_seconds(size_bytes=8 << 20)
        148.0

    Attributes:
        deadline_seconds: time to fetch one object, in seconds, from when its first request may be sent, or the first
            one for the last of its ranges. A request in flight then may go on for the time that the object takes at
            ``min_bytes_per_second``. In an outage, this limit normally ends the retries.
        attempts: maximum number of requests for one range, not counting hedges.
        attempt_seconds: time limit of one request, in seconds, in addition to the time that its bytes take at
            ``min_bytes_per_second``.
        min_bytes_per_second: slowest transfer that can succeed, in bytes per second; all requests in flight share
            the link.
        max_bytes_per_second: maximum rate at which one rank requests bytes from the bucket, including hedges and
            retries, to share a link with others; None for no limit. An average: a burst of 0.1 s and one request may
            exceed it.
        checksum_attempts: number of reads with a wrong checksum after which an object counts as corrupt at rest.
        backoff_base_seconds: upper bound of the first random wait before a retry, in seconds; doubles with every
            failure.
        backoff_cap_seconds: upper bound of every wait before a retry, in seconds.
        hedge: whether to hedge late requests.
        hedge_fraction: maximum number of hedges per request, as a fraction.
        hedge_burst: number of hedges that may be sent in excess of ``hedge_fraction``.
        hedge_after_factor: multiple of the expected (median) transfer time after which a request is late.
        hedge_first_byte_factor: multiple of the median time to the first byte after which a request without a byte is
            late.
        hedge_min_seconds: minimum time before a request counts as late, in seconds. Where responses take
            milliseconds some are late by chance, and a hedge would not save time that a training loop notices.
        hedge_first_seconds: time after which a request is late while there are too few measurements, in seconds.
        start_concurrency: initial limit of requests in flight; None for 16 requests of 8 MiB, and as many bytes in
            smaller requests, from ``min_concurrency`` to ``max_concurrency``.
        min_concurrency: minimum limit of requests in flight, even if the store throttles.
        max_concurrency: maximum limit of requests in flight.
        max_request_bytes: maximum size of a request for a whole object or a column of one, in bytes; more is read in
            parallel ranges, each with retries and hedges of its own.
        split_parts: maximum number of parallel ranges in which to read a smaller object if it is urgent; 1 never
            splits it.
        split_min_bytes: minimum size of such a range, in bytes.
    """

    deadline_seconds: Positive[float] = 60.0
    attempts: Positive[int] = 32
    attempt_seconds: Positive[float] = 20.0
    min_bytes_per_second: Positive[float] = 64 << 10
    max_bytes_per_second: Finite[Positive[float]] | None = None
    checksum_attempts: Positive[int] = 3
    backoff_base_seconds: Positive[float] = 0.05
    backoff_cap_seconds: float = 5.0
    hedge: bool = True
    hedge_fraction: Fraction[float] = 0.10
    hedge_burst: AtLeastOne[int] = 2
    hedge_after_factor: AtLeastOne[float] = 2.5
    hedge_first_byte_factor: AtLeastOne[float] = 4.0
    hedge_min_seconds: NotNegative[float] = 0.05
    hedge_first_seconds: Positive[float] = 1.0
    start_concurrency: int | None = None
    min_concurrency: Positive[int] = 4
    max_concurrency: int = 64
    max_request_bytes: Positive[int] = 16 << 20
    split_parts: Positive[int] = 4
    split_min_bytes: Positive[int] = 1 << 20

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if not self.backoff_cap_seconds >= self.backoff_base_seconds:
            raise ConfigError(f"backoff_cap_seconds={self.backoff_cap_seconds} is below backoff_base_seconds")
        if self.min_concurrency > self.max_concurrency:
            raise ConfigError(
                f"min_concurrency={self.min_concurrency} must be at most max_concurrency={self.max_concurrency}"
            )
        start = self.start_concurrency
        if start is not None and not self.min_concurrency <= start <= self.max_concurrency:
            raise ConfigError(
                f"start_concurrency={start} must be from min_concurrency={self.min_concurrency} "
                f"to max_concurrency={self.max_concurrency}"
            )

    def start_limit(self, request_bytes: float) -> int:
        """Return the initial limit of requests in flight, for requests of ``request_bytes``."""
        if self.start_concurrency is not None:
            return self.start_concurrency
        requests = max(_START_REQUESTS, int(_START_REQUESTS * LARGE_REQUEST_BYTES / max(1.0, request_bytes)))
        return max(self.min_concurrency, min(self.max_concurrency, requests))

    def transfer_seconds(self, size_bytes: int) -> float:
        """Return the time limit of a transfer, in seconds, not counting the wait for its first byte."""
        return size_bytes / self.min_bytes_per_second

    def attempt_limit_seconds(self, size_bytes: int) -> float:
        """Return the time limit of one request for ``size_bytes``, in seconds."""
        return self.attempt_seconds + self.transfer_seconds(size_bytes)


def check_fetch(fetch: object) -> None:
    """Raise ConfigError unless a setting ``fetch`` is a :class:`FetchConfig`."""
    if not isinstance(fetch, FetchConfig):
        raise ConfigError(f"fetch must be a FetchConfig, such as FetchConfig(deadline_seconds=60), not {fetch!r:.80}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prefetcher and the consumer have come, the input of a :class:`Schedule`.

    Items, which are super-samples or groups of samples, count from the start of the run.

    Example:
        >>> progress = Progress(issued=5, consumed=3, next_item_step=4, step=2)
        >>> FetchSize(fetch_size=4, threshold=2).admit(progress)  # 2 items are unused
        4

    Attributes:
        issued: number of items whose fetch has begun.
        consumed: number of items that the consumer has begun to use.
        next_item_step: number of the step that first uses the next item to issue; None behind the last item.
        step: number of the consumer's current step.
    """

    issued: int
    consumed: int
    next_item_step: int | None
    step: int


class Schedule(Protocol):
    """Decides how far ahead to fetch: :class:`Continuous`, :class:`FetchSize`, :class:`NextBatch` or a class of yours.

    Example:
        >>> from stoker import NextBatch, Progress
        >>> NextBatch(depth=2).admit(Progress(issued=5, consumed=3, next_item_step=4, step=2))
        1
    """

    @property
    def needed_slots(self) -> int:
        """The minimum number of ring slots that the schedule works with."""
        ...

    @property
    def follows_steps(self) -> bool:
        """Whether :meth:`admit` uses :attr:`Progress.step`; if not, it may lag until an item is first used."""
        ...

    def admit(self, progress: Progress) -> int:
        """Return how many items may be issued now; called again after they are issued and there is progress."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Fetch in order of first use, across epochs, too: at first as much as fills the link, with time the whole ring.

    The default.

    Example:
        >>> from stoker_torch import Loader
        >>> loader = Loader("data", batch_size=32, schedule=Continuous())
        >>> loader.close()
    """

    needed_slots: ClassVar[int] = 1  # only the ring limits it
    follows_steps: ClassVar[bool] = False

    def admit(self, progress: Progress) -> int:
        """Return 1 while there is a next item: the ring limits how many are issued in a row."""
        return int(progress.next_item_step is not None)


@dataclass(frozen=True, slots=True)
class FetchSize(BoundedConfig):
    """Fetch ``fetch_size`` more items whenever at most ``threshold`` fetched items are unused.

    DELI's pre-fetch rule: Krichevsky, St. Louis and Guo, "Quantifying and Improving Performance of Distributed Deep
    Learning with Cloud Storage" (IC2E 2021).

    Example:
        >>> from stoker import FetchSize
        >>> FetchSize.half_and_half(8)
        FetchSize(fetch_size=4, threshold=4)

    Attributes:
        fetch_size: number of items to fetch at a time.
        threshold: number of unused items at or below which to fetch.
    """

    fetch_size: AtLeastOne[int]
    threshold: NotNegative[int]
    follows_steps: ClassVar[bool] = False  # it counts items

    @classmethod
    def half_and_half(cls, items: int) -> FetchSize:
        """Return DELI's 50/50 rule: fetch half of ``items`` (a cache's capacity, at least 1) when half is unused."""
        return cls(fetch_size=items - items // 2, threshold=items // 2)

    @property
    def needed_slots(self) -> int:
        """``threshold + fetch_size``: the unused items and the new ones are in the ring at once."""
        return self.threshold + self.fetch_size

    def admit(self, progress: Progress) -> int:
        """Return ``fetch_size`` when at most ``threshold`` issued items are unused, else 0."""
        return self.fetch_size if progress.issued - progress.consumed <= self.threshold else 0


@dataclass(frozen=True, slots=True)
class NextBatch(BoundedConfig):
    """Fetch the items of the next ``depth`` steps while the current step runs (IPDL's in-parallel loading).

    Example:
        >>> from stoker_torch import Loader
        >>> loader = Loader("data", batch_size=32, schedule=NextBatch(depth=2))
        >>> loader.close()

    Attributes:
        depth: number of steps to fetch ahead.
    """

    depth: AtLeastOne[int] = 1
    needed_slots: ClassVar[int] = 1  # the order determines how many items a step needs
    follows_steps: ClassVar[bool] = True

    def admit(self, progress: Progress) -> int:
        """Return 1 while the next item is first used at most ``depth`` steps ahead, else 0."""
        upcoming = progress.next_item_step
        return int(upcoming is not None and upcoming <= progress.step + self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(BoundedConfig):
    """Settings of the batch pipeline of one rank, or of one worker of it.

    Attributes:
        order: seed, shuffle, window and lanes.
        batch_size: samples per batch and rank.
        rank: number of this rank.
        world_size: number of ranks.
        worker: number of this worker process in its rank, if whole lanes are assigned to workers.
        workers: number of worker processes, which divide the memory; None if steps are assigned to ranks.
        local_ranks: ranks on this machine, which share its disk caches; with or without this one.
        chunks: whether a worker's batches only say in which portions samples are read.
        by_lanes: whether to shard a ``full`` order by lanes, like other orders.
        drop_last: whether to leave out the last global batch if it is incomplete.
        evaluation: whether to deliver every sample once, with no repeats and no drops; ranks may differ by one batch.
        limit: number of positions to deliver in each epoch, from its start; None for all.
        columns: names of the columns to deliver, in this order; None for all.
        memory_bytes: memory budget of this rank, in bytes.
        held_bytes: part of the budget that is used elsewhere, in bytes.
        end_epoch: epoch before which to stop reading ahead; None for no limit.
        schedule: how far ahead to fetch.
        fetch: retries, hedged requests and concurrency.
    """

    order: OrderConfig = field(default_factory=OrderConfig)
    batch_size: int
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int | None = None
    local_ranks: Sequence[int] = ()
    chunks: bool = False
    by_lanes: bool = False
    drop_last: bool = False
    evaluation: bool = False
    limit: AtLeastOne[int] | None = None
    columns: tuple[str, ...] | None = None
    memory_bytes: int = 512 << 20
    held_bytes: int = 0
    end_epoch: int | None = None
    schedule: Schedule = field(default_factory=Continuous)
    fetch: FetchConfig = field(default_factory=FetchConfig)

    def sharding(self, samples: int) -> Sharding:
        """Return the sharding of an epoch of ``samples`` samples for this rank, or this worker of it."""
        has_lanes = self.workers is not None or self.by_lanes or self.order.shuffle != "full"
        kind = RankSharding if self.workers is None else WorkerSharding
        return kind(
            samples=samples if self.limit is None else min(samples, self.limit),
            lanes=self.order.lanes if has_lanes else 1,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
            evaluation=self.evaluation,
            worker=self.worker,
            workers=self.workers or 1,
            chunks=self.chunks,
        )

    def other_shardings(self, samples: int) -> list[Sharding]:
        """Return the sharding of an epoch of ``samples`` samples for the other processes of the machine."""
        readers = [(rank, worker) for rank in self.local_ranks for worker in range(self.workers or 1)]
        others = [reader for reader in readers if reader != (self.rank, self.worker)]
        return [replace(self, rank=rank, worker=worker).sharding(samples) for rank, worker in others]


@dataclass(slots=True, kw_only=True)
class FetchCounters:
    """Counters of one fetcher, or of several in turn.

    Attributes:
        requests: ranged reads sent to the store: first attempts, retries and hedges. Each is billed.
        bytes: bytes that completed requests received.
        useful_bytes: bytes of objects and ranges that were verified and delivered, from the store or a tier.
        failures: failed requests, by name of the error.
        retries: requests sent again after a failure, by name of the error.
        hedges: second requests for late bytes.
        start_hedges: hedges before the first batch, which do not count against the hedge budget.
        hedge_wins: hedges that finished before the first request.
        hedged_bytes: bytes requested by the losers of hedge races whose responses had begun: an upper bound of what
            they transferred, since the progress of a cancelled transfer is unknown.
        checksum_failures: reads, from the store or a tier, with a wrong checksum.
        objects: successful fetches.
        failed: fetches that ended in an error; cancelled fetches count in neither.
        tier_hits: objects delivered by a tier, by name of the tier.
        tier_errors: reads in which a tier failed or returned corrupt bytes, by name of the tier.
        tier_late: reads in which a tier was late, so that the store was read as well or instead, by name of the tier.
    """

    requests: int = 0
    bytes: int = 0
    useful_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    hedges: int = 0
    start_hedges: int = 0
    hedge_wins: int = 0
    hedged_bytes: int = 0
    checksum_failures: int = 0
    objects: int = 0
    failed: int = 0
    tier_hits: Counter[str] = field(default_factory=Counter)
    tier_errors: Counter[str] = field(default_factory=Counter)
    tier_late: Counter[str] = field(default_factory=Counter)

    def count_delivery(self, size_bytes: int) -> None:
        """Count a verified object, or verified ranges of one."""
        self.objects += 1
        self.useful_bytes += size_bytes
