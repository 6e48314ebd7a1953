"""The record of a run: fetches in flight, total waits of the training loop by phase, and the longest waits."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter

from stoker._base.fetch_record import CURRENT_FETCH, DeviceCopy, Fetch, Phase, Span, merge_spans
from stoker.abc import BufferedSink, CopySink, FetchSink, ReleaseSink, TraceSink


def explain_wait(
    fetch: Fetch | None, begin_seconds: float, end_seconds: float, offset_seconds: float = 0.0
) -> list[Span]:
    """Return the spans of a wait for an item, in order and without gaps.

    If the fetch was queued while no fetch was in flight, it was late by that time; that much of the wait counts as
    queue.

    Args:
        fetch: fetch of the item, in loop time; None if there was none.
        begin_seconds: begin of the wait.
        end_seconds: end of the wait.
        offset_seconds: seconds to add to loop time for the clock of the wait; default 0.
    """
    if fetch is None:
        return merge_spans([Span(Phase.OTHER, begin_seconds, end_seconds)])
    issued_seconds = fetch.issued_seconds + offset_seconds
    ready_seconds = fetch.ready_seconds + offset_seconds
    at_work_seconds = max(begin_seconds, issued_seconds, begin_seconds + fetch.idle_seconds)
    spans = [Span(Phase.QUEUE, begin_seconds, min(at_work_seconds, end_seconds), fetch.object)]
    if ready_seconds > at_work_seconds:
        for phase, begin, end, key in fetch.path():
            begin, end = max(begin + offset_seconds, at_work_seconds), min(end + offset_seconds, end_seconds)
            if begin < end:
                spans.append(Span(phase, begin, end, key))
    spans.append(Span(Phase.OTHER, max(at_work_seconds, ready_seconds), end_seconds, fetch.object))
    return merge_spans(spans)


WORST_WAITS = 10
_BY_BEGIN = itemgetter(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The time that the training loop waited for one batch, by phase and object.

    Attributes:
        batch: number of the batch in the run, from 0.
        epoch: epoch of the batch.
        spans: at least one span, in order, which add up to the wait. Times are those of ``time.perf_counter``.

    Example:
        >>> print(Wait(batch=7, epoch=0, spans=(Span(Phase.TIER, 1.0, 1.5, "data/0"),)))
        batch 7 (epoch 0) waited 0.500 s: 0.500 s tier of data/0
    """

    batch: int
    epoch: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Duration of the wait in seconds."""
        return sum(span.seconds for span in self.spans)

    def by_cause(self) -> dict[tuple[Phase, str], float]:
        """Return the seconds of each phase and object, in descending order."""
        seconds: defaultdict[tuple[Phase, str], float] = defaultdict(float)
        for span in self.spans:
            seconds[span.phase, span.object] += span.seconds
        return dict(sorted(seconds.items(), key=lambda each: -each[1]))

    def __str__(self) -> str:
        (phase, key), seconds = next(iter(self.by_cause().items()))
        about = f" of {key}" if key else ""
        return f"batch {self.batch} (epoch {self.epoch}) waited {self.seconds:.3f} s: {seconds:.3f} s {phase}{about}"


class Recorder:
    """The record of one run. Its memory is bounded by the items in the ring and the longest waits.

    The event loop's thread reports fetches, the consumer's thread reports waits. Times of waits are those of
    ``time.perf_counter``, or loop time if the consumer runs on the loop and never calls :meth:`restart_items`, as under
    a virtual clock.

    Args:
        sinks: sinks that receive waits, and the other events that they implement.

    Attributes:
        seconds: total wait by phase.
    """

    def __init__(self, sinks: Sequence[TraceSink] = ()) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        self._sinks = tuple(sinks)
        self._fetch_sinks = tuple(sink for sink in sinks if isinstance(sink, FetchSink))
        self._release_sinks = tuple(sink for sink in sinks if isinstance(sink, ReleaseSink))
        self._copy_sinks = tuple(sink for sink in sinks if isinstance(sink, CopySink))
        self._offset_seconds = 0.0
        self._fetches: dict[int, Fetch] = {}
        self._pending: list[Span] = []
        self._begun: list[Span] = []
        self._batches = 0
        self._worst: list[tuple[float, int, Wait]] = []

    # Called by the event loop's thread.

    def restart_items(self, offset_seconds: float) -> None:
        """Restart the numbers of items; ``offset_seconds`` is to be added to loop time for perf_counter time."""
        self._offset_seconds = offset_seconds
        self._fetches.clear()

    def track(self, item: int, step: int, idle_seconds: float = 0.0) -> AbstractContextManager[Fetch]:
        """Record the fetch that the current task performs in the block; kept if the block sets its slot.

        Args:
            item: number of the item.
            step: number of the first step that uses the item.
            idle_seconds: time that the item was queued while no fetch was in flight; default 0.
        """
        return _TrackedFetch(self, Fetch(item, step, asyncio.get_running_loop().time(), idle_seconds))

    def add_fetch(self, fetch: Fetch) -> None:
        """Add a completed fetch."""
        self._fetches[fetch.item] = fetch
        for sink in self._fetch_sinks:
            sink.fetched(fetch, self._offset_seconds)

    def remove_fetch(self, item: int) -> None:
        """Remove an item that the consumer has released."""
        fetch = self._fetches.pop(item, None)
        if fetch is not None:
            for sink in self._release_sinks:
                sink.released(fetch, asyncio.get_running_loop().time(), self._offset_seconds)

    # Called by the thread that copies batches to a device.

    @property
    def wants_copies(self) -> bool:
        """Whether a sink receives copies."""
        return bool(self._copy_sinks)

    def add_copy(self, copy: DeviceCopy) -> None:
        """Add the copy of a batch to a device."""
        for sink in self._copy_sinks:
            sink.copied(copy)

    # Called by the consumer's thread, or by a thread that takes batches for it.

    def add_item_wait(self, item: int, begin_seconds: float, end_seconds: float) -> None:
        """Add a wait for an item, before it is released."""
        if end_seconds <= begin_seconds:
            return
        self._pending += explain_wait(self._fetches.get(item), begin_seconds, end_seconds, self._offset_seconds)

    def add_wait(self, phase: Phase, begin_seconds: float, end_seconds: float) -> None:
        """Add a wait for something other than an item."""
        self._pending.append(Span(phase, begin_seconds, end_seconds))

    def add_start(self, asked_seconds: float, now_seconds: float) -> None:
        """Add the start of an iteration, from its request to its begin; it counts for the first batch."""
        self._begun += self._split_interval(asked_seconds, now_seconds, Phase.START)

    def add_batch(self, epoch: int, asked_seconds: float, now_seconds: float) -> None:
        """Add a batch, from its request to its delivery; time without another phase counts as gather."""
        spans = [*self._begun, *self._split_interval(asked_seconds, now_seconds, Phase.GATHER)]
        self._begun.clear()
        if not spans:
            spans.append(Span(Phase.GATHER, asked_seconds, now_seconds))
        wait_seconds = 0.0
        for phase, begin, end, _ in spans:
            self.seconds[phase] += end - begin
            wait_seconds += end - begin
        number = self._batches
        self._batches += 1
        is_bad = len(self._worst) < WORST_WAITS or wait_seconds > self._worst[0][0]
        if not is_bad and not self._sinks:
            return
        wait = Wait(batch=number, epoch=epoch, spans=tuple(spans))
        if is_bad:
            heapq.heappush(self._worst, (wait_seconds, -number, wait))
            if len(self._worst) > WORST_WAITS:
                heapq.heappop(self._worst)
        for sink in self._sinks:
            sink.waited(wait)

    def _split_interval(self, begin_seconds: float, end_seconds: float, rest: Phase) -> list[Span]:
        """Return the spans of an interval from the pending waits; overlaps and times outside of it do not count."""
        spans: list[Span] = []
        cursor = begin_seconds
        pending, self._pending = self._pending, []  # another thread may add to them
        for phase, wait_begin, wait_end, key in sorted(pending, key=_BY_BEGIN):
            begin, end = max(wait_begin, cursor), min(wait_end, end_seconds)
            if begin < end:
                spans += (Span(rest, cursor, begin), Span(phase, begin, end, key))
                cursor = end
        spans.append(Span(rest, cursor, end_seconds))
        return merge_spans(spans)

    # Queries.

    def by_phase(self) -> Mapping[str, float]:
        """Return the total wait of the training loop by phase, in seconds."""
        return {str(phase): seconds for phase, seconds in self.seconds.items()}

    def worst_waits(self) -> tuple[Wait, ...]:
        """Return the ten longest waits, in descending order."""
        return tuple(wait for _, _, wait in sorted(self._worst, reverse=True))

    def flush(self) -> None:
        """Flush all buffered sinks."""
        for sink in self._sinks:
            if isinstance(sink, BufferedSink):
                sink.flush()


class _TrackedFetch:
    """Sets the fetch of the current task. A generator-based context manager would take three times as long."""

    __slots__ = ("_fetch", "_recorder", "_token")

    def __init__(self, recorder: Recorder, fetch: Fetch) -> None:
        self._recorder, self._fetch = recorder, fetch

    def __enter__(self) -> Fetch:
        self._token = CURRENT_FETCH.set(self._fetch)
        return self._fetch

    def __exit__(self, *exception: object) -> None:
        CURRENT_FETCH.reset(self._token)
        fetch = self._fetch
        fetch.ready_seconds = asyncio.get_running_loop().time()
        if fetch.slot is not None:
            self._recorder.add_fetch(fetch)
