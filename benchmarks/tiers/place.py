"""Objects, and a place that they can be read from."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from benchmarks.cache_tiers import data_set
from stoker._format.manifest import Manifest
from stoker.abc import ObjectRef

__all__ = ["Objects", "Place"]


@dataclass(frozen=True, slots=True)
class Objects:
    """Super-samples that every process can make for itself.

    Attributes:
        count: how many.
        size_bytes: of each.
    """

    count: int
    size_bytes: int

    def bodies(self) -> list[bytes]:
        """Return their bytes."""
        return data_set(self.count, self.size_bytes)[1]

    def manifest(self) -> Manifest:
        """Return their manifest."""
        return data_set(self.count, self.size_bytes)[0]

    def refs(self) -> list[tuple[ObjectRef, bytes]]:
        """Return each with its bytes, as a loader knows it that has its SHA-256 from the manifest."""
        manifest, bodies = data_set(self.count, self.size_bytes)
        return [
            (replace(manifest.ref(row), sha256_128=hashlib.sha256(body).digest()[:16]), body)
            for row, body in enumerate(bodies)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where objects can be read.

    Attributes:
        name: of the place.
        read: fills memory with the object of that number.
        server_seconds: processor time so far of the processes that serve; 0 where this process reads by itself.
        most_reads: in a round; None as many as wanted.
    """

    name: str
    read: Callable[[int, memoryview], Awaitable[None]]
    server_seconds: Callable[[], float] = lambda: 0.0
    most_reads: int | None = None
