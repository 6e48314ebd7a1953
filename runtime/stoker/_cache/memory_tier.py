"""Super-samples that are kept in memory between epochs, above the ring."""

from __future__ import annotations

import asyncio
import mmap
import os

from stoker._base.sizes import format_bytes
from stoker._cache.future import Future
from stoker._cache.keeper import CacheStatistics, Keeper
from stoker._cache.naming import name_of
from stoker._format.manifest import Manifest
from stoker._memory.ring import ALIGNMENT_BYTES, Ring, populate
from stoker.abc import ObjectRef
from stoker.errors import BudgetError

__all__ = ["MemoryTier"]


class MemoryTier:
    """A :class:`~stoker._cache.keeper.KeepingTier` in fixed slots of anonymous memory, of one process.

    One copy in and one out, both on the event loop: that of 8 MiB takes less than a millisecond, and handing it to a
    thread would cost slots that are neither free nor in use.

    Args:
        limit_bytes: of all slots; their memory is taken as they are filled.
        policy: name of the eviction policy, one of :func:`~stoker._cache.eviction.policy_names`.
        largest_bytes: of the super-samples; what is larger is not kept.

    Raises:
        BudgetError: not one super-sample fits.
        ConfigError: there is no such policy.
    """

    name = "memory"
    is_shared = False

    def __init__(self, limit_bytes: int, policy: str, *, largest_bytes: int) -> None:
        slot_bytes = -(-largest_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if limit_bytes < slot_bytes:
            raise BudgetError(
                f"a cache in memory of {format_bytes(limit_bytes)} a process holds no super-sample, of which the "
                f"largest has {format_bytes(slot_bytes)}: raise its limit, or leave it out"
            )
        self._ring = Ring(limit_bytes // slot_bytes, slot_bytes)
        self._keeper = Keeper(policy, self._ring.slots * slot_bytes, slot_bytes)
        self._slots: dict[str, int] = {}
        self._touched = 0
        self._pid = os.getpid()

    async def follow(self, manifest: Manifest, future: Future) -> None:
        """Keep what a stretch of the order needs; a forked child begins with nothing."""
        if self._pid != os.getpid():
            self._forget()
            self._pid = os.getpid()
        self._keeper.follow(manifest, future)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Copy an object, if it is here."""
        name = name_of(ref)
        if not self._keeper.look_up(name):
            return False
        into[:] = self._ring.view(self._slots[name], ref.size_bytes)
        self._keeper.hits += 1
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Copy an object into a slot, if that is worth it."""
        if ref.size_bytes > self._ring.slot_bytes:
            self._keeper.declined += 1
            return
        evicted = self._keeper.offer(ref)
        if evicted is None:
            return
        for name in evicted:
            self._ring.release(self._slots.pop(name))
        slot = self._ring.acquire()
        self._touch_next()
        assert slot is not None  # noqa: S101 - the keeper counts in slots
        self._ring.view(slot, ref.size_bytes)[:] = data
        self._ring.commit(slot)
        self._slots[name_of(ref)] = slot

    def _touch_next(self) -> None:
        """Have the pages of one more slot taken in a thread, so that the copy into it does not wait for them.

        Fresh slots are filled in their order.
        """
        self._touched += 1
        if self._touched < self._ring.slots:
            start = -(-self._ring.offset(self._touched) // mmap.PAGESIZE) * mmap.PAGESIZE
            if piece := self._ring.memory[start : start + self._ring.slot_bytes]:  # none is left of a small last slot
                asyncio.get_running_loop().run_in_executor(None, populate, piece)

    async def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._forget()

    def statistics(self) -> CacheStatistics:
        """Return a snapshot."""
        return self._keeper.statistics()

    def _forget(self) -> None:
        self._keeper.clear()
        self._slots.clear()
        self._touched = 0
        self._ring = Ring(self._ring.slots, self._ring.slot_bytes)
