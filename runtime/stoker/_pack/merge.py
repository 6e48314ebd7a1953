"""Merges finished runs into one new version of the manifest, without adding any raw object twice.

Functions are invoked at least once, and a queue may deliver the same raw objects again in other groups, so several runs
may have them. A record lists the raw object of each of its samples. The merge compares them with those of the manifest,
and packs a run with repeated objects again without them. Records keep the raw objects for longer than any queue.

Of several concurrent merges, the first to publish the next version succeeds; the others start again on top of it. A
merge that dies leaves either nothing, or a version whose records are not updated yet; the next merge updates them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from stoker._base.retry import RetryingStore
from stoker._format import versions
from stoker._format.manifest import Manifest, ManifestRows
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._pack.catalog import BucketCatalog
from stoker._pack.record import SOURCE_HASH_BYTES, SOURCE_RETENTION_SECONDS, PackRecord, empty_sources, hash_run
from stoker._pack.run import SuperSampleWriter, repack
from stoker.errors import DatasetExistsError, PackError

_log = logging.getLogger("stoker.pack.merge")
_dedup_log = logging.getLogger("stoker.pack.known")


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutJob:
    """A fan-out job, whose runs are committed together.

    Attributes:
        id: id in the records of the runs, 16 hexadecimal digits.
        runs: ids of all runs, in order of their samples.
        creates: whether the job creates the data set, which must not exist yet.
    """

    id: str
    runs: tuple[str, ...]
    creates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """Result of a merge.

    Attributes:
        manifest: newest version, None if there is no data set.
        runs: number of runs added.
        added_samples: number of samples added.
        repeated_samples: number of samples left out because the data set has them already.
        refused: ids of runs that were not added because they belong to another data set or have other columns.
    """

    manifest: Manifest | None
    runs: int = 0
    added_samples: int = 0
    repeated_samples: int = 0
    refused: tuple[str, ...] = ()


async def merge(
    store: RetryingStore, catalog: BucketCatalog, *, now_seconds: float, job: FanoutJob | None = None
) -> MergeResult:
    """Commit a version with every finished run that waits for a commit, or nothing if there is none.

    Args:
        store: store of the data set.
        catalog: catalog of its pack records.
        now_seconds: Unix time in seconds.
        job: job whose runs to commit; by default all runs that belong to no job.

    Raises:
        PackError: a run of the job is unfinished or belongs to another data set, or the newest version is lost.
        DatasetExistsError: the job creates the data set, which exists already.
        StoreError: the bucket fails.
    """
    while True:
        base = await versions.find_newest_manifest(store)
        records = await catalog.records()  # read after the manifest, so every run of the manifest is among them
        if any(record.version > _version_of(base) for record in records):
            if await _has_newer_version(store, base):
                continue
            raise PackError(
                f"the pack records at {store.url} name a newer version than any that exists; restore it with: "
                f"stoker rebuild-manifest {store.url}"
            )
        records = await _repair_records(catalog, records, base, now_seconds)
        memory = RememberedSources(records, now_seconds)
        waiting, lapsed = (
            _select_of_job(job, records, base, memory, store.url) if job else _select_waiting(records, base, memory)
        )
        accepted, rejected = _select_fitting(waiting, base, job, store.url)
        added, dropped, repeated_samples = await _remove_repeated(store, catalog, memory, accepted, base)
        manifest = base
        if added:
            try:
                manifest = await versions.commit(store, partial(_build_next_version, base, added))
            except _NewerVersionError:
                continue
            await catalog.save(_mark_committed(added, manifest, now_seconds))
        if added or not (lapsed and await _has_newer_version(store, base)):
            await catalog.delete_records([*dropped, *lapsed])
        return MergeResult(
            manifest=manifest,
            runs=len(added),
            added_samples=sum(record.samples for record in added),
            repeated_samples=repeated_samples,
            refused=rejected,
        )


async def _has_newer_version(store: RetryingStore, base: Manifest | None) -> bool:
    return _version_of(await versions.find_newest_manifest(store)) != _version_of(base)


def _version_of(manifest: Manifest | None) -> int:
    return 0 if manifest is None else manifest.version


class _NewerVersionError(Exception):
    """Another writer has committed a version."""


def _build_next_version(base: Manifest | None, added: Sequence[PackRecord], newest: Manifest | None) -> Manifest:
    """Return the version that follows ``base``; :func:`stoker._format.versions.commit` passes ``newest``."""
    if _version_of(newest) != _version_of(base):
        raise _NewerVersionError
    prefixes = [record.prefix for record in added if record.prefix is not None]
    packed = [each for prefix in prefixes for _, each in prefix.records()]
    runs = tuple(run for prefix in prefixes for run in prefix.runs)
    shuffles = {run: shuffle for record in added for run, shuffle in record.shuffles.items()}
    if newest is None:
        return replace(prefixes[0], version=1, rows=ManifestRows.of(packed), runs=runs, shuffles=shuffles)
    remaining = newest.remove_runs(run for record in added for run in record.replaces)
    return remaining.append_runs(ManifestRows.of(packed), *runs, shuffles=shuffles)


async def _repair_records(
    catalog: BucketCatalog, records: list[PackRecord], base: Manifest | None, now_seconds: float
) -> list[PackRecord]:
    """Repair the records that an interrupted merge left, and return the valid records.

    Marks records of runs in the manifest as committed, and deletes committed records of runs that another run replaced.
    """
    if base is None:
        return records
    in_base = {run.run for run in base.runs}
    late = [record for record in records if record.run in in_base and not record.is_committed and len(record)]
    if late:
        await catalog.save(_mark_committed(late, base, now_seconds))
        records = await catalog.records()
    replaced = _find_replaced_runs(records, base.version, in_base)
    await catalog.delete_records(replaced)
    return [record for record in records if record.run not in replaced]


def _find_replaced_runs(records: Sequence[PackRecord], base_version: int, in_base: Set[str]) -> set[str]:
    """Return the committed runs that the manifest no longer has and whose records are not needed."""
    known = {record.run for record in records}
    return {
        record.run
        for record in records
        if record.is_committed and record.run not in in_base and record.version <= base_version
        if not record.job  # kept, so that a repeated job finds its runs committed
        if known.isdisjoint(run.run for run in record.replaces)  # else the replaced runs would look current
    }


def _mark_committed(records: Iterable[PackRecord], manifest: Manifest, now_seconds: float) -> list[PackRecord]:
    return [
        replace(record, state="committed", version=manifest.version, committed_seconds=int(now_seconds))
        for record in records
    ]


def _select_waiting(
    records: Sequence[PackRecord], base: Manifest | None, remembered: RememberedSources
) -> tuple[list[PackRecord], list[str]]:
    """Return the finished runs that belong to no job, and the ids of runs that will never be needed.

    The finished runs come largest first: of two with the same raw objects the smaller is packed again, and a run comes
    before its remainder that an interrupted merge wrote. Runs that will never be needed are compactions of rows that
    another compaction replaced, and unfinished runs whose raw objects were packed by others.
    """
    waiting: list[PackRecord] = []
    lapsed: list[str] = []
    left = base  # the rows that no compaction has replaced
    for record in records:
        if record.mode != "deferred" or record.job or record.is_committed:
            continue
        is_unfinished = record.state == "packing"
        if not record.replaces:
            if not is_unfinished:
                waiting.append(record)
            elif remembered.index.contains(record.names).all():
                lapsed.append(record.run)
        elif left is None or (rest := remembered.apply_compaction(record, left)) is None:
            lapsed.append(record.run)
        elif not is_unfinished:
            waiting.append(record)
            left = rest
    return sorted(waiting, key=lambda record: -record.samples), lapsed


def _select_of_job(
    job: FanoutJob, records: Iterable[PackRecord], base: Manifest | None, remembered: RememberedSources, url: str
) -> tuple[list[PackRecord], list[str]]:
    """Return the job's uncommitted runs, and an empty list of records to delete."""
    by_run = {record.run: record for record in records if record.job == job.id}
    runs = [
        run for run in job.runs if run in by_run or not remembered.index.contains(hash_run(run)).all()
    ]  # others were compacted
    open_runs = [run for run in runs if run not in by_run or by_run[run].state == "packing"]
    if open_runs:
        raise PackError(
            f"{len(open_runs)} of {len(job.runs)} parts of job {job.id} are incomplete (first: run "
            f"{open_runs[0]}); run the same command again"
        )
    waiting = [by_run[run] for run in runs if not by_run[run].is_committed]
    if waiting and job.creates and base is not None:
        raise DatasetExistsError(
            f"another process created a data set at {url} first; add to it with stoker pack --append"
        )
    return waiting, []


def _select_fitting(
    waiting: Sequence[PackRecord], base: Manifest | None, job: FanoutJob | None, url: str
) -> tuple[list[PackRecord], tuple[str, ...]]:
    """Return the runs with the data set's columns and its id or provisional id, and the ids of the other runs."""
    first = base or next((record.prefix for record in waiting if record.prefix is not None), None)
    fitting, rejected = [], []
    for record in waiting:
        if first and record.prefix and fits(record.prefix, first, url):
            fitting.append(record)
        else:
            rejected.append(record.run)
    if rejected and job is not None:
        raise PackError(f"run {rejected[0]} of job {job.id} was packed for another data set than that at {url}")
    if rejected:
        _log.warning(
            "%s: %d runs belong to another data set or have other columns: %s", url, len(rejected), rejected[:5]
        )
    return fitting, tuple(rejected)


def fits(prefix: Manifest, base: Manifest, url: str) -> bool:
    """Return whether a run's super-samples have the columns and the id (or provisional id) of a data set."""
    return prefix.dataset in (provisional_dataset(url), base.dataset) and prefix.schema == base.schema


def provisional_dataset(url: str) -> str:
    """Return the data set id that ingestion functions use for a store's URL before a data set exists there.

    The data set keeps the id if their runs create it; if another process creates it, their runs are packed again.
    """
    return hashlib.sha256(f"ingest {url}".encode()).hexdigest()[:16]


async def _remove_repeated(
    store: RetryingStore,
    catalog: BucketCatalog,
    remembered: RememberedSources,
    selected: Sequence[PackRecord],
    base: Manifest | None,
) -> tuple[list[PackRecord], list[str], int]:
    """Remove the raw objects that committed runs, or earlier runs in ``selected``, have already.

    Returns:
        The runs to add, packed again if samples were left out; the ids of the runs that were packed again or left out,
        whose records are no longer needed; and the number of samples left out.
    """
    first = base or next((record.prefix for record in selected), None)
    dataset = "" if first is None else first.dataset
    added: list[PackRecord] = []
    dropped: list[str] = []
    rests: set[str] = set()
    repeated_samples = 0
    for record in selected:
        if record.run in rests:  # an interrupted merge wrote this remainder, and it was just added
            continue
        if record.replaces:
            added.append(record)
            continue
        wanted = remembered.index.add_new(record.names)
        if all(wanted) and record.prefix is not None and record.prefix.dataset == dataset:
            added.append(record)
            continue
        repeated_samples += wanted.count(False) if any(wanted) else record.samples
        dropped.append(record.run)
        if any(wanted):
            added.append(await _pack_remainder(store, catalog, dataset, record, wanted))
            rests.add(added[-1].run)
    return added, dropped, repeated_samples


async def _pack_remainder(
    store: RetryingStore, catalog: BucketCatalog, dataset: str, record: PackRecord, wanted: Sequence[bool]
) -> PackRecord:
    """Pack the wanted samples of a run again as a new run, and return its record."""
    prefix = record.prefix
    if prefix is None:
        raise PackError(f"run {record.run} is finished but has no super-sample")
    sources = record.sources[np.array(wanted)] if len(record.sources) else record.sources
    identity = hashlib.sha256(f"rest of {record.run} in {dataset}".encode() + sources.tobytes()).hexdigest()
    rest = replace(
        record, run=identity[:16], identity=identity, state="packing", prefix=None, sources=sources, version=0
    )
    limit_bytes = min(prefix.largest_bytes, MAX_TARGET_BYTES)
    cutter = SuperSampleWriter(prefix.schema, limit_bytes, dataset=dataset, run=rest.run)
    journal = await catalog.journal(rest.run)
    is_wanted = (lambda _: True) if all(wanted) else wanted.__getitem__
    return await repack(store, map(prefix.ref, range(len(prefix))), rest, journal, cutter, is_wanted)


def collect_source_names(records: Iterable[PackRecord], now_seconds: float) -> NDArray[np.uint8]:
    """Return the raw objects' hashes in records that are uncommitted or young enough, ``uint8 [names, 16]``."""
    young = now_seconds - SOURCE_RETENTION_SECONDS
    return np.concatenate(
        [empty_sources(), *(r.names for r in records if not r.is_committed or r.committed_seconds >= young)]
    )


class DedupIndex:
    """Set of raw objects' hashes, for tens of millions: 16 bytes each, where a Python set takes about 100.

    Args:
        names: hashes in the set, ``uint8 [names, 16]``.
    """

    def __init__(self, names: NDArray[np.uint8]) -> None:
        self._sorted = np.sort(_as_byte_strings(names))
        self._added: set[bytes] = set()

    def contains(self, names: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which of the names are in the initial set, ``bool [names]``."""
        wanted = _as_byte_strings(names)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.bool_)
        places = np.searchsorted(self._sorted, wanted)
        is_found: NDArray[np.bool_] = self._sorted[np.minimum(places, len(self._sorted) - 1)] == wanted
        return is_found

    def add_new(self, names: NDArray[np.uint8]) -> list[bool]:
        """Add the names, and return for each whether it is new."""
        fresh = []
        for name, is_known in zip(map(bytes, names), self.contains(names).tolist(), strict=True):
            fresh.append(not is_known and name not in self._added)
            self._added.add(name)
        return fresh


class RememberedSources:
    """The raw objects in the records of committed runs.

    Args:
        records: records of all runs.
        now_seconds: Unix time in seconds.
    """

    def __init__(self, records: Iterable[PackRecord], now_seconds: float) -> None:
        self._now_seconds = now_seconds
        self._committed = {record.run: record for record in records if record.is_committed}

    @cached_property
    def index(self) -> DedupIndex:
        """All hashes; computed on first use, because sorting millions is only needed if a run waits for a commit."""
        return DedupIndex(collect_source_names(self._committed.values(), self._now_seconds))

    def apply_compaction(self, record: PackRecord, manifest: Manifest) -> Manifest | None:
        """Return the rest of a manifest after a compaction replaces its rows, None if the compaction cannot apply.

        It cannot apply if some of the rows are missing; if it would remove the last rows of a run without keeping the
        run's hashes (another compaction replaced the other rows meanwhile); or if it is finished with another number
        of samples than the rows.
        """
        rest = manifest.remove_runs(record.replaces)
        if len(rest) != len(manifest) - sum(run.rows for run in record.replaces):
            return None
        if record.state != "packing" and record.samples != manifest.samples - rest.samples:
            _dedup_log.warning("run %s has %d samples, not those of the rows it replaces", record.run, record.samples)
            return None
        ended = {run.run for run in manifest.runs} - {run.run for run in rest.runs}
        names = collect_source_names(
            (self._committed[run] for run in ended if run in self._committed), self._now_seconds
        )
        return rest if DedupIndex(record.sources).contains(names).all() else None


def _as_byte_strings(names: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return the names as fixed-length byte strings, which NumPy sorts; trailing zeros do not matter."""
    return np.ascontiguousarray(names).view(f"S{SOURCE_HASH_BYTES}").reshape(-1)
