"""Steps and partition together: whatever the sizes, every sample once, equal steps, items held as long as needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Order, OrderConfig
from stoker._memory.budget import window_items
from stoker._order.order import Shuffle
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker._order.units import Units
from support.units import units_of


@dataclass(frozen=True)
class Case:
    samples: list[int]
    order: OrderConfig
    world_size: int
    batch_size: int
    start: int
    body_bytes: list[int]

    def units(self) -> Units:
        return units_of(self.samples, self.body_bytes, self.order.unit_bytes)

    def partition(self, rank: int, **more: bool) -> RankSharding:
        return RankSharding(
            samples=sum(self.samples),
            lanes=1 if self.order.shuffle == "full" else self.order.lanes,
            batch_size=self.batch_size,
            rank=rank,
            world_size=self.world_size,
            **more,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    samples = draw(st.lists(st.integers(1, 20), min_size=1, max_size=30))
    shuffle: Shuffle = draw(st.sampled_from(["none", "block", "window", "full"]))
    order = OrderConfig(
        seed=draw(st.integers(0, 2**64 - 1)),
        shuffle=shuffle,
        window=draw(st.integers(1, 6)),
        lanes=draw(st.integers(1, 9)),
        unit_bytes=draw(st.none() | st.integers(1, 1000)) if shuffle == "window" else None,
    )
    world_size, batch_size, start = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 15)),
        draw(st.integers(0, sum(samples))),
    )
    bodies = draw(st.lists(st.integers(0, 3000), min_size=len(samples), max_size=len(samples)))
    return Case(samples, order, world_size, batch_size, start, bodies)


def delivered(case: Case, rank: int, epochs: int = 1, **more: bool) -> tuple[list[list[int]], int, int]:
    """Walk one rank's steps like a consumer; return the samples of each step, the repeats and the most items held."""
    units = case.units()
    partition = case.partition(rank, **more)
    order = Order(units, case.order, 0)
    steps = SuperSampleSteps(
        units, PositionRange(order=case.order, sharding=partition, position=case.start, end_epoch=epochs)
    )
    held: dict[int, int] = {}
    seen: set[int] = set()
    batches, repeated, most = [], 0, 0
    while (step := steps.next()) is not None:
        for item, _ in step.first_uses:
            assert item == len(seen), "items are numbered in order of first use"
            seen.add(item)
        announced = dict(step.first_uses)
        batch: list[int] = []
        for segment in step.segments:
            for item in segment.released_before:
                del held[item]
            for item in segment.items:
                if item not in held:
                    held[item] = announced.pop(item)
            most = max(most, len(held))
            which, rows = segment.row_indices()
            assert len(which) == len(rows) > 0
            super_samples = np.array([held[item] for item in segment.items])
            batch += order.sample_ids(super_samples[which], rows).tolist()
            for item in segment.released_after:
                del held[item]
        assert not announced, "every item that is announced is used"
        batches.append(batch)
        repeated += step.repeated
        if step.is_last:
            assert not held, "an epoch's end leaves nothing held"
    return batches, repeated, most


@given(cases())
@settings(max_examples=300, deadline=None)
def test_all_ranks_together_deliver_the_rest_of_the_epoch_once_in_equally_many_steps(case: Case) -> None:
    rest = Order(case.units(), case.order, 0).at(case.start, sum(case.samples)).tolist()
    by_rank = [delivered(case, rank) for rank in range(case.world_size)]
    assert len({len(batches) for batches, _, _ in by_rank}) == 1
    assert len({repeated for _, repeated, _ in by_rank}) == 1
    every = [sample for batches, _, _ in by_rank for batch in batches for sample in batch]
    assert sorted(set(every)) == sorted(rest)
    assert len(every) == len(rest) + by_rank[0][1]


@given(cases())
@settings(max_examples=200, deadline=None)
def test_a_global_batch_is_the_next_positions_of_the_order(case: Case) -> None:
    order = Order(case.units(), case.order, 0)
    by_rank = [delivered(case, rank)[0] for rank in range(case.world_size)]
    position = case.start
    for parts in zip(*by_rank, strict=True):
        end = min(position + case.world_size * case.batch_size, sum(case.samples))
        assert {sample for part in parts for sample in part} == set(order.at(position, end).tolist())
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        position = end


@given(cases())
@settings(max_examples=200, deadline=None)
def test_a_rank_never_holds_more_than_the_budget_counts_on(case: Case) -> None:
    for rank in range(case.world_size):
        *_, most = delivered(case, rank)
        assert most <= window_items(len(case.units()), case.order, case.partition(rank))


@given(cases())
@settings(max_examples=100, deadline=None)
def test_drop_last_and_evaluation_deliver_what_they_say(case: Case) -> None:
    rest = sum(case.samples) - case.start
    whole = rest // (case.world_size * case.batch_size) * case.world_size * case.batch_size
    dropped = [delivered(case, rank, drop_last=True)[0] for rank in range(case.world_size)]
    assert sum(len(batch) for batches in dropped for batch in batches) == whole
    evaluated = [delivered(case, rank, evaluation=True)[0] for rank in range(case.world_size)]
    every = [sample for batches in evaluated for batch in batches for sample in batch]
    assert len(every) == len(set(every)) == rest
    steps = [len(batches) for batches in evaluated]
    assert max(steps) - min(steps) <= 1


@given(cases())
@settings(max_examples=50, deadline=None)
def test_epochs_follow_one_another(case: Case) -> None:
    batches, _, _ = delivered(case, 0, epochs=3)
    partition = case.partition(0)
    assert len(batches) == partition.count_steps(case.start) + 2 * partition.count_steps(0)
