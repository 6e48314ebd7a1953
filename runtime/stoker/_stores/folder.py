"""A folder of a store, as a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from stoker.abc import Buffer, ObjectInfo, Store

__all__ = ["FolderStore"]


class FolderStore:
    """Passes everything on to ``store`` with ``folder`` in front of the keys; connections stay the store's.

    Args:
        store: has the folder.
        folder: ends with a slash.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    @property
    def url(self) -> str:
        """The folder, as the user would write it."""
        return f"{self._store.url.rstrip('/')}/{self._folder.rstrip('/')}"

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        data, info = await self._store.get(self._folder + key)
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
        info = await self._store.get_range(self._folder + key, start, end, into=into, tag=tag, begun=begun)
        return self._relative(info)

    async def head(self, key: str) -> ObjectInfo:
        """Return size and tag."""
        return self._relative(await self._store.head(self._folder + key))

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key in the folder starts with ``prefix``."""
        after = self._folder + start_after if start_after else ""
        async for info in self._store.list(self._folder + prefix, start_after=after):
            yield self._relative(info)

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object."""
        return self._relative(await self._store.put(self._folder + key, data, if_absent=if_absent, if_tag=if_tag))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._store.delete(self._folder + key)

    async def close(self) -> None:
        """Do nothing: the connections are the store's."""

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._folder))
