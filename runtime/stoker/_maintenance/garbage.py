"""Collecting garbage: what no version of the manifest covers, and versions that nobody wants any more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from stoker._base.retry import RetryingStore
from stoker._base.sizes import counted
from stoker._base.task_group import for_each
from stoker._format import versions
from stoker._format.manifest import Manifest, version_key
from stoker._maintenance.inspection import Place, list_super_samples
from stoker._maintenance.restoration import restored
from stoker._pack.log import Logged, list_records
from stoker._pack.part import provisional_dataset
from stoker._pack.record import PackRecord
from stoker.abc import ObjectInfo, Store
from stoker.errors import ConfigError, FormatError, NotFoundError, PackError

__all__ = ["GarbageReport", "Unfinished", "gc"]

_DELETES_AT_ONCE = 16
_SHOWN_RUNS = 5


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
    objects = await list_super_samples(retrying)
    logged = await list_records(retrying)
    newest = await versions.newest_manifest(retrying)
    _check_manifest_is_there(store.url, newest, logged)
    if newest is None and not (objects or logged):
        await versions.check_bucket(store, "data set")
        raise NotFoundError(f"there is no data set at {store.url}, and nothing of one")
    numbers = await versions.list_versions(retrying)
    dropped = [] if keep_versions is None else numbers[:-keep_versions]
    kept = [newest] if newest is not None else []
    kept += [await versions.read_manifest(retrying, version) for version in numbers if version not in dropped]
    covered = _covered(kept)
    given_up = _given_up(store.url, abandoned, objects, logged, covered)
    await _check_none_waits(retrying, newest, [item for item in logged if _run_of(item) in given_up])
    unfinished = {_run_of(item): item.record for item in logged if _is_unfinished(item)}
    protected = {run: record for run, record in unfinished.items() if run not in given_up}
    if newest is None:
        objects = {place: info for place, info in objects.items() if place[0] in {*given_up, *protected}}
    refused = {run for run, record in protected.items() if _is_refused(record, newest, store.url)}
    report = replace(_sorted_out(objects, logged, covered, protected, refused), versions=tuple(dropped))
    if delete:
        await _delete(retrying, newest, report)
        report = replace(report, is_deleted=True)
    return report


def _given_up(
    url: str,
    abandoned: Collection[str],
    objects: Iterable[Place],
    logged: Sequence[Logged],
    covered: Mapping[str, set[tuple[int, int]]],
) -> set[str]:
    """Return the runs that ids of runs and jobs are of."""
    of_id: dict[str, set[str]] = defaultdict(set)
    for run in {run for run, _ in objects} | {_run_of(item) for item in logged}:
        if run not in covered:
            of_id[run].add(run)
    for item in logged:
        if item.record is not None and item.record.job and _is_unfinished(item) and _run_of(item) not in covered:
            of_id[item.record.job].add(_run_of(item))
    if unknown := [each for each in abandoned if each not in of_id]:
        raise ConfigError(
            f"no unfinished run or job at {url} has the id {unknown[0]!r:.80}; stoker gc {url} lists those there are"
        )
    return {run for each in abandoned for run in of_id[each]}


async def _check_none_waits(store: RetryingStore, newest: Manifest | None, given_up: Iterable[Logged]) -> None:
    """Raise PackError if the next commit would add one of the runs, as far as anybody can know.

    The bucket's record may not tell that a run has come to its end, where records are kept in memory until they are
    committed: but its last super-sample does.
    """
    waiting = []
    for item in given_up:
        record = item.record
        if record is None or record.mode != "deferred" or record.job or record.is_committed:
            continue
        if record.state == "packing":
            with suppress(FormatError):  # with an object of somebody else it never comes to its end
                record = await restored(store, record)
        if record.state == "complete" and not _is_refused(record, newest, store.url):
            waiting.append(record.run)
    if waiting:
        raise PackError(
            f"the next commit to {store.url} adds {counted(len(waiting), 'run')} called abandoned, since all of it is "
            f"there: {', '.join(waiting[:_SHOWN_RUNS])}; nothing was deleted"
        )


def _is_refused(record: PackRecord | None, newest: Manifest | None, url: str) -> bool:
    """Return whether no commit adds a run that has come to its end, since it is not of the data set."""
    prefix = None if record is None or record.mode != "deferred" or record.state != "complete" else record.prefix
    if newest is None or prefix is None:
        return False
    return prefix.schema != newest.schema or prefix.dataset not in (newest.dataset, provisional_dataset(url))


def _sorted_out(
    objects: Mapping[Place, ObjectInfo],
    logged: Sequence[Logged],
    covered: Mapping[str, set[tuple[int, int]]],
    protected: Mapping[str, PackRecord | None],
    refused: Collection[str],
) -> GarbageReport:
    """Return what is garbage where some runs are protected and some intervals of some are covered."""
    counts: Counter[str] = Counter()
    garbage = []
    for (run, number), info in objects.items():
        if run in protected and run not in covered:
            counts[run] += 1
        elif not any(start <= number < end for start, end in covered.get(run, ())):
            garbage.append(info)
    unfinished = {
        run: Unfinished(run=run, objects=counts[run], record=record, is_refused=run in refused)
        for run, record in protected.items()
        if run not in covered
    }
    staying = {run for item in logged if (run := _run_of(item)) in covered or run in unfinished}
    records = [item.key for item in logged if _run_of(item) not in staying and not _explains(item, staying)]
    return GarbageReport(objects=tuple(garbage), records=tuple(records), unfinished=unfinished)


def _explains(item: Logged, staying: Set[str]) -> bool:
    """Return whether a record says what became of rows of which another, that stays, tells."""
    record = item.record
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


def _check_manifest_is_there(url: str, newest: Manifest | None, logged: Sequence[Logged]) -> None:
    known = 0 if newest is None else newest.version
    if any(item.record is not None and item.record.version > known for item in logged):
        raise PackError(
            f"the pack records at {url} tell of a newer version than any that is there; nothing is deleted before "
            f"it is restored with: stoker rebuild-manifest {url}"
        )


def _is_unfinished(item: Logged) -> bool:
    # Of a damaged record nobody knows: its run is protected too.
    return item.record is None or not item.record.is_committed


def _run_of(item: Logged) -> str:
    return item.key.removeprefix("packs/").removesuffix(".safetensors")


def _covered(manifests: Sequence[Manifest]) -> dict[str, set[tuple[int, int]]]:
    """Return the half-open intervals of numbers that the manifests have of each run."""
    covered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for manifest in manifests:
        for run in manifest.runs:
            covered[run.run].add((run.first_number, run.first_number + run.rows))
    return covered
