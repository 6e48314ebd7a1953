"""Objects in memory that the processes of a machine share, or those of other machines, for readers that need parts.

Samples in an order that mixes all super-samples are small ranges of many objects. In memory that is mapped, reading a
range copies bytes; of another process's objects, all ranges are read by one request. An object that is nowhere is
fetched whole, given to the tier, and then found there by all processes, so that the bucket is read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from stoker._base.batch_read import ObjectPart
from stoker._base.breaker import FAILURE_THRESHOLD
from stoker._base.checksum import crc32c
from stoker._base.task_group import Limiter, for_each
from stoker._cache.index import MappedTier, Presence
from stoker._fetch import tier_chain
from stoker._fetch.config import FetchCounters
from stoker._fetch.fetcher import Fetcher
from stoker._format.manifest import Manifest
from stoker._memory.ring import anonymous_memory
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, StoreError

_FOUND_AT_ONCE = 16
"""Objects that are looked for at a time, or fetched if need be."""
_COPIED_AT_ONCE_BYTES = 4 << 20
SLOW_SECONDS, _LEAST_BYTES_PER_SECOND = 0.25, 50e6
"""Time that processes take for ranges, and rate of the bytes; what is lacking after a longer time is not waited for."""
STAGED_OBJECTS = 2
"""Objects that a process fetches at a time, each by several requests."""


class _Copies:
    """Ranges that are copied by one call, from wherever their objects are.

    Args:
        parts: the ranges.
        into: memory that they are copied to.
        verify: raises ChecksumError if the copied range with a number is wrong.
        count: called with the size of each range that was copied.

    Attributes:
        numbers: key of an object → numbers of its ranges.
        patience: how long to wait for objects that others fetch.
        left: numbers of ranges that were not copied.
        copied_bytes: bytes that were copied since the event loop had a turn.
    """

    def __init__(
        self,
        parts: Sequence[ObjectPart],
        into: memoryview,
        verify: Callable[[int], None],
        count: Callable[[int], None],
    ) -> None:
        self.parts, self.into, self._verify, self._count = parts, into, verify, count
        self.numbers: dict[str, list[int]] = {}
        for number, each in enumerate(parts):
            self.numbers.setdefault(each.ref.key, []).append(number)
        self.patience = tier_chain.Patience(tier_chain.SINGLE_FLIGHT_SECONDS)
        self.left = set(range(len(parts)))
        self.copied_bytes = 0

    def ref(self, key: str) -> ObjectRef:
        """Return an object."""
        return self.parts[self.numbers[key][0]].ref

    def take_all(self, key: str, memory: memoryview) -> None:
        """Copy an object's ranges from its bytes.

        Raises:
            ChecksumError: one is wrong; those before it are taken.
        """
        for number in self.numbers[key]:
            _, part = self.parts[number]
            self.into[part.offset : part.offset + part.size_bytes] = memory[part.start : part.end]
            self.take(number)

    def take(self, number: int) -> None:
        """Take a range that was copied.

        Raises:
            ChecksumError: it is wrong.
        """
        self._verify(number)
        if number in self.left:
            self.left.discard(number)
            size_bytes = self.parts[number].part.size_bytes
            self.copied_bytes += size_bytes
            self._count(size_bytes)


class MappedObjects:
    """Copies ranges of a mapped tier's objects, and fetches objects that it lacks. Belongs to one event loop.

    Args:
        tier: the tier.
        largest_bytes: size of the largest object, in bytes.
        fetcher: fetches whole objects, and offers them to the tier.
        counters: counters of hits, to update.
        loads: whether to fetch objects that are missing; default True.
    """

    def __init__(
        self,
        tier: MappedTier,
        largest_bytes: int,
        fetcher: Fetcher,
        counters: FetchCounters,
        *,
        loads: bool = True,
    ) -> None:
        self._tier, self._fetcher, self._counters, self._loads = tier, fetcher, counters, loads
        self._object_bytes = largest_bytes
        self._limiter = Limiter(STAGED_OBJECTS)
        self._free: list[memoryview] = []
        self._loading: dict[str, asyncio.Event] = {}
        self._failed: set[str] = set()
        self._late_reads = 0  # of small objects, in a row

    @staticmethod
    def size_bytes(manifest: Manifest) -> int:
        """Return the memory of objects on their way to the tier."""
        return STAGED_OBJECTS * manifest.largest_bytes

    async def copy(
        self, parts: Sequence[ObjectPart], into: memoryview, verify: Callable[[int], None], *, loads: bool = True
    ) -> Sequence[int]:
        """Copy ranges of objects that are in the tier, or that it has room for, so that they are fetched.

        An object that cannot be read as a whole is tried once: those of its ranges that are wanted may be right.

        Args:
            parts: ranges of objects.
            into: memory that the ranges are copied to.
            verify: raises ChecksumError if the copied range with a number is wrong.
            loads: whether to fetch objects that are missing, if this does so at all; default True.

        Returns:
            The numbers of ranges that were not copied, ascending.
        """
        copies = _Copies(parts, into, verify, self._count)
        usual_seconds = sum(each.part.size_bytes for each in parts) / _LEAST_BYTES_PER_SECOND
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        try:
            async with asyncio.timeout(copies.patience.seconds + usual_seconds):
                lacking = await self._copy_present(copies, copies.numbers)
        except TimeoutError:
            return sorted(copies.left)
        copies.patience.spend(loop.time() - begun_seconds, usual_seconds)

        async def load(key: str) -> None:
            if (other := self._loading.get(key)) is not None:
                await other.wait()
                await self._copy_present(copies, [key])
            elif key not in self._failed:
                await self._load(copies, key)

        if loads and self._loads and lacking:
            # If loaders all began with the first one, they would wait for the same objects, one by one.
            first = self._fetcher.rng.randrange(len(lacking))
            await for_each(lacking[first:] + lacking[:first], load, concurrency=_FOUND_AT_ONCE)
        return sorted(copies.left)

    async def fetch_once(self, ref: ObjectRef, into: memoryview, fetch: Callable[[], Awaitable[object]]) -> None:
        """Fill ``into`` with a small object from the tier; else fetch it, and give it to the tier.

        Args:
            ref: the object.
            into: memory of its size.
            fetch: fills ``into`` from the store, verified.

        Raises:
            StoreError: the store failed.
        """
        if self._late_reads < FAILURE_THRESHOLD:
            try:
                async with asyncio.timeout(tier_chain.SINGLE_FLIGHT_SECONDS):
                    is_here = await self._tier.read(ref, into)
                self._late_reads = 0
                if is_here and crc32c(into) == ref.crc32c:
                    self._count(len(into))
                    return
                if is_here:
                    self._reject(ref)
            except TimeoutError:
                self._late_reads += 1
            except StoreError:  # the store has it
                pass
        try:
            await fetch()
        except BaseException:
            if isinstance(self._tier, tier_chain.SingleFlightTier):
                self._tier.decline(ref)
            raise
        self._tier.offer(ref, into)

    async def _copy_present(self, copies: _Copies, keys: Iterable[str]) -> list[str]:
        """Copy the ranges of objects that are in the tier; return the keys of those that it lacks and has room for."""
        lacking: list[str] = []
        remote: list[int] = []

        async def find(key: str) -> None:
            try:
                found = await self._tier.find(copies.ref(key))
            except StoreError:  # the next read of a whole object tells
                return
            if found.is_remote:
                remote.extend(copies.numbers[key])
            elif found.memory is not None:
                await self._copy_from(copies, key, found.memory)
            elif found.has_room:
                lacking.append(key)

        await for_each(keys, find, concurrency=_FOUND_AT_ONCE)
        if remote:
            lacking += await self._copy_remote(copies, remote)
        return lacking

    async def _copy_from(self, copies: _Copies, key: str, memory: memoryview) -> None:
        try:
            copies.take_all(key, memory)
        except ChecksumError:
            self._reject(copies.ref(key))
        if copies.copied_bytes >= _COPIED_AT_ONCE_BYTES:
            copies.copied_bytes = 0
            await asyncio.sleep(0)  # other fetches go on

    async def _copy_remote(self, copies: _Copies, numbers: Sequence[int]) -> list[str]:
        """Copy ranges of objects that are not mapped; return the keys of those that are lacking and have room."""
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        found = await self._tier.read_parts([copies.parts[number] for number in numbers], copies.into)
        size_bytes = sum(copies.parts[number].part.size_bytes for number in numbers)
        is_slow = loop.time() - begun_seconds > SLOW_SECONDS + size_bytes / _LEAST_BYTES_PER_SECOND
        lacking: dict[str, None] = {}
        for number, presence in zip(numbers, found, strict=True):
            ref = copies.parts[number].ref
            if presence is Presence.LACKING and not is_slow:
                lacking[ref.key] = None
            elif presence is Presence.COPIED:
                try:
                    copies.take(number)
                except ChecksumError:
                    self._reject(ref)
        return list(lacking)

    def _reject(self, ref: ObjectRef) -> None:
        """Have the tier forget an object of which a value is wrong."""
        self._counters.tier_errors[self._tier.name] += 1
        self._counters.checksum_failures += 1
        self._tier.reject(ref)

    def _count(self, size_bytes: int) -> None:
        """Count a range that was copied."""
        self._counters.tier_hits[self._tier.name] += 1
        self._counters.count_delivery(size_bytes)

    async def _load(self, copies: _Copies, key: str) -> None:
        """Fetch an object, offer it to the tier, and copy its ranges."""
        ref, ended = copies.ref(key), asyncio.Event()
        self._loading[key] = ended
        try:
            await self._limiter.acquire()
            try:
                if copies.patience.seconds <= 0:
                    return
                memory = self._free.pop() if self._free else anonymous_memory(self._object_bytes)
                data = memory[: ref.size_bytes]
                try:
                    await self._fetcher.fetch_whole(ref, data, urgent=True, patience=copies.patience)
                    self._counters.objects -= 1  # delivered are its ranges, when they are copied
                    self._counters.useful_bytes -= ref.size_bytes
                    await self._copy_from(copies, key, data)
                except StoreError:
                    self._failed.add(key)
                finally:
                    self._free.append(memory)
            finally:
                self._limiter.release()
        finally:
            del self._loading[key]
            ended.set()
