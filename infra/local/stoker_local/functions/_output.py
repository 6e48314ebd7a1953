"""What a process writes: read as it comes, the newest kept."""

from __future__ import annotations

import asyncio
import os
from collections import deque

__all__ = ["Output", "tail"]

_PIPE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 16
_TAIL_BYTES = 4096


class Output:
    """The reading end of a pipe on an event loop.

    What a process wrote before it answered is in the pipe when its answer arrives, so :meth:`take` never misses it.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._pieces: deque[bytes] = deque()
        self._size_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def started(self) -> None:
        """Close this process's writing end: the other process has its own."""
        os.close(self.writer)
        self.writer = -1

    def take(self) -> bytes:
        """Return the end, up to 64 KiB, of what was written since the last call."""
        self._read_all()
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._size_bytes = 0
        return taken

    def close(self) -> None:
        """Read what is there, and stop; :meth:`take` still returns it."""
        self._read_all()
        self._loop.remove_reader(self._reader)
        for descriptor in (self._reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self.writer = -1

    def _read_all(self) -> None:
        """Read what the pipe holds, and no more than it can: somebody may write without end."""
        left_bytes = _PIPE_BYTES
        while left_bytes > 0 and (read_bytes := self._read()):
            left_bytes -= read_bytes

    def _read(self) -> int:
        """Read once; return how much there was."""
        if self._reader < 0:
            return 0
        try:
            piece = os.read(self._reader, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not piece:  # every writer has ended
            self._loop.remove_reader(self._reader)
            return 0
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        while self._size_bytes > _KEPT_BYTES and len(self._pieces) > 1:
            self._size_bytes -= len(self._pieces.popleft())
        return len(piece)


def tail(log: bytes) -> bytes:
    """Return the last 4 KiB, which is what callers may ask for."""
    return log[-_TAIL_BYTES:]
