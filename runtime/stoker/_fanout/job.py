"""Packing as a fan-out: one task for each part of a source, and one commit of all parts at the end.

The job's id is a hash of the source and of the settings that divide it into parts. So the same command, run again, is
the same job with the same parts, and each function finds the parts that an earlier run has packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from stoker._base.arguments import BoundedConfig, NumberBound
from stoker._fanout.concurrency import Task
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._format.supersample import FORMAT, MAX_TARGET_BYTES
from stoker._order.epoch_layout import MAX_SLICES
from stoker._pack.permute_task import PermuteTask
from stoker._pack.plan import check_can_append, check_can_create
from stoker._pack.record import list_records
from stoker._pack.shuffle import work_url
from stoker._sources import ObjectSource
from stoker._sources.parts import SourcePart, split_source
from stoker.abc import Readable
from stoker.errors import ConfigError

MAX_PARTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig(BoundedConfig):
    """Settings of a pack job.

    Attributes:
        dataset: URL of the data set, as functions reach it.
        append: whether to append to an existing data set; if not, there must be none.
        super_sample_bytes: maximum data of a super-sample, in bytes.
        part_bytes: maximum raw data of a part, in bytes, unless a single object is larger; with ``shuffle`` also the
            mean data of a slice of the permutation.
        shuffle: seed of a uniform permutation of all samples; None for the source's order.
    """

    dataset: str
    append: bool = False
    super_sample_bytes: Annotated[int, NumberBound(">=", 1), NumberBound("<=", MAX_TARGET_BYTES)] = 8 << 20
    part_bytes: int = 256 << 20
    shuffle: int | None = None

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if self.part_bytes < self.super_sample_bytes:
            raise ConfigError(
                f"a part of {self.part_bytes} bytes would not fill a super-sample of {self.super_sample_bytes}; "
                "make parts larger (--part-bytes), or super-samples smaller (--super-sample-bytes)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """The tasks of a pack job.

    Attributes:
        id: id of the job, 16 hexadecimal digits.
        dataset_id: id of the data set, 16 hexadecimal digits.
        runs: pack runs of the parts, in the order of the samples.
        tasks: one task per part, in the order of the samples; they may run in any order.
        commit: task that makes one version of the data set out of all parts, to run after all others. For a job that
            permutes the samples, :func:`plan_permutation` has another one.
    """

    id: str
    dataset_id: str
    runs: tuple[str, ...]
    tasks: tuple[Task, ...]
    commit: Task

    @property
    def is_committed(self) -> bool:
        """Whether an earlier process has committed the job, so that there is nothing to pack."""
        return not self.tasks


async def plan_job(source: ObjectSource, store: Readable, config: JobConfig) -> PackJob:
    """Return the job that packs ``source`` into the data set at ``store``.

    Raises:
        ConfigError: there are too many parts.
        DatasetExistsError: the data set exists, and ``append`` is False.
        NotFoundError: the data set does not exist, and ``append`` is True.
        SchemaError: the data set has other columns.
        StoreError: the data set cannot be read.
    """
    base = await versions.find_newest_manifest(store)
    if config.append:
        base = check_can_append(store, source.schema, base)
    dataset = base.dataset if config.append and base is not None else None
    content: list[object] = [FORMAT, "job", dataset, source.fingerprint, config.super_sample_bytes, config.part_bytes]
    if config.shuffle is not None:
        content.append(["shuffle", str(config.shuffle)])
    job = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    if not config.append:
        records = [item.record for item in await list_records(store) if item.record is not None]
        check_can_create(store, base, [record for record in records if record.job != job or record.is_committed])
    if config.shuffle is not None and (done := await _find_committed(store, job)):
        return PackJob(id=job, dataset_id=dataset or job, runs=(), tasks=(), commit=_plan_commit(config, job, done))
    common = SourcePart(
        dataset=config.dataset if config.shuffle is None else work_url(config.dataset, job),
        dataset_id=dataset or job,
        source=source.root,
        kind=source.kind,
        schema=source.schema,
        super_sample_bytes=config.super_sample_bytes,
        job=job,
    )
    parts = tuple(split_source(source, common, config.part_bytes))
    if len(parts) > MAX_PARTS:
        raise ConfigError(
            f"the source has {len(parts)} parts, more than the {MAX_PARTS} that one commit allows; make parts larger "
            "(--part-bytes)"
        )
    runs = tuple(part.run for part in parts)
    return PackJob(
        id=job,
        dataset_id=common.dataset_id,
        runs=runs,
        tasks=tuple(_tasks(source, parts)),
        commit=_plan_commit(config, job, runs),
    )


def _plan_commit(config: JobConfig, job: str, runs: Sequence[str]) -> Task:
    mode = "append" if config.append else "create"
    event = {"dataset": config.dataset, "job": job, "runs": list(runs), "mode": mode}
    return Task(name="commit", function="commit", event=event)


def plan_permutation(job: PackJob, staged: Manifest, config: JobConfig) -> dict[str, tuple[Task, ...]]:
    """Return the tasks that permute staged samples: activity → tasks, which must be complete before the next ones.

    Args:
        job: job whose parts are packed.
        staged: manifest of its samples, in the source's order.
        config: configuration of the job, with a seed.
    """
    assert config.shuffle is not None  # noqa: S101 - of a job that permutes
    parts = min(-(-staged.size_bytes // config.part_bytes), staged.samples, MAX_SLICES)
    first = PermuteTask(
        dataset=config.dataset,
        dataset_id=job.dataset_id,
        job=job.id,
        seed=config.shuffle,
        parts=parts,
        super_sample_bytes=config.super_sample_bytes,
        step="slice",
        part=0,
    )
    slices = [replace(first, part=part) for part in range(parts)]
    scatters = [replace(first, step="scatter", part=part) for part in range(first.permutation.count_scatters(staged))]

    def plan(tasks: Sequence[PermuteTask]) -> tuple[Task, ...]:
        size_bytes = staged.size_bytes // max(1, len(tasks))
        return tuple(
            Task(name=f"{task.step} {task.part}", function="pack", event=task.to_event(), size_bytes=size_bytes)
            for task in tasks
        )

    commit = _plan_commit(config, job.id, [task.run for task in slices])
    return {"scattering": plan(scatters), "permuting": plan(slices), "committing": (commit,)}


async def _find_committed(store: Readable, job: str) -> list[str]:
    """Return the runs of a job that was committed earlier; none if it was not."""
    records = [item.record for item in await list_records(store) if item.record is not None]
    return [record.run for record in records if record.job == job and record.is_committed]


def _tasks(source: ObjectSource, parts: Sequence[SourcePart]) -> Iterator[Task]:
    begin = 0
    for number, part in enumerate(parts):
        if part.rows is not None and source.samples:
            first, last = part.rows
            size_bytes = source.size_bytes * (last - first) // source.samples
            name = f"part {number} (rows {first} to {last - 1})"
        else:
            end = begin + (len(part.objects) if part.keys is None else part.keys.objects)
            size_bytes = sum(item.size_bytes for item in source.objects[begin:end])
            name = f"part {number} ({source.objects[begin].key} to {source.objects[end - 1].key})"
            begin = end
        yield Task(name=name, function="pack", event=part.to_json(), size_bytes=size_bytes)
