"""Memory of the proxy's process over 10,000 reads."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from benchmarks.warm_tier.fleet import create_objects, fleet
from benchmarks.warm_tier.rate import patient
from stoker_warm._erasure import ErasureCode

__all__ = ["Memory", "memory"]

OBJECT_BYTES, OBJECTS = 1 << 20, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the proxy's process, which also has the objects and the function cloud.

    Attributes:
        reads: number of reads so far.
        resident_bytes: resident memory of the process.
    """

    reads: int
    resident_bytes: int


async def memory(reads: int, samples: int = 10) -> list[Memory]:
    """Read ``reads`` objects, and sample the memory of the proxy ``samples`` times meanwhile."""
    objects, found = create_objects(OBJECTS, OBJECT_BYTES), []
    into, process = memoryview(bytearray(OBJECT_BYTES)), psutil.Process()
    async with fleet(patient(ErasureCode(4, 2))) as running:
        await running.put(objects)
        for number in range(1, reads + 1):
            if not await running.proxy.objects.read(objects[number % OBJECTS].name, into):
                raise RuntimeError(f"a read failed: {running.proxy.statistics()}")
            if number % (reads // samples) == 0:
                found.append(Memory(reads=number, resident_bytes=process.memory_info().rss))
    return found
