"""Base classes of stores, which check and count requests before an adapter or plug-in sends them.

The smallest adapter is a store in this process's memory, for tests and demonstrations.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stoker._base.batch_read import BatchLimits, BatchReadable, ObjectRange
from stoker._base.fields import make_printable
from stoker._base.meter import Egress, Meter, Operation, PriceKey
from stoker._base.upload import ObjectUpload, PartWritable
from stoker._stores.location import Location, check_conditions, check_key, check_range, check_tag_and_range, check_text
from stoker.abc import Buffer, ObjectInfo, RangeReadable
from stoker.errors import (
    BucketNotFoundError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StokerError,
    StoreError,
)

_PAGE_KEYS = 1000
_VERBS = {
    "get_range": "read ranges of objects",
    "get_ranges": "read ranges of several objects by one request",
    "head": "report size and tag of objects",
    "list": "list objects",
    "put": "write objects",
    "delete": "delete objects",
}


class ObjectStore:
    """Base class of built-in stores. Public methods check their arguments, and count requests, including failed ones.

    An adapter implements methods with an underscore, which send the requests. A method that it does not implement
    raises a PermissionDeniedError.

    Attributes:
        url: Root URL as the user wrote it, without secrets.
        meter: Counter of requests and bytes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.meter = Meter(url, key=self.price_key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.meter!r}>"

    def price_key(self) -> PriceKey:
        """Return the key of the store's prices in the price file."""
        return PriceKey(self.url)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        with self.meter.count_request(Operation.GET):
            data, info = await self._get(key)
        self.meter.add_read(len(data))
        return data, info

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read bytes ``[start, end)`` into ``into``."""
        check_range(start, end, into)
        with self.meter.count_request(Operation.GET, requested_bytes=end - start):
            info = await self._get_range(key, start, end, into, tag, begun)
        self.meter.add_read(end - start)
        return info

    @property
    def batch_limits(self) -> BatchLimits | None:
        """Limits of a request for ranges of several objects; None, the default, if the store has no such request."""
        return None

    async def get_ranges(
        self, ranges: Sequence[ObjectRange], *, into: memoryview, begun: Callable[[], None] | None = None
    ) -> None:
        """Read ranges of several objects, one behind the other, into ``into``, by one request."""
        with self.meter.count_request(Operation.GET, requested_bytes=into.nbytes):
            await self._get_ranges(ranges, into, begun)
        self.meter.add_read(into.nbytes)

    async def head(self, key: str) -> ObjectInfo:
        """Return size and tag."""
        with self.meter.count_request(Operation.HEAD):
            return await self._head(key)

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects under ``prefix``; each page of 1,000 keys counts as a request, and so does an empty one."""
        async with aclosing(self._list(prefix, start_after)) as infos:
            for number in itertools.count():
                with self.meter.count_request(Operation.LIST) if number % _PAGE_KEYS == 0 else nullcontext():
                    info = await anext(infos, None)
                if info is None:
                    return
                yield info

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object."""
        check_conditions(if_absent=if_absent, if_tag=if_tag)
        with self.meter.count_request(Operation.PUT):
            info = await self._put(key, data, if_absent=if_absent, if_tag=if_tag)
        self.meter.add_written(memoryview(data).nbytes)
        return info

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
        """Begin to write a new object in parts; None, the default, if the store cannot. The upload counts its requests.

        Args:
            key: Key of the object.
            size_bytes: Size of the object.
        """
        return None

    async def delete(self, key: str) -> None:
        """Delete an object."""
        with self.meter.count_request(Operation.DELETE):
            await self._delete(key)

    async def close(self) -> None:
        """Close connections; the store may be used again."""

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        info = await self._head(key)
        data = bytearray(info.size_bytes)
        info = await self._get_range(key, 0, len(data), memoryview(data), info.tag or None, None)
        return bytes(data), info

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        raise self._unsupported_error("get_range", key)

    async def _get_ranges(
        self, ranges: Sequence[ObjectRange], into: memoryview, begun: Callable[[], None] | None
    ) -> None:
        raise self._unsupported_error("get_ranges", ranges[0].key)

    async def _head(self, key: str) -> ObjectInfo:
        raise self._unsupported_error("head", key)

    def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        raise self._unsupported_error("list", prefix)

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        raise self._unsupported_error("put", key)

    async def _delete(self, key: str) -> None:
        raise self._unsupported_error("delete", key)

    def _unsupported_error(self, method: str, key: str) -> StoreError:
        """Return the error for a method that this store does not implement."""
        return PermissionDeniedError(
            f"{self.url}/{make_printable(key)}: this store cannot {_VERBS[method]}: {self._name} has no "
            f"{method}(); give the URL of a store that can"
        )

    @property
    def _name(self) -> str:
        return type(self).__name__


class MeteredStore(ObjectStore):
    """Wraps any store, such as a plug-in's: checks keys, counts requests, and translates errors.

    Other attributes of the wrapped store (``presign`` …) remain accessible.

    Args:
        store: Store to wrap. It needs only those methods of :class:`stoker.abc.Store` that are called, and no ``get``.
        meter: Counter of requests, which several stores may share. Default: a new one.
    """

    def __init__(self, store: Any, meter: Meter | None = None) -> None:
        super().__init__(store.url)
        self.wrapped = store
        self.meter = meter or self.meter

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "wrapped":  # copy() asks before the attribute is set
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def price_key(self) -> PriceKey:
        """Return the key of the store's prices in the price file."""
        return price_key(self.wrapped)

    async def close(self) -> None:
        """Close the wrapped store, if it has a method ``close``."""
        if hasattr(self.wrapped, "close"):
            await self.wrapped.close()

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        if not hasattr(self.wrapped, "get"):
            return await super()._get(key)
        with self._method("get", key) as get:
            result: tuple[bytes, ObjectInfo] = await get(key)
        return result

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        with self._method("get_range", key) as read:
            info: ObjectInfo = await read(key, start, end, into=into, tag=tag, begun=begun)
        return info

    @property
    def batch_limits(self) -> BatchLimits | None:
        """Limits of a request for ranges of several objects; None if the wrapped store has no such request."""
        return self.wrapped.batch_limits if isinstance(self.wrapped, BatchReadable) else None

    async def _get_ranges(
        self, ranges: Sequence[ObjectRange], into: memoryview, begun: Callable[[], None] | None
    ) -> None:
        with self._method("get_ranges", ranges[0].key) as read:
            await read(ranges, into=into, begun=begun)

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
        """Begin to write a new object in parts, if the wrapped store can; all of it counts as one request."""
        if not isinstance(self.wrapped, PartWritable):
            return None
        with self.meter.count_request(Operation.PUT), self._method("begin_upload", key) as begin:
            upload: ObjectUpload | None = await begin(key, size_bytes)
        return upload

    async def _head(self, key: str) -> ObjectInfo:
        with self._method("head", key) as head:
            info: ObjectInfo = await head(key)
        return info

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        for text in (prefix, start_after):
            check_text("object key or prefix", text)
        with self._method("list", prefix) as method:
            listing = method(prefix, start_after=start_after)
            try:
                async for info in listing:
                    yield info
            finally:
                if isinstance(listing, AsyncGenerator):
                    await listing.aclose()

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        conditions = {"if_absent": if_absent, "if_tag": if_tag} if if_absent or if_tag is not None else {}
        with self._method("put", key) as put:
            if not conditions.keys() <= inspect.signature(put).parameters.keys():
                raise StoreError(
                    f"{self.url}/{make_printable(key)}: this store cannot write conditionally, so another "
                    f"writer might go unnoticed: put() of {self._name} takes no if_absent and if_tag; use a store "
                    "that supports them"
                )
            info: ObjectInfo = await put(key, data, **conditions)
        return info

    async def _delete(self, key: str) -> None:
        with self._method("delete", key) as delete:
            await delete(key)

    @contextmanager
    def _method(self, name: str, key: str) -> Iterator[Callable[..., Any]]:
        """Yield a method of the wrapped store; unexpected exceptions become a StoreError that names the object."""
        if name != "list":
            check_key(key)
        method: Callable[..., Any] | None = getattr(self.wrapped, name, None)
        if method is None:
            raise self._unsupported_error(name, key)
        try:
            yield method
        except StokerError:
            raise
        except Exception as error:
            message = f"{self.url}/{make_printable(key)}: {name}() of {self._name} failed: {error!r}"
            raise StoreError(message) from error

    @property
    def _name(self) -> str:
        return type(self.wrapped).__name__


def price_key(store: RangeReadable) -> PriceKey:
    """Return the key of a store's prices: the user's choice, its endpoint or its URL.

    A user's own store may have an attribute ``prices``, the name of a store in the price file.
    """
    if isinstance(store, ObjectStore):
        return store.price_key()
    return PriceKey(store.url, name=getattr(store, "prices", ""))


def with_meter(store: RangeReadable, *, egress: Egress = "same_region", meter: Meter | None = None) -> ObjectStore:
    """Return a view of a store that shares its connections and has another meter.

    Args:
        store: Store to view; its own meter does not count requests of the view.
        egress: Location of the reader relative to the store. Default: ``"same_region"``.
        meter: Meter to use, for several stores that share one. Default: a new one.
    """
    counted = copy(store) if isinstance(store, ObjectStore) else MeteredStore(store)
    counted.meter = meter or Meter(store.url, egress=egress, key=partial(price_key, store))
    return counted


@dataclass(slots=True)
class _MemoryBucket:
    """Objects by key within the bucket. A tag is the number of the write, so no two writes share one."""

    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    writes: int = 0


_buckets: dict[str, _MemoryBucket] = {}
_lock = threading.Lock()  # held for a few dictionary operations; loops in several threads may share a bucket


class MemoryStore(ObjectStore):
    """A store in this process's memory, ``memory://name/prefix``; stores with the same name share their objects."""

    def __init__(self, location: Location, _options: None = None) -> None:
        super().__init__(location.url)
        self._location = location

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        return await self._read(key)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        """Copy a range; ``begun`` is not called, since the copy takes no time."""
        data, info = await self._read(key)
        check_tag_and_range(self._location.object_url(key), info, start, end, tag)
        into[:] = memoryview(data)[start:end]
        return info

    async def _head(self, key: str) -> ObjectInfo:
        return (await self._read(key))[1]

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield the objects under ``prefix`` as they were when the listing began."""
        first = self._location.within_bucket(prefix)
        after = self._location.within_bucket(start_after).encode()
        with self._bucket() as bucket:
            entries = [(key.encode(), entry) for key, entry in bucket.objects.items() if key.startswith(first)]
        entries = sorted(item for item in entries if not start_after or item[0] > after)
        for number, (key, (data, tag)) in enumerate(entries):
            if number % _PAGE_KEYS == 0:
                await asyncio.sleep(0)
            yield ObjectInfo(key=self._location.relative(key.decode()), size_bytes=len(data), tag=tag)

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        full_key, content = self._location.full_key(key), bytes(data)
        await asyncio.sleep(0)
        with _lock:
            bucket = _buckets.setdefault(self._location.bucket, _MemoryBucket())
            _, existing = bucket.objects.get(full_key, (b"", None))
            if (if_absent and existing is not None) or (if_tag is not None and existing != if_tag):
                raise PreconditionFailedError(
                    f"{self._location.object_url(key)} was written by another writer; read it again and decide"
                )
            bucket.writes += 1
            bucket.objects[full_key] = (content, f"{bucket.writes:x}")
            return ObjectInfo(key=key, size_bytes=len(content), tag=f"{bucket.writes:x}")

    async def _delete(self, key: str) -> None:
        full_key = self._location.full_key(key)
        await asyncio.sleep(0)
        with self._bucket() as bucket:
            bucket.objects.pop(full_key, None)

    async def _read(self, key: str) -> tuple[bytes, ObjectInfo]:
        full_key = self._location.full_key(key)
        await asyncio.sleep(0)
        with self._bucket() as bucket:
            if full_key not in bucket.objects:
                raise NotFoundError(f"{self._location.object_url(key)} does not exist")
            data, tag = bucket.objects[full_key]
        return data, ObjectInfo(key=key, size_bytes=len(data), tag=tag)

    @contextmanager
    def _bucket(self) -> Iterator[_MemoryBucket]:
        with _lock:
            if self._location.bucket not in _buckets:
                raise BucketNotFoundError(f"{self.url}: nothing was ever written to memory://{self._location.bucket}")
            yield _buckets[self._location.bucket]
