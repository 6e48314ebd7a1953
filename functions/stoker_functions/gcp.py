"""Google Cloud Functions and Cloud Run: NAME of this module is the target of ``functions-framework --asgi``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import functions_framework.aio as framework

from stoker_functions._handlers import HANDLERS, SERVING_HANDLERS, handler_of
from stoker_functions._hosted import Hosted
from stoker_functions._settings import Settings

__all__ = ["ingest", *HANDLERS, *SERVING_HANDLERS]

_hosted = cache(lambda: Hosted(Settings.from_environment()))


@framework.http
async def ingest(request: Any) -> tuple[dict[str, Any], int]:
    """Pack a raw object that a notification or a CloudEvent announces, with others that come at the same time."""
    return await _hosted().answer(_hosted().ingest, await request.body())


def __getattr__(name: str) -> Callable[[Any], Any]:
    handlers = {**HANDLERS, **SERVING_HANDLERS}
    if name not in handlers:
        raise AttributeError(f"there is no function {name!r}")
    handler = handler_of(handlers[name])

    async def invoke(request: Any) -> Any:
        if name in SERVING_HANDLERS:
            return await handler(request.scope, _hosted().deployment)
        return await _hosted().answer(handler, await request.body())

    invoke.__name__ = name
    return framework.http(invoke)
