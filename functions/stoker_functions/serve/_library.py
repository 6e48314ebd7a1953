"""The data sets of a service: their manifests, kept while there is room, and what reads their samples."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from stoker._base.retry import RetryingStore, RetryPolicy
from stoker._fetch.config import FetchConfig
from stoker._fetch.samples import SampleReader
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._format.versions import read_manifest
from stoker._memory.sample_memory import SampleMemory
from stoker._stores import Store
from stoker.errors import NotFoundError, PermissionDeniedError
from stoker_functions.serve._messages import Refusal

__all__ = ["Library", "Shelf"]

# Waiting is billed here: clients are told when to try again. Only a batch, of many reads, tries some of them again.
_ONCE = RetryPolicy(attempts=1)
_FETCHES = FetchConfig(deadline_seconds=20.0, attempts=6, attempt_seconds=8.0, hedge=False)


class Shelf:
    """One data set, on one event loop.

    Args:
        store: where it is.
        manifest_bytes: of manifests that may be kept; the one used last always is.

    Attributes:
        store: the same, without retries.
    """

    def __init__(self, store: Store, manifest_bytes: int) -> None:
        self.store = RetryingStore(store, _ONCE)
        self._manifest_bytes = manifest_bytes
        self._manifests: OrderedDict[int, Manifest] = OrderedDict()
        self._newest = "", 0  # the pointer's tag, and the version that it stood for
        self._reading = asyncio.Lock()

    async def manifest(self, version: int | None) -> Manifest:
        """Return a version, or the one that is newest at the time of the call; of many that ask, one reads.

        Raises:
            NotFoundError: there is no such version, or no data set.
            StoreError: it could not be had.
        """
        tag = "" if version else await self._pointer_tag()
        if (known := self._known(version, tag)) is not None:
            return known
        async with self._reading:
            if (known := self._known(version, tag)) is not None:
                return known
            if version is not None:
                async with self.telling_what_is_missing():
                    return self._keep(await read_manifest(self.store, version))
            newest = self._keep(await read_manifest(self.store))
            self._newest = tag, newest.version
            return newest

    @asynccontextmanager
    async def telling_what_is_missing(self) -> AsyncIterator[None]:
        """Do what needs a version of the manifest that may not exist.

        Who may not list a bucket is denied what does not exist; who may read the pointer may read every version.

        Raises:
            NotFoundError: it does not exist.
        """
        try:
            yield
        except PermissionDeniedError:
            await self.store.head(POINTER_KEY)
            raise NotFoundError(f"{self.store.url} has no such version of the manifest") from None

    async def _pointer_tag(self) -> str:
        """Return the tag of the newest manifest, empty if a commit was cut off before it wrote the first one."""
        try:
            return (await self.store.head(POINTER_KEY)).tag
        except NotFoundError:
            return ""

    def _known(self, version: int | None, tag: str) -> Manifest | None:
        """Return a version that is kept; for None, the newest one, if the pointer has the tag still."""
        if version is None:
            return self._kept(self._newest[1]) if tag and self._newest[0] == tag else None
        return self._kept(version)

    def _kept(self, version: int) -> Manifest | None:
        found = self._manifests.get(version)
        if found is not None:
            self._manifests.move_to_end(version)
        return found

    def _keep(self, manifest: Manifest) -> Manifest:
        self._manifests[manifest.version] = manifest
        self._manifests.move_to_end(manifest.version)
        held_bytes = sum(kept.file_bytes for kept in self._manifests.values())
        while held_bytes > self._manifest_bytes and len(self._manifests) > 1:
            _, oldest = self._manifests.popitem(last=False)
            held_bytes -= oldest.file_bytes
        return manifest


class Library:
    """All data sets of a service, on one event loop.

    Args:
        datasets: name → URL.
        store: opens the store at a URL, or returns the one that is open.
        memory_bytes: a quarter for manifests, in equal parts for each data set, the rest to read samples with.
    """

    def __init__(self, datasets: Mapping[str, str], store: Callable[[str], Store], memory_bytes: int) -> None:
        self._datasets, self._store = datasets, store
        self._manifest_bytes = memory_bytes // (4 * max(1, len(datasets)))
        self._reading_bytes = memory_bytes - memory_bytes // 4
        self._shelves: dict[str, Shelf] = {}
        self._reader: tuple[str, int, SampleReader] | None = None
        self._lent = 0  # to how many, at this time
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._turn = asyncio.Lock()

    def shelf(self, name: str) -> Shelf:
        """Return a data set by its name.

        Raises:
            Refusal: there is none of that name.
        """
        if name not in self._datasets:
            raise Refusal(404, "no-such-dataset", "there is no data set of that name here")
        if name not in self._shelves:
            self._shelves[name] = Shelf(self._store(self._datasets[name]), self._manifest_bytes)
        return self._shelves[name]

    @asynccontextmanager
    async def reader(self, name: str, manifest: Manifest) -> AsyncIterator[SampleReader]:
        """Lend what reads samples of a version of a data set; it is kept with its heads until another is wanted.

        A reader may take all the memory, so there is one at a time, for any number of readings at once. Who wants
        another waits until it is free, and who comes later waits behind him.

        Raises:
            BudgetError: the memory is too small.
        """
        async with self._turn:
            if self._reader is None or self._reader[:2] != (name, manifest.version):
                await self._is_free.wait()
                self._reader = name, manifest.version, self._opened(name, manifest)
            reader = self._reader[2]
            self._lent += 1
            self._is_free.clear()
        try:
            yield reader
        finally:
            self._lent -= 1
            if not self._lent:
                self._is_free.set()

    def _opened(self, name: str, manifest: Manifest) -> SampleReader:
        memory = SampleMemory.plan(manifest, 0, self._reading_bytes)
        return SampleReader(self.shelf(name).store.wrapped, manifest, manifest.schema, memory, _FETCHES)


def manifest_key(version: int | None) -> str:
    """Return the key of a version's manifest, of the newest if it is None."""
    return POINTER_KEY if version is None else version_key(version)
