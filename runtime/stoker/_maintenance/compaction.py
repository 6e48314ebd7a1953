"""Compaction: merges many small super-samples into few large ones, in a new version of the manifest.

Continuous ingestion creates small super-samples, and a loader needs as long to read a small object as a large one.
Compaction packs the samples of all super-samples below half of the target size again, in order. Older versions of the
manifest keep the small ones until ``stoker gc --keep-versions`` deletes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from stoker._base.retry import RetryingStore
from stoker._format import versions
from stoker._format.manifest import Manifest, PackRun, group_runs
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._pack.catalog import BucketCatalog
from stoker._pack.merge import collect_source_names, merge
from stoker._pack.record import PackRecord
from stoker._pack.run import SuperSampleWriter, repack
from stoker.errors import NotFoundError

_MIN_OBJECTS = 2
_MAX_REPLACED_RUNS = 12_000  # intervals of runs; a record lists them in its header, whose size is limited


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """Result of a compaction.

    Attributes:
        manifest: newest version.
        objects_before: number of super-samples that were packed again; 0 if there was nothing to gain.
        objects_after: number of super-samples that replaced them.
        left_objects: number of small super-samples left for another compaction.
    """

    manifest: Manifest
    objects_before: int = 0
    objects_after: int = 0
    left_objects: int = 0


async def compact(
    store: RetryingStore,
    catalog: BucketCatalog,
    *,
    now_seconds: float,
    super_sample_bytes: int = 8 << 20,
    limit_bytes: int | None = None,
) -> CompactionResult:
    """Pack the small super-samples of the newest version again.

    A compaction may be killed at any point, and several may run at the same time: a version has either all of the small
    super-samples or all of the large ones. Afterwards the median size is at least half of ``super_sample_bytes``,
    except for data sets of one or two super-samples and if ``limit_bytes``, or the number of runs that a record can
    list, left some.

    Args:
        store: store of the data set.
        catalog: catalog of its pack records.
        now_seconds: Unix time in seconds.
        super_sample_bytes: target size of super-samples, in bytes, at most 32 MiB.
        limit_bytes: maximum total size of the super-samples to pack again, from the first row on; None for no limit.

    Raises:
        NotFoundError: there is no data set.
        BucketNotFoundError: there is no bucket.
        StoreError: the bucket fails.
    """
    base = await versions.find_newest_manifest(store)
    if base is None:
        await versions.check_bucket(store, "data set")
        raise NotFoundError(f"there is no data set at {store.url}; nothing to compact")
    small = np.flatnonzero(base.rows.size_bytes < super_sample_bytes // 2).tolist()
    rows = _select_rows(base, small, limit_bytes)
    if len(rows) < _MIN_OBJECTS or _has_no_gain(base, rows, super_sample_bytes):
        return CompactionResult(manifest=base, left_objects=len(small) if len(rows) < len(small) else 0)
    replaced = group_runs(map(base.locate_row, rows))
    names = collect_source_names(_records_to_keep_names_of(base, replaced, await catalog.records()), now_seconds)
    identity = hashlib.sha256(json.dumps([base.dataset, super_sample_bytes, *map(astuple, replaced)]).encode())
    record = PackRecord(
        run=identity.hexdigest()[:16],
        identity=identity.hexdigest(),
        source=f"compaction of version {base.version}",
        mode="deferred",
        replaces=replaced,
        sources=names,
    )
    target_bytes = min(super_sample_bytes, MAX_TARGET_BYTES)
    cutter = SuperSampleWriter(base.schema, target_bytes, dataset=base.dataset, run=record.run)
    journal = await catalog.journal(record.run)
    packed = await repack(store, map(base.ref, rows), record, journal, cutter)
    merged = await merge(store, catalog, now_seconds=now_seconds)
    return CompactionResult(
        manifest=merged.manifest or base,
        objects_before=len(rows),
        objects_after=len(packed),
        left_objects=len(small) - len(rows),
    )


def _select_rows(base: Manifest, rows: Sequence[int], limit_bytes: int | None) -> list[int]:
    """Return the first of ``rows``, limited by ``limit_bytes`` and by the number of runs that a record can list."""
    ends = np.cumsum(base.rows.size_bytes[list(rows)], dtype=np.int64)
    fitting = len(rows) if limit_bytes is None else int(np.searchsorted(ends, limit_bytes, side="right"))
    return list(
        rows[: min(fitting, sum(run.rows for run in group_runs(map(base.locate_row, rows))[:_MAX_REPLACED_RUNS]))]
    )


def _has_no_gain(base: Manifest, rows: Sequence[int], super_sample_bytes: int) -> bool:
    """Return whether packing the rows again would not reduce their number, as after a compaction."""
    total_bytes = int(base.rows.size_bytes[list(rows)].sum(dtype=np.int64))
    return len(rows) <= -(-total_bytes // super_sample_bytes)


def _records_to_keep_names_of(
    base: Manifest, replaced: Sequence[PackRun], records: Iterable[PackRecord]
) -> Iterable[PackRecord]:
    """Return the records whose hashes of raw objects the new run must keep.

    The record of an earlier compaction keeps its hashes if the manifest keeps some of its rows. Otherwise each
    compaction, which packs the last super-sample of the previous one again, would copy all earlier hashes, and their
    number would only grow.
    """
    runs = {run.run for run in replaced}
    left = {run.run for run in base.remove_runs(replaced).runs}
    return (record for record in records if record.run in runs and not (record.replaces and record.run in left))
