from __future__ import annotations

import pytest

from stoker import Continuous, FetchSize, NextBatch, Progress
from stoker.errors import ConfigError


def progress(*, issued: int = 0, consumed: int = 0, next_item_step: int | None = 0, step: int = 0) -> Progress:
    return Progress(issued, consumed, next_item_step, step)


def test_continuous_always_admits_while_there_are_items() -> None:
    assert Continuous().admit(progress(issued=10**6)) > 0
    assert Continuous().admit(progress(next_item_step=None)) == 0


def test_fetch_size_requests_a_whole_fetch_when_the_threshold_is_reached() -> None:
    schedule = FetchSize(fetch_size=4, threshold=2)
    unused = {left: schedule.admit(progress(issued=10, consumed=10 - left)) for left in range(6)}
    assert unused == {0: 4, 1: 4, 2: 4, 3: 0, 4: 0, 5: 0}


@pytest.mark.parametrize("items", [1, 2, 5, 2048])
def test_half_and_half_fits_exactly(items: int) -> None:
    schedule = FetchSize.half_and_half(items)
    assert schedule.needed_slots == items
    assert 0 <= schedule.fetch_size - schedule.threshold <= 1


def test_next_batch_admits_items_of_the_next_depth_steps_only() -> None:
    schedule = NextBatch(depth=2)
    admitted = [schedule.admit(progress(next_item_step=upcoming, step=5)) for upcoming in range(4, 10)]
    assert admitted == [1, 1, 1, 1, 0, 0]
    assert schedule.admit(progress(next_item_step=None, step=5)) == 0


def test_senseless_schedules_are_refused() -> None:
    for make in (lambda: FetchSize(0, 1), lambda: FetchSize(1, -1), lambda: NextBatch(0)):
        with pytest.raises(ConfigError):
            make()
