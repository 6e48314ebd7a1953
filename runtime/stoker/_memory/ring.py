"""The in-process buffer: fixed slots in one anonymous shared mapping, each with a life cycle.

Invariant: every slot is in exactly one state, and ``free + filling + ready == slots``. A slot changes state only
along the transition table below; anything else, a double release above all, is a :class:`RingStateError`.

The ring decides and never waits: who may acquire, and when, is the business of its users. It is not thread-safe:
one thread changes states; others may read memory through :meth:`Ring.view` and :meth:`Ring.offset` while they hold
a READY slot.

:class:`FirstTouch` takes pages of fresh memory before they are written to, beside the thread that will write there. The
first write to a page of an anonymous mapping makes the kernel find and clear one, and in a virtual machine often the
hypervisor, too, which takes up to ten times as long as the copy. Within a receive that holds up the event loop. Linux
takes pages on request and changes nothing in those that are there (madvise, MADV_POPULATE_WRITE, since 5.14), so that
may run beside the writer. Where there is no such request, pages are taken at their first write as ever.
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

from stoker.errors import BudgetError, ConfigError, StokerError

ALIGNMENT_BYTES = 64
"""Slots start on cache lines, so columns of every dtype are aligned views."""


class RingStateError(StokerError, RuntimeError):
    """A slot was asked for a transition that its state does not have. A bug in the caller, never bad luck."""


class SlotState(enum.Enum):
    """Where a slot stands in its life."""

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
    """A moment of a ring.

    Attributes:
        free: slots that nobody holds.
        filling: slots that a transport may be writing to.
        ready: slots with verified bytes that a consumer has yet to release.
        peak_used: the most slots that were not free at once, ever.
        committed: how often a slot became ready.
    """

    free: int
    filling: int
    ready: int
    peak_used: int
    committed: int


def anonymous_memory(size_bytes: int) -> memoryview:
    """Map ``size_bytes`` of zeroed memory, shared with children of a fork and in no file system.

    Not /dev/shm, which containers keep at 64 MB; and pages are taken only when first written.
    """
    return memoryview(mmap.mmap(-1, size_bytes))


class Ring:
    """``slots`` slots of ``slot_bytes`` bytes each; the memory is allocated at the first acquire and then reused.

    The slot freed last is acquired first: its pages are in memory already (fresh pages cost about 8 times a copy).

    Attributes:
        promised: free slots that are not :attr:`spare`, until whoever they are for has acquired them.
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
        self.promised = 0
        self._ready = 0
        self._peak_used = 0
        self._committed = 0

    @property
    def memory(self) -> memoryview:
        """All slots, :meth:`offset` apart."""
        if self._memory is None:
            self._memory = self._allocate(self.slots * self._stride_bytes)
        return self._memory

    @property
    def free(self) -> int:
        """How many slots can be acquired now."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """How many of these nobody was promised: what hedges may take."""
        return max(0, len(self._free) - self.promised)

    def acquire(self) -> int | None:
        """FREE to FILLING: return a slot, or None when every slot is in use."""
        if not self._free:
            return None
        _ = self.memory
        slot = self._free.pop()
        self._step(slot, "acquire")
        self._peak_used = max(self._peak_used, self.slots - len(self._free))
        return slot

    @contextmanager
    def filling(self, what: str, size_bytes: int) -> Iterator[int]:
        """Hold a slot while it is filled: READY behind the block, FREE again if the block raises.

        Raises:
            BudgetError: a slot is smaller.
            RingStateError: no slot is free.
        """
        if size_bytes > self.slot_bytes:
            raise BudgetError(f"{what} has {size_bytes} bytes: more than the ring's {self.slot_bytes}")
        slot = self.acquire()
        if slot is None:
            raise RingStateError(f"no free slot for {what}: {self!r}")
        try:
            yield slot
        except BaseException:
            self.abort(slot)
            raise
        self.commit(slot)

    def commit(self, slot: int) -> None:
        """FILLING to READY: the bytes are whole and verified, and no transport writes here any more."""
        self._step(slot, "commit")
        self._ready += 1
        self._committed += 1

    def abort(self, slot: int) -> None:
        """FILLING to FREE: give the slot back unfilled. Its transport must have ended."""
        self._step(slot, "abort")
        self._free.append(slot)

    def release(self, slot: int) -> None:
        """READY to FREE: the consumer is done with the bytes."""
        self._step(slot, "release")
        self._free.append(slot)
        self._ready -= 1

    def offset(self, slot: int) -> int:
        """Return where the slot starts in :attr:`memory`, in bytes; a multiple of 64."""
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

    def _step(self, slot: int, action: str) -> None:
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
