"""Collecting garbage: what no version of the manifest covers, and versions that nobody wants any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker import versions
from stoker.bounded import for_each
from stoker.errors import ConfigError, NotFoundError, PackError
from stoker.maintenance.inspection import Place, list_super_samples
from stoker.manifest import Manifest, version_key
from stoker.pack.log import Logged, list_records
from stoker.retry import RetryingStore
from stoker.store.protocol import ObjectInfo, Store

__all__ = ["GarbageReport", "gc"]

_DELETES_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """What is garbage, and what would be if it were abandoned.

    Attributes:
        objects: super-samples that nothing covers.
        records: keys of pack records whose runs are nowhere.
        unfinished: run → how many super-samples are protected for a pack that can be resumed.
        versions: of the manifest, older than those that are kept.
        is_deleted: whether the garbage is gone.
    """

    objects: tuple[ObjectInfo, ...]
    records: tuple[str, ...]
    unfinished: Mapping[str, int]
    versions: tuple[int, ...] = ()
    is_deleted: bool = False

    @property
    def size_bytes(self) -> int:
        """How many bytes the super-samples have."""
        return sum(info.size_bytes for info in self.objects)


async def gc(
    store: Store, *, delete: bool = False, keep_versions: int | None = None, abandoned: bool = False
) -> GarbageReport:
    """Find, and with ``delete`` delete, what no version of the manifest covers.

    A pack that runs, or that was killed and can be resumed, is left alone. The listing of objects is taken before the
    records are read and those before the manifests, so a pack that starts or commits meanwhile loses nothing.

    Args:
        store: where the data set is.
        delete: delete what was found.
        keep_versions: how many of the newest versions to keep, at least 1; None keeps all. What only older ones
            cover becomes garbage, so no training must run on them.
        abandoned: unfinished packs are garbage too, and jobs that were not committed. No pack must be running. What
            functions have packed and the next commit adds is not.

    Raises:
        ConfigError: ``keep_versions`` is less than 1.
        NotFoundError: there is no manifest, and not ``abandoned``.
        PackError: records tell of versions that are lost; the manifest must be rebuilt first.
        FormatError: a version cannot be read, so nobody can tell what it covers. ChecksumError likewise.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1, not {keep_versions}; the newest version is never deleted")
    retrying = RetryingStore(store)
    objects = await list_super_samples(retrying)
    logged = await list_records(retrying)
    newest = await versions.newest_manifest(retrying)
    _check_manifest_is_there(store.url, newest, logged, abandoned=abandoned)
    numbers = await versions.list_versions(retrying)
    dropped = [] if keep_versions is None else numbers[:-keep_versions]
    kept = [newest] if newest is not None else []
    kept += [await versions.read_manifest(retrying, version) for version in numbers if version not in dropped]
    is_protected = _waits_for_commit if abandoned else _is_unfinished
    unfinished = [_run_of(item) for item in logged if is_protected(item)]
    report = replace(_sorted_out(objects, logged, _covered(kept), unfinished), versions=tuple(dropped))
    if delete:
        await _delete(retrying, newest, report)
        report = replace(report, is_deleted=True)
    return report


def _sorted_out(
    objects: Mapping[Place, ObjectInfo],
    logged: Sequence[Logged],
    covered: Mapping[str, set[tuple[int, int]]],
    protected: Iterable[str],
) -> GarbageReport:
    """Return what is garbage where some runs are protected and some intervals of some are covered."""
    unfinished = {run: 0 for run in protected if run not in covered}
    garbage = []
    for (run, number), info in objects.items():
        if run in unfinished:
            unfinished[run] += 1
        elif not any(start <= number < end for start, end in covered.get(run, ())):
            garbage.append(info)
    records = [item.key for item in logged if _run_of(item) not in covered and _run_of(item) not in unfinished]
    return GarbageReport(objects=tuple(garbage), records=tuple(records), unfinished=unfinished)


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


def _check_manifest_is_there(url: str, newest: Manifest | None, logged: Sequence[Logged], *, abandoned: bool) -> None:
    known = 0 if newest is None else newest.version
    if any(item.record is not None and item.record.version > known for item in logged):
        raise PackError(
            f"the pack records at {url} tell of a newer version than any that is there; nothing is deleted before "
            f"it is restored with: stoker rebuild-manifest {url}"
        )
    if newest is None and not abandoned:
        raise NotFoundError(
            f"there is no data set at {url}; unfinished packs are deleted with: stoker gc --abandoned --delete {url}"
        )


def _is_unfinished(item: Logged) -> bool:
    # Of a damaged record nobody knows: its run is protected too.
    return item.record is None or not item.record.is_committed


def _waits_for_commit(item: Logged) -> bool:
    record = item.record
    return record is not None and (record.mode, record.state, record.job) == ("deferred", "complete", "")


def _run_of(item: Logged) -> str:
    return item.key.removeprefix("packs/").removesuffix(".safetensors")


def _covered(manifests: Sequence[Manifest]) -> dict[str, set[tuple[int, int]]]:
    """Return the half-open intervals of numbers that the manifests have of each run."""
    covered: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for manifest in manifests:
        for run in manifest.runs:
            covered[run.run].add((run.first_number, run.first_number + run.rows))
    return covered
