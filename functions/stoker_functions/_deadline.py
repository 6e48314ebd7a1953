"""When an invocation must have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stoker.errors import DeadlineError

__all__ = ["Deadline"]

_RESERVED_SHARE = 0.1
_LEAST_RESERVED_SECONDS, _MOST_RESERVED_SECONDS = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of an invocation, on the clock of the running event loop.

    Attributes:
        at_seconds: when the platform kills it.
        stop_at_seconds: when it should stop taking on work, so that what is under way is still made durable: a tenth of
            the whole time before the end, at least 2 s and at most 30 s.
    """

    at_seconds: float
    stop_at_seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline of an invocation that has so much time from here on."""
        seconds = max(seconds, 0.0)
        reserved = min(max(_RESERVED_SHARE * seconds, _LEAST_RESERVED_SECONDS), _MOST_RESERVED_SECONDS)
        at_seconds = asyncio.get_running_loop().time() + seconds
        return cls(at_seconds, at_seconds - min(reserved, seconds / 2))

    @asynccontextmanager
    async def limit(self, what: str) -> AsyncIterator[None]:
        """Cancel what is inside when it is time to stop.

        Raises:
            DeadlineError: it was; ``what`` names it, and what to do.
        """
        try:
            async with asyncio.timeout_at(self.stop_at_seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} did not come to its end in the time of this invocation") from error

    @property
    def is_near(self) -> bool:
        """Whether it is time to stop taking on work."""
        return asyncio.get_running_loop().time() >= self.stop_at_seconds

    def remaining_seconds(self) -> float:
        """Return how long it is until the platform kills the invocation, below zero where it should have."""
        return self.at_seconds - asyncio.get_running_loop().time()
