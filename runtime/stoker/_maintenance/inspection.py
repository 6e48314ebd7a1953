"""Reading super-samples only to see whether they are what they should be."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each
from stoker._format import tensorfile
from stoker._format.manifest import Manifest, object_key
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES, Origin, SuperSample
from stoker.abc import ObjectInfo, ObjectRef, Readable
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    TruncatedError,
)

__all__ = ["BadObject", "Opened", "Place", "list_super_samples", "open_super_sample", "problem_of", "verify"]

_LARGEST_BYTES = MAX_SUPER_SAMPLE_BYTES + tensorfile.MAX_HEADER_BYTES + tensorfile.PREFIX_BYTES
_KEY = re.compile(r"data/([0-9a-f]{16})/([0-9]{8,10})", re.ASCII)
_BAD = (NotFoundError, ObjectChangedError, ChecksumError, TruncatedError, FormatError)

Place = tuple[str, int]
"""A super-sample's pack run and its number within it."""


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
