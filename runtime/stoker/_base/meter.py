"""Requests to a store: their kinds, what of them it will bill, and a wrapper of stores whose one hook sees them all.

A request is billed when it is sent, whether or not its caller waited for the answer, so cancelled and broken ones
count; one that the store refused or failed to serve (429, 5xx) does not
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html). Where a client cannot know, the meter
errs upwards: a request that was cancelled before it left, and every byte of a read that broke, count as billed.
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

from stoker._base.arguments import Bounded
from stoker._base.fields import shown
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
    """A kind of request to a store, as stores bill them."""

    GET = "GET"
    HEAD = "HEAD"
    PUT = "PUT"
    LIST = "LIST"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True)
class PriceKey:
    """What the prices of a store are found by.

    Attributes:
        url: of the store.
        endpoint: URL of the service that is asked instead of the cloud's own; empty for the cloud's own.
        name: of a store in the price file, where the user has named one; it decides.
    """

    url: str
    endpoint: str = ""
    name: str = ""


def check_store_name(name: object) -> None:
    """Raise ConfigError unless a store in a price file may have this name."""
    if not isinstance(name, str) or not _STORE_NAME.fullmatch(name):
        raise ConfigError(
            f"{shown(name)} is no name of a store in the price file: write one as r2 or minio, of a-z, 0-9, . _ and -"
        )


_NOT_BILLED = (ThrottledError, ServerError)
_BROKEN = (asyncio.CancelledError, TruncatedError, ConnectionLostError, DeadlineError)


@dataclass(slots=True, kw_only=True)
class Reading(Bounded):
    """What a meter had counted at one moment.

    Attributes:
        url: the store it counts for.
        egress: where its reader is.
        requests: started, by operation; failed and cancelled ones too.
        not_billed: of them, those that the store refused or failed to serve.
        failed: how many ended with an error.
        cancelled: how many their caller gave up.
        read_bytes: that arrived, in reads that ended well.
        broken_bytes: asked for by reads that were cancelled or cut off: at most these arrived besides.
        written_bytes: of writes that ended well.
        key: by which the store's prices are found; None where its URL tells.
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
    """Counters of one store. Changed on one thread; :meth:`reading` may be called from any.

    Args:
        url: of the store.
        egress: where its reader is.
        key: returns by what the store's prices are found; by default its URL tells.

    Raises:
        ConfigError: ``egress`` is none of the known classes.
    """

    def __init__(self, url: str, *, egress: Egress = "same_region", key: Callable[[], PriceKey] | None = None) -> None:
        self._key = key
        self._counted = Reading(url=url, egress=egress)

    def __repr__(self) -> str:
        counts = " ".join(f"{operation}={count}" for operation, count in self._counted.requests.items() if count)
        return f"<Meter {self._counted.url} {counts or 'unused'}>"

    @contextmanager
    def request(self, operation: Operation, *, asked_bytes: int = 0) -> Iterator[None]:
        """Count one request, from its start to however it ends.

        Args:
            operation: its kind.
            asked_bytes: what a read will have moved if it breaks off.
        """
        self._counted.requests[operation] += 1
        try:
            yield
        except (asyncio.CancelledError, StoreError) as error:
            self._note_failure(operation, error, asked_bytes)
            raise

    def _note_failure(self, operation: Operation, error: BaseException, asked_bytes: int) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._counted.cancelled += 1
        else:
            self._counted.failed += 1
        if isinstance(error, _NOT_BILLED):
            self._counted.not_billed[operation] += 1
        elif isinstance(error, _BROKEN):
            self._counted.broken_bytes += asked_bytes

    def add_read(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._counted.read_bytes += size_bytes

    def add_written(self, size_bytes: int) -> None:
        """Count bytes that were stored."""
        self._counted.written_bytes += size_bytes

    def reading(self) -> Reading:
        """Return what was counted so far."""
        now = self._counted
        key = None if self._key is None else self._key()
        return replace(now, requests=dict(now.requests), not_billed=dict(now.not_billed), key=key)


R_co = TypeVar("R_co", bound=Readable, covariant=True)
T = TypeVar("T")


class ReaderWrapper(Generic[R_co]):
    """Reads through another store. A subclass says in :meth:`_perform` what else a request does.

    Attributes:
        wrapped: the other store.
    """

    _folder = ""  # what stands before every key there; it ends with a slash, or is empty

    def __init__(self, store: R_co) -> None:
        self.wrapped: R_co = store

    @property
    def url(self) -> str:
        """The other store's root, or the folder of it."""
        return f"{self.wrapped.url.rstrip('/')}/{self._folder.rstrip('/')}" if self._folder else self.wrapped.url

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send one request, which is about ``key``, and return its answer; called for every request but listings."""
        return await request()

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
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
        """Return size and tag."""
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

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._perform(Operation.DELETE, key, partial(self.wrapped.delete, self._folder + key))

    async def close(self) -> None:
        """Close the other store."""
        await self.wrapped.close()


class FolderStore(StoreWrapper):
    """A folder of a store, as a store; connections stay the store's.

    Args:
        store: has the folder.
        folder: ends with a slash.
    """

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(store)
        self._folder = folder

    async def close(self) -> None:
        """Do nothing: the connections are the store's."""
