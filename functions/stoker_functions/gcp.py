"""Google Cloud Functions and Cloud Run: a name of this module is the target of ``functions-framework --asgi``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import functions_framework.aio as framework

from stoker_functions._deployment import Deployment, DeploymentSettings
from stoker_functions._instance import GOOGLE_HANDLERS, SERVING_HANDLERS, answer_request, import_handler

__all__ = [*GOOGLE_HANDLERS, *SERVING_HANDLERS]

_deployment = cache(lambda: Deployment(DeploymentSettings.from_environment()))


def __getattr__(name: str) -> Callable[[Any], Any]:
    handlers = {**GOOGLE_HANDLERS, **SERVING_HANDLERS}
    if name not in handlers:
        raise AttributeError(f"stoker_functions.gcp has no handler {name!r}; it has {', '.join(handlers)}")
    handler = import_handler(handlers[name])

    async def invoke(request: Any) -> Any:
        if name in SERVING_HANDLERS:
            return await handler(request.scope, request.receive, _deployment())
        return await answer_request(handler, await request.body(), _deployment())

    invoke.__name__ = name
    return framework.http(invoke)
