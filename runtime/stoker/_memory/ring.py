"""The ring buffer of a process: equal slots in one anonymous mapping. An object takes one or more of them.

The slots of an object are adjacent and have one life cycle; the number that :meth:`Ring.acquire` returns identifies
them. Invariant: every slot is in exactly one state, and ``free + filling + ready == slots``. Slots change state only
according to the transition table below; anything else, such as a double release, is a :class:`RingStateError`.

Free slots may be too scattered for a large object, although there are enough of them. Then :meth:`Ring.compact` moves
the READY objects together. So any objects fit together whose slots are at most those of the ring.

The ring never waits: its users decide when to acquire slots. It is not thread-safe: one thread changes states; other
threads may read memory through :meth:`Ring.view` and :meth:`Ring.offset` while they hold a READY object, except during
a compaction.

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
from contextlib import contextmanager, suppress
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
    """Map ``size_bytes`` of zeroed memory of this process; pages are allocated at the first write.

    It is outside /dev/shm, which containers limit to 64 MB. On Linux the mapping is private, since its pages are
    allocated in half the time of shared ones; a forked child sees zeros in it, so that the parent's writes after the
    fork copy no page.
    """
    if sys.platform != "linux":
        return memoryview(mmap.mmap(-1, size_bytes))
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # before Linux 4.14
        memory.madvise(_MADV_WIPEONFORK)
    return memoryview(memory)


class Ring:
    """A buffer of equal slots, whose memory is allocated at the first acquire and then reused.

    Slots that were freed last are acquired first, because their pages are allocated (a new page costs about 8 copies).
    An object that takes another number of slots than those has the lowest ones that are free and adjacent.

    Args:
        slots: number of slots.
        slot_bytes: size of a slot.
        allocate: function that returns zeroed memory of a given size; default :func:`anonymous_memory`.

    Attributes:
        reserved: number of adjacent free slots that are reserved for callers other than hedges; see :meth:`can_spare`.
        on_free: function that is called after slots have become free.
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
        self._numbers = list(range(slots - 1, -1, -1))  # of no object
        self._states = [SlotState.FREE] * slots  # by number, like the next two
        self._starts = list(range(slots))
        self._counts = [1] * slots
        self._holes: dict[int, list[int]] = {slots: [0]}  # number of adjacent free slots → first slot of each such run
        self.free = slots
        """Number of free slots."""
        self.reserved = 0
        self.on_free: Callable[[], object] = lambda: None
        self._ready = 0
        self._peak_used = 0
        self._committed = 0

    @property
    def memory(self) -> memoryview:
        """The memory of all slots."""
        if self._memory is None:
            self._memory = self._allocate(self.slots * self._stride_bytes)
        return self._memory

    def count_slots(self, size_bytes: int) -> int:
        """Return the number of slots that an object takes."""
        return 1 + max(0, -(-(size_bytes - self.slot_bytes) // self._stride_bytes))

    def has_run(self, count: int) -> bool:
        """Return whether ``count`` adjacent slots are free."""
        if self._holes.get(count):
            return True
        return count <= self.free and any(length >= count for _, length in self._merge_holes())

    def can_spare(self, size_bytes: int) -> bool:
        """Return whether a hedge of ``size_bytes`` may acquire slots: it fits, and so do the reserved slots then."""
        count = self.count_slots(size_bytes)
        if count + self.reserved > self.free:
            return False
        start = self._take_run(count)
        if start is None:
            return False
        leaves_reserved = not self.reserved or self.has_run(self.reserved)
        self._holes.setdefault(count, []).append(start)
        return leaves_reserved

    def acquire(self, size_bytes: int = 0) -> int | None:
        """FREE to FILLING: return the number of an object of ``size_bytes``; None if too few adjacent slots are free.

        The default is one slot.
        """
        _ = self.memory
        count = self.count_slots(size_bytes)
        start = self._take_run(count)
        if start is None:
            return None
        slot = self._numbers.pop()
        self._transition(slot, "acquire")
        self._starts[slot], self._counts[slot] = start, count
        self.free -= count
        self._peak_used = max(self._peak_used, self.slots - self.free)
        return slot

    @contextmanager
    def fill_slot(self, name: str, size_bytes: int) -> Iterator[int]:
        """Acquire slots for the block that fills them: READY after the block, or FREE if the block raises.

        Args:
            name: name of the object, for messages.
            size_bytes: size of the object.

        Raises:
            MemoryBudgetError: the object is larger than the ring.
            RingStateError: too few adjacent slots are free.
        """
        if self.count_slots(size_bytes) > self.slots:
            raise MemoryBudgetError(
                f"{name} has {size_bytes} bytes: more than the ring of {self.slots} slots of {self.slot_bytes} bytes"
            )
        slot = self.acquire(size_bytes)
        if slot is None:
            raise RingStateError(f"no free slot for {name}: {self!r}")
        try:
            yield slot
        except BaseException:
            self.abort(slot)
            raise
        self.commit(slot)

    def demand(self, item: int) -> None:
        """Record that the consumer waits for an item, by number; a ring of fixed slots needs not know."""

    def commit(self, slot: int) -> None:
        """FILLING to READY: the bytes are complete and verified, and no transport writes to them any more."""
        self._transition(slot, "commit")
        self._ready += self._counts[slot]
        self._committed += 1

    def abort(self, slot: int) -> None:
        """FILLING to FREE: return the slots unfilled. Their transport must have ended."""
        self._transition(slot, "abort")
        self._put_back(slot)

    def release(self, slot: int) -> None:
        """READY to FREE: the consumer does not need the bytes any more."""
        self._transition(slot, "release")
        self._ready -= self._counts[slot]
        self._put_back(slot)

    def compact(self) -> None:
        """Move the READY objects towards the start, so that the free slots behind them are adjacent.

        The offsets of READY objects change. So no thread may read them meanwhile, nor use an offset from before.
        Objects that are being filled stay where they are.
        """
        used = [slot for slot, state in enumerate(self._states) if state is not SlotState.FREE]
        self._holes, end = {}, 0
        for slot in sorted(used, key=self._starts.__getitem__):
            start, count = self._starts[slot], self._counts[slot]
            if self._states[slot] is SlotState.READY:
                self._move(slot, end)
            elif start > end:
                self._holes.setdefault(start - end, []).append(end)
            end = self._starts[slot] + count
        if end < self.slots:
            self._holes.setdefault(self.slots - end, []).append(end)

    def offset(self, slot: int) -> int:
        """Return the offset of an object in :attr:`memory`, in bytes; a multiple of 64."""
        self._check_number(slot)
        return self._starts[slot] * self._stride_bytes

    def view(self, slot: int, length_bytes: int) -> memoryview:
        """Return the first ``length_bytes`` bytes of an object's slots, writable, without a copy."""
        start = self.offset(slot)
        if self._states[slot] is SlotState.FREE:
            raise RingStateError(f"slot {slot} is free: its bytes may be overwritten at any time")
        size_bytes = (self._counts[slot] - 1) * self._stride_bytes + self.slot_bytes
        if not 0 <= length_bytes <= size_bytes:
            raise RingStateError(f"{length_bytes} bytes do not fit in slots of {size_bytes}")
        return self.memory[start : start + length_bytes]

    def statistics(self) -> RingStatistics:
        """Return a snapshot."""
        return RingStatistics(
            free=self.free,
            filling=self.slots - self.free - self._ready,
            ready=self._ready,
            peak_used=self._peak_used,
            committed=self._committed,
        )

    def _take_run(self, count: int) -> int | None:
        """Take adjacent slots from the free ones, and return the first; None if there are not enough."""
        if self._holes.get(count):
            return self._holes[count].pop()
        if count > self.free:
            return None
        for start, length in self._merge_holes():
            if length >= count:
                self._holes[length].remove(start)
                if length > count:
                    self._holes.setdefault(length - count, []).append(start + count)
                return start
        return None

    def _merge_holes(self) -> list[tuple[int, int]]:
        """Merge adjacent runs of free slots; return the first slot and the number of slots of each, in order."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted((start, length) for length, starts in self._holes.items() for start in starts):
            if merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((start, length))
        self._holes = {}
        for start, length in reversed(merged):
            self._holes.setdefault(length, []).append(start)
        return merged

    def _put_back(self, slot: int) -> None:
        count = self._counts[slot]
        self._holes.setdefault(count, []).append(self._starts[slot])
        self._numbers.append(slot)
        self.free += count
        self.on_free()

    def _move(self, slot: int, start: int) -> None:
        if start != self._starts[slot]:
            size_bytes = self._counts[slot] * self._stride_bytes
            old, new = self._starts[slot] * self._stride_bytes, start * self._stride_bytes
            self.memory[new : new + size_bytes] = self.memory[old : old + size_bytes]  # may overlap
            self._starts[slot] = start

    def _check_number(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise RingStateError(f"slot {slot} is not in this ring of {self.slots}")

    def _transition(self, slot: int, action: str) -> None:
        self._check_number(slot)
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


_MADV_WIPEONFORK = 18
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
