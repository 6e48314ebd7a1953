"""The record of one fetch: phases, activities (sequences of phases) and requests.

A context variable holds the fetch that the current task works for, so that readers and stores need not pass it on.
Without a recorder nothing is recorded, at almost no cost.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker._base.arguments import explain_arguments
from stoker._deprecation import alias_attributes


class Phase(enum.StrEnum):
    """Activity during a span of time.

    For concurrent activities, the phase is that of the one that ended last, since only that could have shortened the
    wait.

    Example:
        >>> from stoker.trace import Phase, Span, Wait
        >>> wait = Wait(batch=7, epoch=0, spans=(Span(Phase.TRANSFER, 1.0, 1.5), Span(Phase.DECODE, 1.5, 1.6)))
        >>> sum(span.seconds for span in wait.spans if span.phase is Phase.TRANSFER)
        0.5
    """

    START = "start"
    """Start of an iteration: ending the previous one, and reading what the first item depends on."""
    QUEUE = "queue"
    """Waiting of an item for a slot of the ring, for its turn at the start of a run, or for the concurrency limit."""
    TIER = "tier"
    """Reading from a tier."""
    FIRST_BYTE = "first_byte"
    """Waiting for the first byte of a response."""
    TRANSFER = "transfer"
    """Receiving bytes."""
    HEDGE = "hedge"
    """Waiting for a late request and its hedge: from sending the request until the first response began."""
    RETRY = "retry"
    """Requests that failed or delivered wrong bytes, and the back-off after them."""
    VERIFY = "verify"
    """Computing the checksum."""
    GATHER = "gather"
    """Copying rows into the batch, and creating tensors."""
    DECODE = "decode"
    """Decode, transform and collate in the thread pool."""
    OTHER = "other"
    """Anything else, such as switching threads or waiting for a CPU core."""


@alias_attributes("Span", {"clipped": "clip", "later": "shift"})
class Span(NamedTuple):
    """A span of time in one phase.

    Attributes:
        phase: phase of the span.
        begin_seconds: begin, in seconds on the recorder's clock.
        end_seconds: end, in seconds on the same clock.
        object: key of the object that was read; empty if none.

    Example:
        >>> Span(Phase.TRANSFER, 1.0, 3.0, "data/0").clip(2.0, 9.0).seconds
        1.0
    """

    phase: Phase
    begin_seconds: float
    end_seconds: float
    object: str = ""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_seconds - self.begin_seconds

    def clip(self, begin_seconds: float, end_seconds: float) -> Span:
        """Return the part of the span between two times; its duration may be zero or negative."""
        begin = max(self.begin_seconds, begin_seconds)
        end = min(self.end_seconds, end_seconds)
        return Span(self.phase, begin, end, self.object)

    def shift(self, seconds: float) -> Span:
        """Return the span on a clock that is ``seconds`` ahead."""
        return Span(self.phase, self.begin_seconds + seconds, self.end_seconds + seconds, self.object)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order without empty ones; adjacent spans of equal phase and object are merged."""
    merged: list[Span] = []
    for span in spans:
        phase, begin, end, key = span
        if end <= begin:
            continue
        if merged and (last := merged[-1]).end_seconds == begin and last.phase is phase and last.object == key:
            merged[-1] = Span(phase, last.begin_seconds, end, key)
        else:
            merged.append(span)
    return merged


_MAX_ACTIVITIES = 256
"""Maximum activities kept per fetch. A group of samples has thousands; the earliest are summarised."""
_MAX_REQUESTS = 4096


class Request(NamedTuple):
    """One request to the store.

    Example:
        >>> request = Request(1.0, 1.02, 1.1, size_bytes=8 << 20, is_whole=True, object="data/0")
        >>> f"first byte after {request.begun_seconds - request.sent_seconds:.2f} s"
        'first byte after 0.02 s'

    Attributes:
        sent_seconds: time of sending, in loop time.
        begun_seconds: time of the first byte of the response; None if there was none, or the store does not report it.
        ended_seconds: time of the end.
        size_bytes: number of requested bytes.
        is_whole: whether all of them arrived.
        object: key of the object.
    """

    sent_seconds: float
    begun_seconds: float | None
    ended_seconds: float
    size_bytes: int
    is_whole: bool
    object: str = ""


class DeviceCopy(NamedTuple):
    """The copy of one batch to a device, such as a GPU.

    Example:
        >>> copy = DeviceCopy("cuda:0", 1.0, 1.25, size_bytes=5 << 30)
        >>> copy.size_bytes / (copy.end_seconds - copy.begin_seconds) / 2**30
        20.0

    Attributes:
        device: name of the device.
        begin_seconds: begin of the copy on the device, on the clock of the waits.
        end_seconds: end of the copy.
        size_bytes: number of bytes copied.
    """

    device: str
    begin_seconds: float
    end_seconds: float
    size_bytes: int


@alias_attributes("Fetch", {"add": "add_activity"})
@explain_arguments("Fetch", renamed={"past": "earlier_spans", "strands": "activities"})
@dataclass(slots=True, eq=False)
class Fetch:
    """The fetch of one item into the ring. Times are in loop time.

    Example:
        >>> fetch = Fetch(item=0, step=0, issued_seconds=1.0, ready_seconds=1.25)
        >>> fetch.ready_seconds - fetch.issued_seconds
        0.25

    Attributes:
        item: number of the item, in order of first use.
        step: number of the first step that uses the item.
        issued_seconds: begin of the fetch.
        idle_seconds: time before ``issued_seconds`` in which the item waited for a slot or its schedule while no fetch
            was in flight.
        ready_seconds: time at which the slot was ready.
        slot: slot that holds the item; None before it is ready.
        activities: ended activities, in order of their ends; the last 256 at most.
        earlier_spans: critical path of earlier activities.
        requests: requests sent for the item; the last 4,096 at most.
        tiers: name and outcome of each tier: ``"delivered"``, ``"lacking"``, ``"failed"``, ``"late"``, ``"beaten"`` by
            the store, or ``"not asked"`` because its circuit breaker is open.
    """

    item: int
    step: int
    issued_seconds: float
    idle_seconds: float = 0.0
    ready_seconds: float = 0.0
    slot: int | None = None
    activities: list[Activity] = field(default_factory=list)
    earlier_spans: Sequence[Span] = ()
    requests: list[Request] = field(default_factory=list)
    tiers: list[tuple[str, str]] = field(default_factory=list)
    _known_path: Sequence[Span] | None = None

    @property
    def object(self) -> str:
        """Key of the object that was read last; empty if none was read."""
        return self.activities[-1].object if self.activities else ""

    def add_activity(self, activity: Activity) -> None:
        """Add an activity that has just ended."""
        self.activities.append(activity)
        if len(self.activities) == _MAX_ACTIVITIES:
            ended, self.activities = self.activities[: _MAX_ACTIVITIES // 2], self.activities[_MAX_ACTIVITIES // 2 :]
            path = _critical_path(ended, self.earlier_spans, self.issued_seconds, ended[-1].end_seconds)
            self.earlier_spans = _shorten_path(path, _MAX_ACTIVITIES)

    def path(self) -> Sequence[Span]:
        """Return the critical path of a completed fetch: its phases, in order and without gaps.

        The path is followed backwards from the end, always along the activity that ended last; only these activities
        could have shortened the fetch (J. Kelley, M. Walker, "Critical-Path Planning and Scheduling", 1959). While an
        activity waits in a queue, the path has the activities of the same fetch that it waits for.
        """
        if self._known_path is None:
            self._known_path = merge_spans(
                _critical_path(self.activities, self.earlier_spans, self.issued_seconds, self.ready_seconds)
            )
        return self._known_path


CURRENT_FETCH: ContextVar[Fetch | None] = ContextVar("stoker_fetch", default=None)
"""The fetch that the current task works for; None if it is not recorded."""


class Activity:
    """A sequence of phases for one object; a context manager that ends the last phase.

    Args:
        fetch: fetch that the activity belongs to; None if it is not recorded.
        object: key of the object.
        phase: first phase.
        now_seconds: begin of the first phase, in loop time.

    Attributes:
        phase_starts: phases, each with its begin.
        end_seconds: end of the last phase.
    """

    __slots__ = ("_fetch", "end_seconds", "object", "phase_starts")

    def __init__(self, fetch: Fetch | None, object: str, phase: Phase, now_seconds: float) -> None:  # noqa: A002 - its name
        self._fetch = fetch
        self.object = object
        self.phase_starts = [(phase, now_seconds)]
        self.end_seconds = now_seconds

    def add_attempt(self, requests: Sequence[Request]) -> None:
        """Add the phases of an attempt that has ended: a request and its hedges, in the order they were sent.

        A failed attempt, and the time until the next one, count as retry.
        """
        if self._fetch is None:
            return
        sent = self._fetch.requests
        sent += requests
        if len(sent) > _MAX_REQUESTS:
            del sent[: -_MAX_REQUESTS // 2]
        self.phase_starts += _attempt_marks(requests)

    def mark_wasted(self) -> None:
        """Mark the whole activity as wasted: all its time counts as retry."""
        self.phase_starts = [(Phase.RETRY, self.begin_seconds)]

    @property
    def begin_seconds(self) -> float:
        """Begin of the first phase."""
        return self.phase_starts[0][1]

    def __enter__(self) -> Activity:
        return self

    def __exit__(self, *exception: object) -> None:
        fetch, self._fetch = self._fetch, None  # a reference cycle would keep every fetch until a garbage collection
        if fetch is not None:
            self.end_seconds = asyncio.get_running_loop().time()
            fetch.add_activity(self)


_NULL_ACTIVITY = Activity(None, "", Phase.OTHER, 0.0)
"""The activity for tasks without a recorded fetch."""


def start_activity(object: str, phase: Phase) -> Activity:  # noqa: A002 - as it is called everywhere
    """Start an activity of the current task's fetch."""
    fetch = CURRENT_FETCH.get()
    return _NULL_ACTIVITY if fetch is None else Activity(fetch, object, phase, asyncio.get_running_loop().time())


def mark_wasted(object: str) -> None:  # noqa: A002 - as it is called everywhere
    """Mark all activities of an object in the current fetch as wasted."""
    fetch = CURRENT_FETCH.get()
    if fetch is not None:
        for each in fetch.activities:
            if each.object == object:
                each.mark_wasted()


def _attempt_marks(requests: Sequence[Request]) -> list[tuple[Phase, float]]:
    """Return the phases of an attempt, each with its begin time."""
    first = winner = requests[0]
    if not first.is_whole:
        for winner in requests:
            if winner.is_whole:
                break
        else:
            return [(Phase.RETRY, first.sent_seconds)]
    if winner.begun_seconds is None:  # the store does not report it
        return [(Phase.TRANSFER if len(requests) == 1 else Phase.HEDGE, first.sent_seconds)]
    if len(requests) == 1:
        return [(Phase.FIRST_BYTE, first.sent_seconds), (Phase.TRANSFER, winner.begun_seconds)]
    hedged_seconds = requests[1].sent_seconds
    if first.begun_seconds is None or first.begun_seconds > hedged_seconds:  # its first byte was late
        return [(Phase.HEDGE, first.sent_seconds), (Phase.TRANSFER, winner.begun_seconds)]
    marks = [(Phase.FIRST_BYTE, first.sent_seconds), (Phase.TRANSFER, first.begun_seconds)]
    if winner is not first:  # its bytes were
        marks += [(Phase.HEDGE, hedged_seconds), (Phase.TRANSFER, winner.begun_seconds)]
    return marks


def _critical_path(
    activities: Sequence[Activity], earlier_spans: Sequence[Span], issued: float, ready: float
) -> list[Span]:
    """Return the critical path of earlier spans followed by activities; see :meth:`Fetch.path`."""
    path: list[Span] = []
    cursor, key = ready, activities[-1].object if activities else ""
    queued = math.inf  # begin of the queue phase of the latest activity on the path
    for each in reversed(activities):
        if each.end_seconds > cursor:
            continue
        if each.end_seconds < cursor:
            path += _gap_spans(each.end_seconds, cursor, queued, key)
        key, cursor, end = each.object, each.end_seconds, each.end_seconds
        for phase, begin in reversed(each.phase_starts):
            if phase is not Phase.QUEUE:
                path.append(Span(phase, begin, end, key))
                cursor = begin
            end = begin
        queued = each.begin_seconds if each.phase_starts[0][0] is Phase.QUEUE else math.inf
    before = [span.clip(issued, cursor) for span in earlier_spans if span.begin_seconds < cursor]
    begin = before[-1].end_seconds if before else issued
    if begin < cursor:
        path += _gap_spans(begin, cursor, queued, key)
    return [*before, *reversed(path)]


def _gap_spans(begin: float, end: float, queued: float, object: str) -> list[Span]:  # noqa: A002 - as it is called everywhere
    """Return the spans, last first, for a time without a working activity."""
    border = min(max(begin, queued), end)
    return [Span(Phase.QUEUE, border, end, object), Span(Phase.OTHER, begin, border, object)]


def _shorten_path(spans: Iterable[Span], max_spans: int) -> list[Span]:
    """Shorten a path to at most ``max_spans`` spans of the same total time, by merging pairs."""
    shortened = merge_spans(spans)
    while len(shortened) > max_spans:
        pairs = [shortened[index : index + 2] for index in range(0, len(shortened), 2)]
        longest = [(max(pair, key=lambda span: span.seconds), pair) for pair in pairs]
        shortened = merge_spans(
            span._replace(begin_seconds=pair[0].begin_seconds, end_seconds=pair[-1].end_seconds)
            for span, pair in longest
        )
    return shortened


def record_tier_outcome(name: str, outcome: str) -> None:
    """Record the outcome of a read from a tier, if the current fetch is recorded."""
    if (fetch := CURRENT_FETCH.get()) is not None and len(fetch.tiers) < _MAX_ACTIVITIES:
        fetch.tiers.append((name, outcome))
