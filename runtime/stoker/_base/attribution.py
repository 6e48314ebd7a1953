"""Says what a wait for an item was."""

from __future__ import annotations

from stoker._base.fetch_record import Fetch
from stoker._base.phases import Phase, Span, merged

__all__ = ["explained"]


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
