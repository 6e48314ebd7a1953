"""How long to wait before another try: exponential back-off with full jitter.

"Full jitter" (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015): a uniform draw between
zero and the exponential bound keeps clients that failed together from coming back together.
"""

from __future__ import annotations

import math
import random

__all__ = ["LONG_SECONDS", "backoff_seconds"]

LONG_SECONDS = 10.0
"""A wait longer than this is logged: nobody should have to guess why nothing happens."""


def backoff_seconds(
    failures: int,
    *,
    base_seconds: float,
    cap_seconds: float,
    rng: random.Random,
    retry_after_seconds: float | None = None,
    left_seconds: float = math.inf,
) -> float:
    """Return the wait after ``failures`` >= 1 failures in a row.

    What the store asked for (``retry_after_seconds``) is waited out, and the jitter comes on top of it. Where that
    would take longer than the ``left_seconds`` until the deadline, half of them are waited out: the store is asked a
    few more times, and less often than it would be without its word.
    """
    doublings = min(failures - 1, 64)  # enough for any cap, and no overflow
    jitter = rng.uniform(0.0, min(cap_seconds, base_seconds * 2.0**doublings))
    asked_seconds = max(0.0, retry_after_seconds or 0.0)
    if asked_seconds and jitter + asked_seconds >= left_seconds:
        return max(jitter, left_seconds / 2)
    return jitter + asked_seconds
