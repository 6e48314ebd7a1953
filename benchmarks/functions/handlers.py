"""Handlers to compare with: one that does nothing, and one that treats every sample by itself."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_functions._instance import Instance

# What is imported here is part of the bare runtime's start.

_AT_ONCE = 64  # as many as pack reads at once


def nothing(event: Any, context: Any) -> dict[str, Any]:
    """Answer."""
    return {}


def one_by_one(event: Any, context: Any) -> dict[str, Any]:
    """Read every raw object and write it as an object of its own, as a function does that treats samples singly."""
    return _instance().run(_copy, event, context.get_remaining_time_in_millis() / 1000)


@cache
def _instance() -> Instance:
    from stoker_functions._deployment import Settings
    from stoker_functions._instance import Instance

    return Instance(Settings.from_environment())


async def _copy(event: Any, deployment: Any, deadline: Any) -> dict[str, Any]:
    from stoker._base.task_group import for_each
    from stoker._sources.listing import read
    from stoker.abc import ObjectInfo

    source, target = deployment.source(event["source"]), deployment.dataset(event["dataset"])

    async def copy(described: list[Any]) -> None:
        key, size_bytes, tag = described
        await target.put(key, await read(source, ObjectInfo(key=key, size_bytes=size_bytes, tag=tag)))

    await for_each(event["objects"], copy, concurrency=_AT_ONCE)
    return {"objects": len(event["objects"])}
