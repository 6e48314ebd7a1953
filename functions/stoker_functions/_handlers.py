"""Every handler by its name. A function imports its own and no other: that is most of its cold start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

__all__ = ["HANDLERS", "LAMBDA_HANDLERS", "SERVING_HANDLERS", "handler_of"]

HANDLERS = {
    "pack": "stoker_functions._pack:pack",
    "commit": "stoker_functions._commit:commit",
    "compact": "stoker_functions._compact:compact",
    "shuffle": "stoker_functions._shuffle:shuffle",
    "warm_node": "stoker_functions._warm_node:warm_node",
}
"""Name → module and function; events and results of these are the same everywhere."""

LAMBDA_HANDLERS = {
    **HANDLERS,
    "ingest": "stoker_functions._ingest:ingest_queue",
    "serve": "stoker_functions.serve._handlers:serve_url",
    "serve_with_token": "stoker_functions.serve._handlers:serve_url_with_token",
}
"""Those of Lambda: these get a queue's messages, and requests of function URLs."""

SERVING_HANDLERS = {
    "serve": "stoker_functions.serve._handlers:serve_scope",
    "serve_with_token": "stoker_functions.serve._handlers:serve_scope_with_token",
}
"""Those that answer requests as ASGI words them."""


def handler_of(where: str) -> Callable[..., Awaitable[Any]]:
    """Import ``module:function`` and return the function."""
    module, _, name = where.partition(":")
    handler: Callable[..., Awaitable[Any]] = getattr(import_module(module), name)
    return handler
