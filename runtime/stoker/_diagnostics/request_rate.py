"""How many requests a second a bucket answers: told by those that it refused, or let wait for their turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["RateLimit", "SentRequest", "rate_limit_of"]

_WAITS_FACTOR, _WAITS_SECONDS = 1.6, 0.02
"""Requests wait for their turn if their first bytes take so much longer than those of requests sent one by one."""
_LEAST_TELLING, _QUEUED_PART = 4, 1 / 3
"""Answers, at least, between which a rate is told; and the part of all that waited, where requests do: a few are late
by themselves."""
_LEAST_SECONDS, _EVEN = 1e-3, 1.6


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request of a probe.

    Attributes:
        sent: when it was sent.
        begun: when its answer began; None if none did, or the store does not tell.
        is_refused: whether the bucket asked for fewer requests (503 SlowDown, 429).
    """

    sent: float
    begun: float | None
    is_refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A limit on requests, as :class:`~stoker._diagnostics.latency.BucketModel` has it.

    Attributes:
        requests_per_second: that are answered.
        burst: requests that are answered at once, after a pause.
        longest_line_seconds: for which a request waits for its turn, at most; it is refused where it would wait longer.
    """

    requests_per_second: float
    burst: int = 1
    longest_line_seconds: float = math.inf


def rate_limit_of(requests: Sequence[SentRequest], usual_seconds: float) -> RateLimit | None:
    """Return the limit that a bucket has set to requests, None if nothing tells of one.

    Args:
        requests: in the order in which they were sent; the last of them as fast as the bucket would have them.
        usual_seconds: of a first byte, where requests are sent one by one.
    """
    requests = sorted(requests, key=lambda each: each.sent)
    late_seconds = _WAITS_FACTOR * usual_seconds + _WAITS_SECONDS
    refused = [each.sent for each in requests if each.is_refused]
    answered = [(each.sent, each.begun) for each in requests if each.begun is not None and not each.is_refused]
    queued = [(sent, begun) for sent, begun in answered if begun - sent > late_seconds]
    is_queued = len(queued) >= max(_LEAST_TELLING + 1, _QUEUED_PART * len(answered))
    if refused:
        rate = _rate(
            [sent for sent, _ in answered if sent > refused[0] + usual_seconds / 2], requests[-1].sent - refused[0]
        )
        longest = max(begun - sent for sent, begun in queued) - usual_seconds if is_queued else 0.0
    elif is_queued:
        moments = sorted(begun for _, begun in queued)
        rate, longest = (len(moments) - 1) / max(moments[-1] - moments[0], _LEAST_SECONDS), math.inf
    else:
        return None
    full = refused[0] if refused else queued[0][0]
    at_once = sum(sent < full for sent, _ in answered) - rate * (full - requests[0].sent)
    return RateLimit(requests_per_second=rate, burst=max(1, round(at_once)), longest_line_seconds=longest)


def _rate(moments: Sequence[float], seconds: float) -> float:
    """Return the events a second.

    Where none follow each other much sooner than usual, nothing is saved up for a burst, and the two nearest to each
    other tell what could be had.
    """
    mean = max(1, len(moments)) / max(seconds, _LEAST_SECONDS)
    if len(moments) <= _LEAST_TELLING:
        return mean
    nearest = min(later - sooner for sooner, later in pairwise(moments))
    return 1 / nearest if nearest * mean * _EVEN > 1 else mean
