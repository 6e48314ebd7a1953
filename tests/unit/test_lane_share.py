"""Whole lanes for workers: every sample once, ranks equally many, from wherever each lane has come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import OrderConfig
from stoker._order.sharding import LaneInterleaving, LaneSlice, WorkerSharding
from stoker._order.steps import PositionRange, SuperSampleSteps
from stoker.errors import ConfigError


@dataclass(frozen=True)
class Case:
    samples: int
    ranks: int
    workers: int
    lanes: int
    batch_size: int

    def share(self, rank: int, worker: int, **more: Any) -> WorkerSharding:
        return WorkerSharding(
            samples=self.samples,
            lanes=self.lanes,
            batch_size=self.batch_size,
            rank=rank,
            world_size=self.ranks,
            worker=worker,
            workers=self.workers,
            **more,
        )

    def shares(self, **more: Any) -> list[list[WorkerSharding]]:
        """Return the shares of each rank's workers."""
        return [[self.share(rank, worker, **more) for worker in range(self.workers)] for rank in range(self.ranks)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, workers = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    takers = ranks * workers
    return Case(
        samples=draw(st.integers(takers, 90)),
        ranks=ranks,
        workers=workers,
        lanes=takers * draw(st.integers(1, 4)),
        batch_size=draw(st.integers(1, 12)),
    )


def delivered(share: WorkerSharding, position: int = 0) -> list[int]:
    """Return the positions of the epoch that a share delivers, in the order of its steps."""
    return [
        int(place) for step, _ in share.steps(position) for part in step.slices for place in part.positions(share.lanes)
    ]


def once(positions: list[int]) -> list[int]:
    return sorted(set(positions))


@given(cases())
@settings(max_examples=400)
def test_all_workers_of_all_ranks_deliver_every_sample_once_and_each_rank_as_many_batches(case: Case) -> None:
    ranks = case.shares()
    by_worker = [[delivered(share) for share in workers] for workers in ranks]
    every = [place for workers in by_worker for places in workers for place in places]
    assert once(every) == list(range(case.samples))
    assert len(every) - case.samples < case.ranks
    assert len(every) - case.samples == sum(step.repeated for ws in ranks for s in ws for step, _ in s.steps(0))
    lengths = [[len(places) for places in workers] for workers in by_worker]
    assert all(each == lengths[0] for each in lengths)
    assert sum(lengths[0]) == -(-case.samples // case.ranks)
    assert [[share.count_steps() for share in workers] for workers in ranks] == [
        [-(-length // case.batch_size) for length in each] for each in lengths
    ]


@given(cases())
@settings(max_examples=200)
def test_a_worker_has_each_position_of_its_number_modulo_all_takers(case: Case) -> None:
    takers = case.ranks * case.workers
    for rank, worker in product(range(case.ranks), range(case.workers)):
        wanted = list(range(rank + case.ranks * worker, case.samples, takers))
        share = case.share(rank, worker)
        assert once(delivered(share)) == wanted
        assert {place % case.lanes for place in wanted} <= set(share.own_lanes.tolist())
        for step, _ in replace(share, evaluation=True).steps(0):
            assert [part.lane for part in step.slices] == sorted({part.lane for part in step.slices})


@given(cases())
@settings(max_examples=200)
def test_drop_last_drops_what_only_some_ranks_have_and_evaluation_keeps_it(case: Case) -> None:
    chunks = [[delivered(share) for share in workers] for workers in case.shares(drop_last=True, chunks=True)]
    assert len({tuple(map(len, workers)) for workers in chunks}) == 1
    every = [place for workers in chunks for places in workers for place in places]
    assert len(every) == len(set(every)) == case.samples // case.ranks * case.ranks
    for share in (share for workers in case.shares(drop_last=True) for share in workers):
        assert all(step.samples == case.batch_size for step, _ in share.steps(0))
    evaluated = [place for ws in case.shares(evaluation=True) for share in ws for place in delivered(share)]
    assert sorted(evaluated) == list(range(case.samples))


@given(cases(), st.data())
@settings(max_examples=400)
def test_from_any_progress_of_the_lanes_any_crew_delivers_the_rest_once(case: Case, data: st.DataObject) -> None:
    sizes = [len(range(lane, case.samples, case.lanes)) for lane in range(case.lanes)]
    progress = {lane: data.draw(st.integers(0, size)) for lane, size in enumerate(sizes)}
    rest = sorted(place * case.lanes + lane for lane, size in enumerate(sizes) for place in range(progress[lane], size))
    ranks = [[delivered(share) for share in workers] for workers in case.shares(delivered=progress)]
    assert set(rest) <= {place for workers in ranks for places in workers for place in places}
    assert len({tuple(map(len, workers)) for workers in ranks}) == 1
    whole = case.shares(delivered=progress, evaluation=True)
    assert sorted(place for workers in whole for share in workers for place in delivered(share)) == rest


@given(cases(), st.data())
@settings(max_examples=400)
def test_a_worker_continues_exactly_from_what_it_says_of_its_own_lanes(case: Case, data: st.DataObject) -> None:
    rank, worker = data.draw(st.integers(0, case.ranks - 1)), data.draw(st.integers(0, case.workers - 1))
    share = case.share(rank, worker, chunks=True)
    turns = share.delivery_order(0, share.count)
    places = [place for part in share.slices(0, share.count) for place in part.positions(case.lanes).tolist()]
    sequence = [places[turn] for turn in turns]
    assert sequence == sorted(sequence)
    stop = data.draw(st.integers(0, share.count))
    progress, repeated = share.progress(stop)
    later = replace(share, delivered=progress, repeated=repeated, batch_size=data.draw(st.integers(1, 12)))
    assert later.count == share.count - stop
    assert sorted(delivered(later)) == sequence[stop:]
    assert later.from_start().count == share.count


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), min_size=1, max_size=8))
def test_what_is_left_of_lanes_is_taken_farthest_behind_first(lanes: list[list[int]]) -> None:
    starts, ends = (np.array(each) for each in zip(*lanes, strict=True))
    rest = LaneInterleaving(starts, ends)
    left = sorted((place, lane) for lane, (start, end) in enumerate(lanes) for place in range(start, end))
    assert rest.total == len(left)
    reached = starts.copy()
    for count, (_, lane) in enumerate(left):
        assert rest.first_places_after(count).tolist() == reached.tolist()
        reached[lane] += 1
    assert (
        rest.first_places_after(len(left)).tolist() == rest.first_places_after(len(left) + 5).tolist() == ends.tolist()
    )


def test_a_repeated_sample_is_the_workers_last_and_comes_last() -> None:
    share = WorkerSharding(samples=5, lanes=4, batch_size=2, rank=1, world_size=2)
    assert [step.slices for step, _ in share.steps(0)] == [
        (LaneSlice(1, 0, 1), LaneSlice(3, 0, 1)),
        (LaneSlice(3, 0, 1),),
    ]
    assert share.progress(3) == ({1: 1, 3: 1}, 1)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"lanes": 10, "workers": 4}, "lanes=8, or another multiple of 4"),
        ({"lanes": 2, "world_size": 2, "workers": 3}, "lanes=6"),
        ({"lanes": 1, "rank": 1}, "rank must be in .*, not 1"),
        ({"lanes": 1, "drop_last": True, "evaluation": True}, "drop_last"),
        ({"lanes": 8, "world_size": 2, "workers": 4, "samples": 7}, "7 samples are too few"),
    ],
)
def test_what_cannot_be_dealt_evenly_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        WorkerSharding(**{"samples": 50, "batch_size": 4} | wrong)


@given(cases(), st.lists(st.integers(1, 8), min_size=1, max_size=20), st.sampled_from(["none", "block", "window"]))
@settings(max_examples=200, deadline=None)
def test_no_super_sample_is_read_by_two_workers_but_those_that_a_lanes_border_cuts(
    case: Case, sizes: list[int], shuffle: Any
) -> None:
    samples = np.array(sizes + [1] * max(0, case.ranks * case.workers - sum(sizes)))
    case = replace(case, samples=int(samples.sum()))
    order = OrderConfig(shuffle=shuffle, window=2, lanes=case.lanes)
    reads = []
    for share in (share for workers in case.shares(evaluation=True) for share in workers):
        steps = SuperSampleSteps(samples, PositionRange(order=order, sharding=share, end_epoch=1))
        while (step := steps.next()) is not None:
            reads += [super_sample for _, super_sample in step.first_uses]
    assert set(reads) == set(range(len(samples)))
    assert len(reads) <= len(samples) + case.lanes - 1
