"""A place nearer than the bucket that may hold super-samples: memory of a peer, a warm function, a disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["ObjectRef", "Tier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """One object as a manifest pins it.

    Attributes:
        key: relative to the store's root.
        size_bytes: of the whole object.
        crc32c: of the whole object. With ``size_bytes`` it is the object's identity.
        tag: the store's ETag or generation when the object was packed, sent back as a precondition; empty if
            unknown.
        row: in the manifest that pins it, which is what the order counts in; negative if there is none. No part of
            the object's identity.
    """

    key: str
    size_bytes: int
    crc32c: int
    tag: str = ""
    row: int = field(default=-1, compare=False)


class Tier(Protocol):
    """A nearer place, asked before the store. It may lose, lack or spoil anything: the fetcher verifies."""

    @property
    def name(self) -> str:
        """What statistics and messages call it."""
        ...

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Fill ``into``, which has exactly ``ref.size_bytes`` bytes, and return True; or False if it is not here.

        When the call ends, however it ends (cancellation too), nothing writes to ``into`` any more. A read that is late
        is cancelled, and must end at once: the store fills the same memory then. What cannot stop at once, such as a
        thread, reads into memory of its own first.

        Raises:
            StoreError: the tier failed; the fetcher goes on to the next place.
        """
        ...

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Be told of verified bytes that had to be fetched from farther away.

        Must not block, and must copy what it keeps: ``data`` is reused after the call.
        """
        ...

    async def close(self) -> None:
        """Release what the tier holds. Idempotent."""
        ...
