"""The storage of a tier server: whole objects, in memory or elsewhere, each storage within a fixed limit.

Objects of a data set in use are not evicted: each is needed once per epoch, so a cache that is smaller than the epoch
has the same number of hits whichever objects it keeps, but none if each replaces the one before (H. Zhao and others,
"SiloD", EuroSys 2023, uniform caching). Objects of an idle data set are evicted for others.

Tenants share a storage fairly: if there is no room, the tenant with most bytes loses objects to one with less than an
equal share. The objects that a tenant is writing take at most half of a memory.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from stoker._base.threads import run_in_thread
from stoker._cache.eviction import CacheEntries, Lru
from stoker._memory.ring import prefault

IDLE_SECONDS = 600.0
"""A data set is idle if none of its objects was read for this time."""
STALE_SECONDS = 86_400.0
"""An object is stale if it was not read for this time, even in a data set in use: it may belong to an old version."""
_FULL_SECONDS = 1.0
"""Pause after a search for victims that did not free enough, before the next search for the same tenant."""
_MAPPED_BYTES = 1 << 20
"""Minimum size of an object with its own memory mapping, which is returned to the system as a whole."""
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # where there is one, as on Linux

Data = TypeVar("Data")


async def create_buffer(size_bytes: int) -> memoryview:
    """Return memory for one object. Large ones are faulted in by a thread, with huge pages if the system has them.

    Page faults cost up to ten times as much as filling the pages.

    Raises:
        MemoryError: The system has no memory.
    """
    if size_bytes < _MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for an object of {size_bytes} bytes: {error}; if memory is free, raise vm.max_map_count"
        ) from None
    if _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # the kernel has no huge pages
            mapping.madvise(_MADV_HUGEPAGE)
    memory = memoryview(mapping)
    await run_in_thread(lambda _: prefault(memory))
    return memory


@dataclass(slots=True, eq=False, weakref_slot=True)
class _DatasetGroup:
    """The objects of one data set."""

    read_seconds: float


@dataclass(slots=True, eq=False)
class _StoredObject(Generic[Data]):
    """One object: its data (None until it is complete), its number of readers, and the time of the last read.

    An object that is dropped while it is read is no longer found, and is removed after its last reader.
    """

    data: Data | None
    group: _DatasetGroup
    read_seconds: float
    size_bytes: int
    readers: int = 0
    is_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatistics:
    """Counters and size of one storage.

    Attributes:
        hits: Number of reads of objects that were here.
        added: Number of objects that were added.
        declined: Number of objects that were not added for lack of room.
        evicted: Number of objects that were evicted.
        objects: Number of objects held now, including those that are being written.
        used_bytes: Size of these objects, in bytes.
        limit_bytes: Maximum size of these objects, in bytes.
    """

    hits: int
    added: int
    declined: int
    evicted: int
    objects: int
    used_bytes: int
    limit_bytes: int


def _parse_tenant(key: str) -> str:
    return key.partition("/")[0]


class BoundedStorage(ABC, Generic[Data]):
    """Objects by key, ``<tenant>/<name>``, within a limit. Used by one event loop.

    Args:
        limit_bytes: Maximum size of all objects together, in bytes.
        max_writing_bytes: Maximum size of the objects that one tenant is writing; a single object may be larger.
        clock: Monotonic clock, in seconds. Default: :func:`time.monotonic`.

    Attributes:
        name: Name of the storage in metrics.
    """

    name: str

    def __init__(self, limit_bytes: int, max_writing_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._max_writing_bytes = clock, max_writing_bytes
        self._entries: dict[str, _StoredObject[Data]] = {}
        self._policy = _FairSharePolicy(self)
        self._cache_entries = CacheEntries[str](self._policy, limit_bytes)
        self._groups: WeakValueDictionary[str, _DatasetGroup] = WeakValueDictionary()
        self._writing_bytes = Counter[str]()
        self._full_until_seconds: dict[str, float] = {}
        self._hits = self._added = self._declined = self._evicted = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def reserve(self, key: str, size_bytes: int, group: str) -> bool:
        """Reserve room for an object that is not here; return False if there is none.

        The caller calls :meth:`store` or :meth:`cancel_reservation` afterwards.

        Args:
            key: Key of the object.
            size_bytes: Size of the object.
            group: Id of the group of its data set's objects.
        """
        tenant, now_seconds = _parse_tenant(key), self._clock()
        has_room = self._cache_entries.used + size_bytes <= self._cache_entries.capacity
        evicted = None
        if self._may_write(tenant, size_bytes) and (
            has_room or now_seconds >= self._full_until_seconds.get(tenant, now_seconds)
        ):
            evicted = self._make_room(key, size_bytes)
            if evicted is None:
                self._full_until_seconds[tenant] = now_seconds + _FULL_SECONDS
        if evicted is None:
            self._declined += 1
            return False
        for each in evicted:
            self._remove(each, self._entries.pop(each).data)
        self._evicted += len(evicted)
        self._put(key, None, group, size_bytes)
        self._writing_bytes[tenant] += size_bytes
        return True

    def _make_room(self, key: str, size_bytes: int) -> list[str] | None:
        """Return the keys of the objects evicted for another one; None if there is no room for it."""
        self._policy.newcomer_bytes = size_bytes
        return self._cache_entries.offer(key, size_bytes)

    def _may_write(self, tenant: str, size_bytes: int) -> bool:
        writing_bytes = self._writing_bytes[tenant]
        return not writing_bytes or writing_bytes + size_bytes <= self._max_writing_bytes

    async def store(self, key: str, data: memoryview) -> None:
        """Store the bytes of an object with reserved room, and take ownership of them.

        Raises:
            OSError: The bytes cannot be stored.
        """
        self._entries[key].data = await self._write(key, data)
        self._writing_bytes[_parse_tenant(key)] -= len(data)
        self._added += 1

    def cancel_reservation(self, key: str) -> None:
        """Give back the reserved room of an object that was not stored."""
        entry = self._entries.get(key)
        if entry is not None and entry.data is None:
            self._writing_bytes[_parse_tenant(key)] -= entry.size_bytes
            self._delete(key)

    def drop(self, key: str) -> None:
        """Remove an object, if it is here and not being written.

        Later reads do not find it; its room is free once its present readers have ended.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.data is not None:
            entry.is_dropped = True
            self._delete_if_unread(key, entry)

    def _delete_if_unread(self, key: str, entry: _StoredObject[Data]) -> None:
        """Remove an object that was dropped, unless it is being read."""
        if entry.is_dropped and not entry.readers and self._entries.get(key) is entry:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._cache_entries.remove(key)
        self._remove(key, self._entries.pop(key).data)

    @asynccontextmanager
    async def pin(self, key: str) -> AsyncIterator[Data | None]:
        """Yield an object's data, which stays valid meanwhile; None if the object is not here."""
        entry = self._entries.get(key)
        if entry is None or entry.data is None or entry.is_dropped:
            yield None
            return
        self._cache_entries.look_up(key)
        self._hits += 1
        entry.read_seconds = entry.group.read_seconds = self._clock()
        entry.readers += 1
        try:
            yield entry.data
        finally:
            entry.readers -= 1
            self._delete_if_unread(key, entry)

    def statistics(self) -> StorageStatistics:
        """Return a snapshot."""
        return StorageStatistics(
            hits=self._hits,
            added=self._added,
            declined=self._declined,
            evicted=self._evicted,
            objects=len(self._entries),
            used_bytes=self._cache_entries.used,
            limit_bytes=self._cache_entries.capacity,
        )

    def close(self) -> None:
        """Release all objects. Idempotent."""
        self._entries.clear()

    def _put(self, key: str, data: Data | None, group_name: str, size_bytes: int) -> None:
        """Add an entry to the group of that name, and mark the group as in use."""
        now_seconds = self._clock()
        group = self._groups.get(group_name)
        if group is None:
            group = self._groups[group_name] = _DatasetGroup(now_seconds)
        group.read_seconds = now_seconds
        self._entries[key] = _StoredObject(data, group, now_seconds, size_bytes)

    def is_in_use(self, key: str) -> bool:
        """Return whether an object is being read or written."""
        entry = self._entries[key]
        return bool(entry.readers) or entry.data is None

    def is_unused(self, key: str) -> bool:
        """Return whether an object can be evicted freely: its data set is idle, or it is stale."""
        entry, now_seconds = self._entries[key], self._clock()
        is_idle = now_seconds - entry.group.read_seconds >= IDLE_SECONDS
        return is_idle or now_seconds - entry.read_seconds >= STALE_SECONDS

    def is_recent(self, key: str) -> bool:
        """Return whether an object was read within the idle time."""
        return self._clock() - self._entries[key].read_seconds < IDLE_SECONDS

    def size_of(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self._entries[key].size_bytes

    @abstractmethod
    async def _write(self, key: str, data: memoryview) -> Data:
        """Store an object's bytes, and return their new location."""

    @abstractmethod
    def _remove(self, key: str, data: Data | None) -> None:
        """Free the storage of an object's bytes, if it has any."""


class _FairSharePolicy:
    """Eviction policy with fair shares: first unused objects, then those of the tenant with most bytes.

    Objects that are being read or written stay. The least recently used object of a tenant goes first. A tenant evicts
    others' objects only if it stays within an equal share among all tenants with objects; so if there is no room, a
    tenant below its share always finds another one above.

    Attributes:
        newcomer_bytes: Size of the object to make room for.
    """

    def __init__(self, storage: BoundedStorage[Any]) -> None:
        self._place = storage
        self._orders: dict[str, Lru[str]] = {}
        self._held_bytes = Counter[str]()
        self.newcomer_bytes = 0

    def used(self, key: str) -> None:
        """Move an object to the end of its tenant's queue."""
        self._orders[_parse_tenant(key)].used(key)

    def added(self, key: str) -> None:
        """Add an object of ``newcomer_bytes`` to its tenant's queue."""
        tenant = _parse_tenant(key)
        self._orders.setdefault(tenant, Lru()).added(key)
        self._held_bytes[tenant] += self.newcomer_bytes

    def removed(self, key: str) -> None:
        """Remove an object from its tenant's queue."""
        tenant = _parse_tenant(key)
        self._orders[tenant].removed(key)
        self._held_bytes[tenant] -= self._place.size_of(key)
        if not self._held_bytes[tenant]:
            del self._held_bytes[tenant], self._orders[tenant]

    def victims(self, newcomer: str) -> Iterator[str]:
        """Yield the objects that may be evicted, unused ones first."""
        left = dict(self._held_bytes)
        gone = set[str]()
        for key in self._unused(newcomer):
            gone.add(key)
            left[_parse_tenant(key)] -= self._place.size_of(key)
            yield key
        tenant = _parse_tenant(newcomer)
        share_bytes = self._place.statistics().limit_bytes // len(left.keys() | {tenant})
        if left.pop(tenant, 0) + self.newcomer_bytes <= share_bytes:
            yield from self._of_largest(left, gone)

    def _unused(self, newcomer: str) -> Iterator[str]:
        for order in self._orders.values():
            for key in order.victims(newcomer):
                if self._place.is_recent(key):
                    break
                if self._place.is_unused(key) and not self._place.is_in_use(key):
                    yield key

    def _of_largest(self, left: dict[str, int], gone: set[str]) -> Iterator[str]:
        """Yield objects, each of the tenant that holds most bytes after the evictions before."""
        keys = {tenant: self._orders[tenant].victims("") for tenant in left}
        while left:
            largest = max(left, key=lambda tenant: left[tenant])
            key = next(keys[largest], None)
            if key is None:
                del left[largest]
            elif key not in gone and not self._place.is_in_use(key):
                left[largest] -= self._place.size_of(key)
                yield key


class MemoryStorage(BoundedStorage[memoryview]):
    """Objects in memory, in the buffers that received them."""

    name = "memory"

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(limit_bytes, limit_bytes // 2, clock)

    async def _write(self, key: str, data: memoryview) -> memoryview:
        return data

    def _remove(self, key: str, data: memoryview | None) -> None:
        """Do nothing: the memory is freed with its last reference."""
