"""Bytes that lie in several buffers, such as an object that is too large to be copied into one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from stoker.abc import Buffer


class SegmentedBytes:
    """The concatenation of buffers, which is never built: a slice copies at most its own bytes.

    Example:
        >>> data = SegmentedBytes([b"head", b"body"])
        >>> len(data), bytes(data[2:6])
        (8, b'adbo')

    Args:
        buffers: the buffers, which must not change any more.
    """

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._buffers = [view for buffer in buffers if len(view := memoryview(buffer).cast("B"))]
        self._starts = [0]
        for view in self._buffers:
            self._starts.append(self._starts[-1] + len(view))

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the buffers, in order."""
        return iter(self._buffers)

    def __getitem__(self, part: slice) -> Buffer:
        """Return a slice without a step: a view if it lies in one buffer, else a copy."""
        start, end, _ = part.indices(len(self))
        pieces: list[memoryview] = []
        number = bisect_right(self._starts, start) - 1
        while start < end:
            base = self._starts[number]
            pieces.append(self._buffers[number][start - base : end - base])
            start += len(pieces[-1])
            number += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
