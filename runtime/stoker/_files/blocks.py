"""Blocks of files that are read ahead: each read of consecutive positions makes the next block larger."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from stoker.errors import StokerError

BLOCK_BYTES = 8 << 20
"""Size that blocks grow to; a single larger position is a block of its own."""
_MAX_POSITIONS = 4096
_OVERHEAD_BYTES = 256  # of a position in a block
_BLOCKS_AHEAD = 4
_SEQUENTIAL_POSITIONS = 3
"""Length of a sequence, behind which blocks are read before they are needed."""
_RECENT_MISSES = 64
"""Misses since the last use of a block, after which it is not continued: random readers meet such blocks."""
_READING_THREADS = 4
_REMEMBERED_EVICTIONS = 1024

Stream = str | int
"""Name of a stream."""
ReadPositions = Callable[[Stream, int, int], Sequence[bytes]]
"""Reads positions ``[start, end)`` of a stream; may return fewer, from the start, but at least one."""


@dataclass(slots=True, eq=False)
class _Block:
    """Consecutive positions of a stream that are read together.

    Attributes:
        stream: the stream.
        start: first position.
        end: position behind the last one.
        sequence: number of positions of the sequence that ends with this block.
        leads_on: whether the blocks behind this one are to be read, after the first use of this one.
        used_at: number of misses before the last use.
        data: the bytes of each position.
        mean_bytes: mean size of a position; that of the block before it while this one is read.
        used_bytes: memory of the data; 0 while it is read.
    """

    stream: Stream
    start: int
    end: int
    sequence: int
    leads_on: bool
    used_at: int
    mean_bytes: float
    data: Future[Sequence[bytes]] = field(default_factory=Future)
    used_bytes: int = 0


class BlockCache:
    """Keeps blocks of streams in memory, and reads ahead of sequential reads. Thread-safe.

    A stream has consecutive positions, such as the files of a folder or the parts of a large file. A read of the
    position behind a block that was used lately is sequential: it reads a block of twice the size. Behind the third
    position of a sequence, the first use of a block starts reads of the next ones in other threads. Any other read is
    of one position. Streams need no state of their own, so readers may be at different places of one stream.

    Args:
        read: function that reads positions; called from several threads.
        length: function that returns the number of positions of a stream.
        max_bytes: memory for blocks; the least recently used ones are evicted, except the last one.
    """

    def __init__(self, read: ReadPositions, length: Callable[[Stream], int], max_bytes: int) -> None:
        self._read, self._length, self._max_bytes = read, length, max_bytes
        self._lock = threading.Lock()
        self._blocks: dict[tuple[Stream, int], _Block] = {}
        self._recent: OrderedDict[_Block, None] = OrderedDict()
        self._used_bytes = self._misses = 0
        self._evicted: OrderedDict[tuple[Stream, int], None] = OrderedDict()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_READING_THREADS, "stoker-read-ahead")

    def get(self, stream: Stream, position: int) -> bytes:
        """Return the bytes of a position of a stream.

        Raises:
            OSError, StokerError: the position could not be read, or the cache is closed.
        """
        max_positions = _MAX_POSITIONS
        while True:
            with self._lock:
                block = self._blocks.get((stream, position))
                is_new = block is None
                if block is None:
                    self._misses += 1
                    block = self._add(stream, position, max_positions)
                self._recent.move_to_end(block)
                block.used_at = self._misses
            if is_new:
                self._fill(block)
            try:
                found = block.data.result()
            except (OSError, StokerError):
                if block.end - block.start <= 1:
                    raise
                max_positions = 1  # to know which position cannot be read
                continue
            if block.leads_on:
                self._read_behind(block)
            if position < block.start + len(found):  # else the block has become shorter
                return found[position - block.start]

    def is_evicted(self, stream: Stream, position: int) -> bool:
        """Return whether a position that had a block of its own was evicted lately, and is not in memory again."""
        return (stream, position) in self._evicted

    def close(self) -> None:
        """Forget all blocks; later reads, and those that wait for a thread, raise StokerError."""
        with self._lock:
            self._is_closed = True
            self._blocks.clear()
            self._recent.clear()
        self._threads.shutdown(wait=False)

    def _add(self, stream: Stream, start: int, max_positions: int = _MAX_POSITIONS) -> _Block:
        if self._is_closed:
            raise StokerError("the files are closed")
        before = self._blocks.get((stream, start - 1))
        mean_bytes, sequence, count = 0.0, 0, 1
        if before is not None and self._misses - before.used_at <= _RECENT_MISSES:
            mean_bytes, sequence = before.mean_bytes, before.sequence
            count = max(1, int(min(2 * (before.end - before.start), max_positions, BLOCK_BYTES // (mean_bytes + 1))))
        last, end = min(start + count, self._length(stream)), start + 1
        while end < last and (stream, end) not in self._blocks:
            end += 1
        leads_on = sequence >= _SEQUENTIAL_POSITIONS
        block = _Block(stream, start, end, sequence + end - start, leads_on, self._misses, mean_bytes)
        self._blocks.update(((stream, position), block) for position in range(start, end))
        self._evicted.pop((stream, start), None)
        self._recent[block] = None
        return block

    def _read_behind(self, block: _Block) -> None:
        """Start to read the blocks behind one, unless they are in memory, or this was called before."""
        with self._lock:
            if not block.leads_on or self._is_closed:
                return
            block.leads_on = False
            stream, end = block.stream, block.end
            for _ in range(min(_BLOCKS_AHEAD, self._max_bytes // 4 // max(1, block.used_bytes))):
                if end >= self._length(stream):
                    return
                if (found := self._blocks.get((stream, end))) is None:
                    found = self._add(stream, end)
                    self._threads.submit(self._fill, found)
                end = found.end

    def _fill(self, block: _Block) -> None:
        try:
            if self._is_closed:
                raise StokerError("the files are closed")
            found = self._read(block.stream, block.start, block.end)
        except BaseException as error:  # noqa: BLE001 - a task boundary: get raises it in the threads that wait
            with self._lock:
                self._drop(block)
            block.data.set_exception(error)
            return
        with self._lock:
            self._remove_positions(block, block.start + len(found))
            block.end = block.start + len(found)
            block.mean_bytes = sum(map(len, found)) / len(found)
            if block in self._recent:
                block.used_bytes = sum(map(len, found)) + _OVERHEAD_BYTES * len(found)
                self._used_bytes += block.used_bytes
                self._evict()
        block.data.set_result(found)

    def _evict(self) -> None:
        while self._used_bytes > self._max_bytes:
            filled = (each for each in self._recent if each.used_bytes)
            oldest = next(filled)
            if next(filled, None) is None:
                return
            self._drop(oldest)
            if oldest.end == oldest.start + 1:
                self._evicted[oldest.stream, oldest.start] = None
                if len(self._evicted) > _REMEMBERED_EVICTIONS:
                    self._evicted.popitem(last=False)

    def _drop(self, block: _Block) -> None:
        self._remove_positions(block, block.start)
        if block in self._recent:
            del self._recent[block]
            self._used_bytes -= block.used_bytes

    def _remove_positions(self, block: _Block, first: int) -> None:
        for position in range(first, block.end):
            if self._blocks.get((block.stream, position)) is block:
                del self._blocks[block.stream, position]
