"""pack: reads raw objects, and writes super-samples and their record; or permutes what it has packed for a job.

It stays within the function's memory and writes nothing to its disk. Before the deadline it stops, records the
super-samples that are durable and returns; the same event, invoked again, continues after them. Repeating an event at
the same time or after its end changes nothing: keys are a hash of the event, and an object is never overwritten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from stoker._base.retry import RetryingStore
from stoker._base.sizes import format_bytes
from stoker._base.task_group import MAX_AHEAD_BYTES
from stoker._pack.permute_task import PermuteTask
from stoker._pack.plan import drop_lost_prefix
from stoker._pack.record import Journal, PackRecord
from stoker._pack.run import RunWriter, SuperSampleWriter
from stoker._pack.shuffle import PermutedWriter, read_staged
from stoker._pack.stored_samples import usable_bytes
from stoker._sources.listing import ObjectSource
from stoker._sources.parts import SourcePart, open_part
from stoker.errors import ConfigError, PackError
from stoker_functions._deployment import Deployment, InvocationDeadline

_log = logging.getLogger("stoker_functions.pack")
_BASE_BYTES = 128 << 20  # Python, numpy and the cloud's SDK, measured on Lambda's runtime client
_BUILDING_SUPER_SAMPLES = 3  # memory of one under construction, in super-samples: values, data section, object
_MAX_UPLOADS = 8
_RECORD_SECONDS = 1.0  # time to write the record, after the last upload
_ANSWER_SECONDS = 0.2  # time to answer


async def pack(event: object, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    """Pack the part that the event describes, or execute its task of a permutation.

    Returns:
        ``run`` (16 hexadecimal digits), ``state`` (``complete``, or ``packing``: invoke the same event again), the
        durable ``samples``, ``objects`` and ``size_bytes``, and ``requests`` to stores in this invocation.

    Raises:
        EventError: the event is not a part, or its URLs are not allowed by the settings.
        ConfigError: the instance has too little memory.
        PackError: a raw object is damaged, was replaced, or is too large; or the time is too short for one
            super-sample.
        SchemaError: a raw object has other columns than the data set.
        StoreError: the bucket fails.
    """
    if isinstance(event, Mapping) and "shuffle" in event:
        return await _permute(PermuteTask.from_event(event), deployment, deadline)
    part = SourcePart.from_json(event)
    with deployment.count_requests() as requests:
        record = await pack_part(part, deployment, deadline)
    return {**pack_result(record), "requests": requests}


def pack_result(record: PackRecord) -> dict[str, Any]:
    """Return the result of an invocation for a run."""
    return {
        "run": record.run,
        "state": "packing" if record.state == "packing" else "complete",
        "samples": record.samples,
        "objects": len(record),
        "size_bytes": 0 if record.prefix is None else record.prefix.size_bytes,
    }


async def pack_part(
    part: SourcePart, deployment: Deployment, deadline: InvocationDeadline, opened: ObjectSource | None = None
) -> PackRecord:
    """Pack a part, as far as the time allows, and return its record; see :func:`pack`.

    Args:
        part: part to pack.
        deployment: deployment with the stores and the catalog.
        deadline: end of the invocation.
        opened: samples of the part, if they are open already.
    """
    time_seconds = deadline.remaining_seconds()
    store, source = deployment.dataset_store(part.dataset), deployment.source_store(part.source)
    concurrency = _concurrency(deployment.settings.memory_bytes, part.super_sample_bytes)
    journal = await deployment.catalog(part.dataset).journal(part.run)
    record = journal.recorded or part.record()
    if record.state != "packing":
        return record
    record = await drop_lost_prefix(store, record, part.dataset_id)
    cutter = SuperSampleWriter(part.schema, part.super_sample_bytes, dataset=part.dataset_id, run=part.run)
    run = RunWriter(store, cutter, record, journal, concurrency=concurrency)

    async def fill() -> None:
        samples = opened or await open_part(part, source)
        run.skip_durable()
        async with aclosing(samples.read(record.samples)) as samples_ahead:
            async for where, sample in samples_ahead:
                if cut := run.sample_writer.add(sample, where):
                    await run.submit(cut)
        await run.complete()

    await _fill_run(run, fill, deadline, part.source, time_seconds)
    return journal.recorded or record


async def _fill_run(
    run: RunWriter, fill: Callable[[], Awaitable[None]], deadline: InvocationDeadline, source: str, time_seconds: float
) -> None:
    """Fill a run as far as the time allows, and record its progress.

    Raises:
        PackError: there are no samples, or the time is too short for one super-sample.
    """
    recorded = len(run.record)
    await run.begin()
    try:
        async with asyncio.timeout_at(deadline.stop_at_seconds) as limit:
            await fill()
    except Exception as error:
        await _record_progress(run, deadline)
        if not isinstance(error, TimeoutError) or not limit.expired():
            raise
        _log.info("stopping run %s before the deadline, at %d samples", run.record.run, run.progress.samples)
    finally:
        await run.cancel()
    if not run.packed and not limit.expired():
        raise PackError(f"{source}: the part has no samples; nothing was packed")
    if limit.expired() and len(run.packed) == recorded:
        raise PackError(
            f"run {run.record.run} of {source} did not finish a single super-sample of "
            f"{format_bytes(run.sample_writer.super_sample_bytes)} in {time_seconds:.0f} s; give the function more "
            "time or memory, or make smaller super-samples"
        )


async def _permute(task: PermuteTask, deployment: Deployment, deadline: InvocationDeadline) -> dict[str, Any]:
    store = deployment.dataset_store(task.dataset)
    memory_bytes = usable_bytes(deployment.settings.memory_bytes)
    slow = "could not stop in time, since the bucket is slow; the recorded progress is kept"
    with deployment.count_requests() as requests:
        async with deadline.limit(f"{task.step} {task.part} of job {task.job}", slow, late=True):
            if task.step == "slice":
                journal = await deployment.catalog(task.dataset).journal(task.run)
                record = journal.recorded or task.record()
                if record.state == "packing":
                    record = await _pack_slice(task, store, record, journal, memory_bytes, deadline)
                return {**pack_result(record), "requests": requests}
            staged = await read_staged(store, task.job)
            scatter = task.permutation.scatter(
                store, staged, memory_bytes=memory_bytes, stop_at_seconds=deadline.stop_at_seconds
            )
            done = await scatter.write(task.part)
    return {name if name in ("state", "run") else f"scattered_{name}": value for name, value in done.items()} | {
        "requests": requests
    }


async def _pack_slice(
    task: PermuteTask,
    store: RetryingStore,
    record: PackRecord,
    journal: Journal,
    memory_bytes: int,
    deadline: InvocationDeadline,
) -> PackRecord:
    """Pack a slice, as far as the time allows, and return its record."""
    time_seconds = deadline.remaining_seconds()
    staged = await read_staged(store, task.job)
    scatter = task.permutation.scatter(store, staged, memory_bytes=memory_bytes)
    begun = await drop_lost_prefix(store, record, task.dataset_id)
    writer = SuperSampleWriter(staged.schema, task.super_sample_bytes, dataset=task.dataset_id, run=task.run)
    uploads = scatter.source(store, staged).memory.uploads
    run = RunWriter(store, writer, begun, journal, concurrency=uploads)

    async def fill() -> None:
        run.skip_durable()
        permuted = PermutedWriter(run)
        await permuted.write(await scatter.read(task.part, begun.samples))
        await permuted.complete()

    await _fill_run(run, fill, deadline, f"slice {task.part} of job {task.job}", time_seconds)
    return journal.recorded or begun


async def _record_progress(run: RunWriter, deadline: InvocationDeadline) -> None:
    """Record the super-samples that are durable, if there is time."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline.at_seconds - _ANSWER_SECONDS):
            await run.stop(timeout_seconds=max(0.0, deadline.remaining_seconds() - _RECORD_SECONDS))


def _concurrency(memory_bytes: int, super_sample_bytes: int) -> int:
    """Return the number of concurrent uploads that fit in memory."""
    free_bytes = memory_bytes - _BASE_BYTES - MAX_AHEAD_BYTES - _BUILDING_SUPER_SAMPLES * super_sample_bytes
    uploads = free_bytes // super_sample_bytes
    if uploads < 1:
        needed_bytes = memory_bytes - free_bytes + super_sample_bytes
        raise ConfigError(
            f"an instance with {format_bytes(memory_bytes)} of memory cannot pack super-samples of "
            f"{format_bytes(super_sample_bytes)}; give the function at least {format_bytes(needed_bytes)}"
        )
    return min(int(uploads), _MAX_UPLOADS)
