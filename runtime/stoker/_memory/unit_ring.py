"""The ring of units: items of any size in one block of memory, which they get in the order in which they began.

An item holds a slot, which has no memory of its own, and a region of the memory, whose size may become known only after
the slot was acquired. A region is assigned after those of all items before it. So the regions belong to the next items
to be used, and if the memory holds all items that the consumer uses at once, there is no deadlock. An item that fails
keeps its region, or its turn, until it is fetched again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections import deque
from collections.abc import Callable

from stoker._base.sizes import format_bytes
from stoker._memory.ring import Ring, anonymous_memory
from stoker.errors import MemoryBudgetError


class UnitRing(Ring):
    """A ring whose slots get regions of one block of memory.

    Args:
        slots: maximum number of items at a time.
        size_bytes: size of the memory.
        granule_bytes: sizes of regions are rounded up to multiples of it; regions of one size leave no gaps.
        allocate: function that returns memory of a size.
    """

    def __init__(
        self,
        slots: int,
        size_bytes: int,
        granule_bytes: int,
        *,
        allocate: Callable[[int], memoryview] = anonymous_memory,
    ) -> None:
        super().__init__(slots, 1, allocate=allocate)
        self._size_bytes, self._granule_bytes = size_bytes, granule_bytes
        self.restart()

    def restart(self) -> None:
        """Forget all items, before a new stream of them. Every slot must be free."""
        self._free_regions = [(0, self._size_bytes)]  # by start; no two are adjacent
        self._regions: dict[int, tuple[int, int]] = {}
        self._items: dict[int, tuple[int, int]] = {}  # slot → unit and turn
        self._failed_turns: dict[int, deque[int]] = {}  # unit → turns of its failed items
        self._waiting: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._begun = self._next_turn = 0
        self._demanded = -1

    @property
    def memory(self) -> memoryview:
        """The memory of all regions."""
        if self._memory is None:
            self._memory = self._allocate(self._size_bytes)
        return self._memory

    def can_spare(self, size_bytes: int) -> bool:
        """Return False: slots have no memory that a hedge could use."""
        return False

    def begin(self, slot: int, unit: int) -> None:
        """Give the item in a slot its turn: the next one, or the one that it had when it failed."""
        failed = self._failed_turns.get(unit)
        if failed:
            self._items[slot] = unit, failed.popleft()
        else:
            self._items[slot] = unit, self._begun
            self._begun += 1

    async def place(self, slot: int, size_bytes: int) -> memoryview:
        """Wait for the turn of a slot and for room, and return its region, of ``size_bytes`` bytes.

        Raises:
            MemoryBudgetError: the consumer waits for the item, and the items that it uses leave no room.
        """
        _, turn = self._items[slot]
        if turn not in self._regions:
            placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[turn] = size_bytes, placed
            try:
                self._assign()
                await placed
            finally:
                self._waiting.pop(turn, None)
        return self.memory[self.offset_of(slot) :][:size_bytes]

    def offset_of(self, slot: int) -> int:
        """Return the offset of a slot's region in :attr:`memory`, in bytes."""
        _, turn = self._items[slot]
        return self._regions[turn][0]

    def demand(self, item: int) -> None:
        """Record that the consumer waits for an item, by number, and releases no other item meanwhile."""
        self._demanded = max(self._demanded, item)
        self._assign()

    def abort(self, slot: int) -> None:
        """FILLING to FREE; the turn and the region of the item are kept for the next item of the same unit."""
        super().abort(slot)
        unit, turn = self._items.pop(slot)
        self._failed_turns.setdefault(unit, deque()).append(turn)

    def release(self, slot: int) -> None:
        """READY to FREE: the consumer does not need the bytes any more."""
        super().release(slot)
        _, turn = self._items.pop(slot)
        self._free_region(*self._regions.pop(turn))
        self._assign()

    def _assign(self) -> None:
        """Assign regions to the items that wait, in turn, while there is room."""
        while (waiting := self._waiting.get(self._next_turn)) is not None:
            size_bytes, placed = waiting
            region = self._take_region(-(-max(1, size_bytes) // self._granule_bytes) * self._granule_bytes)
            if region is None and self._next_turn > self._demanded:
                return
            del self._waiting[self._next_turn]
            if region is not None:
                self._regions[self._next_turn] = region
                self._next_turn += 1
            if placed.done():  # cancelled
                continue
            if region is None:
                placed.set_exception(self._shortage(size_bytes))
            else:
                placed.set_result(None)

    def _shortage(self, size_bytes: int) -> MemoryBudgetError:
        return MemoryBudgetError(
            f"the units to mix at this position of the order do not fit in the {format_bytes(self._size_bytes)} that "
            f"memory= leaves for units, the next one has {format_bytes(size_bytes)}: give at least "
            f"{format_bytes(max(size_bytes, self._size_bytes // 8))} more memory, with which a state can resume"
        )

    def _take_region(self, size_bytes: int) -> tuple[int, int] | None:
        """Take the first free region that is large enough, as start and size; None if there is none."""
        for index, (start, free_bytes) in enumerate(self._free_regions):
            if free_bytes >= size_bytes:
                rest = [(start + size_bytes, free_bytes - size_bytes)] if free_bytes > size_bytes else []
                self._free_regions[index : index + 1] = rest
                return start, size_bytes
        return None

    def _free_region(self, start: int, size_bytes: int) -> None:
        """Insert a free region, and join it with adjacent ones."""
        free = self._free_regions
        index = bisect(free, (start, 0))
        if index < len(free) and free[index][0] == start + size_bytes:
            size_bytes += free.pop(index)[1]
        if index and sum(free[index - 1]) == start:
            index -= 1
            before, before_bytes = free.pop(index)
            start, size_bytes = before, before_bytes + size_bytes
        free.insert(index, (start, size_bytes))
