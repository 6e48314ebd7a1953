"""The handlers of functions by name, and their answers over HTTP.

A function imports only its own handler, since imports are most of its cold start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from stoker.errors import (
    ConfigError,
    EventError,
    FormatError,
    PackError,
    SchemaError,
    StokerError,
    ThrottledError,
    TransientError,
)
from stoker_functions._deployment import Deployment, InvocationDeadline

HANDLERS = {
    "pack": "stoker_functions._pack:pack",
    "commit": "stoker_functions._commit:commit",
    "compact": "stoker_functions._commit:compact",
    "shuffle": "stoker_functions._shuffle_job.work:shuffle",
    "warm_node": "stoker_functions._warm_node:warm_node",
}
"""Name → module and function; these have the same events and results on every platform."""

LAMBDA_HANDLERS = {
    **HANDLERS,
    "ingest": "stoker_functions._ingest:ingest_queue",
    "serve": "stoker_functions.serve._service:serve_url",
    "serve_with_token": "stoker_functions.serve._service:serve_url_with_token",
}
"""Handlers on Lambda, with those that get a queue's messages and the requests of function URLs."""

GOOGLE_HANDLERS = {**HANDLERS, "ingest": "stoker_functions._ingest:ingest_object"}
"""Handlers on Google Cloud, where ``ingest`` gets one object at a time."""

SERVING_HANDLERS = {
    "serve": "stoker_functions.serve._service:serve_scope",
    "serve_with_token": "stoker_functions.serve._service:serve_scope_with_token",
}
"""Handlers of ASGI requests on Google Cloud."""
Handler = Callable[[object, Deployment, InvocationDeadline], Awaitable[dict[str, Any]]]
"""``await handler(event, deployment, deadline)`` returns the caller's result, as JSON values."""
_log = logging.getLogger("stoker_functions.hosted")
_STATUSES: tuple[tuple[type[StokerError] | tuple[type[StokerError], ...], int], ...] = (
    (ThrottledError, 429),
    (TransientError, 503),
    ((EventError, ConfigError, SchemaError, FormatError, PackError), 400),
)


def import_handler(where: str) -> Callable[..., Awaitable[Any]]:
    """Import ``module:function`` and return the function."""
    module, _, name = where.partition(":")
    handler: Callable[..., Awaitable[Any]] = getattr(import_module(module), name)
    return handler


async def answer_request(handler: Handler, body: bytes, deployment: Deployment) -> tuple[dict[str, Any], int]:
    """Return a handler's result for a request's body, or the error, and the HTTP status.

    The status is 400 for requests that can never succeed, 429 or 503 for those that may succeed later, else 500.
    """
    try:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            raise EventError("the request's body is not JSON") from None
        return await handler(event, deployment, InvocationDeadline.after(deployment.settings.timeout_seconds)), 200
    except StokerError as error:
        _log.warning("%s: %s", type(error).__name__, error)
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
        return {"errorType": type(error).__name__, "errorMessage": str(error)}, status
