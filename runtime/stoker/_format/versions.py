"""The versions of a data set's manifest in its store, and how a new one is committed.

``manifests/<n>.safetensors`` is written once, and only where no version n is yet: whoever writes it has won that
number, and whoever lost builds again on top of the winner. ``manifest.safetensors``, the pointer, is a byte copy of the
newest version and only moves forward. A writer that dies between the two leaves the pointer behind; the next writer
finds the newer version by asking for the numbers that follow, and its commit moves the pointer past it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.task_group import end_tasks, for_each
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker.abc import ObjectInfo, Readable, Store
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    FormatError,
    NotFoundError,
    ObjectChangedError,
    PreconditionFailedError,
    StoreError,
)

T = TypeVar("T")

LARGE_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 1 << 30  # of thirty million super-samples
_LATE_SECONDS = 0.08  # a manifest that takes longer is worth a second request, which tells whether it is large
_LEAST_BYTES_PER_SECOND = 10e6  # a manifest that comes more slowly is read a second time, too
_PARALLEL_READS = 8
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Stored:
    manifest: Manifest
    data: bytes | bytearray


async def read_manifest(store: Readable, version: int | None = None) -> Manifest:
    """Return a version of a data set's manifest, by default the newest.

    A small manifest is one GET, and up to three if it is late; a large one (over 8 MiB) parallel ranged reads. Nothing
    is listed, unless the pointer is missing. Transient errors are retried.

    Args:
        store: where the data set is; a :class:`~stoker._base.retry.RetryingReader` counts the hedges.
        version: default the newest.

    Raises:
        NotFoundError: there is no data set, or it has no such version.
        FormatError: what is there is not a manifest.
        ChecksumError: it is damaged.
    """
    reader = store if isinstance(store, RetryingReader) else RetryingReader(store)
    if version is None:
        return (await _read_newest(reader)).manifest
    try:
        return (await _read_version(reader, version)).manifest
    except NotFoundError:
        newest = (await _read_newest(reader)).manifest.version
        raise NotFoundError(f"the data set at {store.url} has no version {version}; its newest is {newest}") from None


async def newest_manifest(store: Readable) -> Manifest | None:
    """Return the newest complete version, also where the pointer stayed behind it; None if there is no data set.

    Raises:
        FormatError: a manifest is not one.
        ChecksumError: a manifest is damaged.
    """
    found = await _newest(RetryingReader(store))
    return None if found is None else found.manifest


async def commit(store: Store, build: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Commit the version that ``build`` makes of the newest one, and return it.

    Args:
        store: where the data set is.
        build: gets the newest version (None: there is none) and returns its successor, or the very same object if
            there is nothing to commit. Called again, on top of the winner, each time another writer was first.

    Cancelled, it has either committed nothing or a version that the next writer's commit makes visible.

    Raises:
        StoreError: the store says both that the next version exists and that it does not.
        Exception: what ``build`` raises; nothing was committed.
    """
    retrying = RetryingStore(store)
    lost = 0
    while True:
        newest = await _newest(retrying)
        base = None if newest is None else newest.manifest
        built = build(base)
        if newest is not None and built is newest.manifest:
            await advance(store, newest.manifest, newest.data)
            return built
        following = 1 if base is None else base.version + 1
        if built.version != following or following <= lost:
            raise StoreError(
                f"version {built.version} of {store.url} cannot follow what is there; nothing was committed"
            )
        try:
            return await publish(store, built)
        except PreconditionFailedError:
            lost = following


async def publish(store: Store, manifest: Manifest) -> Manifest:
    """Write a version where there is none of its number yet, and let the pointer follow.

    Raises:
        PreconditionFailedError: there is a version of that number; nothing was written.
    """
    data = manifest.to_bytes()
    await RetryingStore(store).put(version_key(manifest.version), data, if_absent=True)
    await advance(store, manifest, data)
    return manifest


async def advance(store: Store, manifest: Manifest, data: bytes | bytearray | None = None) -> None:
    """Make the pointer a copy of ``manifest`` unless it is one of a newer version; a damaged one is replaced."""
    retrying = RetryingStore(store)
    content = manifest.to_bytes() if data is None else data
    while True:
        try:
            found, info = await retrying.get(POINTER_KEY)
        except NotFoundError:
            tag = None
        else:
            if _version_of(found) >= manifest.version:
                return
            tag = info.tag
        try:
            await retrying.put(POINTER_KEY, content, if_absent=tag is None, if_tag=tag)
        except PreconditionFailedError:
            continue
        return


async def check_bucket(store: Readable, lacking: str) -> None:
    """Raise BucketNotFoundError if the bucket, or folder, does not exist: the reason why something is ``lacking``."""
    try:
        async for _ in RetryingReader(store).list("manifests/"):
            return
    except BucketNotFoundError as error:
        raise BucketNotFoundError(f"there is no {lacking}: {error}") from None


async def list_versions(store: Readable) -> list[int]:
    """Return the numbers of the versions that are there, rising."""
    try:
        keys = [info.key async for info in RetryingReader(store).list("manifests/")]
    except NotFoundError:  # the bucket itself does not exist: a local folder before its first object
        return []
    return sorted(int(match[1]) for key in keys if (match := _VERSION_KEY.fullmatch(key)))


def _version_of(data: bytes) -> int:
    try:
        return Manifest.from_bytes(data).version
    except (FormatError, ChecksumError):
        return 0


async def _read_newest(reader: RetryingReader[Readable]) -> _Stored:
    """Return what the pointer holds; without one, the newest version that a crash left behind."""
    try:
        return await _read(reader, POINTER_KEY)
    except BucketNotFoundError as error:
        raise BucketNotFoundError(f"there is no data set: {error}") from error
    except NotFoundError:
        found = await _newest_listed(reader)
    if found is None:
        remedy = (
            "check the address, which ends with /v1/NAME"
            if reader.url.startswith("stoker+")
            else f"pack one with: stoker pack SOURCE {reader.url}"
        )
        raise NotFoundError(f"there is no data set at {reader.url}; {remedy}")
    return found


async def _newest_listed(reader: RetryingReader[Readable]) -> _Stored | None:
    versions = await list_versions(reader)
    return await _read_version(reader, versions[-1]) if versions else None


async def _newest(reader: RetryingReader[Readable]) -> _Stored | None:
    """Return the newest complete version: the pointer's, or one that follows it without a gap."""
    try:
        newest = await _read(reader, POINTER_KEY)
    except NotFoundError:
        return await _newest_listed(reader)
    while True:
        try:
            newest = await _read_version(reader, newest.manifest.version + 1)
        except NotFoundError:
            return newest


async def _read_version(reader: RetryingReader[Readable], version: int) -> _Stored:
    found = await _read(reader, version_key(version))
    if found.manifest.version != version:
        raise FormatError(f"{reader.url}/{version_key(version)} says that it is version {found.manifest.version}")
    return found


async def _read(reader: RetryingReader[Readable], key: str) -> _Stored:
    try:
        return await _read_once(reader, key)
    except (ChecksumError, FormatError, ObjectChangedError):  # damaged on its way, or replaced between two ranges
        return await _read_once(reader, key)


async def _read_once(reader: RetryingReader[Readable], key: str) -> _Stored:
    data = await _fetch(reader, key)
    remedy = f"stoker rebuild-manifest {reader.url} makes a new one from the super-samples"
    try:
        return _Stored(Manifest.from_bytes(data), data)
    except ChecksumError as error:
        raise ChecksumError(f"{reader.url}/{key} is damaged: {error}; {remedy}") from None
    except FormatError as error:
        raise FormatError(f"{reader.url}/{key} is not a manifest: {error}; {remedy}") from None


async def _fetch(reader: RetryingReader[Readable], key: str) -> bytes | bytearray:
    """Read an object; once it is late, read it in parts if it is large, and else a second time."""
    async with _begun(reader.get(key)) as whole:
        await asyncio.wait({whole}, timeout=_LATE_SECONDS)
        info = None if whole.done() else await _looked_up(reader, key, whole)
        if info is not None and info.size_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(f"{reader.url}/{key} has {info.size_bytes} bytes, more than any manifest")
        if info is not None and info.size_bytes > LARGE_BYTES:
            return await _fetch_in_parts(reader, info)
        if info is not None:
            await asyncio.wait({whole}, timeout=info.size_bytes / _LEAST_BYTES_PER_SECOND)
        if not whole.done():
            return (await _hedged(reader, whole, lambda: _prompt(reader, lambda: reader.get(key))))[0]
        return whole.result()[0]


async def _looked_up(reader: RetryingReader[Readable], key: str, whole: asyncio.Task[Any]) -> ObjectInfo | None:
    """Return what the store says of an object, None if ``whole`` is done first, or if the store does not say."""
    async with _begun(_prompt(reader, lambda: reader.head(key))) as looking:
        await asyncio.wait({whole, looking}, return_when=asyncio.FIRST_COMPLETED)
        try:
            return looking.result() if looking.done() and not whole.done() else None
        except StoreError:
            return None


async def _prompt(reader: RetryingReader[Readable], send: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Send a request, and once more if it is late."""
    async with _begun(send()) as request:
        await asyncio.wait({request}, timeout=_LATE_SECONDS)
        return request.result() if request.done() else await _hedged(reader, request, send)


async def _hedged(
    reader: RetryingReader[Readable], late: asyncio.Task[T], send: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Send a request beside one that is late; the first that ends decides."""
    reader.hedges += 1
    async with _begun(send()) as again:
        await asyncio.wait({late, again}, return_when=asyncio.FIRST_COMPLETED)
        return late.result() if late.done() else again.result()


@asynccontextmanager
async def _begun(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Have work done beside the block; what is left of it behind the block is cancelled, and has ended."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await end_tasks([task])


async def _fetch_in_parts(reader: RetryingReader[Readable], info: ObjectInfo) -> bytearray:
    data = bytearray(info.size_bytes)
    view = memoryview(data)

    async def fetch(start: int) -> None:
        end = min(start + LARGE_BYTES, len(data))
        await reader.get_range(info.key, start, end, into=view[start:end], tag=info.tag)

    await for_each(range(0, len(data), LARGE_BYTES), fetch, concurrency=_PARALLEL_READS)
    return data
