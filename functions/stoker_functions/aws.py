"""AWS Lambda: ``stoker_functions.aws.NAME`` is the handler of a function, which imports nothing for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any

from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_functions._instance import LAMBDA_HANDLERS, handler_of

__all__ = [*LAMBDA_HANDLERS]


@cache
def _instance() -> tuple[Deployment, asyncio.Runner]:
    """Return what lasts from one invocation to the next: the connections, and their event loop."""
    return Deployment(Settings.from_environment()), asyncio.Runner()


def _invoke(handler: Callable[..., Awaitable[Any]], event: Any, context: Any) -> Any:
    deployment, runner = _instance()
    seconds = context.get_remaining_time_in_millis() / 1000

    async def handle() -> Any:
        return await handler(event, deployment, Deadline.after(seconds))

    return runner.run(handle())


def __getattr__(name: str) -> Callable[[Any, Any], Any]:
    if name not in LAMBDA_HANDLERS:
        raise AttributeError(f"there is no function {name!r}")
    return partial(_invoke, handler_of(LAMBDA_HANDLERS[name]))
