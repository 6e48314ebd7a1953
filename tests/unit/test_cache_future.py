"""When a rank needs each super-sample next, against a walk through its steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stoker import OrderConfig
from stoker._cache.index import NEVER, AccessForecast
from stoker._order.sharding import RankSharding, WorkerSharding
from stoker._order.steps import PositionRange, SuperSampleSteps

SAMPLES = np.array([7, 9, 8, 10, 7, 8, 9, 11, 6, 8, 8, 9, 7, 8, 10, 9, 8, 7, 9, 8])


def uses(positions: PositionRange) -> list[tuple[int, int, int, int]]:
    """Return (epoch, position before the step, position behind it, super-sample) of each first use."""
    steps, found, before = SuperSampleSteps(SAMPLES, positions), [], (positions.epoch, positions.position)
    while (step := steps.next()) is not None:
        begin = before[1] if before[0] == step.epoch else 0
        found += [(step.epoch, begin, step.end, ref) for _, ref in step.first_uses]
        before = (step.epoch, step.end)
    return found


@pytest.mark.parametrize("shuffle", ["window", "block", "none"])
@pytest.mark.parametrize(("world", "lanes", "batch"), [(1, 1, 8), (1, 3, 6), (3, 3, 5), (2, 4, 6)])
def test_next_uses_are_those_of_the_steps(shuffle: str, world: int, lanes: int, batch: int) -> None:
    order = OrderConfig(seed=3, shuffle=shuffle, window=3, lanes=lanes)  # type: ignore[arg-type]
    for rank in range(world):
        partition = RankSharding(
            samples=int(SAMPLES.sum()), lanes=lanes, batch_size=batch, rank=rank, world_size=world, drop_last=True
        )
        positions = PositionRange(order=order, sharding=partition, end_epoch=4)
        future, length = AccessForecast(SAMPLES, positions), int(SAMPLES.sum()) + 1
        seen = uses(positions)
        for epoch, _, end, _ in seen:
            future.advance(epoch, end)
            told = {each: future.next_use(each) for each in range(len(SAMPLES))}
            firsts = dict[tuple[int, int], tuple[int, int, int, int]]()
            for use in seen:  # one that is cut at the border of two lanes is used twice; its first use is told
                firsts.setdefault((use[0], use[3]), use)
            for super_sample, time in told.items():
                behind = (use for use in firsts.values() if use[3] == super_sample and use[:2] >= (epoch, end))
                real = next(behind, None)
                if real is not None and world == 1:  # which reads everything in each epoch
                    assert time == (real[0] + 1) * length, (super_sample, time, real)
                elif real is None:
                    assert (
                        time == NEVER or world == 1 or time % length > length - world * batch
                    )  # in what drop_last leaves out
                else:
                    assert real[0] * length + real[1] < time <= real[0] * length + real[2], (super_sample, time, real)


def test_what_is_never_needed_again_is_never() -> None:
    order = OrderConfig(seed=1, window=2)
    partition = RankSharding(samples=int(SAMPLES.sum()), batch_size=10)
    future = AccessForecast(SAMPLES, PositionRange(order=order, sharding=partition, end_epoch=2))
    assert all(future.next_use(each) < NEVER for each in range(len(SAMPLES)))
    future.advance(1, int(SAMPLES.sum()))
    assert all(future.next_use(each) == NEVER for each in range(len(SAMPLES)))


def test_the_present_never_goes_back() -> None:
    partition = RankSharding(samples=int(SAMPLES.sum()), batch_size=10)
    future = AccessForecast(SAMPLES, PositionRange(order=OrderConfig(), sharding=partition))
    future.advance(2, 5)
    present = future.present
    future.advance(1, 5)
    assert future.present == present


def test_plans_of_epochs_that_have_passed_are_forgotten() -> None:
    partition = RankSharding(samples=int(SAMPLES.sum()), batch_size=10)
    future = AccessForecast(SAMPLES, PositionRange(order=OrderConfig(), sharding=partition), horizon_epochs=2)
    for epoch in range(50):
        future.advance(epoch, 3)
        for each in range(len(SAMPLES)):
            future.next_use(each)
    assert len(future._plans) <= 3


def test_a_worker_knows_the_lanes_that_it_has() -> None:
    order = OrderConfig(seed=2, window=2, lanes=4)
    share = WorkerSharding(samples=int(SAMPLES.sum()), lanes=4, batch_size=4, worker=1, workers=2)
    positions = PositionRange(order=order, sharding=share, end_epoch=3)
    future = AccessForecast(SAMPLES, positions)
    needed = {use[3] for use in uses(positions) if use[0] == 0}
    assert {each for each in range(len(SAMPLES)) if future.next_use(each) <= int(SAMPLES.sum())} == needed


def test_what_was_taken_is_needed_in_the_next_epoch_and_what_its_step_has_yet_to_take_is_needed_now() -> None:
    order = OrderConfig(seed=3, window=6)
    length = int(SAMPLES.sum()) + 1
    positions = PositionRange(order=order, sharding=RankSharding(samples=length - 1, batch_size=8), end_epoch=3)
    future, steps = AccessForecast(SAMPLES, positions), SuperSampleSteps(SAMPLES, positions)
    while (step := steps.next()) is not None:
        refs = [ref for _, ref in step.first_uses]
        for place, ref in enumerate(refs):
            future.record_request(ref, step.epoch, step.end)
            after = [future.next_use(each) for each in refs[: place + 1]]
            assert all(time > (step.epoch + 1) * length for time in after)
            before = [future.next_use(each) for each in refs[place + 1 :]]
            assert all(time == (step.epoch + 1) * length for time in before)


def test_the_present_is_the_end_of_the_last_step_that_was_taken_whole() -> None:
    positions = PositionRange(order=OrderConfig(), sharding=RankSharding(samples=int(SAMPLES.sum()), batch_size=10))
    future = AccessForecast(SAMPLES, positions)
    length = int(SAMPLES.sum()) + 1
    assert future.present == 0
    future.record_request(1, 0, 10)
    future.record_request(2, 0, 10)
    assert future.present == 0
    future.record_request(3, 0, 20)
    assert future.present == 10
    future.record_request(4, 1, 10)
    assert future.present == 20
    future.record_request(5, 1, 20)
    assert future.present == length + 10


def test_the_needs_of_others_that_share_a_cache_count() -> None:
    partition = RankSharding(samples=int(SAMPLES.sum()), lanes=3, batch_size=4, world_size=3)
    other = replace(partition, rank=1)
    positions = PositionRange(order=OrderConfig(seed=1, window=2, lanes=3), sharding=partition, end_epoch=1)
    alone = AccessForecast(SAMPLES, positions)
    theirs = AccessForecast(SAMPLES, PositionRange(order=positions.order, sharding=other, end_epoch=1))
    shared = AccessForecast(SAMPLES, positions, others=[other])
    times = [(alone.next_use(each), theirs.next_use(each), shared.next_use(each)) for each in range(len(SAMPLES))]
    assert all(both == min(mine, others) for mine, others, both in times)
    assert any(mine == NEVER != others for mine, others, _ in times)


def test_for_full_reads_only_the_epoch_of_the_next_use_is_known() -> None:
    partition = RankSharding(samples=int(SAMPLES.sum()), lanes=2, batch_size=4, world_size=2)
    positions = PositionRange(order=OrderConfig(seed=1, window=2, lanes=2), sharding=partition, end_epoch=2)
    together = AccessForecast(SAMPLES, positions, others=[replace(partition, rank=1)])
    length = int(SAMPLES.sum()) + 1
    assert {together.next_use(each) for each in range(len(SAMPLES))} == {length}
    together.advance(0, length - 1)
    assert {together.next_use(each) for each in range(len(SAMPLES))} == {2 * length}
