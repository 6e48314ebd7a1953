"""Objects, and a place to read them from."""

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
    """Super-samples that every process can create itself.

    Attributes:
        count: number of objects.
        size_bytes: size of each.
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
        """Return each reference, with the SHA-256 as in a manifest, and its bytes."""
        manifest, bodies = data_set(self.count, self.size_bytes)
        return [
            (replace(manifest.ref(row), sha256_128=hashlib.sha256(body).digest()[:16]), body)
            for row, body in enumerate(bodies)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place to read objects from.

    Attributes:
        name: name of the place.
        read: function that fills memory with the object of a number.
        server_seconds: processor time of the server processes so far; 0 if there are none.
        most_reads: maximum number of reads in a round; None for no limit.
    """

    name: str
    read: Callable[[int, memoryview], Awaitable[None]]
    server_seconds: Callable[[], float] = lambda: 0.0
    max_reads: int | None = None
