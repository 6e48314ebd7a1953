"""Reads super-samples to verify them, and restores the record of a run from their heads.

After DIESEL (Wang et al., ICPP 2020), where a metadata server that lost entries is refilled from the chunks. The first
record of a run in the bucket identifies the run; its super-samples give its progress, and the last one is marked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from stoker._base.checksum import combine_crc32c, crc32c
from stoker._base.retry import RetryingReader
from stoker._base.task_group import Limiter, for_each, run_in_order
from stoker._format.identity import compute_sha256_128
from stoker._format.manifest import Manifest, object_key
from stoker._format.supersample import MAX_OBJECT_BYTES, Head, PackOrigin, SuperSample, SuperSampleRecord
from stoker._pack.record import PackRecord
from stoker.abc import ObjectInfo, ObjectRef, Readable
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    TruncatedError,
)

T = TypeVar("T")
Checked = TypeVar("Checked")

SUPER_SAMPLE_KEY_PATTERN = re.compile(r"data/([0-9a-f]{16})/([0-9]{8}|[1-9][0-9]{8,9})", re.ASCII)
_MAX_CHECKED_BYTES = 256 << 20
_BAD_OBJECT_ERRORS = (NotFoundError, ObjectChangedError, ChecksumError, TruncatedError, FormatError)

RunPosition = tuple[str, int]
"""A super-sample's pack run and its number within the run."""
_FIRST_BYTES = 64 << 10  # covers the whole head if rows are few or large
_HEAD_BYTES = 4 << 20  # memory counted per head, since some are large: 16 are read at once


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object that is missing, damaged, or different from its entry in the manifest or pack record.

    Attributes:
        key: key of the object.
        problem: description of the problem.
    """

    key: str
    problem: str


async def verify(
    store: Readable,
    manifest: Manifest,
    *,
    deep: bool = False,
    concurrency: int = 4,
    on_object: Callable[[ObjectRef, BadObject | None], object] = lambda ref, bad: None,
) -> list[BadObject]:
    """Read every super-sample of ``manifest`` and return the bad ones, in the manifest's order.

    The checks cover size, checksum of the object, head, origin, schema and number of samples; ``deep`` also checks the
    checksum of every value. At most ``concurrency`` objects are in memory, of 256 MiB in total or a single one.

    Args:
        store: store of the data set.
        manifest: version to verify.
        deep: whether to check every value.
        concurrency: maximum number of concurrent reads.
        on_object: called with each object and its problem, None for a good object, in any order.

    Raises:
        StoreError: the store could not be read, so its objects are neither good nor bad.
    """
    reader = RetryingReader(store)

    def report(row: int, problem: str | None) -> None:
        ref = manifest.ref(row)
        on_object(ref, None if problem is None else BadObject(ref.key, problem))

    memory = Limiter(_MAX_CHECKED_BYTES)

    async def check(row: int) -> None:
        size_bytes = min(int(manifest.rows.size_bytes[row]), _MAX_CHECKED_BYTES)
        await memory.acquire(size_bytes)
        try:
            await _check_row(reader, manifest, row, deep=deep)
        finally:
            memory.release(size_bytes)

    _, problems = await check_objects(
        range(len(manifest)),
        check,
        concurrency=concurrency,
        on_checked=report,
    )
    return [BadObject(manifest.key(row), problems[row]) for row in sorted(problems)]


async def check_objects(
    items: Iterable[T],
    check: Callable[[T], Awaitable[Checked]],
    *,
    concurrency: int,
    on_checked: Callable[[T, str | None], object] = lambda item, problem: None,
) -> tuple[dict[T, Checked], dict[T, str]]:
    """Check objects; read an object with a wrong checksum a second time.

    Args:
        items: keys of the objects to check, of any hashable type.
        check: function that reads an object and returns a result, or raises an error that describes the problem.
        concurrency: maximum number of concurrent checks.
        on_checked: called with each item and its problem, None for a good object, in any order.

    Returns:
        Item → result of ``check`` for good objects, in the order of the items; item → problem for the others.

    Raises:
        StoreError: the store could not be read.
    """
    ordered = list(items)
    checked: dict[T, Checked] = {}
    problems: dict[T, str] = {}

    async def check_one(item: T) -> None:
        try:
            try:
                checked[item] = await check(item)
            except ChecksumError:  # it may have been damaged in transit
                checked[item] = await check(item)
        except BucketNotFoundError:
            raise
        except _BAD_OBJECT_ERRORS as error:
            problems[item] = str(error)
        on_checked(item, problems.get(item))

    await for_each(ordered, check_one, concurrency=concurrency)
    return {item: checked[item] for item in ordered if item in checked}, problems


async def open_super_sample(
    store: Readable, key: str, size_bytes: int | None = None
) -> tuple[SuperSample, SuperSampleRecord]:
    """Read an object completely and check it against the checksum in its own head; return it and its manifest entry.

    Args:
        store: store of the data set.
        key: key of the object.
        size_bytes: expected size in bytes, None for any.

    Raises:
        ObjectChangedError: the object does not have ``size_bytes``.
        FormatError: the object is not a super-sample.
        ChecksumError: the object is damaged.
    """
    info = await store.head(key)
    if size_bytes not in (None, info.size_bytes):
        raise ObjectChangedError(f"{key} has {info.size_bytes} bytes, not {size_bytes}")
    if info.size_bytes > MAX_OBJECT_BYTES:
        raise FormatError(f"{key} has {info.size_bytes} bytes, more than any super-sample")
    data = bytearray(info.size_bytes)
    await store.get_range(key, 0, len(data), into=memoryview(data), tag=info.tag)
    sample = SuperSample(data)
    sample.verify()
    packed = _describe_object(sample.head, data, info)
    return sample, replace(packed, sha256_128=await compute_sha256_128(data))


def check_content(key: str, actual: SuperSampleRecord, expected: ObjectRef | SuperSampleRecord) -> None:
    """Raise ChecksumError unless a completely read object has the checksum and the hash from the manifest."""
    if actual.crc32c != expected.crc32c:
        raise ChecksumError(f"{key} has crc32c {actual.crc32c:08x}, the manifest says {expected.crc32c:08x}")
    if expected.sha256_128 is not None and actual.sha256_128 != expected.sha256_128:
        raise ChecksumError(f"{key} has the right CRC-32C, but another SHA-256: it was changed on purpose")


def _describe_object(head: Head, data: bytearray, info: ObjectInfo) -> SuperSampleRecord:
    """Return the manifest entry of an object whose ``data`` has at least the head."""
    header_crc32c = crc32c(memoryview(data)[: head.header_bytes])
    return SuperSampleRecord(
        ordinal=head.origin.ordinal,
        size_bytes=info.size_bytes,
        samples=head.samples,
        head_bytes=head.head_bytes,
        head_crc32c=crc32c(memoryview(data)[: head.head_bytes]),
        crc32c=combine_crc32c(header_crc32c, head.data_crc32c, info.size_bytes - head.header_bytes),
        tag=info.tag,
    )


async def list_super_samples(store: Readable) -> dict[RunPosition, ObjectInfo]:
    """Return every object with the key of a super-sample; none if the bucket or folder does not exist."""
    try:
        return {
            (match[1], int(match[2])): info
            async for info in RetryingReader(store).list("data/")
            if (match := SUPER_SAMPLE_KEY_PATTERN.fullmatch(info.key))
        }
    except NotFoundError:
        return {}


async def _check_row(reader: RetryingReader[Readable], manifest: Manifest, row: int, *, deep: bool) -> None:
    ref = manifest.ref(row)
    sample, actual = await open_super_sample(reader, ref.key, ref.size_bytes)
    head = sample.head
    check_content(ref.key, actual, ref)
    run, number = manifest.locate_row(row)
    if head.origin != PackOrigin(dataset=manifest.dataset, run=run, ordinal=number):
        raise FormatError(f"{ref.key} has the origin {head.origin}")
    if head.schema != manifest.schema:
        raise FormatError(f"{ref.key} has another schema than the manifest")
    rows = manifest.rows
    if (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{ref.key} has {head.samples} samples, the manifest says {rows.samples[row]}")
    if deep:
        sample.verify_values()


async def restore_record(store: Readable, record: PackRecord) -> PackRecord:
    """Return a run's record updated from its super-samples: one LIST, and a read of each head.

    Args:
        store: store of the data set.
        record: last known record of the run.

    Raises:
        FormatError: an object under the run's keys is not a super-sample of the run.
        StoreError: the bucket fails.
    """
    reader = RetryingReader(store)
    objects = {info.key: info async for info in reader.list(f"data/{record.run}/")}
    infos: list[ObjectInfo] = []
    while info := objects.get(object_key(record.run, len(infos))):
        infos.append(info)
    recorded = () if record.prefix is None else record.prefix.records()
    hashes = {(each.ordinal, each.crc32c): each.sha256_128 for _, each in recorded}  # heads do not have these
    places: list[tuple[str, SuperSampleRecord]] = []
    dataset, schema, is_complete = "", None, False
    async with aclosing(run_in_order((_HEAD_BYTES, partial(_read_head, reader, info)) for info in infos)) as heads:
        async for head, packed in heads:
            if schema is None:
                dataset, schema = head.origin.dataset, head.schema
            origin = PackOrigin(dataset=dataset, run=record.run, ordinal=len(places))
            if (head.origin, head.schema) != (origin, schema):
                raise FormatError(f"{infos[len(places)].key} has the origin {head.origin}")
            places.append((record.run, replace(packed, sha256_128=hashes.get((packed.ordinal, packed.crc32c)))))
            is_complete = head.is_last
    if schema is None:
        return record
    manifest = Manifest.of(dataset, schema, places)
    restored = replace(record, state="complete" if is_complete else "packing", prefix=manifest)
    return restored if restored.progress > record.progress else record


async def _read_head(reader: RetryingReader[Readable], info: ObjectInfo) -> tuple[Head, SuperSampleRecord]:
    data = bytearray()
    needed_bytes = min(_FIRST_BYTES, info.size_bytes)
    while needed_bytes > len(data):  # once for most heads, twice for a large head, three times for a large header
        rest = bytearray(needed_bytes - len(data))
        await reader.get_range(info.key, len(data), needed_bytes, into=memoryview(rest), tag=info.tag)
        data += rest
        needed_bytes = Head.bytes_needed(data, info.size_bytes)
    head = Head.parse(data, info.size_bytes)
    return head, _describe_object(head, data, info)
