"""Metering of billed requests to a store, and a store wrapper with one hook for all requests.

A store bills a request when it is sent, even if the caller cancels it or the connection breaks; it does not bill a
request that it refused or failed to serve (429, 5xx;
https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html). If a client cannot know, the meter
overestimates: a request that was cancelled before it was sent, and all bytes of a broken read, count as billed.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Literal, TypeVar, cast

from stoker._base.arguments import BoundedConfig
from stoker._base.fields import quote_value
from stoker._base.upload import ObjectUpload, PartWritable
from stoker.abc import Buffer, Listable, ObjectInfo, Readable, Store
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    ServerError,
    StoreError,
    ThrottledError,
    TruncatedError,
)

_STORE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)

Egress = Literal["same_region", "other_region", "internet"]


class Operation(enum.StrEnum):
    """A kind of request to a store, as in its bill.

    Example:
        >>> Operation("GET") is Operation.GET
        True
    """

    GET = "GET"
    HEAD = "HEAD"
    PUT = "PUT"
    LIST = "LIST"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True)
class PriceKey:
    """The key for looking up a store's prices.

    Attributes:
        url: URL of the store.
        endpoint: URL of a service other than the cloud's own; empty for the cloud's own.
        name: name of a store in the price file, if the user chose one, which takes precedence; otherwise empty.
    """

    url: str
    endpoint: str = ""
    name: str = ""


def check_store_name(name: object) -> None:
    """Raise ConfigError unless the name is valid for a store in a price file."""
    if not isinstance(name, str) or not _STORE_NAME.fullmatch(name):
        raise ConfigError(
            f"the name of a store in the price file must be made of a-z, 0-9, . _ and -, such as r2 or minio, not "
            f"{quote_value(name)}"
        )


_UNBILLED_ERRORS = (ThrottledError, ServerError)
_BROKEN_READ_ERRORS = (asyncio.CancelledError, TruncatedError, ConnectionLostError, DeadlineError)


@dataclass(slots=True, kw_only=True)
class MeterReading(BoundedConfig):
    """A snapshot of a meter.

    Attributes:
        url: URL of the store.
        egress: location of the reader: ``same_region``, ``other_region`` or ``internet``.
        requests: number of requests started, by operation, including failed and cancelled ones.
        not_billed: number of these that the store refused or failed to serve, by operation.
        failed: number of requests that ended with an error.
        cancelled: number of requests that were cancelled.
        read_bytes: bytes received by successful reads.
        broken_bytes: bytes requested by cancelled or broken reads; an upper bound of what they received.
        written_bytes: bytes written by successful writes.
        key: key of the store's prices; None to use the URL.
    """

    url: str
    egress: Egress
    requests: dict[Operation, int] = field(default_factory=lambda: dict.fromkeys(Operation, 0))
    not_billed: dict[Operation, int] = field(default_factory=lambda: dict.fromkeys(Operation, 0))
    failed: int = 0
    cancelled: int = 0
    read_bytes: int = 0
    broken_bytes: int = 0
    written_bytes: int = 0
    key: PriceKey | None = field(default=None, repr=False)


class Meter:
    """Counters of the requests to one store. One thread changes them; any thread may call :meth:`snapshot`.

    Args:
        url: URL of the store.
        egress: location of the reader: ``same_region`` (default), ``other_region`` or ``internet``.
        key: function that returns the key of the store's prices; default None, which uses the URL.

    Raises:
        ConfigError: ``egress`` is not one of these values.
    """

    def __init__(self, url: str, *, egress: Egress = "same_region", key: Callable[[], PriceKey] | None = None) -> None:
        self._key = key
        self._counted = MeterReading(url=url, egress=egress)

    def __repr__(self) -> str:
        counts = " ".join(f"{operation}={count}" for operation, count in self._counted.requests.items() if count)
        return f"<Meter {self._counted.url} {counts or 'unused'}>"

    @contextmanager
    def count_request(self, operation: Operation, *, requested_bytes: int = 0) -> Iterator[None]:
        """Count the request that the block performs, and its outcome.

        Args:
            operation: kind of the request.
            requested_bytes: number of bytes requested by a read, which count if it breaks; default 0.
        """
        self._counted.requests[operation] += 1
        try:
            yield
        except (asyncio.CancelledError, StoreError) as error:
            self._count_failure(operation, error, requested_bytes)
            raise

    def _count_failure(self, operation: Operation, error: BaseException, asked_bytes: int) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._counted.cancelled += 1
        else:
            self._counted.failed += 1
        if isinstance(error, _UNBILLED_ERRORS):
            self._counted.not_billed[operation] += 1
        elif isinstance(error, _BROKEN_READ_ERRORS):
            self._counted.broken_bytes += asked_bytes

    def add_read(self, size_bytes: int) -> None:
        """Count bytes received by a read."""
        self._counted.read_bytes += size_bytes

    def add_written(self, size_bytes: int) -> None:
        """Count bytes written."""
        self._counted.written_bytes += size_bytes

    def snapshot(self) -> MeterReading:
        """Return a snapshot of the counters."""
        now = self._counted
        key = None if self._key is None else self._key()
        return replace(now, requests=dict(now.requests), not_billed=dict(now.not_billed), key=key)


R_co = TypeVar("R_co", bound=Readable, covariant=True)
T = TypeVar("T")


class ReaderWrapper(Generic[R_co]):
    """Reads through another store. Subclasses override :meth:`_perform`, the hook for all requests.

    Attributes:
        wrapped: the store that performs the requests.
    """

    _folder = ""  # prefix of every key in the wrapped store: empty, or ends with a slash

    def __init__(self, store: R_co) -> None:
        self.wrapped: R_co = store

    @property
    def url(self) -> str:
        """URL of the wrapped store, or of the folder in it."""
        return f"{self.wrapped.url.rstrip('/')}/{self._folder.rstrip('/')}" if self._folder else self.wrapped.url

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send one request for ``key`` and return its result; called for every request except listings."""
        return await request()

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object and its metadata."""
        data, info = await self._perform(Operation.GET, key, partial(self.wrapped.get, self._folder + key))
        return data, self._relative(info)

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
        request = partial(self.wrapped.get_range, self._folder + key, start, end, into=into, tag=tag, begun=begun)
        return self._relative(await self._perform(Operation.GET, key, request))

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's metadata."""
        return self._relative(await self._perform(Operation.HEAD, key, partial(self.wrapped.head, self._folder + key)))

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``."""
        after = self._folder + start_after if start_after else ""
        async for info in cast("Listable", self.wrapped).list(self._folder + prefix, start_after=after):
            yield self._relative(info)

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._folder)) if self._folder else info


class StoreWrapper(ReaderWrapper[Store]):
    """Reads, writes and deletes through another store."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object."""
        request = partial(self.wrapped.put, self._folder + key, data, if_absent=if_absent, if_tag=if_tag)
        return self._relative(await self._perform(Operation.PUT, key, request))

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload | None:
        """Begin to write a new object in parts; return None if the store cannot."""
        if not isinstance(self.wrapped, PartWritable):
            return None
        request = partial(self.wrapped.begin_upload, self._folder + key, size_bytes)
        return await self._perform(Operation.PUT, key, request)

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._perform(Operation.DELETE, key, partial(self.wrapped.delete, self._folder + key))

    async def close(self) -> None:
        """Close the other store."""
        await self.wrapped.close()


class FolderStore(StoreWrapper):
    """A folder of a store, as a store that shares the connections.

    Args:
        store: store that contains the folder.
        folder: prefix of the keys; ends with a slash.
    """

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(store)
        self._folder = folder

    async def close(self) -> None:
        """Do nothing: the connections belong to the store."""
