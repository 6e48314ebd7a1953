"""A store around another: every call is passed on, and one hook sees them all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar, cast

from stoker._base.meter import Operation
from stoker.abc import Buffer, Listable, ObjectInfo, Readable, Store

__all__ = ["FolderStore", "ReaderWrapper", "StoreWrapper"]

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
