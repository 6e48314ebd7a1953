"""Reading super-samples to see whether they are what they should be, and what their heads tell of a run.

The latter after DIESEL (Wang et al., ICPP 2020): a metadata server that loses its newest entries, or all of them, is
filled again from the chunks. What a run is, and that there is one, its first record in the bucket tells; how far it has
come, its super-samples do, the last of which says that it is the last.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from stoker._base.checksum import crc32c, crc32c_combined
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each, in_order
from stoker._format.identity import hashed
from stoker._format.manifest import Manifest, object_key
from stoker._format.supersample import MAX_OBJECT_BYTES, Head, Origin, Packed, SuperSample
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
Found = TypeVar("Found")

SUPER_SAMPLE_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8}|[1-9][0-9]{8,9})", re.ASCII)
_BAD = (NotFoundError, ObjectChangedError, ChecksumError, TruncatedError, FormatError)

Place = tuple[str, int]
"""A super-sample's pack run and its number within it."""
_FIRST_BYTES = 64 << 10  # has the whole head where rows are few or large
_HEAD_BYTES = 4 << 20  # as much as is counted for one, of which some are large: 16 are read at once


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object that is not what the manifest, or its pack record, says.

    Attributes:
        key: of the object.
        problem: what is wrong with it.
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

    Size, checksum of the whole, head, origin, schema and number of samples are checked; ``deep`` checks every value on
    its own checksum too. At most ``concurrency`` objects (of at most 33 MiB) are in memory.

    Args:
        store: where the data set is.
        manifest: a version of it.
        deep: check every value.
        concurrency: objects read at once.
        on_object: called with each object, in any order, and what is wrong with it.

    Raises:
        StoreError: the store could not be read; that says nothing about its objects.
    """
    reader = RetryingReader(store)

    def tell(row: int, problem: str | None) -> None:
        ref = manifest.ref(row)
        on_object(ref, None if problem is None else BadObject(ref.key, problem))

    _, problems = await problems_of(
        range(len(manifest)),
        lambda row: _check_row(reader, manifest, row, deep=deep),
        concurrency=concurrency,
        on_checked=tell,
    )
    return [BadObject(manifest.key(row), problems[row]) for row in sorted(problems)]


async def problems_of(
    items: Iterable[T],
    check: Callable[[T], Awaitable[Found]],
    *,
    concurrency: int,
    on_checked: Callable[[T, str | None], object] = lambda item, problem: None,
) -> tuple[dict[T, Found], dict[T, str]]:
    """Check objects; a damaged one is read a second time.

    Args:
        items: what tells the objects apart.
        check: reads one, and returns what is known of it, or raises what is wrong with it.
        concurrency: objects read at once.
        on_checked: called with each item, in any order, and what is wrong with it.

    Returns:
        What ``check`` returned for good ones, in the order of the items; and what is wrong with the others.

    Raises:
        StoreError: the store could not be read.
    """
    ordered = list(items)
    found: dict[T, Found] = {}
    problems: dict[T, str] = {}

    async def check_one(item: T) -> None:
        try:
            try:
                found[item] = await check(item)
            except ChecksumError:  # perhaps it was damaged on its way
                found[item] = await check(item)
        except BucketNotFoundError:
            raise
        except _BAD as error:
            problems[item] = str(error)
        on_checked(item, problems.get(item))

    await for_each(ordered, check_one, concurrency=concurrency)
    return {item: found[item] for item in ordered if item in found}, problems


async def open_super_sample(store: Readable, key: str, size_bytes: int | None = None) -> tuple[SuperSample, Packed]:
    """Read an object whole and check it on the checksum in its own head; return it, and what a manifest says of it.

    Raises:
        ObjectChangedError: it does not have ``size_bytes``.
        FormatError: it is no super-sample.
        ChecksumError: it is damaged.
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
    packed = _described(sample.head, data, info)
    return sample, replace(packed, sha256_128=await hashed(data))


def check_content(key: str, found: Packed, said: ObjectRef | Packed) -> None:
    """Raise ChecksumError unless an object that was read whole has the checksum, and the hash, that a manifest says."""
    if found.crc32c != said.crc32c:
        raise ChecksumError(f"{key} has crc32c {found.crc32c:08x}, the manifest says {said.crc32c:08x}")
    if said.sha256_128 is not None and found.sha256_128 != said.sha256_128:
        raise ChecksumError(f"{key} has its checksum, but not its SHA-256: it was changed on purpose")


def _described(head: Head, data: bytearray, info: ObjectInfo) -> Packed:
    """Return what a manifest says of an object whose ``data``, of which only the head is needed, starts with a head."""
    header_crc32c = crc32c(memoryview(data)[: head.header_bytes])
    return Packed(
        ordinal=head.origin.ordinal,
        size_bytes=info.size_bytes,
        samples=head.samples,
        head_bytes=head.head_bytes,
        head_crc32c=crc32c(memoryview(data)[: head.head_bytes]),
        crc32c=crc32c_combined(header_crc32c, head.data_crc32c, info.size_bytes - head.header_bytes),
        tag=info.tag,
    )


async def list_super_samples(store: Readable) -> dict[Place, ObjectInfo]:
    """Return every object that has the key of a super-sample; none if the bucket (or folder) does not exist."""
    try:
        return {
            (match[1], int(match[2])): info
            async for info in RetryingReader(store).list("data/")
            if (match := SUPER_SAMPLE_KEY.fullmatch(info.key))
        }
    except NotFoundError:
        return {}


async def _check_row(reader: RetryingReader[Readable], manifest: Manifest, row: int, *, deep: bool) -> None:
    ref = manifest.ref(row)
    sample, found = await open_super_sample(reader, ref.key, ref.size_bytes)
    head = sample.head
    check_content(ref.key, found, ref)
    run, number = manifest.place(row)
    if head.origin != Origin(dataset=manifest.dataset, run=run, ordinal=number):
        raise FormatError(f"{ref.key} says that it is {head.origin}")
    if head.schema != manifest.schema:
        raise FormatError(f"{ref.key} has another schema than the manifest")
    rows = manifest.rows
    if (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{ref.key} has {head.samples} samples, the manifest says {rows.samples[row]}")
    if deep:
        sample.verify_values()


async def restored(store: Readable, record: PackRecord) -> PackRecord:
    """Return a run's record as the run's super-samples tell it, from a LIST and the head of each.

    Args:
        store: where the data set is.
        record: what is known of the run, perhaps only that it has begun.

    Raises:
        FormatError: an object under the run's keys is none of its super-samples.
        StoreError: the bucket fails.
    """
    reader = RetryingReader(store)
    objects = {info.key: info async for info in reader.list(f"data/{record.run}/")}
    infos: list[ObjectInfo] = []
    while info := objects.get(object_key(record.run, len(infos))):
        infos.append(info)
    recorded = () if record.prefix is None else record.prefix.packed()
    hashes = {(each.ordinal, each.crc32c): each.sha256_128 for _, each in recorded}  # no head tells them
    places: list[tuple[str, Packed]] = []
    dataset, schema, is_complete = "", None, False
    async with aclosing(in_order((_HEAD_BYTES, partial(_read_head, reader, info)) for info in infos)) as heads:
        async for head, packed in heads:
            if schema is None:
                dataset, schema = head.origin.dataset, head.schema
            origin = Origin(dataset=dataset, run=record.run, ordinal=len(places))
            if (head.origin, head.schema) != (origin, schema):
                raise FormatError(f"{infos[len(places)].key} says that it is {head.origin}")
            places.append((record.run, replace(packed, sha256_128=hashes.get((packed.ordinal, packed.crc32c)))))
            is_complete = head.is_last
    if schema is None:
        return record
    manifest = Manifest.of(dataset, schema, places)
    found = replace(record, state="complete" if is_complete else "packing", prefix=manifest)
    return found if found.progress > record.progress else record


async def _read_head(reader: RetryingReader[Readable], info: ObjectInfo) -> tuple[Head, Packed]:
    data = bytearray()
    needed_bytes = min(_FIRST_BYTES, info.size_bytes)
    while needed_bytes > len(data):  # once, but where the head is large, and twice more where its header alone is
        rest = bytearray(needed_bytes - len(data))
        await reader.get_range(info.key, len(data), needed_bytes, into=memoryview(rest), tag=info.tag)
        data += rest
        needed_bytes = Head.bytes_needed(data, info.size_bytes)
    head = Head.parse(data, info.size_bytes)
    return head, _described(head, data, info)
