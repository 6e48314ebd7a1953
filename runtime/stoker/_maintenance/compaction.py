"""Compaction: many small super-samples into few large ones, in a version of the manifest that has these instead.

What raw objects trickle into is small, and a loader reads a small object as slowly as a large one. The samples of all
super-samples below half of the target size are packed again, in order. Older versions of the manifest keep what they
have until ``stoker gc --keep-versions`` takes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from stoker._base.retry import RetryingStore
from stoker._format import versions
from stoker._format.manifest import Manifest, PackRun, pack_runs
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._pack.catalog import BucketCatalog
from stoker._pack.merge import merge, remembered
from stoker._pack.record import PackRecord
from stoker._pack.run import Cutter, pack_again
from stoker.errors import NotFoundError

_LEAST_OBJECTS = 2
_MOST_REPLACED = 12_000  # intervals of runs: a record names them in its header, which is limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What a compaction did.

    Attributes:
        manifest: the newest version.
        objects_before: how many super-samples were packed again; 0 where there was nothing to gain.
        objects_after: how many they became.
        left_objects: how many small ones are left for another time.
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
) -> Compacted:
    """Pack the small super-samples of the newest version again.

    It may die at any point, and run twice at the same time: a version has either all of the small ones or all of the
    large ones. The median size is at least half of ``super_sample_bytes`` afterwards, but for data sets of one or two
    super-samples, and where ``limit_bytes``, or how many runs a record can name, left some.

    Args:
        store: where the data set is.
        catalog: where its pack records are.
        now_seconds: of the Unix epoch.
        super_sample_bytes: how large a super-sample should be: at most 32 MiB.
        limit_bytes: how much to pack again at most, from the first row on; None for all that is small.

    Raises:
        NotFoundError: there is no data set. BucketNotFoundError: there is no bucket.
        StoreError: the bucket fails.
    """
    base = await versions.newest_manifest(store)
    if base is None:
        await versions.check_bucket(store, "data set")
        raise NotFoundError(f"there is no data set at {store.url}; nothing to compact")
    small = np.flatnonzero(base.rows.size_bytes < super_sample_bytes // 2).tolist()
    rows = _first(base, small, limit_bytes)
    if len(rows) < _LEAST_OBJECTS or _would_remain(base, rows, super_sample_bytes):
        return Compacted(manifest=base, left_objects=len(small) if len(rows) < len(small) else 0)
    replaced = pack_runs(map(base.place, rows))
    names = remembered(_forgotten_with(base, replaced, await catalog.records()), now_seconds)
    identity = hashlib.sha256(json.dumps([base.dataset, super_sample_bytes, *map(astuple, replaced)]).encode())
    record = PackRecord(
        run=identity.hexdigest()[:16],
        identity=identity.hexdigest(),
        source=f"compaction of version {base.version}",
        mode="deferred",
        replaces=replaced,
        sources=names,
    )
    target_bytes = min(super_sample_bytes, MAX_SUPER_SAMPLE_BYTES)
    cutter = Cutter(base.schema, target_bytes, dataset=base.dataset, run=record.run)
    journal = await catalog.journal(record.run)
    packed = await pack_again(store, map(base.ref, rows), record, journal, cutter)
    merged = await merge(store, catalog, now_seconds=now_seconds)
    return Compacted(
        manifest=merged.manifest or base,
        objects_before=len(rows),
        objects_after=len(packed),
        left_objects=len(small) - len(rows),
    )


def _first(base: Manifest, rows: Sequence[int], limit_bytes: int | None) -> list[int]:
    """Return the first of some rows, of at most ``limit_bytes`` together, and of as many runs as a record can name."""
    ends = np.cumsum(base.rows.size_bytes[list(rows)], dtype=np.int64)
    fitting = len(rows) if limit_bytes is None else int(np.searchsorted(ends, limit_bytes, side="right"))
    return list(rows[: min(fitting, sum(run.rows for run in pack_runs(map(base.place, rows))[:_MOST_REPLACED]))])


def _would_remain(base: Manifest, rows: Sequence[int], super_sample_bytes: int) -> bool:
    """Return whether the rows are those that a compaction leaves: the last, small super-sample of one, alone."""
    total_bytes = int(base.rows.size_bytes[list(rows)].sum(dtype=np.int64))
    return len(rows) <= -(-total_bytes // super_sample_bytes)


def _forgotten_with(base: Manifest, replaced: Sequence[PackRun], records: Iterable[PackRecord]) -> Iterable[PackRecord]:
    """Return the records whose names are lost with the rows that are replaced.

    A compaction of which the manifest keeps something keeps its names, too: else each would hand those of all before
    it on to the next, which packs its last super-sample again, and their number would only grow.
    """
    runs = {run.run for run in replaced}
    left = {run.run for run in base.without(replaced).runs}
    return (record for record in records if record.run in runs and not (record.replaces and record.run in left))
