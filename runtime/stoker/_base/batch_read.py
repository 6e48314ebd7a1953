"""Ranges of objects, and reads of several by one request, for stores that have such a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from stoker.abc import ObjectRef
from stoker.errors import StoreError


class ObjectRange(NamedTuple):
    """Bytes ``[start, end)`` of an object; not empty.

    Attributes:
        key: key of the object, relative to the store's root.
        start: offset of the first byte.
        end: offset behind the last byte.
    """

    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RangePart:
    """Bytes ``[start, end)`` of an object, and their place in the caller's memory.

    Attributes:
        start: offset of the first byte in the object.
        end: offset behind the last byte in the object.
        offset: offset of the first byte in the memory.
    """

    start: int
    end: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self.end - self.start


class ObjectPart(NamedTuple):
    """A part of an object, and its place in the caller's memory; not empty.

    Attributes:
        ref: the object.
        part: the part.
    """

    ref: ObjectRef
    part: RangePart


class BatchLimits(NamedTuple):
    """Limits of one request for several ranges.

    Attributes:
        size_bytes: maximum number of bytes of all ranges together.
        ranges: maximum number of ranges.
    """

    size_bytes: int
    ranges: int


class BatchRefusedError(StoreError):
    """The store cannot answer a request for several ranges; requests for each of them may succeed, or say why not."""


@runtime_checkable
class BatchReadable(Protocol):
    """A store that reads ranges of several objects by one request. Without it, each range is a request of its own."""

    @property
    def batch_limits(self) -> BatchLimits | None:
        """Limits of the next request; None if the store cannot read several ranges by one."""
        ...

    async def get_ranges(
        self, ranges: Sequence[ObjectRange], *, into: memoryview, begun: Callable[[], None] | None = None
    ) -> None:
        """Read ranges, one behind the other, into ``into``.

        When the call returns, raises or is cancelled, nothing writes to ``into`` any more. Objects may have changed
        since they were pinned: the caller verifies the bytes.

        Args:
            ranges: ranges within :attr:`batch_limits`, of any objects, in any order.
            into: buffer to fill, of exactly the size of all ranges.
            begun: called before the first bytes of the response are written; may raise a StokerError, which ends the
                call before anything is written. Default: nothing is called.

        Raises:
            BatchRefusedError: the store cannot answer; read the ranges one by one.
            TruncatedError: the response ended before all bytes arrived; ``into`` has those that did.
        """
        ...
