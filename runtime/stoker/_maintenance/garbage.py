"""Deletion of objects that no version of the manifest covers, of old versions, or of a whole data set.

Removing a data set deletes every object that stoker wrote for it, and no other.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.sizes import format_count
from stoker._base.task_group import for_each
from stoker._base.upload import UnfinishedUpload, UploadListable
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._maintenance.inspection import (
    SUPER_SAMPLE_KEY_PATTERN,
    RunPosition,
    list_super_samples,
    open_super_sample,
    restore_record,
)
from stoker._order.epoch_layout import EPOCHS_FOLDER
from stoker._pack.catalog import DIGEST_KEY
from stoker._pack.merge import fits
from stoker._pack.record import RECORD_KEY_PATTERN, PackRecord, list_records, record_key
from stoker._pack.shuffle import WORK_KEY_PATTERN, work_folder
from stoker.abc import ObjectInfo, Store
from stoker.errors import ChecksumError, ConfigError, FormatError, NotFoundError, PackError, StoreError

_log = logging.getLogger("stoker.gc")

_MAX_CONCURRENT_DELETES = 16
_MAX_SHOWN_RUNS = 5
_KEY_PATTERNS = {
    "manifests/": re.compile(r"manifests/[0-9]{8,9}\.safetensors", re.ASCII),
    EPOCHS_FOLDER: re.compile(rf"{EPOCHS_FOLDER}[0-9a-f]{{16}}/[0-9]{{8}}/.+", re.ASCII),
    "data/": SUPER_SAMPLE_KEY_PATTERN,
    "packs/": re.compile(rf"{WORK_KEY_PATTERN.pattern}|{RECORD_KEY_PATTERN.pattern}|{re.escape(DIGEST_KEY)}", re.ASCII),
}
"""Folder of a data set → pattern of the keys that belong to it, in the order of deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRun:
    """A run that no version has: its pack can be resumed, or another process commits it.

    Attributes:
        run: id of the run, or of a job that permutes its samples and has no runs in the data set yet.
        objects: number of its super-samples, with those that are temporary.
        record: record of the run; None if it is damaged.
        is_refused: whether the run is complete but cannot be committed, because it belongs to another data set or has
            other columns.
    """

    run: str
    objects: int
    record: PackRecord | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """Result of a garbage collection: the garbage, and the unfinished runs that were protected.

    Attributes:
        objects: super-samples that no kept version and no unfinished run covers, and temporary objects of packs that
            have ended.
        records: keys of pack records whose runs no longer exist.
        unfinished: run id → run that is protected because it may still be finished or committed.
        versions: versions of the manifest that are not kept.
        uploads: unfinished uploads of super-samples whose runs are not unfinished.
        is_deleted: whether the garbage was deleted.
    """

    objects: tuple[ObjectInfo, ...]
    records: tuple[str, ...]
    unfinished: Mapping[str, UnfinishedRun]
    versions: tuple[int, ...] = ()
    uploads: tuple[UnfinishedUpload, ...] = ()
    is_deleted: bool = False

    @property
    def size_bytes(self) -> int:
        """Total size of ``objects``, in bytes."""
        return sum(info.size_bytes for info in self.objects)


async def collect_garbage(
    store: Store, *, delete: bool = False, keep_versions: int | None = None, abandoned: Collection[str] = ()
) -> GarbageReport:
    """Find the objects that no version of the manifest covers, and with ``delete`` delete them.

    Running packs, resumable packs and runs that wait for a commit are not touched. Objects are listed before records
    are read, and records before manifests, so a pack that starts or commits meanwhile loses nothing. If there is no
    manifest at all, only abandoned runs are garbage.

    Args:
        store: store of the data set.
        delete: whether to delete the garbage.
        keep_versions: number of newest versions to keep, at least 1; None keeps all. Objects that only older versions
            cover become garbage, so no training may read these versions.
        abandoned: ids of unfinished runs or jobs to delete; none of them may be running.

    Raises:
        ConfigError: ``keep_versions`` is less than 1, or no unfinished run or job has an id of ``abandoned``.
        NotFoundError: there is no data set and no part of one.
        BucketNotFoundError: there is no bucket.
        PackError: the next commit adds an abandoned run, or versions are lost and the manifest must be rebuilt first.
        FormatError: a version cannot be read, so its objects are unknown.
        ChecksumError: a version is damaged, so its objects are unknown.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1, not {keep_versions}; the newest version is never deleted")
    retrying = RetryingStore(store)
    contents = await _read_contents(retrying, keep_versions)
    given_up = _find_abandoned(contents, abandoned)
    await _check_none_waits(retrying, contents, given_up)
    report = _create_report(contents, given_up)
    uploads = await _list_uploads(retrying, report)
    report = replace(report, uploads=uploads)
    if delete:
        await _delete(retrying, contents.newest, report)
        report = replace(report, is_deleted=True)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreContents:
    """The objects of a data set in the store.

    Attributes:
        url: URL of the store.
        objects: every object with the key of a super-sample.
        records: run → record; None for a damaged record.
        newest: newest version of the manifest, None if there is none.
        dropped: versions that are not kept.
        covered: run → half-open intervals of the numbers that the kept versions have.
        work: pack → temporary objects of a pack that permutes its samples; the pack is a run or a job.
        staged: pack → a record of its temporary runs, if one can be read.
    """

    url: str
    objects: Mapping[RunPosition, ObjectInfo]
    records: Mapping[str, PackRecord | None]
    newest: Manifest | None
    dropped: tuple[int, ...]
    covered: Mapping[str, Set[tuple[int, int]]]
    work: Mapping[str, Sequence[ObjectInfo]]
    staged: Mapping[str, PackRecord]

    @property
    def open_work(self) -> set[str]:
        """The packs with temporary objects that are not committed."""
        committed = {run for run, each in self.records.items() if each is not None and each.is_committed}
        committed |= {each.job for each in self.records.values() if each is not None and each.is_committed}
        return self.work.keys() - committed - self.covered.keys()

    @property
    def unfinished(self) -> dict[str, PackRecord | None]:
        """The records of runs that are not committed, including damaged records, whose state is unknown."""
        return {run: each for run, each in self.records.items() if each is None or not each.is_committed}

    def is_refused(self, record: PackRecord | None) -> bool:
        """Return whether a run is complete but belongs to another data set, so that it cannot be committed."""
        prefix = None if record is None or record.mode != "deferred" or record.state != "complete" else record.prefix
        return self.newest is not None and prefix is not None and not fits(prefix, self.newest, self.url)


async def _read_contents(store: RetryingStore, keep_versions: int | None) -> _StoreContents:
    """Read the store: objects first, then records, then manifests, so that objects added meanwhile are not garbage."""
    objects = await list_super_samples(store)
    work = await _list_work(store)
    logged = await list_records(store)
    newest = await versions.find_newest_manifest(store)
    if any(item.record is not None and item.record.version > (newest.version if newest else 0) for item in logged):
        raise PackError(
            f"the pack records at {store.url} name a newer version than any that exists; nothing is deleted "
            f"before it is restored with: stoker rebuild-manifest {store.url}"
        )
    if newest is None and not (objects or logged or work):
        await versions.check_bucket(store, "data set")
        raise NotFoundError(f"there is no data set at {store.url}, and no part of one")
    numbers = await versions.list_versions(store)
    dropped = [] if keep_versions is None else numbers[:-keep_versions]
    manifests = [newest] if newest is not None else []
    manifests += [await versions.read_manifest(store, version) for version in numbers if version not in dropped]
    return _StoreContents(
        url=store.url,
        objects=objects,
        records={item.key.removeprefix("packs/").removesuffix(".safetensors"): item.record for item in logged},
        newest=newest,
        dropped=tuple(dropped),
        covered=_covered_intervals(manifests),
        work=work,
        staged={pack: record for pack in work if (record := await _read_staged(store, pack)) is not None},
    )


async def _list_work(store: RetryingStore) -> dict[str, list[ObjectInfo]]:
    """Return pack → temporary objects of a pack that permutes its samples."""
    work: dict[str, list[ObjectInfo]] = defaultdict(list)
    with suppress(NotFoundError):
        async for info in store.list("packs/"):
            if match := WORK_KEY_PATTERN.fullmatch(info.key):
                work[match[1]].append(info)
    return dict(work)


async def _read_staged(store: RetryingStore, pack: str) -> PackRecord | None:
    """Return a record of the runs in a pack's work folder."""
    logged = await list_records(work_folder(store, pack))
    return next((item.record for item in logged if item.record is not None), None)


def _find_abandoned(contents: _StoreContents, abandoned: Collection[str]) -> set[str]:
    """Return the unfinished runs with the given ids of runs or jobs."""
    open_runs = ({run for run, _ in contents.objects} | contents.records.keys()) - contents.covered.keys()
    of_id = defaultdict(set, {run: {run} for run in open_runs | contents.open_work})
    for run, record in contents.unfinished.items():
        if record is not None and record.job and run in open_runs:
            of_id[record.job].add(run)
    if unknown := [each for each in abandoned if each not in of_id]:
        raise ConfigError(
            f"no unfinished run or job at {contents.url} has the id {unknown[0]!r:.80}; list them with: stoker gc "
            f"{contents.url}"
        )
    return {run for each in abandoned for run in of_id[each]}


async def _check_none_waits(store: RetryingStore, contents: _StoreContents, abandoned_runs: Set[str]) -> None:
    """Raise PackError if the next commit would add one of the runs.

    If a catalog keeps records in memory until the commit, the bucket's record does not show that a run is complete, but
    its last super-sample does.
    """
    waiting = []
    for run, record in contents.records.items():
        if (
            run not in abandoned_runs
            or record is None
            or record.mode != "deferred"
            or record.job
            or record.is_committed
        ):
            continue
        pending = record
        if record.state == "packing":
            with suppress(FormatError):  # a run with a foreign object never completes
                pending = await restore_record(store, record)
        if pending.state == "complete" and not contents.is_refused(pending):
            waiting.append(run)
    if waiting:
        raise PackError(
            f"the next commit to {store.url} adds {format_count(len(waiting), 'run')} that --abandoned names, "
            f"because they are complete: {', '.join(waiting[:_MAX_SHOWN_RUNS])}; nothing was deleted"
        )


def _create_report(contents: _StoreContents, abandoned_runs: Set[str]) -> GarbageReport:
    """Return the garbage if the runs in ``abandoned_runs`` are abandoned."""
    protected = {
        run: each for run, each in contents.unfinished.items() if run not in abandoned_runs | contents.covered.keys()
    }
    counts = Counter(run for run, _ in contents.objects)
    open_jobs = {record.job for record in protected.values() if record is not None}
    open_work = contents.open_work - abandoned_runs
    for pack in open_work - open_jobs - protected.keys():
        protected[pack] = contents.staged.get(pack)
    counts.update({pack: len(contents.work[pack]) for pack in open_work})
    unfinished = {
        run: UnfinishedRun(run=run, objects=counts[run], record=record, is_refused=contents.is_refused(record))
        for run, record in protected.items()
    }
    # Without a manifest, only abandoned runs are garbage.
    garbage = tuple(
        info
        for (run, number), info in contents.objects.items()
        if run not in protected and (run in abandoned_runs or contents.newest is not None)
        if not any(start <= number < end for start, end in contents.covered.get(run, ()))
    )
    garbage += tuple(info for pack in sorted(contents.work.keys() - open_work) for info in contents.work[pack])
    staying = (contents.records.keys() & contents.covered.keys()) | protected.keys()
    records = tuple(
        record_key(run)
        for run, record in contents.records.items()
        if run not in staying and not _is_compaction_of(record, staying)
    )
    return GarbageReport(objects=garbage, records=records, unfinished=unfinished, versions=contents.dropped)


def _is_compaction_of(record: PackRecord | None, staying: Set[str]) -> bool:
    """Return whether a record of a compaction must stay because a record of a run that it replaced stays."""
    return record is not None and record.is_committed and any(run.run in staying for run in record.replaces)


async def _list_uploads(store: RetryingStore, report: GarbageReport) -> tuple[UnfinishedUpload, ...]:
    """Return the unfinished uploads of super-samples, except those of unfinished runs, which may go on."""
    if not isinstance(store.wrapped, UploadListable):
        return ()
    try:
        found = await store.wrapped.list_uploads("data/")
    except StoreError as error:
        _log.warning(
            "unfinished uploads at %s could not be listed, so those of killed packs may stay, and be charged: %s; "
            "permit s3:ListBucketMultipartUploads, or let a lifecycle rule abort them",
            store.url,
            error,
        )
        return ()
    runs = ((upload, SUPER_SAMPLE_KEY_PATTERN.fullmatch(upload.key)) for upload in found)
    return tuple(upload for upload, match in runs if match and upload.key.split("/")[1] not in report.unfinished)


async def _delete(store: RetryingStore, newest: Manifest | None, report: GarbageReport) -> None:
    """Delete the garbage in an order in which no remaining object refers to a deleted one."""
    if newest is not None:
        await versions.advance_pointer(store, newest)  # an old pointer would hide the versions after a gap
    for keys in (
        [version_key(version) for version in report.versions],
        list(report.records),
        [info.key for info in report.objects],
    ):
        await for_each(keys, store.delete, concurrency=_MAX_CONCURRENT_DELETES)
    if isinstance(store.wrapped, UploadListable):
        await for_each(report.uploads, store.wrapped.abort_upload, concurrency=_MAX_CONCURRENT_DELETES)


def _covered_intervals(manifests: Sequence[Manifest]) -> dict[str, set[tuple[int, int]]]:
    """Return run → half-open intervals of the numbers that the manifests have."""
    covered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for manifest in manifests:
        for run in manifest.runs:
            covered[run.run].add((run.first_number, run.first_number + run.rows))
    return covered


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """The objects that the removal of a data set deletes.

    Attributes:
        manifest: newest version, None if none can be read.
        objects: objects to delete, in order: manifests first, so that no remaining object refers to a deleted one, and
            pack records last, so that an interrupted removal can be run again.
        others: objects in the data set's folders that do not belong to it and stay.
    """

    manifest: Manifest | None
    objects: tuple[ObjectInfo, ...]
    others: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of the objects to delete, in bytes."""
        return sum(info.size_bytes for info in self.objects)


async def plan_removal(store: Store) -> RemovalPlan:
    """Return the objects of a data set, without deleting any.

    Raises:
        NotFoundError: there is no data set and no part of an unfinished pack.
        BucketNotFoundError: the bucket or folder does not exist.
    """
    reader = RetryingReader(store)
    own: list[ObjectInfo] = []
    others: list[ObjectInfo] = []
    with suppress(NotFoundError):
        own.append(await reader.head(POINTER_KEY))
    for folder, pattern in _KEY_PATTERNS.items():
        async for info in reader.list(folder):
            (own if pattern.fullmatch(info.key) else others).append(info)
    manifest = None
    with suppress(FormatError, ChecksumError, NotFoundError):
        manifest = await versions.find_newest_manifest(reader)
    if manifest is None and not await _has_pack(reader, own):
        raise NotFoundError(f"there is no data set at {store.url}; nothing was deleted")
    return RemovalPlan(manifest=manifest, objects=tuple(own), others=tuple(others))


async def _has_pack(reader: RetryingReader[Store], objects: Iterable[ObjectInfo]) -> bool:
    """Return whether a pack left a readable record or a readable first super-sample."""
    if any(logged.record is not None for logged in await list_records(reader)):
        return True
    first = next((info.key for info in objects if SUPER_SAMPLE_KEY_PATTERN.fullmatch(info.key)), None)
    if first is not None:
        with suppress(NotFoundError, FormatError, ChecksumError):
            await open_super_sample(reader, first)
            return True
    return False


async def remove_dataset(
    store: Store, removal: RemovalPlan, on_deleted: Callable[[ObjectInfo], object] | None = None
) -> None:
    """Delete the objects of a data set: one folder after the other, those of a folder concurrently.

    Training that reads the data set fails at its next request; a running pack fails at its next record.

    Args:
        store: store of the data set.
        removal: objects to delete.
        on_deleted: called with each object after its deletion.
    """
    retrying = RetryingStore(store)

    async def delete(info: ObjectInfo) -> None:
        await retrying.delete(info.key)
        if on_deleted is not None:
            on_deleted(info)

    for _, infos in groupby(removal.objects, key=lambda info: info.key.partition("/")[0]):
        await for_each(infos, delete, concurrency=_MAX_CONCURRENT_DELETES)
