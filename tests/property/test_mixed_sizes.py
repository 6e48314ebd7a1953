"""Super-samples of any mixture of sizes: the smallest budget is enough for any order, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Array, Continuous, FetchConfig, OrderConfig, Schema
from stoker._fetch.batch_stream import StepQueue
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._format.manifest import Manifest
from stoker._format.supersample import SuperSampleRecord
from stoker._memory.budget import SlotPlan, plan_slots
from stoker._memory.ring import Ring
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.abc import ObjectRef
from stoker.errors import MemoryBudgetError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.supersamples import RUN

SCHEMA = Schema({"x": Array("uint8", (1,))})


@dataclass(frozen=True)
class Case:
    """A data set with super-samples of these numbers of samples and bytes, and an order of it."""

    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    order: OrderConfig
    batch_size: int
    spare: float
    seed: int

    @property
    def manifest(self) -> Manifest:
        entries = [
            SuperSampleRecord(
                ordinal=ordinal, size_bytes=size_bytes, samples=samples, head_bytes=1, head_crc32c=0, crc32c=0
            )
            for ordinal, (samples, size_bytes) in enumerate(zip(self.samples, self.sizes, strict=True))
        ]
        return Manifest.of("d", SCHEMA, [(RUN, entry) for entry in entries])

    @property
    def sharding(self) -> RankSharding:
        lanes = 1 if self.order.shuffle == "full" else self.order.lanes
        return RankSharding(samples=sum(self.samples), lanes=lanes, batch_size=self.batch_size)

    def plan(self, memory_bytes: int) -> SlotPlan:
        return plan_slots(self.manifest, 0, self.order, self.sharding, memory_bytes, max_request_bytes=5000)

    def least_plan(self) -> SlotPlan:
        with pytest.raises(MemoryBudgetError) as caught:
            self.plan(0)
        figure = re.search(r"give memory=(\d+) ", str(caught.value))
        assert figure is not None
        with pytest.raises(MemoryBudgetError):
            self.plan(int(figure[1]) - 1)
        plan = self.plan(int(int(figure[1]) * (1.0 + self.spare)))
        assert plan.size_bytes <= int(figure[1]) * (1.0 + self.spare)
        return plan


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 16))
    size = st.one_of(st.integers(1, 3000), st.integers(9000, 20_000), st.sampled_from([1000, 1000, 50_000]))
    return Case(
        samples=tuple(draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))),
        sizes=tuple(draw(st.lists(size, min_size=count, max_size=count))),
        order=OrderConfig(
            seed=draw(st.integers(0, 1000)),
            shuffle=draw(st.sampled_from(["none", "block", "window", "full"])),
            window=draw(st.integers(1, 5)),
            lanes=draw(st.integers(1, 4)),
        ),
        batch_size=draw(st.integers(1, 12)),
        spare=draw(st.sampled_from([0.0, 0.0, 0.3, 2.0])),
        seed=draw(st.integers(0, 1000)),
    )


class Training:
    """Steps through epochs of a case like a batch stream, with a ring of the planned size."""

    def __init__(self, case: Case, plan: SlotPlan) -> None:
        rng = random.Random(case.seed)
        objects = {f"{number:03}": rng.randbytes(size) for number, size in enumerate(case.sizes)}
        profile = StoreProfile(tail_sigma=1.0, late_fraction=0.1, probability={"reset": 0.05, "corrupt": 0.02})
        self.store = FaultyStore(objects, profile=profile, seed=case.seed)
        self.refs: list[ObjectRef] = pin(objects)
        self.ring = Ring(plan.slots, plan.slot_bytes)
        self.fetcher = Fetcher(
            self.store, ring=self.ring, rng=rng, config=FetchConfig(split_min_bytes=2000, checksum_attempts=50)
        )
        positions = PositionRange(order=case.order, sharding=case.sharding, end_epoch=2)
        self.steps = StepQueue(SuperSampleSteps(np.array(case.samples), positions))
        self.prefetcher = Prefetcher(self, self.ring, Continuous(), self.steps.next_item, hedge_slots=plan.hedge_slots)

    def count_slots(self, ref: int) -> int:
        return self.fetcher.count_slots(self.refs[ref])

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        return await self.fetcher.fetch(self.refs[ref], urgent=urgent)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.prefetcher.run())
            held: dict[int, int] = {}
            while (step := self.steps.next_step()) is not None:
                held |= dict(step.first_uses)
                self.prefetcher.advance(step.number, 0)
                for segment in step.segments:
                    for item in segment.released_before:
                        self.prefetcher.release(item)
                    slots = [await self.prefetcher.wait(item) for item in segment.items]
                    for item, slot in zip(segment.items, slots, strict=True):
                        self.check(self.refs[held[item]], slot)
                    for item in segment.released_after:
                        self.prefetcher.release(item)
        self.prefetcher.release_all()
        assert self.ring.free == self.ring.slots
        assert self.ring.has_run(self.ring.slots)

    def check(self, ref: ObjectRef, slot: int) -> None:
        assert bytes(self.ring.view(slot, ref.size_bytes)) == self.store.objects[ref.key]


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_item_arrives_whole_with_the_smallest_memory_that_the_plan_allows(case: Case) -> None:
    async def main() -> None:
        async with asyncio.timeout(100_000):
            await Training(case, case.least_plan()).run()

    run_virtual(main())


def test_one_large_super_sample_does_not_make_every_slot_large() -> None:
    case = Case((10,) * 99 + (1,), (8000,) * 99 + (600_000,), OrderConfig(window=8), 10, 0.0, 0)
    plan = case.least_plan()
    assert plan.size_bytes < 600_000 + 10 * 8200
    assert case.plan(2_000_000).slots > 200


def test_nearly_equal_super_samples_take_one_slot_each() -> None:
    case = Case((10,) * 50, tuple(range(7500, 8000, 10)), OrderConfig(window=8), 10, 0.0, 0)
    plan = case.least_plan()
    assert (plan.slot_bytes, plan.slots, plan.item_slots) == (8000, 10, 1.0)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=60), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_consumer_that_holds_any_of_the_items_never_waits_for_ever(
    counts: list[int], window: int, rng: random.Random
) -> None:
    """The consumer holds ``window`` items at most, while it waits too, and releases them in any order."""
    objects = {f"{number:03}": rng.randbytes(64 * count) for number, count in enumerate(counts)}
    refs = pin(objects)

    async def main() -> None:
        ring = Ring(sum(sorted(counts)[-window:]), 64)
        store = FaultyStore(objects, profile=StoreProfile(tail_sigma=1.0, probability={"reset": 0.05}))
        items = iter([Item(index, ref, index) for index, ref in enumerate(refs)])
        fetcher = Fetcher(store, ring=ring, rng=random.Random(0))
        prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=0)
        held: dict[int, int] = {}
        async with asyncio.timeout(100_000), asyncio.TaskGroup() as group:
            group.create_task(prefetcher.run())
            for index in range(len(refs)):
                while len(held) >= rng.randint(1, window):
                    prefetcher.release(released := rng.choice(list(held)))
                    del held[released]
                held[index] = await prefetcher.wait(index)
                for item, slot in held.items():
                    assert bytes(ring.view(slot, refs[item].size_bytes)) == objects[refs[item].key]
        prefetcher.release_all()
        assert ring.has_run(ring.slots)

    run_virtual(main())


def test_items_that_the_consumer_holds_are_moved_together_for_a_larger_one_that_it_waits_for() -> None:
    objects = {str(number): bytes([number]) * 64 * count for number, count in enumerate([1, 1, 1, 1, 2])}
    refs = pin(objects)

    async def main() -> None:
        ring = Ring(4, 64)
        items = iter([Item(index, ref, index) for index, ref in enumerate(refs)])
        fetcher = Fetcher(FaultyStore(objects), ring=ring, rng=random.Random(0))
        prefetcher = Prefetcher(fetcher, ring, Continuous(), lambda: next(items, None), hedge_slots=0)
        async with asyncio.TaskGroup() as group:
            group.create_task(prefetcher.run())
            slots = [await prefetcher.wait(index) for index in range(4)]
            prefetcher.release(0)
            prefetcher.release(2)
            await asyncio.sleep(10)
            assert prefetcher.ready(4) is None, "nothing moves while the consumer may be reading"
            assert [ring.offset(slots[item]) for item in (1, 3)] == [64, 192]
            slots.append(await prefetcher.wait(4))
            assert [ring.offset(slots[item]) for item in (1, 3, 4)] == [0, 64, 128]
            for item in (1, 3, 4):
                assert bytes(ring.view(slots[item], refs[item].size_bytes)) == objects[str(item)]
        prefetcher.release_all()

    run_virtual(main())
