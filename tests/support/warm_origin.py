"""Where the objects of a warm tier came from, in memory: slow, wrong or away as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from stoker._cache.keeper import size_of
from stoker.abc import ObjectRef
from stoker.errors import StoreError

__all__ = ["MemoryOrigin"]


@dataclass
class MemoryOrigin:
    """An :class:`~stoker_warm._put_back.Origin`.

    Attributes:
        objects: by name.
        seconds: that a read takes.
        find_failure: what asking for names raises.
        read_failure: what reading raises.
        asked: how often names were asked for.
        reads: that were begun: name, start, end.
        under_way: reads now.
        most_under_way: reads, at most.
    """

    objects: dict[str, bytes]
    seconds: float = 0.0
    find_failure: StoreError | None = None
    read_failure: StoreError | None = None
    asked: int = 0
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    @classmethod
    def of(cls, objects: Iterable[tuple[str, bytes]]) -> MemoryOrigin:
        """Return one that has some objects."""
        return cls(dict(objects))

    async def find(self, names: Collection[str]) -> dict[str, ObjectRef]:
        """Return what it knows."""
        self.asked += 1
        if self.find_failure is not None:
            raise self.find_failure
        return {
            name: ObjectRef(key=name, size_bytes=size_of(name), crc32c=int(name[:8], 16))
            for name in names
            if name in self.objects
        }

    async def read(self, ref: ObjectRef, start: int, end: int) -> bytearray:
        """Return bytes of an object."""
        self.reads.append((ref.key, start, end))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
            if self.read_failure is not None:
                raise self.read_failure
            return bytearray(self.objects[ref.key][start:end])
        finally:
            self.under_way -= 1
