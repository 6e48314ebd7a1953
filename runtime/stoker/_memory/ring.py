"""The ring buffer of a process: fixed slots in one anonymous shared mapping, each with a life cycle.

Invariant: every slot is in exactly one state, and ``free + filling + ready == slots``. A slot changes state only
according to the transition table below; anything else, such as a double release, is a :class:`RingStateError`.

The ring never waits: its users decide when to acquire a slot. It is not thread-safe: one thread changes states; other
threads may read memory through :meth:`Ring.view` and :meth:`Ring.offset` while they hold a READY slot.

:class:`PagePrefaulter` prefaults the pages of new memory, concurrently with the thread that writes to it. The first
write to a page of an anonymous mapping makes the kernel, and in a virtual machine often the hypervisor, allocate and
clear a page, which takes up to ten times as long as the copy. During a receive, that blocks the event loop. Linux
allocates pages on request, without changing existing ones (madvise, MADV_POPULATE_WRITE, since 5.14), so this may run
beside the writer. On other systems pages are allocated at the first write.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.errors import ConfigError, MemoryBudgetError, StokerError

ALIGNMENT_BYTES = 64
"""Slots start at cache lines, so that columns of every dtype are aligned views."""


class RingStateError(StokerError, RuntimeError):
    """A slot's state does not allow the requested transition: a bug in the caller."""


class SlotState(enum.Enum):
    """State of a slot in its life cycle."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"


_TRANSITIONS = {
    (SlotState.FREE, "acquire"): SlotState.FILLING,
    (SlotState.FILLING, "commit"): SlotState.READY,
    (SlotState.FILLING, "abort"): SlotState.FREE,
    (SlotState.READY, "release"): SlotState.FREE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStatistics:
    """A snapshot of a ring.

    Attributes:
        free: number of free slots.
        filling: number of slots that a transport may be writing to.
        ready: number of slots with verified bytes that the consumer has not released.
        peak_used: maximum number of slots that were in use at the same time.
        committed: number of times that a slot became ready.
    """

    free: int
    filling: int
    ready: int
    peak_used: int
    committed: int


def anonymous_memory(size_bytes: int) -> memoryview:
    """Map ``size_bytes`` of zeroed memory, which forked children share.

    It is outside /dev/shm, which containers limit to 64 MB. Pages are allocated at the first write.
    """
    return memoryview(mmap.mmap(-1, size_bytes))


class Ring:
    """A buffer of equal slots, whose memory is allocated at the first acquire and then reused.

    The slot that was freed last is acquired first, because its pages are allocated (a new page costs about 8 copies).

    Args:
        slots: number of slots.
        slot_bytes: size of a slot.
        allocate: function that returns zeroed memory of a given size; default :func:`anonymous_memory`.

    Attributes:
        reserved: number of free slots that are reserved for callers other than hedges; see :attr:`unreserved`.
    """

    def __init__(
        self, slots: int, slot_bytes: int, *, allocate: Callable[[int], memoryview] = anonymous_memory
    ) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(f"a ring needs at least one slot of one byte, not {slots} of {slot_bytes}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._stride_bytes = -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._allocate = allocate
        self._memory: memoryview | None = None
        self._states = [SlotState.FREE] * slots
        self._free = list(range(slots - 1, -1, -1))
        self.reserved = 0
        self._ready = 0
        self._peak_used = 0
        self._committed = 0

    @property
    def memory(self) -> memoryview:
        """The memory of all slots; slot ``i`` starts at :meth:`offset` ``(i)``."""
        if self._memory is None:
            self._memory = self._allocate(self.slots * self._stride_bytes)
        return self._memory

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def unreserved(self) -> int:
        """Number of free slots that are not reserved, which hedges may acquire."""
        return max(0, len(self._free) - self.reserved)

    def acquire(self) -> int | None:
        """FREE to FILLING: return a slot, or None if all slots are in use."""
        if not self._free:
            return None
        _ = self.memory
        slot = self._free.pop()
        self._transition(slot, "acquire")
        self._peak_used = max(self._peak_used, self.slots - len(self._free))
        return slot

    @contextmanager
    def fill_slot(self, name: str, size_bytes: int) -> Iterator[int]:
        """Acquire a slot for the block that fills it: READY after the block, or FREE if the block raises.

        Args:
            name: name of the object, for messages.
            size_bytes: size of the object.

        Raises:
            MemoryBudgetError: the object is larger than a slot.
            RingStateError: no slot is free.
        """
        if size_bytes > self.slot_bytes:
            raise MemoryBudgetError(f"{name} has {size_bytes} bytes: more than a slot of the ring ({self.slot_bytes})")
        slot = self.acquire()
        if slot is None:
            raise RingStateError(f"no free slot for {name}: {self!r}")
        try:
            yield slot
        except BaseException:
            self.abort(slot)
            raise
        self.commit(slot)

    def commit(self, slot: int) -> None:
        """FILLING to READY: the bytes are complete and verified, and no transport writes to the slot any more."""
        self._transition(slot, "commit")
        self._ready += 1
        self._committed += 1

    def abort(self, slot: int) -> None:
        """FILLING to FREE: return the slot unfilled. Its transport must have ended."""
        self._transition(slot, "abort")
        self._free.append(slot)

    def release(self, slot: int) -> None:
        """READY to FREE: the consumer does not need the bytes any more."""
        self._transition(slot, "release")
        self._free.append(slot)
        self._ready -= 1

    def offset(self, slot: int) -> int:
        """Return the offset of a slot in :attr:`memory`, in bytes; a multiple of 64."""
        if not 0 <= slot < self.slots:
            raise RingStateError(f"slot {slot} is not in this ring of {self.slots}")
        return slot * self._stride_bytes

    def view(self, slot: int, length_bytes: int) -> memoryview:
        """Return the first ``length_bytes`` bytes of a slot that is not free, writable, without a copy."""
        start = self.offset(slot)
        if self._states[slot] is SlotState.FREE:
            raise RingStateError(f"slot {slot} is free: its bytes may be overwritten at any time")
        if not 0 <= length_bytes <= self.slot_bytes:
            raise RingStateError(f"{length_bytes} bytes do not fit in slots of {self.slot_bytes}")
        return self.memory[start : start + length_bytes]

    def statistics(self) -> RingStatistics:
        """Return a snapshot."""
        return RingStatistics(
            free=len(self._free),
            filling=self.slots - len(self._free) - self._ready,
            ready=self._ready,
            peak_used=self._peak_used,
            committed=self._committed,
        )

    def _transition(self, slot: int, action: str) -> None:
        self.offset(slot)
        state = self._states[slot]
        following = _TRANSITIONS.get((state, action))
        if following is None:
            raise RingStateError(f"slot {slot} is {state.value}: cannot {action}")
        self._states[slot] = following

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Ring {self.slots} x {self.slot_bytes} bytes: {now.free} free, {now.filling} filling, {now.ready} ready>"
        )


_MADV_POPULATE_WRITE = 23  # Python's mmap module has no name for it, and holds the GIL during the call
_CHUNK_BYTES = 4 << 20  # takes some milliseconds


class PagePrefaulter:
    """Prefaults all pages of a buffer once, in chunks. After a cancellation, :meth:`run` resumes.

    Args:
        memory: writable buffer that starts at a page.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._done_bytes = 0

    async def run(self) -> None:
        """Prefault the rest, in threads of the loop's executor. A cancelled call leaves one chunk to end by itself."""
        loop = asyncio.get_running_loop()
        while self._done_bytes < self._memory.nbytes:
            piece = self._memory[self._done_bytes : self._done_bytes + _CHUNK_BYTES]
            if not await loop.run_in_executor(None, prefault, piece):
                self._done_bytes = self._memory.nbytes
                return
            self._done_bytes += piece.nbytes


def prefault(memory: memoryview) -> bool:
    """Prefault the pages of writable memory without changing its contents; return whether the system supports it."""
    if sys.platform != "linux":
        return False
    address = ctypes.c_void_p(address_of(memory))
    size_bytes = ctypes.c_size_t(memory.nbytes)
    result: int = ctypes.CDLL(None).madvise(address, size_bytes, _MADV_POPULATE_WRITE)
    return result == 0


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
