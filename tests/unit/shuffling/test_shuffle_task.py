"""Events of tasks: what is one, and what is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker._order.epoch_layout import MAX_EPOCH, MAX_SLICES
from stoker.errors import ConfigError, EventError
from stoker_functions._shuffle_job.work import ShuffleTask
from support.cases import for_each
from support.materialized import WAYS, plan_tasks

EVENT: dict[str, Any] = {
    "dataset": "s3://bucket/train",
    "version": 2,
    "seed": 7,
    "epoch": 3,
    "lanes": 4,
    "way": "scattered",
    "slices": 8,
    "scatters": 3,
    "object_bytes": 8 << 20,
    "step": "slice",
    "part": 7,
    "keep": 1,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_task_of_a_plan_comes_back_from_its_event(way: Any) -> None:
    for phase in plan_tasks(way, slices=4, scatters=3, lanes=2, seed=(1 << 64) - 1):
        for task in phase:
            assert ShuffleTask.from_event(json.loads(json.dumps(task.to_event()))) == task


def test_a_plan_scatters_before_it_writes_and_commits_at_the_end() -> None:
    steps = [[task.step for task in phase] for phase in plan_tasks("scattered", slices=2, scatters=3)]
    assert steps == [["scatter"] * 3, ["slice"] * 2, ["commit"]]
    assert [len(phase) for phase in plan_tasks("ranged", slices=2)] == [2, 1]


NO_NUMBERS: list[Any] = ["3", 1.0, True, -1, [], {}]
NO_TEXTS: list[Any] = [3, [], {}, None, "x" * 5000]


@for_each(
    ("name", "value"),
    [
        *((name, value) for name in EVENT if name not in ("dataset", "way", "step") for value in NO_NUMBERS),
        *((name, value) for name in ("dataset", "way", "step") for value in NO_TEXTS),
        ("version", 0),
        ("seed", 1 << 64),
        ("epoch", MAX_EPOCH + 1),
        ("lanes", 0),
        ("lanes", (1 << 16) + 1),
        ("slices", 0),
        ("slices", MAX_SLICES + 1),
        ("scatters", MAX_SLICES + 1),
        ("object_bytes", 0),
        ("object_bytes", 1 << 30),
        ("way", "sideways"),
        ("step", "delete"),
        ("more", 1),
        ("__class__", "x"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_field_that_is_wrong_is_named(name: str, value: Any) -> None:
    with pytest.raises(EventError, match=name[:4]) as refused:
        ShuffleTask.from_event(EVENT | {name: value})
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", [name for name in EVENT if name not in ("scatters", "part", "keep")])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(EventError, match=name):
        ShuffleTask.from_event({key: value for key, value in EVENT.items() if key != name})


@pytest.mark.parametrize("event", [None, [], "event", 3, {}, {3: 4}, [EVENT]])
def test_what_is_no_object_is_no_event(event: Any) -> None:
    with pytest.raises(EventError):
        ShuffleTask.from_event(event)


@pytest.mark.parametrize(
    "changes",
    [
        {"part": 8},
        {"step": "scatter", "part": 3},
        {"step": "commit", "part": 1},
        {"scatters": 0},
        {"way": "ranged"},
        {"way": "ranged", "scatters": 0, "step": "scatter", "part": 0},
    ],
    ids=str,
)
def test_fields_that_do_not_go_together_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ShuffleTask.from_event(EVENT | changes)
