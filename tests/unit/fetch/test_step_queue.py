"""Between plan and takers: items ahead, steps in turn, and word of each item that is taken."""

from __future__ import annotations

import numpy as np

from stoker import OrderConfig
from stoker._fetch.batch_stream import StepQueue
from stoker._order.sharding import RankSharding
from stoker._order.steps import PositionRange, SuperSampleSteps

SAMPLES = np.array([7, 9, 8, 10, 7, 8])


def steps() -> SuperSampleSteps:
    partition = RankSharding(samples=int(SAMPLES.sum()), batch_size=8)
    return SuperSampleSteps(SAMPLES, PositionRange(order=OrderConfig(window=2), sharding=partition, end_epoch=2))


def test_an_item_is_reported_at_the_next_request_and_the_last_one_at_the_end() -> None:
    taken: list[tuple[int, int, int]] = []
    queue = StepQueue(steps(), lambda *each: taken.append(each))
    planned, given = steps(), []
    while (step := planned.next()) is not None:
        given += [(ref, step.epoch, step.end) for _, ref in step.first_uses]
    for number, (ref, _, _) in enumerate(given):
        item = queue.next_item()
        assert item is not None
        assert (item.index, item.ref) == (number, ref)
        assert taken == given[:number]
    assert queue.next_item() is None
    assert taken == given
    assert queue.next_item() is None
    assert taken == given


def test_a_consumer_ahead_of_the_items_does_not_block_fetches() -> None:
    queue = StepQueue(steps())
    found = []
    while (step := queue.next_step()) is not None:
        assert queue.peek() is None or queue.peek() is not step
        found.append(step.number)
    assert found == list(range(len(found)))
    items = 0
    while queue.next_item() is not None:
        items += 1
    assert items == 2 * len(SAMPLES)
