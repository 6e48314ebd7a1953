"""The function that makes materialized epochs."""

from __future__ import annotations

import asyncio
from typing import Any

from stoker.errors import DeadlineError
from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._shuffle_job.memory import usable_bytes
from stoker_functions._shuffle_job.task import ShuffleTask
from stoker_functions._shuffle_job.work import perform

__all__ = ["shuffle"]

_LAST_SECONDS = 0.5  # to answer, before the platform kills the invocation


async def shuffle(event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
    """Carry out one task of a materialized epoch.

    See :class:`~stoker_functions._shuffle_job.task.ShuffleTask` for the event, which
    may come any number of times, also at the same time.

    Returns:
        ``state``: ``complete``, or ``packing`` where the deadline came first and the same event goes on; and counts.

    Raises:
        DeadlineError: there is too little time; the same event may be tried again.
        EventError: the event is not a task, or of a data set that is none of this deployment's.
        StokerError: the task cannot be carried out; see :func:`stoker_functions._shuffle_job.work.perform`.
    """
    task = ShuffleTask.from_event(event)
    store = deployment.dataset(task.dataset)
    memory_bytes = usable_bytes(deployment.settings.memory_bytes)
    try:
        async with asyncio.timeout_at(deadline.at_seconds - _LAST_SECONDS) as limit:
            with deployment.counted() as requests:
                done = await perform(store, task, memory_bytes=memory_bytes, stop_at_seconds=deadline.stop_at_seconds)
            return {**done, "requests": requests}
    except TimeoutError as error:
        if not limit.expired():
            raise
        name = f"{task.step} {task.part} of epoch {task.epoch}"
        raise DeadlineError(f"{name} could not stop in time: the bucket is slow; what was recorded stays") from error
