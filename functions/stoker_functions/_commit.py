"""commit: adds runs that functions have packed to the manifest. compact: merges small super-samples into large ones.

Both are limited by the time of the invocation; their results become visible at once, or not at all.
"""

from __future__ import annotations

import math
import time
from typing import Any

from stoker._base.fields import JsonFields
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._format.versions import find_newest_manifest
from stoker._maintenance.compaction import compact as compact_dataset
from stoker._pack.merge import FanoutJob, merge
from stoker.errors import EventError, NotFoundError
from stoker_functions._deployment import Deployment, InvocationDeadline

_COMPACT_BYTES_PER_SECOND = 20_000_000  # bytes compacted per second: a quarter of a function's network throughput
_ID = "[0-9a-f]{16}"
_MAX_RUNS = 100_000


async def commit(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Commit the runs that are packed and not committed yet.

    Returns:
        ``version`` and ``samples`` of the newest version (0 if there is none), ``added_samples``, ``runs`` that were
        added, ``repeated_samples`` that the data set had already, ``refused`` runs of other data sets, and
        ``requests`` to stores.

    Raises:
        EventError: the event is not a commit event, or its data set is not allowed by the settings.
        PackError: a run of the job is not finished.
        DatasetExistsError: the job should create the data set, and it exists.
        DeadlineError: there was too little time; nothing is partly visible, and the next invocation continues.
        StoreError: the bucket failed.
    """
    dataset, job = read_commit_event(event)
    store, catalog = deployment.dataset_store(dataset), deployment.catalog(dataset)
    with deployment.count_requests() as requests:
        async with deadline.limit(f"the commit to {dataset}"):
            merged = await merge(store, catalog, now_seconds=time.time(), job=job)
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


async def compact(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Compact a data set.

    Returns:
        ``version`` (0 if there is no data set yet, as a schedule may begin before the first commit), the number of
        super-samples that were merged, ``objects_before`` and ``objects_after``, and ``state``: ``packing`` if small
        super-samples are left for another invocation, else ``complete``.

    Raises:
        EventError: the event is not a compact event, or its data set is not allowed by the settings.
        NotFoundError: an object of the manifest is missing.
        DeadlineError: there was too little time; nothing is partly visible, and the next invocation continues.
        StoreError: the bucket failed.
    """
    dataset, super_sample_bytes = read_compact_event(event)
    store = deployment.dataset_store(dataset)
    async with deadline.limit(f"the compaction of {dataset}"):
        try:
            done = await compact_dataset(
                store,
                deployment.catalog(dataset),
                now_seconds=time.time(),
                super_sample_bytes=super_sample_bytes,
                limit_bytes=_limit_bytes(deadline.remaining_seconds(), super_sample_bytes),
            )
        except NotFoundError:
            if await find_newest_manifest(store) is not None:  # another object is missing
                raise
            return {"version": 0, "objects_before": 0, "objects_after": 0, "state": "complete"}
    return {
        "version": done.manifest.version,
        "objects_before": done.objects_before,
        "objects_after": done.objects_after,
        "state": "packing" if done.left_objects and done.objects_before else "complete",
    }


def _limit_bytes(seconds: float, super_sample_bytes: int) -> int | None:
    """Return how many bytes to pack again in ``seconds``, at least those of two super-samples; None for no limit."""
    return max(2 * super_sample_bytes, int(seconds * _COMPACT_BYTES_PER_SECOND)) if math.isfinite(seconds) else None


def read_commit_event(event: object) -> tuple[str, FanoutJob | None]:
    """Return the URL of the data set of a commit event, and the job whose runs to commit; None for runs of no job.

    Raises:
        EventError: the event is not a commit event.
    """
    fields = JsonFields(event, "commit event")
    dataset = fields.text("dataset")
    job = fields.text("job", pattern=f"({_ID})?", default="")
    if not job:
        if "runs" in fields or "mode" in fields:
            raise EventError("the commit event has 'runs' or a 'mode', and no 'job': add the id of the job")
        fields.check_no_fields_left()
        return dataset, None
    runs = fields.array("runs", max_length=_MAX_RUNS)
    creates = fields.choice("mode", ("create", "append"), default="append") == "create"
    fields.check_no_fields_left()
    checked = tuple(JsonFields({"run": run}, "commit event").text("run", pattern=_ID) for run in runs)
    if not checked or len(set(checked)) < len(checked):
        raise EventError("the commit event's 'runs' are empty, or contain one twice; name each run of the job once")
    return dataset, FanoutJob(id=job, runs=checked, creates=creates)


def read_compact_event(event: object) -> tuple[str, int]:
    """Return the URL of the data set of a compact event, and the size of a super-sample in bytes.

    Raises:
        EventError: the event is not a compact event.
    """
    fields = JsonFields(event, "compact event")
    dataset = fields.text("dataset")
    size_bytes = fields.integer("super_sample_bytes", min_value=1, max_value=MAX_TARGET_BYTES, default=8 << 20)
    fields.check_no_fields_left()
    return dataset, size_bytes
