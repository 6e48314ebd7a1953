"""Versions of a data set's manifest in its store, and their atomic commit.

A conditional write creates ``manifests/<n>.safetensors`` only if it does not exist. Of concurrent writers, one wins the
number; the others rebuild their version on top of it. ``manifest.safetensors``, the pointer, is a byte copy of the
newest version and only moves forward. If a writer dies between the two writes, the pointer is stale: the next writer
finds the newer version by reading the numbers that follow, and its commit advances the pointer.
"""

from __future__ import annotations

import asyncio
import re
import time
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
MAX_MANIFEST_BYTES = 1 << 30  # thirty million super-samples
_HEDGE_DELAY_SECONDS = 0.05  # after this time, a second request asks for the size of the manifest
_MIN_BYTES_PER_SECOND = 10e6  # a slower transfer is hedged, too
_PARALLEL_READS = 8
_last_commit_seconds = 0.0
_VERSION_KEY = re.compile(r"manifests/([0-9]{8,9})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest, and its object's bytes.

    Attributes:
        manifest: the manifest.
        data: the bytes.
    """

    manifest: Manifest
    data: bytes | bytearray


async def read_manifest(store: Readable, version: int | None = None) -> Manifest:
    """Read a version of a data set's manifest, by default the newest.

    A small manifest takes one GET, or up to three if it is late; a large one (over 8 MiB) is read in parallel ranges.
    The bucket is listed only if the pointer is missing. Transient errors are retried.

    Args:
        store: store of the data set; a :class:`~stoker._base.retry.RetryingReader` counts the hedges.
        version: version number, from 1; default the newest.

    Raises:
        NotFoundError: there is no data set, or it has no such version.
        FormatError: the object is not a manifest.
        ChecksumError: the manifest is damaged.
    """
    return (await read_stored_manifest(store, version)).manifest


async def read_stored_manifest(store: Readable, version: int | None = None) -> StoredManifest:
    """Read a version of a data set's manifest as :func:`read_manifest` does; return its bytes, too."""
    reader = store if isinstance(store, RetryingReader) else RetryingReader(store)
    if version is None:
        return await _read_newest(reader)
    try:
        return await _read_version(reader, version)
    except NotFoundError:
        newest = (await _read_newest(reader)).manifest.version
        raise NotFoundError(f"the data set at {store.url} has no version {version}; its newest is {newest}") from None


async def find_newest_manifest(store: Readable) -> Manifest | None:
    """Return the newest complete version, even if the pointer is stale; None if there is no data set.

    Raises:
        FormatError: an object is not a manifest.
        ChecksumError: a manifest is damaged.
    """
    newest = await _find_newest(RetryingReader(store))
    return None if newest is None else newest.manifest


async def commit(store: Store, build: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Commit the version that ``build`` derives from the newest one, and return it.

    If the call is cancelled, it has committed nothing, or a version that the next writer's commit makes visible.

    Args:
        store: store of the data set.
        build: function from the newest version (None if there is none) to its successor, or to the same object if
            there is nothing to commit. Called again with the winner's version each time another writer wins.

    Raises:
        StoreError: the store reports both that the next version exists and that it does not.
        Exception: an exception of ``build``; nothing was committed.
    """
    retrying = RetryingStore(store)
    lost_races = 0
    while True:
        newest = await _find_newest(retrying)
        base = None if newest is None else newest.manifest
        built = build(base)
        if newest is not None and built is newest.manifest:
            await advance_pointer(store, newest.manifest, newest.data)
            return built
        following = 1 if base is None else base.version + 1
        if built.version != following or following <= lost_races:
            raise StoreError(
                f"version {built.version} of {store.url} does not follow the newest version; nothing was committed"
            )
        try:
            return await publish(store, built)
        except PreconditionFailedError:
            lost_races = following


async def publish(store: Store, manifest: Manifest) -> Manifest:
    """Write a version unless its number exists, and advance the pointer.

    Raises:
        PreconditionFailedError: a version with this number exists; nothing was written.
    """
    data = manifest.to_bytes()
    await RetryingStore(store).put(version_key(manifest.version), data, if_absent=True)
    await advance_pointer(store, manifest, data)
    return manifest


def last_commit_seconds() -> float:
    """Return when this process has committed a version last, in seconds since the epoch; 0 if it never has."""
    return _last_commit_seconds


async def advance_pointer(store: Store, manifest: Manifest, data: bytes | bytearray | None = None) -> None:
    """Replace the pointer by a copy of ``manifest``, unless it is a valid copy of this or a newer version."""
    try:
        await _advance_pointer(store, manifest, data)
    finally:
        global _last_commit_seconds
        _last_commit_seconds = time.time()


async def _advance_pointer(store: Store, manifest: Manifest, data: bytes | bytearray | None) -> None:
    retrying = RetryingStore(store)
    content = manifest.to_bytes() if data is None else data
    while True:
        try:
            pointer, info = await retrying.get(POINTER_KEY)
        except NotFoundError:
            tag = None
        else:
            if _version_of(pointer) >= manifest.version:
                return
            tag = info.tag
        try:
            await retrying.put(POINTER_KEY, content, if_absent=tag is None, if_tag=tag)
        except PreconditionFailedError:
            continue
        return


async def check_bucket(store: Readable, missing: str) -> None:
    """Raise BucketNotFoundError if the bucket or folder does not exist, as the reason that ``missing`` is missing."""
    try:
        async for _ in RetryingReader(store).list("manifests/"):
            return
    except BucketNotFoundError as error:
        raise BucketNotFoundError(f"there is no {missing}: {error}") from None


async def list_versions(store: Readable) -> list[int]:
    """Return the numbers of the existing versions, ascending."""
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


async def _read_newest(reader: RetryingReader[Readable]) -> StoredManifest:
    """Read the pointer or, if it is missing after a crash, the newest listed version."""
    try:
        return await _read_twice(reader, POINTER_KEY)
    except BucketNotFoundError as error:
        raise BucketNotFoundError(f"there is no data set: {error}") from error
    except NotFoundError:
        newest = await _list_newest(reader)
    if newest is None:
        remedy = (
            "check the address, which ends with /v1/NAME"
            if reader.url.startswith("stoker+")
            else f"pack one with: stoker pack SOURCE {reader.url}"
        )
        raise NotFoundError(f"there is no data set at {reader.url}; {remedy}")
    return newest


async def _list_newest(reader: RetryingReader[Readable]) -> StoredManifest | None:
    versions = await list_versions(reader)
    return await _read_version(reader, versions[-1]) if versions else None


async def _find_newest(reader: RetryingReader[Readable]) -> StoredManifest | None:
    """Return the newest complete version: the pointer's, or the last that follows it without a gap."""
    try:
        newest = await _read_twice(reader, POINTER_KEY)
    except NotFoundError:
        return await _list_newest(reader)
    while True:
        try:
            newest = await _read_version(reader, newest.manifest.version + 1)
        except NotFoundError:
            return newest


async def _read_version(reader: RetryingReader[Readable], version: int) -> StoredManifest:
    manifest = await _read_twice(reader, version_key(version))
    if manifest.manifest.version != version:
        raise FormatError(f"{reader.url}/{version_key(version)} says that it is version {manifest.manifest.version}")
    return manifest


async def _read_twice(reader: RetryingReader[Readable], key: str) -> StoredManifest:
    try:
        return await _read_once(reader, key)
    except (ChecksumError, FormatError, ObjectChangedError):  # damaged in transit, or replaced between two ranges
        return await _read_once(reader, key)


async def _read_once(reader: RetryingReader[Readable], key: str) -> StoredManifest:
    data = await _fetch(reader, key)
    remedy = f"restore it from the super-samples with: stoker rebuild-manifest {reader.url}"
    try:
        return StoredManifest(Manifest.from_bytes(data), data)
    except ChecksumError as error:
        raise ChecksumError(f"{reader.url}/{key} is damaged: {error}; {remedy}") from None
    except FormatError as error:
        raise FormatError(f"{reader.url}/{key} is not a manifest: {error}; {remedy}") from None


async def _fetch(reader: RetryingReader[Readable], key: str) -> bytes | bytearray:
    """Read an object. If it is late, read it in parallel ranges if it is large, and hedge the request otherwise."""
    async with _background_task(reader.get(key)) as whole:
        await asyncio.wait({whole}, timeout=_HEDGE_DELAY_SECONDS)
        info = None if whole.done() else await _look_up(reader, key, whole)
        if info is not None and info.size_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(f"{reader.url}/{key} has {info.size_bytes} bytes, more than any manifest")
        if info is not None and info.size_bytes > LARGE_BYTES:
            return await _fetch_in_parts(reader, info)
        if info is not None:
            await asyncio.wait({whole}, timeout=info.size_bytes / _MIN_BYTES_PER_SECOND)
        if not whole.done():
            return (await _hedge(reader, whole, lambda: _send_hedged(reader, lambda: reader.get(key))))[0]
        return whole.result()[0]


async def _look_up(reader: RetryingReader[Readable], key: str, whole: asyncio.Task[Any]) -> ObjectInfo | None:
    """Return an object's metadata; None if ``whole`` finishes first, or the request fails."""
    async with _background_task(_send_hedged(reader, lambda: reader.head(key))) as looking:
        await asyncio.wait({whole, looking}, return_when=asyncio.FIRST_COMPLETED)
        try:
            return looking.result() if looking.done() and not whole.done() else None
        except StoreError:
            return None


async def _send_hedged(reader: RetryingReader[Readable], send: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Send a request, and a hedge if it is late."""
    async with _background_task(send()) as request:
        await asyncio.wait({request}, timeout=_HEDGE_DELAY_SECONDS)
        return request.result() if request.done() else await _hedge(reader, request, send)


async def _hedge(
    reader: RetryingReader[Readable], late: asyncio.Task[T], send: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Hedge a late request: send it again, and return the result of the first that ends."""
    reader.hedges += 1
    async with _background_task(send()) as again:
        await asyncio.wait({late, again}, return_when=asyncio.FIRST_COMPLETED)
        return late.result() if late.done() else again.result()


@asynccontextmanager
async def _background_task(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run a coroutine as a task during the block; at the end of the block, cancel it and wait for it to end."""
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
