"""Rebuilds a manifest from the objects in the store: the heads of the super-samples and the pack records.

After DIESEL (Wang et al., ICPP 2020), whose chunks carry the metadata from which a lost key-value store is refilled.
Here the records list the objects of the data set; an object that no record covers is an orphan of a killed packer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader
from stoker._base.sizes import format_count
from stoker._format import versions
from stoker._format.manifest import MAX_VERSION, Manifest, object_key
from stoker._format.pack_shuffle import PackShuffle
from stoker._format.schema import Schema
from stoker._format.supersample import Head, SuperSampleRecord
from stoker._maintenance.inspection import (
    BadObject,
    RunPosition,
    check_content,
    check_objects,
    list_super_samples,
    open_super_sample,
)
from stoker._pack.record import PackRecord, list_records
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import (
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    PackError,
    PreconditionFailedError,
)

_MAX_CONCURRENT_HEADS = 16
_MAX_CONCURRENT_OBJECTS = 2
_COMPARED_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """Result of a rebuild.

    Attributes:
        manifest: newest version after the rebuild.
        is_new: whether the rebuild committed this version; False if the existing manifest was complete.
        lost: missing or damaged objects that a manifest or record covers; the new manifest does not have them.
        adopted: keys of orphans that are now in the manifest.
        orphans: keys of objects that no version and no finished record covers and that were not adopted.
        refused: orphans that could not be adopted, with the reason.
        gaps: super-samples that seem to be missing although no manifest or record lists them: missing numbers of an
            adopted run, the missing end of an adopted run, and, without any manifest, orphans without a record.
        repeats: adopted super-samples that begin with the same samples as one of another run, which may be a
            compaction of the run.
    """

    manifest: Manifest
    is_new: bool
    lost: tuple[BadObject, ...]
    adopted: tuple[str, ...]
    orphans: tuple[str, ...]
    refused: tuple[BadObject, ...]
    gaps: tuple[BadObject, ...]
    repeats: tuple[BadObject, ...]


_DatasetKey = tuple[str, Schema]
"""Id and columns of a data set, which all its super-samples share."""


@dataclass(frozen=True, slots=True)
class _Orphan:
    """An intact super-sample that no version and no finished record covers."""

    dataset: _DatasetKey
    packed: SuperSampleRecord
    is_last: bool
    first_checksums: tuple[bytes, ...]


async def rebuild_manifest(store: Store, *, adopt: bool = False, verify: bool = False) -> RebuildReport:
    """Commit a manifest of every existing super-sample that belongs to the data set.

    The newest readable version and the records of committed or complete packs list the super-samples. The head of each
    is read (a ranged read) and checked against the listed checksum. Unfinished packs are left to be resumed, and runs
    of functions to be committed.

    Args:
        store: store of the data set.
        adopt: whether to add every other intact super-sample of the data set, after reading it completely. None is
            added if functions ingest raw objects or if the data set was compacted, since its samples may be there
            already.
        verify: whether to read every super-sample completely and leave out damaged ones, instead of reading the heads.

    Raises:
        NotFoundError: there are no super-samples for a manifest, or none without ``adopt``.
        PackError: another writer committed a version meanwhile.
    """
    reader = RetryingReader(store)
    survey = await _read_survey(reader)
    claimed = dict(position for source in survey.sources for position in _iter_positions(source))
    repeated = _find_repeated(survey, claimed)
    expected = {position: packed for position, packed in claimed.items() if position not in repeated}
    checked, lost = await _check_claimed(reader, expected, survey.objects, whole=verify)
    owned = claimed.keys() | repeated
    orphans = sorted(await _find_orphans(reader, survey, owned))
    adopted: dict[RunPosition, _Orphan] = {}
    rejected: tuple[BadObject, ...] = ()
    if adopt:
        adopted, rejected = await _adopt(reader, survey, orphans)
    dataset = survey.dataset or next((orphan.dataset for orphan in adopted.values()), None)
    rows = {**checked, **{position: orphan.packed for position, orphan in adopted.items()}}
    if dataset is None or not rows:
        await versions.check_bucket(store, "super-sample")
        raise NotFoundError(_describe_nothing_found(store.url, orphans, rejected))
    packed = [(run, packed) for (run, _), packed in rows.items()]
    rebuilt = replace(Manifest.of(*dataset, packed, survey.newest_version + 1), shuffles=survey.shuffles)
    manifest = await _publish(store, survey.base, rebuilt)
    return RebuildReport(
        manifest=manifest,
        is_new=manifest is rebuilt,
        lost=lost,
        adopted=_keys(adopted),
        orphans=_keys(position for position in orphans if position not in adopted),
        refused=rejected,
        gaps=tuple(_find_gaps(survey, adopted, owned) if adopt else _find_unrecorded(survey, orphans)),
        repeats=tuple(_find_repeats(adopted)),
    )


def _keys(places: Iterable[RunPosition]) -> tuple[str, ...]:
    return tuple(object_key(*position) for position in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """The objects of a data set in the store.

    Attributes:
        base: newest readable version.
        numbers: numbers of all existing versions.
        newest_version: highest number of any version, including lost ones.
        sources: ``base``, and the prefixes of the finished runs that it lacks.
        records: records of all runs.
        overwritten: runs from before the last overwrite of the data set.
        objects: every object with the key of a super-sample.
    """

    base: Manifest | None
    numbers: tuple[int, ...]
    newest_version: int
    sources: tuple[Manifest, ...]
    records: tuple[PackRecord, ...]
    overwritten: frozenset[str]
    objects: dict[RunPosition, ObjectInfo]

    @property
    def dataset(self) -> _DatasetKey | None:
        """Id and columns of the sources' data set; None without sources."""
        return next(((source.dataset, source.schema) for source in self.sources), None)

    @property
    def shuffles(self) -> dict[str, PackShuffle]:
        """Permutations of the runs whose packs permuted their samples."""
        recorded = {run: shuffle for record in self.records for run, shuffle in record.shuffles.items()}
        return recorded | ({} if self.base is None else dict(self.base.shuffles))

    @property
    def may_have_replaced(self) -> bool:
        """Whether functions ingested raw objects or a compaction ran, so that orphans may be duplicates."""
        return any(len(record.sources) for record in self.records)


async def _read_survey(reader: RetryingReader[Readable]) -> _Survey:
    numbers = await versions.list_versions(reader)
    base = await _read_newest_manifest(reader, numbers)
    records = [logged.record for logged in await list_records(reader) if logged.record is not None]
    known = [*numbers, *(record.version for record in records)]
    overwritten = _find_overwritten(base, records)
    source = None if base is not None and overwritten.issuperset(run.run for run in base.runs) else base
    left = [record for record in records if record.run not in overwritten]
    return _Survey(
        base=base,
        numbers=tuple(numbers),
        # The number of a lost version is not used again: a run may have pinned it.
        newest_version=max([0 if base is None else base.version, *known]),
        sources=_select_sources(source, left),
        records=tuple(records),
        overwritten=overwritten,
        objects=await list_super_samples(reader),
    )


async def _publish(store: Store, base: Manifest | None, rebuilt: Manifest) -> Manifest:
    """Commit the rebuilt manifest; if it equals ``base``, only restore the copies of ``base`` that may be missing."""
    if rebuilt.version > MAX_VERSION:
        raise PackError(
            f"{store.url} has a manifest or pack record of version {rebuilt.version - 1}, the highest possible number; "
            "delete this manifest or record and rebuild again"
        )
    if base is not None and rebuilt.to_bytes() == replace(base, version=base.version + 1).to_bytes():
        with suppress(PreconditionFailedError):
            return await versions.publish(store, base)
        await versions.advance_pointer(store, base)
        return base
    try:
        return await versions.publish(store, rebuilt)
    except PreconditionFailedError:
        raise PackError(f"another writer committed to {store.url} meanwhile; rebuild again") from None


async def _read_newest_manifest(reader: RetryingReader[Readable], numbers: Sequence[int]) -> Manifest | None:
    """Return the newest readable version, which may exist only as the pointer's copy."""
    manifests: list[Manifest] = []
    for version in (None, *reversed(numbers)):
        with suppress(NotFoundError, FormatError, ChecksumError):
            manifests.append(await versions.read_manifest(reader, version))
            if version is not None:
                break
    return max(manifests, key=lambda manifest: manifest.version, default=None)


def _find_overwritten(base: Manifest | None, records: Iterable[PackRecord]) -> frozenset[str]:
    """Return the runs from before the last overwrite of the data set, including those of ``base`` if it is older."""
    committed = [record for record in records if record.is_committed]
    last = max((record for record in committed if record.mode == "overwrite"), key=lambda r: r.version, default=None)
    if last is None:
        return frozenset()
    earlier = frozenset(record.run for record in committed if record.version < last.version)
    has = frozenset() if base is None else frozenset(run.run for run in base.runs)
    is_older = base is not None and base.version < last.version and last.run not in has
    return earlier | has if is_older else earlier - has


def _find_repeated(survey: _Survey, claimed: Mapping[RunPosition, SuperSampleRecord]) -> set[RunPosition]:
    """Return the places to leave out because other places have their samples; newer compactions take precedence.

    These are the places that a compaction replaced; or the compaction's own, if it is incomplete and those that it
    replaced are complete.
    """
    runs = {run.run for source in survey.sources for run in source.runs}
    present = claimed.keys() & survey.objects.keys()
    numbers = _numbers_by_run(survey.objects.keys() | claimed.keys())
    repeated: set[RunPosition] = set()
    compactions = [record for record in survey.records if record.replaces and record.run in runs]
    for record in sorted(compactions, key=lambda record: record.version or math.inf, reverse=True):
        replaced = _find_replaced(record, numbers)
        is_replaced_whole = len(replaced) == sum(run.rows for run in record.replaces) and replaced <= present
        own = set() if record.prefix is None else {position for position, _ in _iter_positions(record.prefix)}
        is_whole = bool(own) and not own - survey.objects.keys() - repeated
        # The missing super-samples of a compaction that is left out are still reported as lost.
        repeated |= own & survey.objects.keys() if is_replaced_whole and not is_whole else replaced
    return repeated


def _find_replaced(record: PackRecord, numbers: Mapping[str, Sequence[int]]) -> set[RunPosition]:
    """Return the known super-samples, from :func:`_numbers_by_run`, that a compaction replaced."""
    return {
        (run.run, number)
        for run in record.replaces
        for number in numbers.get(run.run, ())
        if run.first_number <= number < run.first_number + run.rows
    }


def _numbers_by_run(places: Iterable[RunPosition]) -> Mapping[str, list[int]]:
    """Return the numbers of each run, in ascending order."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for run, number in sorted(places):
        numbers[run].append(number)
    return numbers


async def _find_orphans(reader: RetryingReader[Readable], survey: _Survey, owned: Set[RunPosition]) -> set[RunPosition]:
    """Return the places that belong to no version and to no run that waits for a commit.

    Adopting places of those would add their samples twice.
    """
    waiting = {record.run for record in survey.records if record.mode == "deferred" and not record.is_committed}
    theirs = waiting | survey.overwritten
    orphans = {position for position in survey.objects if position not in owned and position[0] not in theirs}
    for version in survey.numbers:
        with suppress(NotFoundError, FormatError, ChecksumError):
            orphans.difference_update(
                position for position, _ in _iter_positions(await versions.read_manifest(reader, version))
            )
    return orphans


def _select_sources(base: Manifest | None, records: Sequence[PackRecord]) -> tuple[Manifest, ...]:
    """Return ``base`` and the prefixes of the finished runs that it lacks, in the order of their commits.

    At most one complete run can create the data set: if there are several, or if the data set exists, none is used,
    because their packers would have failed too.
    """
    has = set() if base is None else {run.run for run in base.runs}
    by_claim: dict[str, list[PackRecord]] = defaultdict(list)
    for record in records:
        if record.run not in has:
            by_claim[_membership_reason(record, 0 if base is None else base.version)].append(record)
    committed = sorted(by_claim["committed"], key=lambda record: record.version)
    is_founded = base is not None or committed or len(by_claim["create"]) > 1
    finished = [*committed, *([] if is_founded else by_claim["create"]), *by_claim["append"]]
    manifests = [manifest for manifest in (base, *(record.prefix for record in finished)) if manifest is not None]
    return tuple(
        each for each in manifests if (each.dataset, each.schema) == (manifests[0].dataset, manifests[0].schema)
    )


def _membership_reason(record: PackRecord, base_version: int) -> str:
    """Return why a run that the base lacks belongs to the data set: ``committed``, its mode, or empty if it does not.

    A committed run that the base lacks, although the base is not older, was replaced. A run of mode ``deferred`` is
    left to the process that commits it.
    """
    if record.is_committed:
        return "committed" if record.version > base_version else ""
    return record.mode if record.state == "complete" and record.mode != "deferred" else ""


def _iter_positions(manifest: Manifest) -> Iterable[tuple[RunPosition, SuperSampleRecord]]:
    return (((run, packed.ordinal), packed) for run, packed in manifest.records())


def _describe_nothing_found(url: str, orphans: Sequence[RunPosition], rejected: Sequence[BadObject]) -> str:
    if not orphans:
        return f"there are no super-samples at {url} to build a manifest from"
    count_text = (
        f"{format_count(len(orphans), 'super-sample')} of {format_count(len({run for run, _ in orphans}), 'run')}"
    )
    if rejected:
        return f"none of the {count_text} at {url} can be used; the first: {rejected[0].key}: {rejected[0].problem}"
    return (
        f"{url} has {count_text}, but neither a manifest nor the record of a finished pack that lists them; "
        f"stoker rebuild-manifest --adopt {url} reads them and builds a manifest of those that are intact"
    )


def _find_gaps(
    survey: _Survey, adopted: Mapping[RunPosition, _Orphan], listed: Iterable[RunPosition]
) -> Iterable[BadObject]:
    """Yield the missing super-samples of adopted runs, found from gaps in their numbers and a missing end mark.

    Args:
        survey: objects in the store.
        adopted: adopted orphans.
        listed: places that manifests or records list, which are reported as lost if they are missing.
    """
    numbers = _numbers_by_run({*survey.objects, *listed})
    unfinished = {record.run for record in survey.records if record.state == "packing"}
    for run in sorted({run for run, _ in adopted}):
        present = numbers[run]
        for before, after in pairwise((-1, *present)):
            if missing := after - before - 1:
                key = object_key(run, before + 1)
                absent = "does not exist" if missing == 1 else f"and the {missing - 1:,} after it do not exist"
                yield BadObject(key, f"{key} {absent}, though later ones of the run do; their samples are lost")
        last = adopted.get((run, present[-1]))
        if last is not None and not last.is_last and run not in unfinished:
            key = object_key(run, present[-1])
            yield BadObject(key, f"{key} is not marked as the last of its run; later super-samples are lost")


def _find_repeats(adopted: Mapping[RunPosition, _Orphan]) -> Iterable[BadObject]:
    """Yield an adopted super-sample that begins with the same samples as one of another run, once per pair of runs."""
    seen: dict[bytes, RunPosition] = {}
    reported: set[frozenset[str]] = set()
    for position, orphan in adopted.items():
        other = seen.setdefault(orphan.first_checksums[0], position)
        both = zip(orphan.first_checksums, adopted[other].first_checksums, strict=False)
        pair = frozenset((position[0], other[0]))
        if len(pair) == 2 and pair not in reported and all(mine == theirs for mine, theirs in both):
            reported.add(pair)
            key = object_key(*position)
            yield BadObject(
                key,
                f"{key} begins with the samples of {object_key(*other)}; if one of the two runs is a compaction of the "
                "other, samples are in the data set twice: delete the objects of one and rebuild",
            )


def _find_unrecorded(survey: _Survey, orphans: Iterable[RunPosition]) -> Iterable[BadObject]:
    """Yield the runs that may belong to the data set, if the manifest and their records are lost."""
    if survey.base is not None or survey.may_have_replaced:
        return
    recorded = {record.run for record in survey.records}
    for run, places in groupby(orphans, key=itemgetter(0)):
        if run not in recorded:
            key, count = object_key(run, next(places)[1]), 1 + sum(1 for _ in places)
            count_text = format_count(count, "super-sample")
            yield BadObject(key, f"{key} begins a run of {count_text} without a record; --adopt adds it")


async def _check_claimed(
    reader: RetryingReader[Readable],
    claimed: dict[RunPosition, SuperSampleRecord],
    objects: dict[RunPosition, ObjectInfo],
    *,
    whole: bool,
) -> tuple[dict[RunPosition, SuperSampleRecord], tuple[BadObject, ...]]:
    """Return the good super-samples among ``claimed`` with their current tags, and the bad ones, in order.

    With ``whole``, all good ones have their SHA-256 afterwards, even if it was unknown before.
    """
    check_one = _check_whole if whole else _check_head

    async def check(position: RunPosition) -> SuperSampleRecord:
        if position not in objects:
            raise NotFoundError(f"{object_key(*position)} does not exist")
        return await check_one(reader, objects[position], claimed[position])

    checked, problems = await check_objects(
        claimed, check, concurrency=_MAX_CONCURRENT_OBJECTS if whole else _MAX_CONCURRENT_HEADS
    )
    return checked, _bad_objects(claimed, problems)


async def _check_head(
    reader: RetryingReader[Readable], info: ObjectInfo, packed: SuperSampleRecord
) -> SuperSampleRecord:
    if info.size_bytes != packed.size_bytes:
        raise ObjectChangedError(f"{info.key} has {info.size_bytes} bytes, not {packed.size_bytes}")
    head = bytearray(packed.head_bytes)
    await reader.get_range(info.key, 0, len(head), into=memoryview(head), tag=info.tag)
    if crc32c(head) != packed.head_crc32c:
        raise ChecksumError(f"the head of {info.key} was changed: its checksum differs from the packed one")
    Head.parse(head, info.size_bytes)
    return replace(packed, tag=info.tag)


async def _check_whole(
    reader: RetryingReader[Readable], info: ObjectInfo, packed: SuperSampleRecord
) -> SuperSampleRecord:
    _, actual = await open_super_sample(reader, info.key, packed.size_bytes)
    check_content(info.key, actual, packed)
    return replace(packed, tag=info.tag, sha256_128=actual.sha256_128)


async def _adopt(
    reader: RetryingReader[Readable], survey: _Survey, orphans: Sequence[RunPosition]
) -> tuple[dict[RunPosition, _Orphan], tuple[BadObject, ...]]:
    """Return the intact orphans of the data set, and the problems of the others.

    Without a data set, the first orphan decides which data set is restored.
    """
    if survey.may_have_replaced:
        reason = "has no record; functions add to this data set, so its samples may be in it already"
        return {}, _bad_objects(orphans, {position: f"{object_key(*position)} {reason}" for position in orphans})
    opened, problems = await check_objects(orphans, partial(_open_orphan, reader), concurrency=_MAX_CONCURRENT_OBJECTS)
    dataset = survey.dataset or next((orphan.dataset for orphan in opened.values()), None)
    adopted = {position: orphan for position, orphan in opened.items() if orphan.dataset == dataset}
    for position in opened.keys() - adopted.keys():
        problems[position] = f"{object_key(*position)} belongs to another data set or has another schema"
    return adopted, _bad_objects(orphans, problems)


def _bad_objects(places: Iterable[RunPosition], problems: Mapping[RunPosition, str]) -> tuple[BadObject, ...]:
    """Return the bad objects among ``places``, in their order."""
    return tuple(BadObject(object_key(*position), problems[position]) for position in places if position in problems)


async def _open_orphan(reader: RetryingReader[Readable], position: RunPosition) -> _Orphan:
    sample, packed = await open_super_sample(reader, object_key(*position))
    head = sample.head
    if (head.origin.run, head.origin.ordinal) != position:
        raise FormatError(f"{object_key(*position)} has the origin {head.origin}")
    first_checksums = tuple(row.tobytes() for row in head.checksums[:_COMPARED_SAMPLES])
    return _Orphan((head.origin.dataset, head.schema), packed, head.is_last, first_checksums)
