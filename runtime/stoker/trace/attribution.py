"""Says what a wait for an item was."""

from __future__ import annotations

from stoker.trace.fetches import Fetch
from stoker.trace.phases import Phase, Span, merged

__all__ = ["explained"]


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
    at_work_seconds = max(begin_seconds, fetch.issued_seconds, begin_seconds + fetch.idle_seconds)
    spans = [Span(Phase.QUEUE, begin_seconds, min(at_work_seconds, end_seconds), fetch.object)]
    if fetch.ready_seconds > at_work_seconds:
        spans += [span.clipped(at_work_seconds, end_seconds) for span in fetch.path()]
    spans.append(Span(Phase.OTHER, max(at_work_seconds, fetch.ready_seconds), end_seconds, fetch.object))
    return merged(spans)
