"""Keeps the record of a run: what is on its way, what the training loop waited for in all, and the worst of it."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter

from stoker._base.fetch_record import FOLLOWED, Fetch, Phase, Span, merged
from stoker.abc import BufferedSink, FetchSink, ReleaseSink, TraceSink


def explained(fetch: Fetch | None, begin_seconds: float, end_seconds: float, offset_seconds: float = 0.0) -> list[Span]:
    """Return what a wait for an item was, in order, from its begin to its end without a gap.

    A fetch that stood in line while nothing was under way began so much too late, and so did all that came of it: as
    much of the wait was a wait in line.

    Args:
        fetch: of the item, in loop time; None if there was none.
        begin_seconds: of the wait.
        end_seconds: of the wait.
        offset_seconds: what loop time lacks to the clock of the wait.
    """
    if fetch is None:
        return merged([Span(Phase.OTHER, begin_seconds, end_seconds)])
    issued_seconds, ready_seconds = fetch.issued_seconds + offset_seconds, fetch.ready_seconds + offset_seconds
    at_work_seconds = max(begin_seconds, issued_seconds, begin_seconds + fetch.idle_seconds)
    spans = [Span(Phase.QUEUE, begin_seconds, min(at_work_seconds, end_seconds), fetch.object)]
    if ready_seconds > at_work_seconds:
        for phase, begin, end, key in fetch.path():
            begin, end = max(begin + offset_seconds, at_work_seconds), min(end + offset_seconds, end_seconds)
            if begin < end:
                spans.append(Span(phase, begin, end, key))
    spans.append(Span(Phase.OTHER, max(at_work_seconds, ready_seconds), end_seconds, fetch.object))
    return merged(spans)


WORST_WAITS = 10
_BY_BEGIN = itemgetter(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the training loop waited for one batch.

    Attributes:
        batch: its number in the run, from 0.
        epoch: it belongs to.
        spans: what the time was spent on, in order, at least one; they add up to the wait. Times are
            ``time.perf_counter``'s.
    """

    batch: int
    epoch: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """How long."""
        return sum(span.seconds for span in self.spans)

    def by_cause(self) -> dict[tuple[Phase, str], float]:
        """Return the seconds of each phase and object, the longest first."""
        seconds: defaultdict[tuple[Phase, str], float] = defaultdict(float)
        for span in self.spans:
            seconds[span.phase, span.object] += span.seconds
        return dict(sorted(seconds.items(), key=lambda each: -each[1]))

    def __str__(self) -> str:
        (phase, key), seconds = next(iter(self.by_cause().items()))
        about = f" of {key}" if key else ""
        return f"batch {self.batch} (epoch {self.epoch}) waited {self.seconds:.3f} s: {seconds:.3f} s {phase}{about}"


class Recorder:
    """The record of one run. Its memory is that of the items in the ring, and of the worst waits.

    The loop's thread tells of fetches, the consumer's of waits. Times of waits are ``time.perf_counter``'s; where the
    consumer lives on the loop, as under a virtual clock, they are the loop's, as long as :meth:`align` is not called.

    Args:
        sinks: are told of waits, and of what else they have a method for.

    Attributes:
        seconds: the whole waits by phase.
    """

    def __init__(self, sinks: Sequence[TraceSink] = ()) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        self._sinks = tuple(sinks)
        self._fetch_sinks = tuple(sink for sink in sinks if isinstance(sink, FetchSink))
        self._release_sinks = tuple(sink for sink in sinks if isinstance(sink, ReleaseSink))
        self._offset_seconds = 0.0
        self._fetches: dict[int, Fetch] = {}
        self._pending: list[Span] = []
        self._begun: list[Span] = []
        self._batches = 0
        self._worst: list[tuple[float, int, Wait]] = []

    # What the loop's thread tells.

    def align(self, offset_seconds: float) -> None:
        """Begin a stretch: its items are numbered anew. ``offset_seconds`` is what loop time lacks to perf_counter."""
        self._offset_seconds = offset_seconds
        self._fetches.clear()

    def following(self, item: int, step: int, idle_seconds: float = 0.0) -> AbstractContextManager[Fetch]:
        """Keep the record of the fetch that the current task performs here, if it sets the slot in the end.

        Args:
            item: its number.
            step: that first uses it.
            idle_seconds: how long it had stood in line while nothing was under way.
        """
        return _Following(self, Fetch(item, step, asyncio.get_running_loop().time(), idle_seconds))

    def fetched(self, fetch: Fetch) -> None:
        """Keep a fetch that has ended in a slot."""
        self._fetches[fetch.item] = fetch
        for sink in self._fetch_sinks:
            sink.fetched(fetch, self._offset_seconds)

    def released(self, item: int) -> None:
        """Forget an item: the consumer is done with it."""
        fetch = self._fetches.pop(item, None)
        if fetch is not None:
            for sink in self._release_sinks:
                sink.released(fetch, asyncio.get_running_loop().time(), self._offset_seconds)

    # What the consumer's thread tells.

    def waited_for(self, item: int, begin_seconds: float, end_seconds: float) -> None:
        """Note a wait for an item, before it is released."""
        if end_seconds <= begin_seconds:
            return
        self._pending += explained(self._fetches.get(item), begin_seconds, end_seconds, self._offset_seconds)

    def waited(self, phase: Phase, begin_seconds: float, end_seconds: float) -> None:
        """Note a wait for something else."""
        self._pending.append(Span(phase, begin_seconds, end_seconds))

    def begun(self, asked_seconds: float, now_seconds: float) -> None:
        """Note an iteration that was asked for and has begun; it counts with its first batch."""
        self._begun += self._settled(asked_seconds, now_seconds, Phase.START)

    def yielded(self, epoch: int, asked_seconds: float, now_seconds: float) -> None:
        """Note a batch that was asked for and is yielded; what nobody has told of in between was gathering."""
        spans = [*self._begun, *self._settled(asked_seconds, now_seconds, Phase.GATHER)]
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

    def _settled(self, begin_seconds: float, end_seconds: float, rest: Phase) -> list[Span]:
        """Return what an interval was spent on. What was waited for elsewhere, or at other times, does not count."""
        spans: list[Span] = []
        cursor = begin_seconds
        for phase, told, until, key in sorted(self._pending, key=_BY_BEGIN):
            begin, end = max(told, cursor), min(until, end_seconds)
            if begin < end:
                spans += (Span(rest, cursor, begin), Span(phase, begin, end, key))
                cursor = end
        self._pending.clear()
        spans.append(Span(rest, cursor, end_seconds))
        return merged(spans)

    # What is asked.

    def by_phase(self) -> Mapping[str, float]:
        """Return the seconds that the training loop waited, by phase."""
        return {str(phase): seconds for phase, seconds in self.seconds.items()}

    def worst(self) -> tuple[Wait, ...]:
        """Return the longest waits, the worst first."""
        return tuple(wait for _, _, wait in sorted(self._worst, reverse=True))

    def flush(self) -> None:
        """Have the sinks write what they have."""
        for sink in self._sinks:
            if isinstance(sink, BufferedSink):
                sink.flush()


class _Following:
    """Has the current task work for a fetch. A generator would take three times as long."""

    __slots__ = ("_fetch", "_recorder", "_token")

    def __init__(self, recorder: Recorder, fetch: Fetch) -> None:
        self._recorder, self._fetch = recorder, fetch

    def __enter__(self) -> Fetch:
        self._token = FOLLOWED.set(self._fetch)
        return self._fetch

    def __exit__(self, *exception: object) -> None:
        FOLLOWED.reset(self._token)
        fetch = self._fetch
        fetch.ready_seconds = asyncio.get_running_loop().time()
        if fetch.slot is not None:
            self._recorder.fetched(fetch)
