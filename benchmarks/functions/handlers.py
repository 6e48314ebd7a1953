"""Handlers for comparison: one that does nothing, and one that copies every sample to an object of its own."""

from __future__ import annotations

from typing import Any

# Imports of this module count as the bare runtime's start.

_AT_ONCE = 64  # pack's number of concurrent reads


def nothing(event: Any, context: Any) -> dict[str, Any]:
    """Return at once."""
    return {}


def one_by_one(event: Any, context: Any) -> Any:
    """Read every raw object and write it as an object of its own, as a function without super-samples does."""
    from stoker_functions.aws import _invoke

    return _invoke(_copy, event, context)


async def _copy(event: Any, deployment: Any, deadline: Any) -> dict[str, Any]:
    from stoker._base.task_group import for_each
    from stoker._sources.listing import read_object
    from stoker.abc import ObjectInfo

    source, target = deployment.source(event["source"]), deployment.dataset(event["dataset"])

    async def copy(described: list[Any]) -> None:
        key, size_bytes, tag = described
        await target.put(key, await read_object(source, ObjectInfo(key=key, size_bytes=size_bytes, tag=tag)))

    await for_each(event["objects"], copy, concurrency=_AT_ONCE)
    return {"objects": len(event["objects"])}
