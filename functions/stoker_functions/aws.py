"""AWS Lambda: ``stoker_functions.aws.NAME`` is the handler of a function, and imports nothing for other handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any

from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions._instance import LAMBDA_HANDLERS, import_handler

__all__ = [*LAMBDA_HANDLERS]


@cache
def _instance() -> tuple[Deployment, asyncio.Runner]:
    """Return the deployment and the event loop of this instance, which are kept between invocations."""
    return Deployment(DeploymentSettings.from_environment()), asyncio.Runner()


def _invoke(handler: Callable[..., Awaitable[Any]], event: Any, context: Any) -> Any:
    deployment, runner = _instance()
    seconds = context.get_remaining_time_in_millis() / 1000

    async def handle() -> Any:
        return await handler(event, deployment, InvocationDeadline.after(seconds))

    return runner.run(handle())


def __getattr__(name: str) -> Callable[[Any, Any], Any]:
    if name not in LAMBDA_HANDLERS:
        raise AttributeError(f"stoker_functions.aws has no handler {name!r}; it has {', '.join(LAMBDA_HANDLERS)}")
    return partial(_invoke, import_handler(LAMBDA_HANDLERS[name]))
