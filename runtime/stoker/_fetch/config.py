"""Settings of the data path, and its counts: what to deliver, how far ahead to fetch, and how hard to try.

A schedule never changes what is fetched or in which order, only when: a pure decision, made from how far the prefetcher
and the consumer have come. Whatever it says, an item that the consumer is waiting for is issued, and none is issued
without a free slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from stoker._base.arguments import (
    AtLeastOne,
    Bounded,
    Finite,
    Fraction,
    NotNegative,
    Positive,
    explain_arguments,
)
from stoker._order.order import OrderConfig
from stoker._order.sharding import Dealing, LaneShare, Partition
from stoker.errors import ConfigError

GAP_BYTES = 128 << 10
"""Unwanted bytes that are read rather than sending one more request: what arrives in about a first byte's time."""


@explain_arguments("FetchConfig")
@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig(Bounded):
    """How the fetcher retries, hedges and adapts.

    Attributes:
        deadline_seconds: for an object in all, from the moment its first request may be sent; what is under way then
            may go on for as long as the object takes at ``least_bytes_per_second``. What normally ends the attempts in
            an outage.
        attempts: requests for one range, at most, hedges aside.
        attempt_seconds: for one request, beside what its bytes take at ``least_bytes_per_second``.
        least_bytes_per_second: a transfer slower than this never succeeds. A link is shared by all in flight.
        max_bytes_per_second: requested from the bucket by one rank, hedges and retries included, to share a link with
            others; None does not limit. It holds on average: a burst of 0.1 s and one request may exceed it.
        checksum_attempts: readings of an object whose checksum differs before it counts as spoilt at rest.
        backoff_base_seconds: bound of the first wait; doubles with every failure.
        backoff_cap_seconds: bound of every wait.
        hedge: whether late requests are sent a second time.
        hedge_fraction: hedges per request, at most.
        hedge_burst: hedges that may be sent beyond that.
        hedge_after_factor: a request is late after this many times the expected (median) time,
        hedge_first_byte_factor: or without a byte after this many times the median first byte's time,
        hedge_least_seconds: but never before this: where answers take milliseconds one is late by chance, and a second
            request would save nothing that a training loop feels.
        hedge_first_seconds: when a request is late while too few were seen to expect anything.
        concurrency_start: requests in flight at first.
        concurrency_least: requests in flight, at least, however much the store throttles.
        concurrency_most: requests in flight, at most.
        split_parts: parallel ranges that an urgent object is read in, at most; 1 never splits.
        split_least_bytes: the smallest range worth a request of its own.
    """

    deadline_seconds: Positive[float] = 60.0
    attempts: Positive[int] = 32
    attempt_seconds: Positive[float] = 20.0
    least_bytes_per_second: Positive[float] = 64 << 10
    max_bytes_per_second: Finite[Positive[float]] | None = None
    checksum_attempts: Positive[int] = 3
    backoff_base_seconds: Positive[float] = 0.05
    backoff_cap_seconds: float = 5.0
    hedge: bool = True
    hedge_fraction: Fraction[float] = 0.10
    hedge_burst: AtLeastOne[int] = 2
    hedge_after_factor: AtLeastOne[float] = 2.5
    hedge_first_byte_factor: AtLeastOne[float] = 4.0
    hedge_least_seconds: NotNegative[float] = 0.05
    hedge_first_seconds: Positive[float] = 1.0
    concurrency_start: int = 16
    concurrency_least: Positive[int] = 4
    concurrency_most: int = 64
    split_parts: Positive[int] = 4
    split_least_bytes: Positive[int] = 1 << 20

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if not self.backoff_cap_seconds >= self.backoff_base_seconds:
            raise ConfigError(f"backoff_cap_seconds={self.backoff_cap_seconds} is below backoff_base_seconds")
        if not self.concurrency_least <= self.concurrency_start <= self.concurrency_most:
            raise ConfigError(f"concurrency must be least <= start <= most, not {self}")

    def transfer_seconds(self, size_bytes: int) -> float:
        """Return what a transfer may take at most, beside all that waiting for it may."""
        return size_bytes / self.least_bytes_per_second

    def attempt_limit_seconds(self, size_bytes: int) -> float:
        """Return what a request for so many bytes may take at most."""
        return self.attempt_seconds + self.transfer_seconds(size_bytes)


def check_fetch(fetch: object) -> None:
    """Raise ConfigError unless a setting ``fetch`` is a :class:`FetchConfig`."""
    if not isinstance(fetch, FetchConfig):
        raise ConfigError(f"fetch is a FetchConfig, such as FetchConfig(deadline_seconds=60), not {fetch!r:.80}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prefetcher and the consumer have come; items count from the start of the run.

    Attributes:
        issued: items whose fetch has begun.
        consumed: items that the consumer has begun to use.
        next_item_step: the step that first uses the next item to be issued; None if there is none.
        step: the step the consumer is at.
    """

    issued: int
    consumed: int
    next_item_step: int | None
    step: int


class Schedule(Protocol):
    """Decides how far ahead to fetch."""

    @property
    def needed_slots(self) -> int:
        """The fewest slots with which the schedule can do what it says."""
        ...

    @property
    def follows_steps(self) -> bool:
        """Whether :attr:`Progress.step` matters: if not, it may be behind until an item is first used."""
        ...

    def admit(self, progress: Progress) -> int:
        """Return how many items may be issued now; asked again once these are issued and progress is made."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    """Fill whatever memory there is, in order of first use; also across epochs. The default."""

    needed_slots: ClassVar[int] = 1  # the ring is the only limit
    follows_steps: ClassVar[bool] = False

    def admit(self, progress: Progress) -> int:
        """Always one more: it is asked again after each, and the ring bounds the rest."""
        return int(progress.next_item_step is not None)


@dataclass(frozen=True, slots=True)
class FetchSize(Bounded):
    """Fetch ``fetch_size`` more items whenever at most ``threshold`` fetched ones are left to use.

    DELI's pre-fetch rule: Krichevsky, St. Louis and Guo, "Quantifying and Improving Performance of Distributed Deep
    Learning with Cloud Storage" (IC2E 2021).
    """

    fetch_size: AtLeastOne[int]
    threshold: NotNegative[int]
    follows_steps: ClassVar[bool] = False  # it counts items

    @classmethod
    def half_and_half(cls, items: int) -> FetchSize:
        """Fetch half of ``items`` (a cache's room, at least 1) when the other half is left: DELI's 50/50."""
        return cls(fetch_size=items - items // 2, threshold=items // 2)

    @property
    def needed_slots(self) -> int:
        """``threshold`` items still unused and ``fetch_size`` new ones are held at once."""
        return self.threshold + self.fetch_size

    def admit(self, progress: Progress) -> int:
        """Return ``fetch_size`` when at most ``threshold`` issued items are unused, else 0."""
        return self.fetch_size if progress.issued - progress.consumed <= self.threshold else 0


@dataclass(frozen=True, slots=True)
class NextBatch(Bounded):
    """Fetch what the next ``depth`` steps need while the current step runs (IPDL's in-parallel loading)."""

    depth: AtLeastOne[int] = 1
    needed_slots: ClassVar[int] = 1  # how many items a step needs is for the order to say
    follows_steps: ClassVar[bool] = True

    def admit(self, progress: Progress) -> int:
        """Return 1 while the next item is first used at most ``depth`` steps ahead, else 0."""
        upcoming = progress.next_item_step
        return int(upcoming is not None and upcoming <= progress.step + self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig(Bounded):
    """What to deliver and how.

    Attributes:
        order: seed, shuffle, window and lanes.
        batch_size: samples a batch and rank.
        rank: this rank.
        world_size: how many ranks there are.
        worker: this worker process of the rank, where whole lanes are dealt to workers.
        workers: how many there are, which divide the memory; None where steps are dealt to ranks.
        local_ranks: of this machine, which share what is kept on its disks; this one may be among them or not.
        chunks: whether a worker's batches are only how samples are read.
        by_lanes: deal ``full`` by lanes, as other orders are.
        drop_last: leave out the last global batch if it is not full.
        evaluation: deliver every sample once, with no repeats and no drops; ranks may differ by one batch.
        limit: deliver only the first so many positions of every epoch.
        columns: which to deliver, in this order; all if None.
        memory_bytes: budget of this rank.
        held_bytes: of it, what is taken besides.
        end_epoch: do not look ahead into this epoch or beyond.
        schedule: how far ahead to fetch.
        fetch: deadlines, retries, hedges and concurrency.
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

    def dealing(self, samples: int) -> Dealing:
        """Return how an epoch of a data set of so many samples is dealt to this rank, or this worker of it."""
        has_lanes = self.workers is not None or self.by_lanes or self.order.shuffle != "full"
        kind = Partition if self.workers is None else LaneShare
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

    def other_dealings(self, samples: int) -> list[Dealing]:
        """Return how such an epoch is dealt to the other processes of the machine."""
        takers = [(rank, worker) for rank in self.local_ranks for worker in range(self.workers or 1)]
        others = [taker for taker in takers if taker != (self.rank, self.worker)]
        return [replace(self, rank=rank, worker=worker).dealing(samples) for rank, worker in others]


@dataclass(slots=True, kw_only=True)
class FetchCounters:
    """What fetchers have done, one or several after each other.

    Attributes:
        requests: ranged reads sent to the store: first tries, retries and hedges. Each is billed.
        bytes: received whole by those requests.
        useful_bytes: of objects and ranges that were verified and delivered, from store or tier.
        failures: requests that failed, by name of the error.
        retries: requests sent again after a failure, by name of the error.
        hedges: second requests for late bytes.
        start_hedges: of these, those before the first batch that the budget of hedges did not have to allow.
        hedge_wins: hedges that were first.
        hedged_bytes: requested by the losers of hedge races whose answers had begun: an upper bound of what they moved,
            since a cancelled transfer does not tell how far it came.
        checksum_failures: readings, from store or tier, whose checksum differed.
        objects: fetches that ended well.
        failed: fetches that ended in an error (cancelled ones are neither).
        tier_hits: objects delivered by a tier, by name of the tier.
        tier_errors: reads in which a tier failed or spoilt the bytes, by name of the tier.
        tier_late: reads in which a tier was late, so that the store was asked as well or instead, by name of the tier.
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

    def delivered(self, size_bytes: int) -> None:
        """Count an object, or ranges of one, that were verified."""
        self.objects += 1
        self.useful_bytes += size_bytes
