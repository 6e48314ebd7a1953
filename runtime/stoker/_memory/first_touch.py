"""Takes pages of fresh memory before they are written to, beside the thread that will write there.

The first write to a page of an anonymous mapping makes the kernel find and clear one, and in a virtual machine often
the hypervisor, too, which takes up to ten times as long as the copy. Within a receive that holds up the event loop.
Linux takes pages on request and changes nothing in those that are there (madvise, MADV_POPULATE_WRITE, since 5.14), so
that may run beside whoever writes. Where there is no such request, pages are taken at their first write as ever.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

__all__ = ["FirstTouch", "address_of", "populate"]

_MADV_POPULATE_WRITE = 23  # Python's mmap module has no name for it, and keeps the interpreter lock meanwhile
_PIECE_BYTES = 4 << 20  # some milliseconds


class FirstTouch:
    """Takes all pages of some memory once, a piece after the other; it may be interrupted and goes on later.

    Args:
        memory: begins on a page.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._done_bytes = 0

    async def run(self) -> None:
        """Take what is left, in threads of the loop's executor; cancelling leaves one piece to end by itself."""
        loop = asyncio.get_running_loop()
        while self._done_bytes < self._memory.nbytes:
            piece = self._memory[self._done_bytes : self._done_bytes + _PIECE_BYTES]
            if not await loop.run_in_executor(None, populate, piece):
                self._done_bytes = self._memory.nbytes
                return
            self._done_bytes += piece.nbytes


def populate(memory: memoryview) -> bool:
    """Take the pages of writable memory, and leave its contents; return whether that can be done here."""
    if sys.platform != "linux":
        return False
    address, size_bytes = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(memory.nbytes)
    result: int = ctypes.CDLL(None).madvise(address, size_bytes, _MADV_POPULATE_WRITE)
    return result == 0


def address_of(memory: memoryview) -> int:
    """Return where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
