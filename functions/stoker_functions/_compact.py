"""compact: the small super-samples of a data set become large ones, as many as the time allows."""

from __future__ import annotations

import time
from typing import Any

from stoker._format.versions import newest_manifest
from stoker._maintenance.compaction import compact as compact_dataset
from stoker.errors import NotFoundError
from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._events import CompactEvent

__all__ = ["compact"]

_BYTES_A_SECOND = 20_000_000  # read and written again: a quarter of what a function's network carries


async def compact(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Compact a data set.

    Returns:
        ``version`` (0 where there is no data set yet, which a schedule may be ahead of), ``objects_before`` and
        ``objects_after`` of what was packed again, and ``state``: ``packing`` where small super-samples are left for
        another invocation, else ``complete``.

    Raises:
        EventError: the event is none, or of a place that this deployment has nothing to do with.
        NotFoundError: an object that the manifest names is gone.
        DeadlineError: there was too little time; nothing is half visible, and the next invocation goes on.
        StoreError: the bucket fails.
    """
    asked = CompactEvent.from_json(event)
    store = deployment.dataset(asked.dataset)
    async with deadline.limit(f"the compaction of {asked.dataset}"):
        try:
            done = await compact_dataset(
                store,
                deployment.catalog(asked.dataset),
                now_seconds=time.time(),
                super_sample_bytes=asked.super_sample_bytes,
                limit_bytes=max(2 * asked.super_sample_bytes, int(deadline.remaining_seconds() * _BYTES_A_SECOND)),
            )
        except NotFoundError:
            if await newest_manifest(store) is not None:  # it is something else that is gone
                raise
            return {"version": 0, "objects_before": 0, "objects_after": 0, "state": "complete"}
    return {
        "version": done.manifest.version,
        "objects_before": done.objects_before,
        "objects_after": done.objects_after,
        "state": "packing" if done.left_objects and done.objects_before else "complete",
    }
