"""An instance of a function: an event loop and connections that last from one invocation to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._settings import Settings

__all__ = ["Handler", "Instance"]

Handler = Callable[[object, Deployment, Deadline], Awaitable[dict[str, Any]]]
"""``await handler(event, deployment, deadline)`` returns what the caller gets, as JSON values."""


class Instance:
    """Runs handlers one after the other, for platforms whose handlers are no coroutines.

    Args:
        settings: of the deployment.
    """

    def __init__(self, settings: Settings) -> None:
        self._runner = asyncio.Runner()
        self._deployment = Deployment(settings)

    def run(self, handler: Handler, event: object, seconds: float) -> dict[str, Any]:
        """Return what a handler makes of an event in so much time.

        Raises:
            Exception: what the handler raises.
        """

        async def invoke() -> dict[str, Any]:
            return await handler(event, self._deployment, Deadline.after(seconds))

        return self._runner.run(invoke())

    def close(self) -> None:
        """Release all connections, and end the loop."""
        self._runner.run(self._deployment.close())
        self._runner.close()
