"""A store in this process's memory, for tests and demonstrations: named, shared by all who open the same name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker._stores.location import Location, check_found
from stoker._stores.object_store import ObjectStore
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    NotFoundError,
    PreconditionFailedError,
)

__all__ = ["MemoryStore"]

_PAGE_KEYS = 1000


@dataclass(slots=True)
class _Bucket:
    """Objects by key within the bucket. A tag is the number of the write, so no two contents ever share one."""

    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    writes: int = 0


_buckets: dict[str, _Bucket] = {}
_lock = threading.Lock()  # held for a few dictionary operations; loops in several threads may share a bucket


class MemoryStore(ObjectStore):
    """``memory://name/prefix``. As with a local folder, the bucket comes into being with its first object."""

    def __init__(self, location: Location, _options: None = None) -> None:
        super().__init__(location.url)
        self._at = location

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        return await self._read(key)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        """Copy at once: nobody is told that it begins."""
        data, info = await self._read(key)
        check_found(self._at.object_url(key), info, start, end, tag)
        into[:] = memoryview(data)[start:end]
        return info

    async def _head(self, key: str) -> ObjectInfo:
        return (await self._read(key))[1]

    async def _list(self, prefix: str, start_after: str) -> AsyncIterator[ObjectInfo]:
        """Yield the objects under ``prefix`` as they were when the listing began."""
        first, after = self._at.within_bucket(prefix), self._at.within_bucket(start_after).encode()
        with self._bucket() as bucket:
            found = [(key.encode(), entry) for key, entry in bucket.objects.items() if key.startswith(first)]
        found = sorted(item for item in found if not start_after or item[0] > after)
        for number, (key, (data, tag)) in enumerate(found):
            if number % _PAGE_KEYS == 0:
                await asyncio.sleep(0)
            yield ObjectInfo(key=self._at.relative(key.decode()), size_bytes=len(data), tag=tag)

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        full_key, content = self._at.full_key(key), bytes(data)
        await asyncio.sleep(0)
        with _lock:
            bucket = _buckets.setdefault(self._at.bucket, _Bucket())
            _, found = bucket.objects.get(full_key, (b"", None))
            if (if_absent and found is not None) or (if_tag is not None and found != if_tag):
                raise PreconditionFailedError(
                    f"{self._at.object_url(key)} was written by somebody else; read it again and decide"
                )
            bucket.writes += 1
            bucket.objects[full_key] = (content, f"{bucket.writes:x}")
            return ObjectInfo(key=key, size_bytes=len(content), tag=f"{bucket.writes:x}")

    async def _delete(self, key: str) -> None:
        full_key = self._at.full_key(key)
        await asyncio.sleep(0)
        with self._bucket() as bucket:
            bucket.objects.pop(full_key, None)

    async def _read(self, key: str) -> tuple[bytes, ObjectInfo]:
        full_key = self._at.full_key(key)
        await asyncio.sleep(0)
        with self._bucket() as bucket:
            if full_key not in bucket.objects:
                raise NotFoundError(f"{self._at.object_url(key)} does not exist")
            data, tag = bucket.objects[full_key]
        return data, ObjectInfo(key=key, size_bytes=len(data), tag=tag)

    @contextmanager
    def _bucket(self) -> Iterator[_Bucket]:
        with _lock:
            if self._at.bucket not in _buckets:
                raise BucketNotFoundError(f"{self.url}: nothing was ever written to memory://{self._at.bucket}")
            yield _buckets[self._at.bucket]
