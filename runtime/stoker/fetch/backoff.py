"""How long to wait before another try: exponential back-off with full jitter.

"Full jitter" (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015): a uniform draw between
zero and the exponential bound keeps clients that failed together from coming back together.
"""

from __future__ import annotations

import random

__all__ = ["backoff_seconds"]


def backoff_seconds(
    failures: int,
    *,
    base_seconds: float,
    cap_seconds: float,
    rng: random.Random,
    retry_after_seconds: float | None = None,
) -> float:
    """Return the wait after ``failures`` >= 1 failures in a row.

    What the store asked for (``retry_after_seconds``) is waited out in full, and the jitter comes on top of it.
    """
    doublings = min(failures - 1, 64)  # enough for any cap, and no overflow
    jitter = rng.uniform(0.0, min(cap_seconds, base_seconds * 2.0**doublings))
    return jitter + max(0.0, retry_after_seconds or 0.0)
