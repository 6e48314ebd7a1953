"""What a loader has done so far: waits, requests, retries, hedges, dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.cache.keeper import CacheStatistics
from stoker.feed import FeedStatistics
from stoker.meter import Reading
from stoker.prices import Operation, Prices
from stoker.trace.recorder import Recorder, Wait

__all__ = ["LoaderStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """Counts since the loader was made.

    A loaded state with other lanes or of another version begins the counts of fetching anew. A forked child counts on
    from its parent's figures, but for retries and hedges, which begin at zero when it fetches; the parent knows nothing
    of its children. A spawned process makes a loader of its own, with counts of its own.

    Attributes:
        batches: yielded.
        samples: yielded.
        repeated_samples: that all ranks together delivered a second time, to give each rank one in a last batch.
        bad_samples: that failed in ``decode`` or ``transform`` and were replaced.
        wait_seconds: time that the training loop waited for batches: for the bucket and for the pool.
        bucket_wait_seconds: of it, time that it waited for super-samples.
        waits: ``wait_seconds`` by phase: what the loop waited for (:class:`~stoker.trace.phases.Phase`).
        worst_waits: the ten batches that it waited longest for, the longest first, with what each waited for.
        loop_seconds: time between the beginning of the first iteration and the last batch yielded.
        first_batch_seconds: from the construction of the loader to its first batch, None before it.
        look_ups: super-samples that a batch asked for when it first needed them.
        misses: of these, those that were not in memory yet.
        get_requests: sent, hedges and retries included.
        read_bytes: that arrived.
        retries: requests that were tried again.
        hedges: requests that were sent a second time because they were late.
        hedge_wins: of these, those that were faster.
        tier_hits: super-samples that came from a nearer place than the bucket, by its name: ``"warm"``, and ``caches``.
        caches: look-ups, hits, evictions and what is held, by name: ``"memory"``, ``"disk:/mnt/nvme/stoker"``.
        dollars: what the store asks for the requests and bytes, from the price file.
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
    first_batch_seconds: float | None
    look_ups: int
    misses: int
    get_requests: int
    read_bytes: int
    retries: int
    hedges: int
    hedge_wins: int
    dollars: float
    tier_hits: Mapping[str, int] = field(default_factory=dict)
    caches: Mapping[str, CacheStatistics] = field(default_factory=dict)

    @property
    def stall(self) -> float:
        """The share of the loop's time that it waited, 0 to 1."""
        return self.wait_seconds / self.loop_seconds if self.loop_seconds else 0.0

    def idle_dollars(self, dollars_per_hour: float) -> float:
        """Return what an accelerator at that price cost while the loop waited; ``stoker.prices`` has some."""
        return self.wait_seconds / 3600 * dollars_per_hour


@dataclass(slots=True)
class LoopTimes:
    """Times of the training loop, in seconds of ``time.perf_counter``.

    Attributes:
        made: when the loader was constructed.
        first_asked: when the first iteration was begun.
        first_yielded: when the first batch was yielded.
        last_yielded: when the latest was.
        beginning: spent on beginning iterations that have not yielded yet.
        waited: spent on beginning iterations, and between asking for a batch and yielding it, in all.
    """

    made: float
    first_asked: float | None = None
    first_yielded: float | None = None
    last_yielded: float | None = None
    beginning: float = 0.0
    waited: float = 0.0

    def begun(self, asked: float, now: float) -> None:
        """Note an iteration that was asked for and has begun, which may have to read something first."""
        self.first_asked = asked if self.first_asked is None else self.first_asked
        self.beginning += now - asked

    def yielded(self, asked: float, now: float) -> None:
        """Note a batch that was asked for and yielded."""
        self.first_yielded = now if self.first_yielded is None else self.first_yielded
        self.last_yielded = now
        self.waited += self.beginning + now - asked
        self.beginning = 0.0


def statistics(
    feed: FeedStatistics,
    reading: Reading,
    prices: Prices,
    times: LoopTimes,
    yielded: tuple[int, int],
    bad_samples: int,
    recorder: Recorder,
) -> LoaderStatistics:
    """Return a snapshot made of what the parts have counted."""
    loop_seconds = 0.0
    if times.first_asked is not None and times.last_yielded is not None:
        loop_seconds = times.last_yielded - times.first_asked
    return LoaderStatistics(
        batches=yielded[0],
        samples=yielded[1],
        repeated_samples=feed.repeated,
        bad_samples=bad_samples,
        wait_seconds=times.waited,
        bucket_wait_seconds=feed.wait_seconds,
        waits=recorder.by_phase(),
        worst_waits=recorder.worst(),
        loop_seconds=loop_seconds,
        first_batch_seconds=None if times.first_yielded is None else times.first_yielded - times.made,
        look_ups=feed.look_ups,
        misses=feed.misses,
        get_requests=reading.requests[Operation.GET],
        read_bytes=reading.read_bytes,
        retries=sum(feed.fetch.retries.values()),
        hedges=feed.fetch.hedges,
        hedge_wins=feed.fetch.hedge_wins,
        tier_hits=feed.fetch.tier_hits,
        dollars=reading.dollars(prices),
        caches=feed.caches,
    )
