"""The fetch of a batch: ranges of several objects by one request, for stores that have such a request.

The ranges are contiguous in memory, so the response goes straight to its place. A request that fails is sent again for
the ranges that have not arrived whole, which their checksums tell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stoker._base.batch_read import BatchLimits, BatchReadable, ObjectPart, ObjectRange, RangePart
from stoker._fetch.range_reader import ObjectFetch
from stoker.abc import ObjectInfo, ObjectRef, Readable
from stoker.errors import ChecksumError


def split_batches(parts: Sequence[ObjectPart], limits: BatchLimits) -> list[range]:
    """Return runs of parts that one request can read: contiguous in memory and within the limits, or a single part."""
    runs: list[range] = []
    first = size_bytes = next_offset = 0
    for number, (_, part) in enumerate(parts):
        fits = size_bytes + part.size_bytes <= limits.size_bytes and number - first < limits.ranges
        if number > first and not (fits and part.offset == next_offset):
            runs.append(range(first, number))
            first, size_bytes = number, 0
        size_bytes += part.size_bytes
        next_offset = part.offset + part.size_bytes
    return [*runs, range(first, len(parts))] if parts else runs


@dataclass(slots=True, kw_only=True)
class BatchFetch(ObjectFetch):
    """State of the fetch of a batch.

    Attributes:
        parts: the ranges, contiguous in memory.
        verify: raises ChecksumError if the bytes of a part, by its number, are wrong in the caller's memory.
        arrived: number of parts, from the first on, that have arrived before the last failure.
        has_begun: whether a response has begun, so that parts may have arrived.
    """

    shares_memory: ClassVar[bool] = True

    parts: Sequence[ObjectPart]
    verify: Callable[[int], None]
    arrived: int = 0
    has_begun: bool = False

    @classmethod
    def of(
        cls, url: str, parts: Sequence[ObjectPart], into: memoryview, verify: Callable[[int], None], *, urgent: bool
    ) -> BatchFetch:
        """Return the fetch of parts into the caller's memory, from the store at ``url``."""
        size_bytes = sum(part.size_bytes for _, part in parts)
        name = f"{parts[0].ref.key} and {len(parts) - 1} more ranges"
        return cls(
            ref=ObjectRef(key=name, size_bytes=size_bytes, crc32c=0),
            name=f"{url.rstrip('/')}/{name}",
            into=into,
            urgent=urgent,
            tag=None,
            size_bytes=size_bytes,
            parts=parts,
            verify=verify,
        )

    @property
    def part(self) -> RangePart:
        """All parts as one, and its place in the caller's memory."""
        return RangePart(0, self.size_bytes, self.parts[0].part.offset)

    def is_right(self, number: int) -> bool:
        """Return whether the caller's memory has the right bytes of a part."""
        try:
            self.verify(number)
        except ChecksumError:
            return False
        return True

    def request(
        self, store: Readable, part: RangePart, into: memoryview, begun: Callable[[], None]
    ) -> Awaitable[ObjectInfo]:
        """Send a request for the parts that have not arrived."""
        return self._request(store, part, into, begun)

    async def _request(
        self, store: Readable, part: RangePart, into: memoryview, begun: Callable[[], None]
    ) -> ObjectInfo:
        def note_begin() -> None:
            begun()
            self.has_begun = True

        if self.has_begun:
            while self.arrived < len(self.parts) and self.is_right(self.arrived):
                self.arrived += 1
        left = self.parts[self.arrived :]
        arrived_bytes = self.size_bytes - sum(each.size_bytes for _, each in left)
        into[:arrived_bytes] = self.into[part.offset : part.offset + arrived_bytes]  # a hedge may have other memory
        if left:
            assert isinstance(store, BatchReadable)  # noqa: S101 - else there are no batches
            ranges = [ObjectRange(ref.key, each.start, each.end) for ref, each in left]
            await store.get_ranges(ranges, into=into[arrived_bytes:], begun=note_begin)
        return ObjectInfo(key=self.ref.key, size_bytes=self.size_bytes, tag="")
