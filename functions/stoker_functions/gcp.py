"""Google Cloud Functions and Cloud Run: the targets of ``functions-framework --asgi`` are in this module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import functions_framework.aio as framework

from stoker_functions.commit import commit as commit_runs
from stoker_functions.compact import compact as compact_dataset
from stoker_functions.hosted import Hosted
from stoker_functions.instance import Handler
from stoker_functions.pack import pack as pack_part
from stoker_functions.settings import Settings

__all__ = ["commit", "compact", "ingest", "pack"]


@cache
def _hosted() -> Hosted:
    return Hosted(Settings.from_environment())


def _adapted(name: str, handler: Handler) -> Callable[[Any], Any]:
    async def invoke(request: Any) -> tuple[dict[str, Any], int]:
        return await _hosted().answer(handler, await request.body())

    invoke.__name__ = name
    return framework.http(invoke)


pack = _adapted("pack", pack_part)
commit = _adapted("commit", commit_runs)
compact = _adapted("compact", compact_dataset)


@framework.cloud_event
async def ingest(event: Any) -> None:
    """Pack a raw object that a CloudEvent announces, with others that come at the same time."""
    await _hosted().ingest(event.get_data())
