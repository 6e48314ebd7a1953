"""Deleting: what no version of the manifest covers, versions that nobody wants any more, or the whole data set.

Of the last, every object that stoker made for it goes, and no other.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.sizes import counted
from stoker._base.task_group import for_each
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._maintenance.inspection import SUPER_SAMPLE_KEY, Place, list_super_samples, open_super_sample, restored
from stoker._order.order import EPOCHS_FOLDER
from stoker._pack.catalog import DIGEST_KEY
from stoker._pack.merge import fits
from stoker._pack.record import RECORD_KEY, PackRecord, list_records, record_key
from stoker.abc import ObjectInfo, Store
from stoker.errors import ChecksumError, ConfigError, FormatError, NotFoundError, PackError

_DELETES_AT_ONCE = 16
_SHOWN_RUNS = 5
_FOLDERS = {
    "manifests/": re.compile(r"manifests/[0-9]{8,9}\.safetensors", re.ASCII),
    EPOCHS_FOLDER: re.compile(rf"{EPOCHS_FOLDER}[0-9a-f]{{16}}/[0-9]{{8}}/.+", re.ASCII),
    "data/": SUPER_SAMPLE_KEY,
    "packs/": re.compile(rf"{RECORD_KEY.pattern}|{re.escape(DIGEST_KEY)}", re.ASCII),
}
"""The folders of a data set, in the order in which they are deleted, and the keys in them that are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A run that no version has: its pack can be resumed, or another commits it.

    Attributes:
        run: its id.
        objects: how many super-samples it has.
        record: what is known of it; None where that is damaged.
        is_refused: whether it has come to its end and no commit adds it: it is of another data set, or has other
            columns.
    """

    run: str
    objects: int
    record: PackRecord | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """What is garbage, and what would be if it were given up.

    Attributes:
        objects: super-samples that nothing covers.
        records: keys of pack records whose runs are nowhere.
        unfinished: runs that are protected since somebody may finish or commit them, by id.
        versions: of the manifest, older than those that are kept.
        is_deleted: whether the garbage is gone.
    """

    objects: tuple[ObjectInfo, ...]
    records: tuple[str, ...]
    unfinished: Mapping[str, Unfinished]
    versions: tuple[int, ...] = ()
    is_deleted: bool = False

    @property
    def size_bytes(self) -> int:
        """How many bytes the super-samples have."""
        return sum(info.size_bytes for info in self.objects)


async def gc(
    store: Store, *, delete: bool = False, keep_versions: int | None = None, abandoned: Collection[str] = ()
) -> GarbageReport:
    """Find, and with ``delete`` delete, what no version of the manifest covers.

    A pack that runs, or that was killed and can be resumed, is left alone, and so is what waits for a commit. The
    listing of objects is taken before the records are read and those before the manifests, so a pack that starts or
    commits meanwhile loses nothing. Where there is no manifest at all, nothing but what was given up is garbage.

    Args:
        store: where the data set is.
        delete: delete what was found.
        keep_versions: how many of the newest versions to keep, at least 1; None keeps all. What only older ones
            cover becomes garbage, so no training must run on them.
        abandoned: ids of runs, or of whole jobs, that nobody will finish; none of them may be running.

    Raises:
        ConfigError: ``keep_versions`` is less than 1; or nothing has an id of ``abandoned``.
        NotFoundError: there is neither a manifest nor anything else. BucketNotFoundError: there is no bucket.
        PackError: the next commit adds a run that is called abandoned; or records tell of versions that are lost, and
            the manifest must be rebuilt first.
        FormatError: a version cannot be read, so nobody can tell what it covers. ChecksumError likewise.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1, not {keep_versions}; the newest version is never deleted")
    retrying = RetryingStore(store)
    there = await _look(retrying, keep_versions)
    given_up = _given_up(there, abandoned)
    await _check_none_waits(retrying, there, given_up)
    report = _sorted_out(there, given_up)
    if delete:
        await _delete(retrying, there.newest, report)
        report = replace(report, is_deleted=True)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _There:
    """What is in the store.

    Attributes:
        url: of the store.
        objects: every object that has the key of a super-sample.
        records: of all runs, by run; None for a damaged one.
        newest: the newest version of the manifest, None if there is none.
        dropped: versions that are not kept.
        covered: half-open intervals of numbers that the kept versions have, by run.
    """

    url: str
    objects: Mapping[Place, ObjectInfo]
    records: Mapping[str, PackRecord | None]
    newest: Manifest | None
    dropped: tuple[int, ...]
    covered: Mapping[str, Set[tuple[int, int]]]

    @property
    def unfinished(self) -> dict[str, PackRecord | None]:
        """The records of runs that are not committed. Of a damaged one nobody knows, so it is among them."""
        return {run: each for run, each in self.records.items() if each is None or not each.is_committed}

    def refuses(self, record: PackRecord | None) -> bool:
        """Return whether no commit adds a run that has come to its end, since it is not of the data set."""
        prefix = None if record is None or record.mode != "deferred" or record.state != "complete" else record.prefix
        return self.newest is not None and prefix is not None and not fits(prefix, self.newest, self.url)


async def _look(store: RetryingStore, keep_versions: int | None) -> _There:
    """Take stock: objects first, then records, then manifests, so that what is added meanwhile is garbage nowhere."""
    objects = await list_super_samples(store)
    logged = await list_records(store)
    newest = await versions.newest_manifest(store)
    if any(item.record is not None and item.record.version > (newest.version if newest else 0) for item in logged):
        raise PackError(
            f"the pack records at {store.url} tell of a newer version than any that is there; nothing is deleted "
            f"before it is restored with: stoker rebuild-manifest {store.url}"
        )
    if newest is None and not (objects or logged):
        await versions.check_bucket(store, "data set")
        raise NotFoundError(f"there is no data set at {store.url}, and nothing of one")
    numbers = await versions.list_versions(store)
    dropped = [] if keep_versions is None else numbers[:-keep_versions]
    kept = [newest] if newest is not None else []
    kept += [await versions.read_manifest(store, version) for version in numbers if version not in dropped]
    return _There(
        url=store.url,
        objects=objects,
        records={item.key.removeprefix("packs/").removesuffix(".safetensors"): item.record for item in logged},
        newest=newest,
        dropped=tuple(dropped),
        covered=_covered(kept),
    )


def _given_up(there: _There, abandoned: Collection[str]) -> set[str]:
    """Return the runs that ids of runs and jobs are of."""
    open_runs = ({run for run, _ in there.objects} | there.records.keys()) - there.covered.keys()
    of_id = defaultdict(set, {run: {run} for run in open_runs})
    for run, record in there.unfinished.items():
        if record is not None and record.job and run in open_runs:
            of_id[record.job].add(run)
    if unknown := [each for each in abandoned if each not in of_id]:
        raise ConfigError(
            f"no unfinished run or job at {there.url} has the id {unknown[0]!r:.80}; stoker gc {there.url} lists those "
            "there are"
        )
    return {run for each in abandoned for run in of_id[each]}


async def _check_none_waits(store: RetryingStore, there: _There, given_up: Set[str]) -> None:
    """Raise PackError if the next commit would add one of the runs, as far as anybody can know.

    The bucket's record may not tell that a run has come to its end, where records are kept in memory until they are
    committed: but its last super-sample does.
    """
    waiting = []
    for run, record in there.records.items():
        if run not in given_up or record is None or record.mode != "deferred" or record.job or record.is_committed:
            continue
        found = record
        if record.state == "packing":
            with suppress(FormatError):  # with an object of somebody else it never comes to its end
                found = await restored(store, record)
        if found.state == "complete" and not there.refuses(found):
            waiting.append(run)
    if waiting:
        raise PackError(
            f"the next commit to {store.url} adds {counted(len(waiting), 'run')} called abandoned, since all of it is "
            f"there: {', '.join(waiting[:_SHOWN_RUNS])}; nothing was deleted"
        )


def _sorted_out(there: _There, given_up: Set[str]) -> GarbageReport:
    """Return what is garbage, where some runs are given up."""
    protected = {run: each for run, each in there.unfinished.items() if run not in given_up | there.covered.keys()}
    counts = Counter(run for run, _ in there.objects)
    unfinished = {
        run: Unfinished(run=run, objects=counts[run], record=record, is_refused=there.refuses(record))
        for run, record in protected.items()
    }
    # Without a manifest, nothing but what was given up is garbage.
    garbage = tuple(
        info
        for (run, number), info in there.objects.items()
        if run not in protected and (run in given_up or there.newest is not None)
        if not any(start <= number < end for start, end in there.covered.get(run, ()))
    )
    staying = (there.records.keys() & there.covered.keys()) | protected.keys()
    records = tuple(
        record_key(run)
        for run, record in there.records.items()
        if run not in staying and not _explains(record, staying)
    )
    return GarbageReport(objects=garbage, records=records, unfinished=unfinished, versions=there.dropped)


def _explains(record: PackRecord | None, staying: Set[str]) -> bool:
    """Return whether a record says what became of rows of which another, that stays, tells."""
    return record is not None and record.is_committed and any(run.run in staying for run in record.replaces)


async def _delete(store: RetryingStore, newest: Manifest | None, report: GarbageReport) -> None:
    """Delete in an order in which nothing that is left names what is gone."""
    if newest is not None:
        await versions.advance(store, newest)  # a pointer that stayed behind would hide what follows a gap
    for keys in (
        [version_key(version) for version in report.versions],
        list(report.records),
        [info.key for info in report.objects],
    ):
        await for_each(keys, store.delete, concurrency=_DELETES_AT_ONCE)


def _covered(manifests: Sequence[Manifest]) -> dict[str, set[tuple[int, int]]]:
    """Return the half-open intervals of numbers that the manifests have of each run."""
    covered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for manifest in manifests:
        for run in manifest.runs:
            covered[run.run].add((run.first_number, run.first_number + run.rows))
    return covered


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What removing a data set deletes.

    Attributes:
        manifest: the newest version, None if none can be read.
        objects: to be deleted, in this order: manifests first, so that nothing that is left names what is gone, and
            pack records last, so that a removal that was cut off is still one of a data set when it is run again.
        others: objects in the data set's folders that are not its own; they stay.
    """

    manifest: Manifest | None
    objects: tuple[ObjectInfo, ...]
    others: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes the objects have."""
        return sum(info.size_bytes for info in self.objects)


async def plan_removal(store: Store) -> Removal:
    """Return what there is of a data set; nothing is deleted.

    Raises:
        NotFoundError: there is no data set, nor anything that a pack of one left.
        BucketNotFoundError: the bucket, or folder, does not exist.
    """
    reader = RetryingReader(store)
    own: list[ObjectInfo] = []
    others: list[ObjectInfo] = []
    with suppress(NotFoundError):
        own.append(await reader.head(POINTER_KEY))
    for folder, pattern in _FOLDERS.items():
        async for info in reader.list(folder):
            (own if pattern.fullmatch(info.key) else others).append(info)
    manifest = None
    with suppress(FormatError, ChecksumError, NotFoundError):
        manifest = await versions.newest_manifest(reader)
    if manifest is None and not await _has_pack(reader, own):
        raise NotFoundError(f"there is no data set at {store.url}; nothing was deleted")
    return Removal(manifest=manifest, objects=tuple(own), others=tuple(others))


async def _has_pack(reader: RetryingReader[Store], objects: Iterable[ObjectInfo]) -> bool:
    """Return whether a pack left a record that can be read, or its first super-sample."""
    if any(logged.record is not None for logged in await list_records(reader)):
        return True
    first = next((info.key for info in objects if SUPER_SAMPLE_KEY.fullmatch(info.key)), None)
    if first is not None:
        with suppress(NotFoundError, FormatError, ChecksumError):
            await open_super_sample(reader, first)
            return True
    return False


async def remove(store: Store, removal: Removal, on_deleted: Callable[[ObjectInfo], object] | None = None) -> None:
    """Delete the objects, those of one kind side by side and one kind after the other.

    Training that reads the data set fails with its next request; a pack that runs fails with its next record.

    Args:
        store: where the data set is.
        removal: what to delete.
        on_deleted: called with each object when it is gone.
    """
    retrying = RetryingStore(store)

    async def delete(info: ObjectInfo) -> None:
        await retrying.delete(info.key)
        if on_deleted is not None:
            on_deleted(info)

    for _, infos in groupby(removal.objects, key=lambda info: info.key.partition("/")[0]):
        await for_each(infos, delete, concurrency=_DELETES_AT_ONCE)
