"""A bound on the bytes that are requested in a second."""

from __future__ import annotations

import asyncio

__all__ = ["RateLimit"]

_BURST_SECONDS = 0.1
"""Of the rate, that may be requested at once after a pause."""


class RateLimit:
    """A token bucket that may be overdrawn by one request. Lives on one event loop; the first to come is the first.

    In any time, requests are sent for the rate times that time at most, a burst and one request aside. What cannot
    wait, such as a hedge or a retry, is charged, and delays those that come after it.

    Args:
        bytes_per_second: the rate; None does not limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_seconds = float("-inf")  # when all that was requested so far will have been allowed
        self._turn = asyncio.Lock()

    async def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes may be requested. A wait that is cancelled takes nothing."""
        if self._bytes_per_second is None:
            return
        async with self._turn:
            while (left_seconds := self._free_seconds - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - charges put it off
                await asyncio.sleep(left_seconds)
            self.charge(size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Count bytes that are requested without a wait."""
        if self._bytes_per_second is not None:
            earliest_seconds = asyncio.get_running_loop().time() - _BURST_SECONDS
            self._free_seconds = max(self._free_seconds, earliest_seconds) + size_bytes / self._bytes_per_second
