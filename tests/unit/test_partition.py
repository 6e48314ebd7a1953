"""Who delivers what: positions to steps, ranks and lanes."""

from __future__ import annotations

from itertools import chain, product
from typing import Any

import pytest

from stoker._order.sharding import LaneSlice, RankSharding, RankStep
from stoker.errors import ConfigError
from support.cases import for_each


def ranks_of(world_size: int, **settings: Any) -> list[RankSharding]:
    return [RankSharding(rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def walked(partition: RankSharding, position: int = 0) -> list[RankStep]:
    return [step for step, _ in partition.steps(position)]


def places(step: RankStep) -> list[tuple[int, int]]:
    return [(part.lane, place) for part in step.slices for place in range(part.start, part.end)]


def position_of(lane: int, place: int, lanes: int) -> int:
    return place * lanes + lane


GRID = list(product([1, 2, 3, 7, 24, 25], [1, 2, 3, 5], [1, 2, 4], [1, 3, 8]))
IDS = ["{} samples, {} lanes, {} ranks, batch {}".format(*case) for case in GRID]


@for_each(("samples", "lanes", "world_size", "batch_size"), GRID, ids=IDS)
@for_each("start", [0, 1, 5])
def test_ranks_share_every_position_from_any_start_evenly(
    samples: int, lanes: int, world_size: int, batch_size: int, start: int
) -> None:
    ranks = ranks_of(world_size, samples=samples, lanes=lanes, batch_size=batch_size)
    walks = [walked(rank, start) for rank in ranks]
    assert len({len(walk) for walk in walks}) == 1
    assert [len(walk) for walk in walks] == [rank.count_steps(start) for rank in ranks]
    position = start
    for steps in zip(*walks, strict=True):
        assert len({step.end for step in steps}) == 1
        delivered = [position_of(lane, place, lanes) for step in steps for lane, place in places(step)]
        count = steps[0].end - position
        assert set(delivered) == set(range(position, steps[0].end))
        assert len(delivered) == max(count, world_size) == count + steps[0].repeated
        sizes = [step.samples for step in steps]
        assert max(sizes) - min(sizes) <= 1
        position = steps[0].end
    assert position == max(samples, start)


@for_each(("samples", "lanes", "world_size", "batch_size"), GRID, ids=IDS)
def test_drop_last_gives_full_batches_only(samples: int, lanes: int, world_size: int, batch_size: int) -> None:
    for rank in ranks_of(world_size, samples=samples, lanes=lanes, batch_size=batch_size, drop_last=True):
        steps = walked(rank)
        assert [step.samples for step in steps] == [batch_size] * (samples // (batch_size * world_size))


@for_each(("samples", "lanes", "world_size", "batch_size"), GRID, ids=IDS)
def test_an_evaluation_gives_every_position_once_and_ranks_differ_by_one_step(
    samples: int, lanes: int, world_size: int, batch_size: int
) -> None:
    ranks = ranks_of(world_size, samples=samples, lanes=lanes, batch_size=batch_size, evaluation=True)
    walks = [walked(rank) for rank in ranks]
    delivered = sorted(
        position_of(lane, place, lanes) for step in chain.from_iterable(walks) for lane, place in places(step)
    )
    assert delivered == list(range(samples))
    lengths = [len(walk) for walk in walks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)
    assert lengths == [rank.count_steps() for rank in ranks]
    assert all(step.repeated == 0 for step in chain.from_iterable(walks))


def test_a_rank_keeps_to_lanes_of_its_own_where_the_numbers_allow_it() -> None:
    for rank in ranks_of(2, samples=64, lanes=4, batch_size=8):
        lanes = {part.lane for step in walked(rank) for part in step.slices}
        assert lanes == {2 * rank.rank, 2 * rank.rank + 1}
        assert rank.max_open_lanes() == 2


@for_each(("samples", "lanes", "world_size", "batch_size"), GRID, ids=IDS)
def test_no_full_step_has_more_lanes_in_progress_than_documented(
    samples: int, lanes: int, world_size: int, batch_size: int
) -> None:
    for rank, start in product(ranks_of(world_size, samples=40, lanes=lanes, batch_size=batch_size), range(lanes)):
        full_ends = range(start + rank.global_batch, 41, rank.global_batch)
        steps = [step for step in walked(rank, start) if step.end in full_ends]
        assert len({part.lane for step in steps for part in step.slices}) <= rank.max_open_lanes() <= lanes


def test_a_step_is_grouped_by_lane_in_rising_order() -> None:
    step, _ = next(RankSharding(samples=10, lanes=3, batch_size=7).steps(2))
    assert step == RankStep(9, (LaneSlice(0, 1, 3), LaneSlice(1, 1, 3), LaneSlice(2, 0, 3)))


@pytest.mark.parametrize("position", [10, 11, 10**9])
def test_there_is_no_step_at_or_behind_the_end(position: int) -> None:
    partition = RankSharding(samples=10, batch_size=3)
    assert walked(partition, position) == []
    assert partition.count_steps(position) == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank must be in .*, not 2"),
        ({"batch_size": 1, "rank": -1}, "rank must be in .*, not -1"),
        ({"batch_size": 1, "world_size": 0}, "world_size=0"),
        ({"batch_size": 1, "drop_last": True, "evaluation": True}, "drop_last"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RankSharding(samples=10, **settings)
