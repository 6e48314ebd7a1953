"""The ring of units: regions in the order of the items, without overlaps, gaps or deadlocks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._memory.unit_ring import UnitRing
from stoker.errors import MemoryBudgetError
from stoker.testing import run_virtual

T = TypeVar("T")


def started(ring: UnitRing, unit: int) -> int:
    slot = ring.acquire()
    assert slot is not None
    ring.begin(slot, unit)
    return slot


async def is_waiting(placing: asyncio.Task[memoryview]) -> bool:
    await asyncio.sleep(0)
    return not placing.done()


async def soon(placing: Awaitable[T]) -> T:
    return await asyncio.wait_for(placing, 1)


def test_regions_are_given_in_the_order_in_which_items_began_whichever_knows_its_size_first() -> None:
    async def main() -> None:
        ring = UnitRing(4, 100, 1)
        first, second = started(ring, 7), started(ring, 8)
        later = asyncio.create_task(ring.place(second, 30))
        assert await is_waiting(later)
        assert len(await soon(ring.place(first, 50))) == 50
        assert len(await soon(later)) == 30
        assert (ring.offset_of(first), ring.offset_of(second)) == (0, 50)

    run_virtual(main())


def test_an_item_waits_for_room_and_gets_the_released_region() -> None:
    async def main() -> None:
        ring = UnitRing(4, 100, 1)
        slots = [started(ring, unit) for unit in range(3)]
        for slot in slots[:2]:
            await soon(ring.place(slot, 50))
            ring.commit(slot)
        third = asyncio.create_task(ring.place(slots[2], 40))
        assert await is_waiting(third)
        ring.release(slots[0])
        await soon(third)
        assert ring.offset_of(slots[2]) == 0

    run_virtual(main())


def test_an_item_that_failed_keeps_its_region_for_its_next_fetch() -> None:
    async def main() -> None:
        ring = UnitRing(4, 100, 1)
        first = started(ring, 7)
        await soon(ring.place(first, 60))
        ring.abort(first)
        second = started(ring, 8)
        await soon(ring.place(second, 40))
        again = started(ring, 7)
        await soon(ring.place(again, 60))
        assert (ring.offset_of(again), ring.offset_of(second)) == (0, 60)

    run_virtual(main())


def test_an_item_that_failed_before_it_had_a_region_keeps_its_turn() -> None:
    async def main() -> None:
        ring = UnitRing(4, 100, 1)
        first, second = started(ring, 7), started(ring, 8)
        later = asyncio.create_task(ring.place(second, 40))
        ring.abort(first)
        assert await is_waiting(later)
        await soon(ring.place(started(ring, 7), 10))
        await soon(later)

    run_virtual(main())


def test_a_cancelled_item_leaves_its_turn_to_its_next_fetch() -> None:
    async def main() -> None:
        ring = UnitRing(4, 100, 1)
        first, second = started(ring, 7), started(ring, 8)
        later = asyncio.create_task(ring.place(second, 40))
        assert await is_waiting(later)
        later.cancel()
        await soon(ring.place(first, 10))
        with pytest.raises(asyncio.CancelledError):
            await later
        ring.abort(second)
        await soon(ring.place(started(ring, 8), 40))

    run_virtual(main())


def test_if_the_consumer_waits_for_an_item_without_room_the_error_names_what_is_missing() -> None:
    async def main() -> None:
        ring = UnitRing(4, 1000, 1)
        first, second = started(ring, 7), started(ring, 8)
        await soon(ring.place(first, 800))
        later = asyncio.create_task(ring.place(second, 300))
        ring.demand(0)
        assert await is_waiting(later)
        ring.demand(1)
        with pytest.raises(MemoryBudgetError, match="give at least 300 B more memory, with which a state can resume"):
            await soon(later)

    run_virtual(main())


def test_after_a_restart_all_memory_is_free() -> None:
    async def main() -> None:
        ring = UnitRing(2, 100, 1)
        slot = started(ring, 7)
        await soon(ring.place(slot, 100))
        ring.commit(slot)
        ring.release(slot)
        failed = started(ring, 8)
        await soon(ring.place(failed, 100))
        ring.abort(failed)
        ring.restart()
        await soon(ring.place(started(ring, 9), 100))

    run_virtual(main())


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 64), st.data())
def test_regions_never_overlap_and_the_freed_ones_are_joined(
    sizes: list[int], granule: int, data: st.DataObject
) -> None:
    async def main() -> None:
        ring = UnitRing(len(sizes), 2000, granule)
        held: deque[tuple[int, int]] = deque()
        for unit, size in enumerate(sizes):
            slot = started(ring, unit)
            placing = asyncio.create_task(ring.place(slot, size))
            while await is_waiting(placing):
                which = data.draw(st.integers(0, len(held) - 1))
                released, _ = held[which]
                del held[which]
                ring.release(released)
            ring.commit(slot)
            held.append((slot, size))
            spans = sorted((ring.offset_of(each), ring.offset_of(each) + length) for each, length in held)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert spans[-1][1] <= 2000
        for slot, _ in held:
            ring.release(slot)
        assert ring._free_regions == [(0, 2000)]

    run_virtual(main())
