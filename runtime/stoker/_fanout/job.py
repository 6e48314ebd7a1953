"""Packing as a fan-out: one task for each part of a source, and one commit of all parts at the end.

The job's id is a hash of the source and of the settings that divide it into parts. So the same command, run again, is
the same job with the same parts, and each function finds the parts that an earlier run has packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from stoker._base.arguments import BoundedConfig, NumberBound
from stoker._fanout.concurrency import Task
from stoker._format import versions
from stoker._format.supersample import FORMAT, MAX_SUPER_SAMPLE_BYTES
from stoker._pack.plan import check_can_append, check_can_create
from stoker._pack.record import list_records
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
        part_bytes: maximum raw data of a part, in bytes, unless a single object is larger.
    """

    dataset: str
    append: bool = False
    super_sample_bytes: Annotated[int, NumberBound(">=", 1), NumberBound("<=", MAX_SUPER_SAMPLE_BYTES)] = 8 << 20
    part_bytes: int = 256 << 20

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
        tasks: one task per part, in the order of the samples; they may run in any order.
        commit: task that makes one version of the data set out of all parts, to run after all others.
    """

    id: str
    tasks: tuple[Task, ...]
    commit: Task


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
    content = [FORMAT, "job", dataset, source.fingerprint, config.super_sample_bytes, config.part_bytes]
    job = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    if not config.append:
        records = [item.record for item in await list_records(store) if item.record is not None]
        check_can_create(store, base, [record for record in records if record.job != job or record.is_committed])
    common = SourcePart(
        dataset=config.dataset,
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
    commit = {
        "dataset": config.dataset,
        "job": job,
        "runs": [part.run for part in parts],
        "mode": "append" if config.append else "create",
    }
    return PackJob(
        id=job, tasks=tuple(_tasks(source, parts)), commit=Task(name="commit", function="commit", event=commit)
    )


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
