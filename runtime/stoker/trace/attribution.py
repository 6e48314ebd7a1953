"""Says what a wait for an item was: the way back from its end, along whatever ended last.

This is the critical path of the fetch (J. Kelley, M. Walker, "Critical-Path Planning and Scheduling", 1959): the chain
of things each of which began when the one before it ended, and which no other thing would have made shorter.
"""

from __future__ import annotations

import math

from stoker.trace.fetches import Fetch
from stoker.trace.phases import Phase, Span, merged

__all__ = ["critical_path", "explained"]


def critical_path(fetch: Fetch) -> list[Span]:
    """Return what a fetch spent its time on, from its issue until it was ready, in order and without a gap.

    A strand that stands in line waits for others to end: as long as strands of the same fetch do, these are told.
    """
    path: list[Span] = []
    cursor, key = fetch.ready_seconds, fetch.object
    queued_seconds = math.inf  # since when the strand that was followed last had stood in line
    for each in reversed(fetch.strands):
        if each.end_seconds > cursor:
            continue
        if each.end_seconds < cursor:
            path += _gap(each.end_seconds, cursor, queued_seconds, key)
        spans, key = each.spans, each.object
        at_work = [span for span in spans if span.phase is not Phase.QUEUE]
        path += reversed(at_work)
        cursor = at_work[0].begin_seconds if at_work else each.end_seconds
        queued_seconds = each.begin_seconds if spans[0].phase is Phase.QUEUE else math.inf
    path += _gap(fetch.issued_seconds, cursor, queued_seconds, key)
    return merged(reversed(path))


def _gap(begin: float, end: float, queued: float, object: str) -> list[Span]:  # noqa: A002 - as it is called everywhere
    """Return what fills the time in which no strand worked, last first."""
    border = min(max(begin, queued), end)
    return [Span(Phase.QUEUE, border, end, object), Span(Phase.OTHER, begin, border, object)]


def explained(fetch: Fetch | None, begin_seconds: float, end_seconds: float) -> list[Span]:
    """Return what a wait for an item was, in order, from its begin to its end without a gap.

    A fetch that stood in line while nothing was under way began so much too late, and so did all that came of it: as
    much of the wait was a wait in line.

    Args:
        fetch: of the item; None if there was none.
        begin_seconds: of the wait, in loop time.
        end_seconds: of the wait, in loop time.
    """
    if fetch is None:
        return merged([Span(Phase.OTHER, begin_seconds, end_seconds)])
    in_line = Span(
        Phase.QUEUE, begin_seconds, max(fetch.issued_seconds, begin_seconds + fetch.idle_seconds), fetch.object
    )
    rest = [*critical_path(fetch), Span(Phase.OTHER, fetch.ready_seconds, end_seconds, fetch.object)]
    clipped = (span.clipped(max(begin_seconds, in_line.end_seconds), end_seconds) for span in rest)
    return merged([in_line.clipped(begin_seconds, end_seconds), *clipped])
