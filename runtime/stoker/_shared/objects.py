"""What a tier server holds: whole objects, in memory or elsewhere, each place within a limit that it never exceeds.

The objects of a data set that somebody reads stay, since each of them is needed once an epoch, and a cache that is
smaller than the epoch has as many hits whichever of them it keeps, but none if each makes way for the next (H. Zhao and
others, "SiloD", EuroSys 2023, uniform caching). Those of a data set that nobody reads any more leave for others.

Tenants share a place fairly: where there is no room, the tenant that holds most loses objects to one that holds less
than an equal share, and the objects of a tenant that are being written take at most half of a memory.
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

from stoker._base.threads import in_thread
from stoker._cache.eviction import Lru, Residents
from stoker._memory.ring import populate

IDLE_SECONDS = 600.0
"""A data set of which nothing was read for so long is not in use."""
STALE_SECONDS = 86_400.0
"""An object that was not read for so long is not needed, even if its data set is: it may be of an earlier version."""
_FULL_SECONDS = 1.0
"""After a search for objects that may leave has found too little, before the next for that tenant."""
_MAPPED_BYTES = 1 << 20
"""From which size on an object has a mapping of its own, which goes back to the system whole when it leaves."""
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # where there is one, as on Linux

Data = TypeVar("Data")


async def create_buffer(size_bytes: int) -> memoryview:
    """Return memory for one object; that of a large one is taken in a thread, and in huge pages where there are some.

    Taking pages costs up to ten times as much as filling them.

    Raises:
        MemoryError: the system has none.
    """
    if size_bytes < _MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"no memory for an object of {size_bytes} bytes: {error}; if the machine has some, raise vm.max_map_count"
        ) from None
    if _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # the kernel has none
            mapping.madvise(_MADV_HUGEPAGE)
    memory = memoryview(mapping)
    await in_thread(lambda _: populate(memory))
    return memory


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Group:
    """The objects of one data set."""

    read_seconds: float


@dataclass(slots=True, eq=False)
class _Entry(Generic[Data]):
    """One object: where its bytes are, None until they are there; how many read them now, and when that began last.

    One that was dropped while it was read is found no more, and leaves with its last reader.
    """

    data: Data | None
    group: _Group
    read_seconds: float
    size_bytes: int
    readers: int = 0
    is_dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceStatistics:
    """Counts of one place, and what it holds.

    Attributes:
        hits: reads of objects that were here.
        added: objects that were taken in.
        declined: objects that were not, for lack of room.
        evicted: objects that left for others.
        objects: held now, those that are still being written among them.
        used_bytes: what these have.
        limit_bytes: what they may have.
    """

    hits: int
    added: int
    declined: int
    evicted: int
    objects: int
    used_bytes: int
    limit_bytes: int


def _tenant_of(key: str) -> str:
    return key.partition("/")[0]


class ObjectPlace(ABC, Generic[Data]):
    """Objects by key, ``<tenant>/<name>``, within a limit. Lives on one event loop.

    Args:
        limit_bytes: of all objects together.
        max_writing_bytes: of one tenant's objects that are being written, unless it is a single one.
        clock: monotonic, in seconds.

    Attributes:
        name: of the place, in metrics.
    """

    name: str

    def __init__(self, limit_bytes: int, max_writing_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._max_writing_bytes = clock, max_writing_bytes
        self._entries: dict[str, _Entry[Data]] = {}
        self._policy = _FairShare(self)
        self._residents = Residents[str](self._policy, limit_bytes)
        self._groups: WeakValueDictionary[str, _Group] = WeakValueDictionary()
        self._writing_bytes = Counter[str]()
        self._full_until_seconds: dict[str, float] = {}
        self._hits = self._added = self._declined = self._evicted = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def reserve(self, key: str, size_bytes: int, group: str) -> bool:
        """Make room for an object that is not here; return whether there is some.

        :meth:`keep` or :meth:`give_up` follows.

        Args:
            key: of the object.
            size_bytes: of the object.
            group: of the objects of its data set.
        """
        tenant, now_seconds = _tenant_of(key), self._clock()
        has_room = self._residents.used + size_bytes <= self._residents.capacity
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
        """Return whose objects have left for another; None if there is no room for it."""
        self._policy.newcomer_bytes = size_bytes
        return self._residents.offer(key, size_bytes)

    def _may_write(self, tenant: str, size_bytes: int) -> bool:
        writing_bytes = self._writing_bytes[tenant]
        return not writing_bytes or writing_bytes + size_bytes <= self._max_writing_bytes

    async def keep(self, key: str, data: memoryview) -> None:
        """Keep the bytes of an object for which there is room; they are the caller's no more.

        Raises:
            OSError: they cannot be kept.
        """
        self._entries[key].data = await self._write(key, data)
        self._writing_bytes[_tenant_of(key)] -= len(data)
        self._added += 1

    def give_up(self, key: str) -> None:
        """Give back the room of an object of which nothing was kept."""
        entry = self._entries.get(key)
        if entry is not None and entry.data is None:
            self._writing_bytes[_tenant_of(key)] -= entry.size_bytes
            self._forget(key)

    def drop(self, key: str) -> None:
        """Forget an object, if it is here, and not being written: its writer has the room.

        Nobody finds it from here on; where it is read, its room is free when the last reader has ended.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.data is not None:
            entry.is_dropped = True
            self._forget_unread(key, entry)

    def _forget_unread(self, key: str, entry: _Entry[Data]) -> None:
        """Forget an object that was dropped, unless somebody reads it."""
        if entry.is_dropped and not entry.readers and self._entries.get(key) is entry:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._residents.drop(key)
        self._remove(key, self._entries.pop(key).data)

    @asynccontextmanager
    async def reading(self, key: str) -> AsyncIterator[Data | None]:
        """Yield where an object's bytes are, which stay there meanwhile; None if they are not here."""
        entry = self._entries.get(key)
        if entry is None or entry.data is None or entry.is_dropped:
            yield None
            return
        self._residents.look_up(key)
        self._hits += 1
        entry.read_seconds = entry.group.read_seconds = self._clock()
        entry.readers += 1
        try:
            yield entry.data
        finally:
            entry.readers -= 1
            self._forget_unread(key, entry)

    def statistics(self) -> PlaceStatistics:
        """Return a snapshot."""
        return PlaceStatistics(
            hits=self._hits,
            added=self._added,
            declined=self._declined,
            evicted=self._evicted,
            objects=len(self._entries),
            used_bytes=self._residents.used,
            limit_bytes=self._residents.capacity,
        )

    def close(self) -> None:
        """Release what is held. Idempotent."""
        self._entries.clear()

    def _put(self, key: str, data: Data | None, group_name: str, size_bytes: int) -> None:
        """Have an object in the group of that name, which is in use now."""
        now_seconds = self._clock()
        group = self._groups.get(group_name)
        if group is None:
            group = self._groups[group_name] = _Group(now_seconds)
        group.read_seconds = now_seconds
        self._entries[key] = _Entry(data, group, now_seconds, size_bytes)

    def is_in_use(self, key: str) -> bool:
        """Return whether an object is being read or written."""
        entry = self._entries[key]
        return bool(entry.readers) or entry.data is None

    def is_unused(self, key: str) -> bool:
        """Return whether nobody needs an object: its data set is idle, or it is stale."""
        entry, now_seconds = self._entries[key], self._clock()
        is_idle = now_seconds - entry.group.read_seconds >= IDLE_SECONDS
        return is_idle or now_seconds - entry.read_seconds >= STALE_SECONDS

    def is_recent(self, key: str) -> bool:
        """Return whether an object was read lately."""
        return self._clock() - self._entries[key].read_seconds < IDLE_SECONDS

    def size_of(self, key: str) -> int:
        """Return how many bytes an object has."""
        return self._entries[key].size_bytes

    @abstractmethod
    async def _write(self, key: str, data: memoryview) -> Data:
        """Return where an object's bytes are from here on."""

    @abstractmethod
    def _remove(self, key: str, data: Data | None) -> None:
        """Give back where an object's bytes were, if they were anywhere."""


class _FairShare:
    """Which objects of a place leave for another: those that nobody needs, then those of whoever holds most.

    An object in use stays. Of one tenant, the least recently used object leaves first. A tenant with an object more
    than an equal share among those that hold something takes nothing from others; so one that has less than its share
    finds, where there is no room, another that has more.

    Attributes:
        newcomer_bytes: size of the object for which there is to be room.
    """

    def __init__(self, place: ObjectPlace[Any]) -> None:
        self._place = place
        self._orders: dict[str, Lru[str]] = {}
        self._held_bytes = Counter[str]()
        self.newcomer_bytes = 0

    def used(self, key: str) -> None:
        """Have an object leave as the last of its tenant's."""
        self._orders[_tenant_of(key)].used(key)

    def added(self, key: str) -> None:
        """Count an object of ``newcomer_bytes`` among its tenant's."""
        tenant = _tenant_of(key)
        self._orders.setdefault(tenant, Lru()).added(key)
        self._held_bytes[tenant] += self.newcomer_bytes

    def removed(self, key: str) -> None:
        """Count an object no more."""
        tenant = _tenant_of(key)
        self._orders[tenant].removed(key)
        self._held_bytes[tenant] -= self._place.size_of(key)
        if not self._held_bytes[tenant]:
            del self._held_bytes[tenant], self._orders[tenant]

    def victims(self, newcomer: str) -> Iterator[str]:
        """Yield the objects that may leave for another: those that nobody needs first."""
        left = dict(self._held_bytes)
        gone = set[str]()
        for key in self._unused(newcomer):
            gone.add(key)
            left[_tenant_of(key)] -= self._place.size_of(key)
            yield key
        tenant = _tenant_of(newcomer)
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
        """Yield objects, each of the tenant that holds most when the ones before have left."""
        keys = {tenant: self._orders[tenant].victims("") for tenant in left}
        while left:
            largest = max(left, key=lambda tenant: left[tenant])
            key = next(keys[largest], None)
            if key is None:
                del left[largest]
            elif key not in gone and not self._place.is_in_use(key):
                left[largest] -= self._place.size_of(key)
                yield key


class ObjectMemory(ObjectPlace[memoryview]):
    """Objects in memory: the buffers that they were received into."""

    name = "memory"

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(limit_bytes, limit_bytes // 2, clock)

    async def _write(self, key: str, data: memoryview) -> memoryview:
        return data

    def _remove(self, key: str, data: memoryview | None) -> None:
        """Nothing: the memory goes with the last reference to it."""
