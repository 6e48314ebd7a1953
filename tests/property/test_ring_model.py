"""The ring against a model that is too simple to be wrong: two sets of objects and the bytes written to them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stoker._memory.ring import Ring, RingStateError


class RingMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 6), slot_bytes=st.integers(1, 200))
    def make(self, slots: int, slot_bytes: int) -> None:
        self.ring = Ring(slots, slot_bytes)
        self.filling: dict[int, bytes] = {}
        self.ready: dict[int, bytes] = {}
        self.peak = 0
        self.written = 0

    @property
    def used(self) -> int:
        return sum(self.ring.count_slots(len(content)) for content in (self.filling | self.ready).values())

    @rule(slots=st.integers(1, 4), less_bytes=st.integers(0, 199))
    def acquire(self, slots: int, less_bytes: int) -> None:
        stride = -(-self.ring.slot_bytes // 64) * 64
        size_bytes = (slots - 1) * stride + self.ring.slot_bytes - less_bytes % self.ring.slot_bytes
        count = self.ring.count_slots(size_bytes)
        has_run, used = self.ring.has_run(count), self.used
        slot = self.ring.acquire(size_bytes)
        assert has_run == (slot is not None)
        if slot is None:
            assert used + count > self.ring.slots or used > 0, "an empty ring has adjacent slots"
            assert count > 1 or used == self.ring.slots, "any free slot is enough for one"
            return
        assert slot not in self.filling
        assert slot not in self.ready
        self.written += 1
        content = self.written.to_bytes(4, "big")[-1:] * size_bytes
        self.ring.view(slot, size_bytes)[:] = content
        self.filling[slot] = content
        self.peak = max(self.peak, used + count)

    @rule()
    def compact(self) -> None:
        before = {slot: self.ring.offset(slot) for slot in self.filling}
        self.ring.compact()
        assert {slot: self.ring.offset(slot) for slot in self.filling} == before, "a transport writes there"
        if not self.filling and self.ring.free:
            assert self.ring.has_run(self.ring.free), "all free slots are adjacent"

    @rule(reserved=st.integers(0, 6), size_bytes=st.integers(1, 400))
    def spare(self, reserved: int, size_bytes: int) -> None:
        if not self.ring.has_run(reserved):
            return
        self.ring.reserved = reserved
        if self.ring.can_spare(size_bytes):
            slot = self.ring.acquire(size_bytes)
            assert slot is not None
            assert not reserved or self.ring.has_run(reserved)
            self.peak = max(self.peak, self.used + self.ring.count_slots(size_bytes))
            self.ring.abort(slot)
        self.ring.reserved = 0

    @precondition(lambda self: self.filling)
    @rule(position=st.integers(0, 5))
    def commit(self, position: int) -> None:
        slot = sorted(self.filling)[position % len(self.filling)]
        self.ring.commit(slot)
        self.ready[slot] = self.filling.pop(slot)

    @precondition(lambda self: self.filling)
    @rule(position=st.integers(0, 5))
    def abort(self, position: int) -> None:
        slot = sorted(self.filling)[position % len(self.filling)]
        self.ring.abort(slot)
        del self.filling[slot]

    @precondition(lambda self: self.ready)
    @rule(position=st.integers(0, 5))
    def release(self, position: int) -> None:
        slot = sorted(self.ready)[position % len(self.ready)]
        self.ring.release(slot)
        del self.ready[slot]

    @rule(slot=st.integers(-2, 8), action=st.sampled_from(["commit", "abort", "release", "view"]))
    def attempt_what_the_state_forbids(self, slot: int, action: str) -> None:
        held = slot in self.filling or slot in self.ready
        allowed = {
            "commit": slot in self.filling,
            "abort": slot in self.filling,
            "release": slot in self.ready,
            "view": held,
        }
        if allowed[action]:
            return
        with pytest.raises(RingStateError, match=f"slot {slot}"):
            self.ring.view(slot, 1) if action == "view" else getattr(self.ring, action)(slot)

    @invariant()
    def counts_and_contents_agree(self) -> None:
        now = self.ring.statistics()
        assert now.ready == self.used - sum(self.ring.count_slots(len(held)) for held in self.filling.values())
        assert now.filling == self.used - now.ready
        assert now.free + now.filling + now.ready == self.ring.slots
        assert now.free == self.ring.free
        assert now.peak_used == self.peak
        for slot, content in (self.filling | self.ready).items():
            assert bytes(self.ring.view(slot, len(content))) == content


TestRingAgainstModel = RingMachine.TestCase
TestRingAgainstModel.settings = settings(max_examples=100, stateful_step_count=40)
