from __future__ import annotations

import os

import numpy as np
import pytest

from stoker._memory.ring import Ring, RingStateError
from stoker.errors import ConfigError


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


def test_a_child_reads_its_parent_s_writes_through_the_shared_mapping() -> None:
    ring = Ring(1, 8)
    slot = ring.acquire()
    assert slot is not None
    seen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(seen, 1)
        os._exit(0 if bytes(ring.view(slot, 3)) == b"hot" else 1)
    ring.view(slot, 3)[:] = b"hot"
    os.write(tell, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(seen)
    os.close(tell)


def test_views_keep_the_memory_alive_after_the_ring_is_gone() -> None:
    ring = Ring(1, 64)
    slot = ring.acquire()
    assert slot is not None
    array = np.frombuffer(ring.view(slot, 64), np.uint8)
    array[:] = 7
    del ring
    assert array.sum() == 7 * 64


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 8), (8, 0), (-1, 8)])
def test_an_empty_ring_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ConfigError):
        Ring(slots, slot_bytes)
