"""Reading super-samples to see whether they are what they should be, and what their heads tell of a run.

The latter after DIESEL (Wang et al., ICPP 2020): a metadata server that loses its newest entries, or all of them, is
filled again from the chunks. What a run is, and that there is one, its first record in the bucket tells; how far it has
come, its super-samples do, the last of which says that it is the last.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from stoker._base.checksum import crc32c, crc32c_combined
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each
from stoker._format import tensorfile
from stoker._format.manifest import Manifest, PackRun, Rows, object_key
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES, Head, Origin, Packed, SuperSample
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

__all__ = [
    "BadObject",
    "Opened",
    "Place",
    "list_super_samples",
    "open_super_sample",
    "problem_of",
    "restored",
    "verify",
]

_LARGEST_BYTES = MAX_SUPER_SAMPLE_BYTES + tensorfile.MAX_HEADER_BYTES + tensorfile.PREFIX_BYTES
_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_BAD = (NotFoundError, ObjectChangedError, ChecksumError, TruncatedError, FormatError)

Place = tuple[str, int]
"""A super-sample's pack run and its number within it."""
_FIRST_BYTES = 64 << 10  # has the whole head where rows are few or large
_HEADS_AT_ONCE = 16


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
    on_object: Callable[[ObjectRef, BadObject | None], object] | None = None,
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
    bad: dict[int, BadObject] = {}

    async def check(row: int) -> None:
        ref = manifest.ref(row)
        problem = await problem_of(lambda: _check_row(reader, manifest, row, deep=deep))
        if problem is not None:
            bad[row] = BadObject(ref.key, problem)
        if on_object is not None:
            on_object(ref, bad.get(row))

    await for_each(range(len(manifest)), check, concurrency=concurrency)
    return [bad[row] for row in sorted(bad)]


async def problem_of(check: Callable[[], Awaitable[object]]) -> str | None:
    """Return what ``check`` finds wrong with an object, None if nothing; one that is damaged is read a second time.

    Raises:
        StoreError: the store could not be read.
    """
    try:
        try:
            await check()
        except ChecksumError:  # perhaps it was damaged on its way
            await check()
    except BucketNotFoundError:
        raise
    except _BAD as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class Opened:
    """A super-sample that was read whole.

    Attributes:
        sample: its columns.
        data: its bytes.
        info: what the store says of it.
    """

    sample: SuperSample
    data: bytearray
    info: ObjectInfo


async def open_super_sample(store: Readable, key: str, size_bytes: int | None = None) -> Opened:
    """Read an object whole and check it on the checksum in its own head.

    Raises:
        ObjectChangedError: it does not have ``size_bytes``.
        FormatError: it is no super-sample.
        ChecksumError: it is damaged.
    """
    info = await store.head(key)
    if size_bytes not in (None, info.size_bytes):
        raise ObjectChangedError(f"{key} has {info.size_bytes} bytes, not {size_bytes}")
    if info.size_bytes > _LARGEST_BYTES:
        raise FormatError(f"{key} has {info.size_bytes} bytes, more than any super-sample")
    data = bytearray(info.size_bytes)
    await store.get_range(key, 0, len(data), into=memoryview(data), tag=info.tag)
    sample = SuperSample(data)
    sample.verify()
    return Opened(sample, data, info)


async def list_super_samples(store: Readable) -> dict[Place, ObjectInfo]:
    """Return every object that has the key of a super-sample; none if the bucket (or folder) does not exist."""
    try:
        return {
            (match[1], int(match[2])): info
            async for info in RetryingReader(store).list("data/")
            if (match := _KEY.fullmatch(info.key)) and object_key(match[1], int(match[2])) == info.key
        }
    except NotFoundError:
        return {}


async def _check_row(reader: RetryingReader[Readable], manifest: Manifest, row: int, *, deep: bool) -> None:
    ref = manifest.ref(row)
    opened = await open_super_sample(reader, ref.key, ref.size_bytes)
    head = opened.sample.head
    if (found := crc32c(opened.data)) != ref.crc32c:
        raise ChecksumError(f"{ref.key} has crc32c {found:08x}, the manifest says {ref.crc32c:08x}")
    run, number = manifest.place(row)
    if head.origin != Origin(dataset=manifest.dataset, run=run, ordinal=number):
        raise FormatError(f"{ref.key} says that it is {head.origin}")
    if head.schema != manifest.schema:
        raise FormatError(f"{ref.key} has another schema than the manifest")
    rows = manifest.rows
    if (head.samples, head.head_bytes) != (rows.samples[row], rows.head_bytes[row]):
        raise FormatError(f"{ref.key} has {head.samples} samples, the manifest says {rows.samples[row]}")
    if deep:
        for name in head.schema:
            start, end = head.row_range(name, 0, head.samples)
            head.verify_rows(name, 0, memoryview(opened.data)[start:end])


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
    numbers = range(len(objects))
    keys = [f"data/{record.run}/{number:08d}" for number in numbers]
    prefix = next((number for number in numbers if keys[number] not in objects), len(keys))
    if not prefix:
        return record
    first, packed = await _read_head(reader, objects[keys[0]], 0)
    rows = {0: packed}
    is_complete = first.is_last

    async def read(number: int) -> None:
        nonlocal is_complete
        head, rows[number] = await _read_head(reader, objects[keys[number]], number)
        _check(record, first, head, number)
        if number == prefix - 1:
            is_complete = head.is_last

    _check(record, first, first, 0)
    await for_each(range(1, prefix), read, concurrency=_HEADS_AT_ONCE)  # none is kept: they are large
    manifest = Manifest(
        dataset=first.origin.dataset,
        version=1,
        schema=first.schema,
        rows=Rows.of([rows[number] for number in range(prefix)]),
        runs=(PackRun(record.run, 0, prefix),),
    )
    found = replace(record, state="complete" if is_complete else "packing", prefix=manifest)
    return found if found.progress > record.progress else record


async def _read_head(reader: RetryingReader[Readable], info: ObjectInfo, number: int) -> tuple[Head, Packed]:
    data = bytearray()
    needed_bytes = min(_FIRST_BYTES, info.size_bytes)
    while needed_bytes > len(data):  # once, but where the head is large, and twice more where its header alone is
        rest = bytearray(needed_bytes - len(data))
        await reader.get_range(info.key, len(data), needed_bytes, into=memoryview(rest), tag=info.tag)
        data += rest
        needed_bytes = Head.bytes_needed(data, info.size_bytes)
    head = Head.parse(data, info.size_bytes)
    header_crc32c = crc32c(memoryview(data)[: head.header_bytes])
    packed = Packed(
        ordinal=number,
        size_bytes=info.size_bytes,
        samples=head.samples,
        head_bytes=head.head_bytes,
        head_crc32c=crc32c(memoryview(data)[: head.head_bytes]),
        crc32c=crc32c_combined(header_crc32c, head.data_crc32c, info.size_bytes - head.header_bytes),
        tag=info.tag,
    )
    return head, packed


def _check(record: PackRecord, first: Head, head: Head, number: int) -> None:
    origin = Origin(dataset=first.origin.dataset, run=record.run, ordinal=number)
    if (head.origin, head.schema) != (origin, first.schema):
        raise FormatError(f"data/{record.run}/{number:08d} says that it is {head.origin}")
