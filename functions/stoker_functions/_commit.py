"""commit: the runs that functions have packed become a version of the manifest."""

from __future__ import annotations

import time
from typing import Any

from stoker._pack.merge import merge
from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._events import CommitEvent

__all__ = ["commit"]


async def commit(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Commit what waits for it.

    Returns:
        ``version`` and ``samples`` of the newest version (0 where there is none), ``added_samples``, ``runs`` that were
        added, ``repeated_samples`` that the data set had already, ``refused`` runs of other data sets, and
        ``requests`` to stores.

    Raises:
        EventError: the event is none, or of a place that this deployment has nothing to do with.
        PackError: a run of the job is not finished.
        DatasetExistsError: the job was to create the data set, and there is one.
        DeadlineError: there was too little time; nothing is half visible, and the next invocation goes on.
        StoreError: the bucket fails.
    """
    asked = CommitEvent.from_json(event)
    store, catalog = deployment.dataset(asked.dataset), deployment.catalog(asked.dataset)
    with deployment.counted() as requests:
        async with deadline.limit(f"the commit to {asked.dataset}"):
            merged = await merge(store, catalog, now_seconds=time.time(), job=asked.job)
    manifest = merged.manifest
    return {
        "requests": requests,
        "version": 0 if manifest is None else manifest.version,
        "samples": 0 if manifest is None else manifest.samples,
        "added_samples": merged.added_samples,
        "repeated_samples": merged.repeated_samples,
        "runs": merged.runs,
        "refused": list(merged.refused),
    }
