"""Objects in memory that the processes of a machine share, for readers that need parts of them.

Samples in an order that mixes all super-samples are small ranges of many objects. In memory that is mapped, reading a
range copies bytes. An object that is not there is fetched whole, given to the tier, and then found there by all
processes, so that the bucket is read once.
"""

from __future__ import annotations

import asyncio

from stoker._base.task_group import Limiter
from stoker._cache.index import NOT_FOUND, Found, MappedTier
from stoker._fetch.config import FetchCounters
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest
from stoker._memory.ring import anonymous_memory
from stoker.abc import ObjectRef
from stoker.errors import StoreError

_STAGED_OBJECTS = 2
"""Objects that a process fetches at a time, each by several requests."""


class MappedObjects:
    """Finds objects in a mapped tier, and fetches those that it lacks. Belongs to one event loop.

    Args:
        tier: the tier.
        manifest: index of the objects.
        fetcher: fetches whole objects, and offers them to the tier.
        counters: counters of hits, to update.
        loads: whether to fetch objects that are missing; default True.
    """

    def __init__(
        self,
        tier: MappedTier,
        manifest: Manifest,
        fetcher: Fetcher,
        counters: FetchCounters,
        *,
        loads: bool = True,
    ) -> None:
        self._tier, self._fetcher, self._counters, self._loads = tier, fetcher, counters, loads
        self._object_bytes = manifest.largest_bytes
        self._limiter = Limiter(_STAGED_OBJECTS)
        self._free: list[memoryview] = []
        self._loading: dict[str, asyncio.Event] = {}
        self._failed: set[str] = set()

    @staticmethod
    def size_bytes(manifest: Manifest) -> int:
        """Return the memory of objects on their way to the tier."""
        return _STAGED_OBJECTS * manifest.largest_bytes

    async def memory(self, ref: ObjectRef) -> memoryview | None:
        """Return an object's bytes, for reading, once it is in the tier; None if the tier does not have it in time.

        An object that cannot be read as a whole is tried once: those of its ranges that are wanted may be right.
        """
        found = await self._find(ref)
        if found.has_room and self._loads and ref.key not in self._failed:
            try:
                await self._load(ref)
            except StoreError:
                self._failed.add(ref.key)
            found = await self._find(ref)
        return found.memory

    async def copy_start(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy the first bytes of an object, if it is in the tier already; return whether it is."""
        memory = (await self._find(ref)).memory
        if memory is not None:
            into[:] = memory[: len(into)]
        return memory is not None

    def reject(self, ref: ObjectRef) -> None:
        """Have the tier forget an object of which a value is wrong."""
        self._counters.tier_errors[self._tier.name] += 1
        self._counters.checksum_failures += 1
        self._tier.reject(ref)

    def count(self, size_bytes: int) -> None:
        """Count a range that was copied."""
        self._counters.tier_hits[self._tier.name] += 1
        self._counters.count_delivery(size_bytes)

    async def _find(self, ref: ObjectRef) -> Found:
        try:
            return await self._tier.find(ref)
        except StoreError:  # the next read of a whole object tells
            return NOT_FOUND

    async def _load(self, ref: ObjectRef) -> None:
        """Fetch an object and offer it to the tier, or wait while another call does."""
        if (other := self._loading.get(ref.key)) is not None:
            await other.wait()
            return
        ended = self._loading[ref.key] = asyncio.Event()
        try:
            await self._limiter.acquire()
            try:
                memory = self._free.pop() if self._free else anonymous_memory(self._object_bytes)
                try:
                    await self._fetcher.fetch_whole(ref, memory[: ref.size_bytes], urgent=True)
                    self._counters.objects -= 1  # delivered are its ranges, when they are copied
                    self._counters.useful_bytes -= ref.size_bytes
                finally:
                    self._free.append(memory)
            finally:
                self._limiter.release()
        finally:
            del self._loading[ref.key]
            ended.set()
