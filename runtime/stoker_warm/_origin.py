"""Where the objects of a warm tier come from, for when it has lost some."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Protocol

from stoker._base.retry import RetryingReader
from stoker._cache.naming import NameIndex
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker.abc import ObjectRef, Readable

__all__ = ["BucketOrigin", "Origin"]

_LOOK_SECONDS = 300.0


class Origin(Protocol):
    """Has objects for ever that a warm tier only keeps for a while."""

    async def find(self, names: Collection[str]) -> Mapping[str, ObjectRef]:
        """Return those objects that it has, by their names.

        Raises:
            StokerError: it cannot tell now.
        """
        ...

    async def read(self, ref: ObjectRef, start: int, end: int) -> bytearray:
        """Return bytes ``[start, end)`` of an object, not verified.

        Raises:
            StoreError: they cannot be had.
        """
        ...


class BucketOrigin:
    """The objects of a data set, as the newest version of its manifest has them. Lives on one event loop.

    Args:
        store: of the data set; whoever gives it closes it.
        look_seconds: for a name that it does not know, it looks for a newer version at most so often.
    """

    def __init__(self, store: Readable, *, look_seconds: float = _LOOK_SECONDS) -> None:
        self._reader, self._look_seconds = RetryingReader(store), look_seconds
        self._manifest: Manifest | None = None
        self._index: NameIndex | None = None
        self._looked_seconds = float("-inf")
        self._looking = asyncio.Lock()

    async def find(self, names: Collection[str]) -> dict[str, ObjectRef]:
        """Return what pins those objects that the data set has.

        Raises:
            StoreError: the bucket cannot be read.
            FormatError: there is no manifest in it.
        """
        async with self._looking:
            found = self._known(names)
            if len(found) < len(set(names)) and self._is_due():
                await self._look()
                found = self._known(names)
        return found

    async def read(self, ref: ObjectRef, start: int, end: int) -> bytearray:
        """Return bytes of an object, if it is still the one that was packed.

        Raises:
            StoreError: they cannot be had.
        """
        data = bytearray(end - start)
        await self._reader.get_range(ref.key, start, end, into=memoryview(data), tag=ref.tag or None)
        return data

    def _is_due(self) -> bool:
        return asyncio.get_running_loop().time() - self._looked_seconds >= self._look_seconds

    def _known(self, names: Collection[str]) -> dict[str, ObjectRef]:
        if self._manifest is None or self._index is None:
            return {}
        return {name: self._manifest.ref(row) for name, row in self._index.rows(names).items()}

    async def _look(self) -> None:
        began_seconds = asyncio.get_running_loop().time()
        manifest = await read_manifest(self._reader)
        self._looked_seconds = began_seconds
        if self._manifest is None or manifest.version != self._manifest.version:
            self._manifest, self._index = manifest, NameIndex(manifest)
