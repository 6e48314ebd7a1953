"""Lost shards, put back from where the objects came from as soon as their loss is noticed.

The next read of an object puts its lost shards back, too, but by then more of them may be lost than there is parity:
what an object survives is losses between two times at which it is made whole. From the bucket, not from the other
nodes: to be asked for their shards they would be woken, and billed, for far more than GETs cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

from stoker._base.checksum import crc32c
from stoker._base.retry import RetryingReader
from stoker._base.task_group import for_each, task_group
from stoker._cache.keeper import NameIndex
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker.abc import ObjectRef, Readable
from stoker.errors import ChecksumError, StokerError, StoreError, TransientError
from stoker_warm._code import Code
from stoker_warm._directory import Directory
from stoker_warm._statistics import CostMeter, ProxyTally
from stoker_warm._transfers import Shards, ShardWriter, encoded

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


_log = logging.getLogger("stoker.warm.put_back")

NAMES_AT_ONCE = 256
"""Objects that are looked up at once, and put back before more are."""

_LEAST_PAUSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 60.0


def takes_whole(code: Code, positions: Collection[int]) -> bool:
    """Return whether an object is read whole for its shards at some positions, and not a part for each."""
    return max(positions) >= code.data or 2 * len(positions) >= code.data


class _Sought(NamedTuple):
    """An object, and who has it."""

    name: str
    ref: ObjectRef
    origin: Origin


class PutBack:
    """Makes objects whole again, in the order in which they lost shards. Lives on the proxy's event loop.

    An object for which there is no place, since too few nodes are there, waits until another node is. One that fails in
    passing is tried again after a pause, longer each time that nothing came of it.

    Args:
        origins: have the objects; the first that knows one gives it.
        code: how objects are cut.
        at_once: objects.
        writer: puts shards away.
        directory: knows what is missing.
        tally: where shards are counted.
        meter: where what is read for them is.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        code: Code,
        at_once: int,
        writer: ShardWriter,
        directory: Directory,
        tally: ProxyTally,
        meter: CostMeter,
    ) -> None:
        self._origins, self._code, self._at_once = origins, code, at_once
        self._writer, self._directory, self._tally, self._meter = writer, directory, tally, meter
        self._wanted: dict[str, None] = {}
        self._homeless: dict[str, None] = {}  # in the order in which they became so
        self._failed: dict[str, None] = {}
        self._news = asyncio.Event()

    def lost(self, names: Iterable[str]) -> None:
        """Objects have lost shards."""
        self._wanted.update(dict.fromkeys(names))
        if self._wanted:
            self._news.set()

    def met(self) -> None:
        """A node is there, and may have room for what had no place, or take what another one did not."""
        self.lost((*self._homeless, *self._failed))
        self._homeless.clear()
        self._failed.clear()

    def let_go(self, names: Iterable[str]) -> None:
        """Objects went for others: they are not wanted any more."""
        for name in names:
            self._wanted.pop(name, None)
            self._homeless.pop(name, None)
            self._failed.pop(name, None)

    async def run(self) -> None:
        """Put back what is lost, for ever."""
        pause_seconds = _LEAST_PAUSE_SECONDS
        while True:
            await self._some_wanted(pause_seconds)
            before = self._tally.put_back
            try:
                found = await self._found(list(islice(self._wanted, NAMES_AT_ONCE)))
            except StokerError as error:
                _log.warning("what nodes of the warm tier lost cannot be put back for now: %s", error)
                await asyncio.sleep(pause_seconds)
            else:
                await for_each(found, self._put_back, concurrency=self._at_once)
                if not self._failed or self._tally.put_back > before:
                    pause_seconds = _LEAST_PAUSE_SECONDS
                    continue
            pause_seconds = min(_MOST_PAUSE_SECONDS, 2 * pause_seconds)

    async def _some_wanted(self, pause_seconds: float) -> None:
        """Wait until there is something to put back; after a pause that is what failed."""
        while not self._wanted:
            self._news.clear()
            try:
                async with asyncio.timeout(pause_seconds if self._failed else None):
                    await self._news.wait()
            except TimeoutError:
                self._wanted.update(self._failed)
                self._failed.clear()

    async def _found(self, names: Collection[str]) -> list[_Sought]:
        """Return those objects that an origin has; the others are not wanted any more."""
        found: dict[str, _Sought] = {}
        for origin in self._origins:
            unknown = [name for name in names if name not in found]
            if unknown:
                refs = await origin.find(unknown)
                found |= {name: _Sought(name, ref, origin) for name, ref in refs.items()}
        self.let_go(name for name in names if name not in found)
        return [found[name] for name in names if name in found]

    async def _put_back(self, sought: _Sought) -> None:
        name = sought.name
        if name not in self._wanted:
            return  # it was let go meanwhile
        del self._wanted[name]
        if name in self._writer.under_way:  # and may lack what was lost since that began
            self._failed[name] = None
            return
        self._writer.under_way.add(name)
        try:
            written = await self._writer.write(name, self._code, partial(self._shards, sought))
        except TransientError as error:
            _log.debug("the lost shards of %s cannot be put back for now: %s", sought.ref.key, error)
            self._failed[name] = None
            return
        except StoreError as error:
            _log.warning("the lost shards of %s are not put back: %s", sought.ref.key, error)
            return
        finally:
            self._writer.under_way.discard(name)
        placed, stored = written or (0, 0)
        self._tally.put_back += stored
        here = self._directory.find(name, is_use=False)
        if here is None or not here.is_whole:
            (self._failed if placed else self._homeless)[name] = None

    async def _shards(self, sought: _Sought, wanted: Collection[int]) -> Shards:
        """Return the shards at some positions: data as parts of the object, for parity it takes the whole."""
        ref, code = sought.ref, self._code
        cuts = code.cuts(ref.size_bytes)
        if takes_whole(code, wanted):
            whole = await self._read(sought, 0, ref.size_bytes)
            if crc32c(whole) != ref.crc32c:
                raise ChecksumError(f"{ref.key} does not have its checksum, {ref.crc32c:08x}")
            return await encoded(code, whole, wanted)
        async with task_group() as group:
            parts = {at: group.create_task(self._read(sought, *cuts[at])) for at in wanted}
        return {at: memoryview(part.result()) for at, part in parts.items()}

    async def _read(self, sought: _Sought, start: int, end: int) -> bytearray:
        data = await sought.origin.read(sought.ref, start, end)
        self._meter.put_back(end - start)
        return data
