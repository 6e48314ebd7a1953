from __future__ import annotations

import numpy as np
import pytest

from stoker._memory.ring import Ring, RingStateError
from stoker.errors import ConfigError, MemoryBudgetError


def test_a_double_release_names_the_slot_and_its_state() -> None:
    ring = Ring(2, 8)
    slot = ring.acquire()
    assert slot is not None
    ring.commit(slot)
    ring.release(slot)
    with pytest.raises(RingStateError, match=rf"slot {slot} is free: cannot release"):
        ring.release(slot)
    assert ring.statistics().free == 2


def test_a_slot_that_a_transport_fills_cannot_be_released() -> None:
    ring = Ring(1, 8)
    slot = ring.acquire()
    assert slot is not None
    with pytest.raises(RingStateError, match="slot 0 is filling: cannot release"):
        ring.release(slot)


def test_memory_is_allocated_once_at_the_first_acquire() -> None:
    sizes: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        sizes.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    ring = Ring(3, 100, allocate=allocate)
    assert sizes == []
    slot = ring.acquire()
    assert slot is not None
    ring.abort(slot)
    ring.acquire()
    assert sizes == [3 * 128]


def test_an_allocation_that_fails_leaves_every_slot_free() -> None:
    def refuse(size_bytes: int) -> memoryview:
        raise MemoryError(size_bytes)

    ring = Ring(3, 100, allocate=refuse)
    with pytest.raises(MemoryError):
        ring.acquire()
    assert ring.statistics().free == 3


def test_slots_are_aligned_disjoint_and_where_offset_says() -> None:
    ring = Ring(4, 100)
    slots = [slot for _ in range(4) if (slot := ring.acquire()) is not None]
    assert ring.acquire() is None
    for slot in slots:
        ring.view(slot, 100)[:] = bytes([slot]) * 100
    for slot in slots:
        assert ring.offset(slot) % 64 == 0
        assert bytes(ring.memory[ring.offset(slot) :][:100]) == bytes([slot]) * 100


@pytest.mark.parametrize("filled", [True, False])
def test_the_slot_freed_last_is_reused_first(filled: bool) -> None:
    ring = Ring(8, 8)
    first = ring.acquire()
    assert first is not None
    if filled:
        ring.commit(first)
        ring.release(first)
    else:
        ring.abort(first)
    assert ring.acquire() == first


def test_a_view_longer_than_a_slot_is_refused() -> None:
    ring = Ring(2, 100)
    slot = ring.acquire()
    assert slot is not None
    with pytest.raises(RingStateError, match="101 bytes do not fit in slots of 100"):
        ring.view(slot, 101)


def test_views_keep_the_memory_alive_after_the_ring_is_gone() -> None:
    ring = Ring(1, 64)
    slot = ring.acquire()
    assert slot is not None
    array = np.frombuffer(ring.view(slot, 64), np.uint8)
    array[:] = 7
    del ring
    assert array.sum() == 7 * 64


def test_an_object_takes_as_many_adjacent_slots_as_it_needs() -> None:
    ring = Ring(8, 64)
    assert [ring.count_slots(size_bytes) for size_bytes in (0, 1, 64, 65, 128, 512, 513)] == [1, 1, 1, 2, 2, 8, 9]
    small, large = ring.acquire(64), ring.acquire(300)
    assert small is not None
    assert large is not None
    ring.view(large, 300)[:] = bytes(range(1, 101)) * 3
    assert (ring.offset(small), ring.offset(large), ring.free) == (0, 64, 2)
    assert bytes(ring.memory[64:364]) == bytes(range(1, 101)) * 3
    ring.commit(large)
    assert repr(ring) == "<Ring 8 x 64 bytes: 2 free, 1 filling, 5 ready>"


def test_an_object_larger_than_the_ring_is_refused_and_one_that_finds_no_room_is_a_bug() -> None:
    ring = Ring(2, 64)
    with (
        pytest.raises(MemoryBudgetError, match="x has 129 bytes: more than the ring of 2 slots of 64 bytes"),
        ring.fill_slot("x", 129),
    ):
        pass
    ring.acquire()
    with pytest.raises(RingStateError, match="no free slot for y"), ring.fill_slot("y", 128):
        pass


def test_compaction_moves_ready_objects_past_no_object_that_is_being_filled() -> None:
    ring = Ring(6, 64)
    slots = [slot for _ in range(6) if (slot := ring.acquire()) is not None]
    for slot in (0, 1, 3, 4, 5):
        ring.view(slots[slot], 64)[:] = bytes([slot]) * 64
        ring.commit(slots[slot])
    for slot in (0, 3, 5):
        ring.release(slots[slot])
    assert not ring.has_run(2)
    ring.compact()
    assert [ring.offset(slots[slot]) // 64 for slot in (1, 2, 4)] == [0, 2, 3], "slot 2 is being filled"
    assert [bytes(ring.view(slots[slot], 64)) for slot in (1, 4)] == [bytes([1]) * 64, bytes([4]) * 64]
    assert ring.has_run(2)
    assert not ring.has_run(3)


def test_objects_of_another_size_take_the_lowest_slots_whose_pages_are_touched_most_likely() -> None:
    ring = Ring(100, 64)
    slots = [slot for _ in range(4) if (slot := ring.acquire(128)) is not None]
    for slot in slots[:3]:
        ring.abort(slot)
    larger = ring.acquire(300)
    assert larger is not None
    assert ring.offset(larger) == 0


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 8), (8, 0), (-1, 8)])
def test_an_empty_ring_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        Ring(slots, slot_bytes)
