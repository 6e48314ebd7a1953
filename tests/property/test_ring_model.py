"""The ring against a model that is too simple to be wrong: three sets of slots and the bytes written to them."""

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

    @rule()
    def acquire(self) -> None:
        slot = self.ring.acquire()
        used = len(self.filling) + len(self.ready)
        if slot is None:
            assert used == self.ring.slots
            return
        assert slot not in self.filling
        assert slot not in self.ready
        self.written += 1
        content = self.written.to_bytes(4, "big")[-1:] * self.ring.slot_bytes
        self.ring.view(slot, self.ring.slot_bytes)[:] = content
        self.filling[slot] = content
        self.peak = max(self.peak, used + 1)

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
        assert (now.filling, now.ready) == (len(self.filling), len(self.ready))
        assert now.free + now.filling + now.ready == self.ring.slots
        assert now.free == self.ring.free
        assert now.peak_used == self.peak
        for slot, content in (self.filling | self.ready).items():
            assert bytes(self.ring.view(slot, self.ring.slot_bytes)) == content


TestRingAgainstModel = RingMachine.TestCase
TestRingAgainstModel.settings = settings(max_examples=100, stateful_step_count=40)
