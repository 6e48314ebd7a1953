"""The record of one fetch: phases, strands of things that happened one after the other, and the requests sent.

Which fetch a request is for travels with the context of the task, so that readers and stores need not hand it on.
Nothing is recorded, and next to nothing is spent, where nobody follows.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple


class Phase(enum.StrEnum):
    """What was going on.

    Where several things go on at once, the phase is that of the one which ended last: nothing else would have made the
    wait shorter.
    """

    START = "start"
    """An iteration began: what was under way ended, and what must be known before the first item was read."""
    QUEUE = "queue"
    """An item stood in line: for a slot of the ring, for its turn at the start of a run, or for a permit."""
    TIER = "tier"
    """A nearer place than the bucket was asked."""
    FIRST_BYTE = "first_byte"
    """A request was sent, and its answer had not begun."""
    TRANSFER = "transfer"
    """Bytes arrived."""
    HEDGE = "hedge"
    """A request was so late that it was sent again: from its sending until an answer began, to whichever of them."""
    RETRY = "retry"
    """Requests that failed, or brought wrong bytes, and the pauses behind them."""
    VERIFY = "verify"
    """The checksum was calculated."""
    GATHER = "gather"
    """Rows were copied into the batch, and tensors made of them."""
    DECODE = "decode"
    """The pool worked on the batch: decode, transform, collate."""
    OTHER = "other"
    """None of these: threads handed over to each other, or had no processor."""


class Span(NamedTuple):
    """A stretch of time in one phase.

    Attributes:
        phase: which.
        begin_seconds: on the clock of whoever recorded it.
        end_seconds: on the same clock.
        object: the key that it is about, empty if none.
    """

    phase: Phase
    begin_seconds: float
    end_seconds: float
    object: str = ""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_seconds - self.begin_seconds

    def clipped(self, begin_seconds: float, end_seconds: float) -> Span:
        """Return the part of it that lies between two moments; it may last no time, or less."""
        begin, end = max(self.begin_seconds, begin_seconds), min(self.end_seconds, end_seconds)
        return Span(self.phase, begin, end, self.object)

    def later(self, seconds: float) -> Span:
        """Return it on a clock that is ahead by so much."""
        return Span(self.phase, self.begin_seconds + seconds, self.end_seconds + seconds, self.object)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in their order without empty ones; those that touch and are alike become one."""
    whole: list[Span] = []
    for span in spans:
        phase, begin, end, key = span
        if end <= begin:
            continue
        if whole and (last := whole[-1]).end_seconds == begin and last.phase is phase and last.object == key:
            whole[-1] = Span(phase, last.begin_seconds, end, key)
        else:
            whole.append(span)
    return whole


_MOST_STRANDS = 256
"""Kept of one fetch. A group of samples takes thousands; what those that ended first came to is summed up."""
_MOST_REQUESTS = 4096


class Request(NamedTuple):
    """One call of the store.

    Attributes:
        sent_seconds: when, in loop time.
        begun_seconds: when its answer began; None if it did not, or the store does not tell.
        ended_seconds: when it ended.
        size_bytes: that were asked for.
        is_whole: whether it brought them.
        object: the key.
    """

    sent_seconds: float
    begun_seconds: float | None
    ended_seconds: float
    size_bytes: int
    is_whole: bool
    object: str = ""


@dataclass(slots=True, eq=False)
class Fetch:
    """An item on its way into the ring. Times are the loop's.

    Attributes:
        item: its number in order of first use.
        step: that first uses it.
        issued_seconds: when its fetch began.
        idle_seconds: how long it had stood in line before, for a slot or by the schedule, while nothing was under way.
        ready_seconds: when its slot was ready.
        slot: that holds it; None until then.
        strands: that have ended, in that order.
        past: what those that are not kept any more came to.
        requests: that were sent for it, the last ones of very many.
        tiers: nearer places that it came to, by name, and what came of each: ``"delivered"``, ``"lacking"``,
            ``"failed"``, ``"late"``, ``"beaten"`` by the store, or ``"not asked"`` since its circuit breaker is open.
    """

    item: int
    step: int
    issued_seconds: float
    idle_seconds: float = 0.0
    ready_seconds: float = 0.0
    slot: int | None = None
    strands: list[Strand] = field(default_factory=list)
    past: Sequence[Span] = ()
    requests: list[Request] = field(default_factory=list)
    tiers: list[tuple[str, str]] = field(default_factory=list)
    _known_path: Sequence[Span] | None = None

    @property
    def object(self) -> str:
        """The key of the object that ended last; empty if nothing was needed."""
        return self.strands[-1].object if self.strands else ""

    def add(self, strand: Strand) -> None:
        """Add a strand that has just ended."""
        self.strands.append(strand)
        if len(self.strands) == _MOST_STRANDS:
            ended, self.strands = self.strands[: _MOST_STRANDS // 2], self.strands[_MOST_STRANDS // 2 :]
            path = _path(ended, self.past, self.issued_seconds, ended[-1].end_seconds)
            self.past = _summed(path, _MOST_STRANDS)

    def path(self) -> Sequence[Span]:
        """Return the critical path of one that is ready: what its time was spent on, in order and without a gap.

        It goes back from the end, along whatever ended last: each thing began when the one before it ended, and
        nothing else would have made the whole shorter (J. Kelley, M. Walker, "Critical-Path Planning and Scheduling",
        1959). A strand that stands in line waits for others to end: as long as strands of the same fetch do, these are
        told.
        """
        if self._known_path is None:
            self._known_path = merged(_path(self.strands, self.past, self.issued_seconds, self.ready_seconds))
        return self._known_path


FOLLOWED: ContextVar[Fetch | None] = ContextVar("stoker_fetch", default=None)
"""The fetch that the current task works for, if anybody keeps a record of it."""


class Strand:
    """Things that happen one after the other, for one object; a context manager that ends with the last of them.

    Args:
        fetch: it belongs to; None if nobody keeps a record.
        object: the key.
        phase: the first.
        now_seconds: in loop time.

    Attributes:
        marks: phases and when they began.
        end_seconds: when the last one ended.
    """

    __slots__ = ("_fetch", "end_seconds", "marks", "object")

    def __init__(self, fetch: Fetch | None, object: str, phase: Phase, now_seconds: float) -> None:  # noqa: A002 - its name
        self._fetch = fetch
        self.object = object
        self.marks = [(phase, now_seconds)]
        self.end_seconds = now_seconds

    def attempted(self, requests: Sequence[Request]) -> None:
        """Note an attempt that has ended: a request and its hedges, in the order they were sent.

        One that failed is part of a retry, and what follows until the next one is, too.
        """
        if self._fetch is None:
            return
        sent = self._fetch.requests
        sent += requests
        if len(sent) > _MOST_REQUESTS:
            del sent[: -_MOST_REQUESTS // 2]
        self.marks += _attempt_marks(requests)

    def spoil(self) -> None:
        """Note that all of it was in vain."""
        self.marks = [(Phase.RETRY, self.begin_seconds)]

    @property
    def begin_seconds(self) -> float:
        """When it began."""
        return self.marks[0][1]

    def __enter__(self) -> Strand:
        return self

    def __exit__(self, *exception: object) -> None:
        fetch, self._fetch = self._fetch, None  # a circle would keep every fetch until it is looked for, at a high cost
        if fetch is not None:
            self.end_seconds = asyncio.get_running_loop().time()
            fetch.add(self)


_UNRECORDED = Strand(None, "", Phase.OTHER, 0.0)
"""Stands where nobody follows."""


def strand(object: str, phase: Phase) -> Strand:  # noqa: A002 - as it is called everywhere
    """Return a strand that begins, of the fetch that the current task works for."""
    fetch = FOLLOWED.get()
    return _UNRECORDED if fetch is None else Strand(fetch, object, phase, asyncio.get_running_loop().time())


def spoilt(object: str) -> None:  # noqa: A002 - as it is called everywhere
    """Note that what the current fetch has read of an object so far is of no use."""
    fetch = FOLLOWED.get()
    if fetch is not None:
        for each in fetch.strands:
            if each.object == object:
                each.spoil()


def _attempt_marks(requests: Sequence[Request]) -> list[tuple[Phase, float]]:
    """Return the phases of an attempt, each with its begin."""
    first = winner = requests[0]
    if not first.is_whole:
        for winner in requests:
            if winner.is_whole:
                break
        else:
            return [(Phase.RETRY, first.sent_seconds)]
    if winner.begun_seconds is None:  # a store that does not tell
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


def _path(strands: Sequence[Strand], past: Sequence[Span], issued: float, ready: float) -> list[Span]:
    """Return the critical path of strands, which lie behind a past; see :meth:`Fetch.path`."""
    path: list[Span] = []
    cursor, key = ready, strands[-1].object if strands else ""
    queued = math.inf  # since when the strand that was followed last had stood in line
    for each in reversed(strands):
        if each.end_seconds > cursor:
            continue
        if each.end_seconds < cursor:
            path += _gap(each.end_seconds, cursor, queued, key)
        key, cursor, end = each.object, each.end_seconds, each.end_seconds
        for phase, begin in reversed(each.marks):
            if phase is not Phase.QUEUE:
                path.append(Span(phase, begin, end, key))
                cursor = begin
            end = begin
        queued = each.begin_seconds if each.marks[0][0] is Phase.QUEUE else math.inf
    before = [span.clipped(issued, cursor) for span in past if span.begin_seconds < cursor]
    begin = before[-1].end_seconds if before else issued
    if begin < cursor:
        path += _gap(begin, cursor, queued, key)
    return [*before, *reversed(path)]


def _gap(begin: float, end: float, queued: float, object: str) -> list[Span]:  # noqa: A002 - as it is called everywhere
    """Return what fills the time in which no strand worked, last first."""
    border = min(max(begin, queued), end)
    return [Span(Phase.QUEUE, border, end, object), Span(Phase.OTHER, begin, border, object)]


def _summed(spans: Iterable[Span], most: int) -> list[Span]:
    """Return a path of at most so many spans and as long: of more, neighbours are told as the longer of the two."""
    whole = merged(spans)
    while len(whole) > most:
        pairs = [whole[place : place + 2] for place in range(0, len(whole), 2)]
        longest = [(max(pair, key=lambda span: span.seconds), pair) for pair in pairs]
        whole = merged(
            span._replace(begin_seconds=pair[0].begin_seconds, end_seconds=pair[-1].end_seconds)
            for span, pair in longest
        )
    return whole


def note_tier(name: str, outcome: str) -> None:
    """Note what came of a nearer place, if anybody keeps a record."""
    if (fetch := FOLLOWED.get()) is not None and len(fetch.tiers) < _MOST_STRANDS:
        fetch.tiers.append((name, outcome))
