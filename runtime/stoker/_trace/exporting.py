"""What is counted of a fetch, for those who keep counts elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from stoker._base.fetch_record import Fetch

__all__ = ["EXTRA", "FetchCounts"]

EXTRA = "{what} needs the extra 'telemetry': pip install 'stoker[telemetry]'"
"""What to say where a library is missing."""


class FetchCounts(NamedTuple):
    """The counts of one fetch.

    Attributes:
        seconds: from its issue until it was ready.
        answered: requests that brought what was asked for.
        lost: requests that failed, or were overtaken by a hedge.
        read_bytes: that the answered ones brought.
    """

    seconds: float
    answered: int
    lost: int
    read_bytes: int

    @classmethod
    def of(cls, fetch: Fetch) -> FetchCounts:
        """Count one."""
        sizes = [request.size_bytes for request in fetch.requests if request.is_whole]
        lost = len(fetch.requests) - len(sizes)
        return cls(fetch.ready_seconds - fetch.issued_seconds, len(sizes), lost, sum(sizes))
