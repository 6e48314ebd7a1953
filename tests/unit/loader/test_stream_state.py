"""The state of a stream data set, and states of several put together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.errors import StateError
from stoker_torch import merge_states
from stoker_torch._state import StreamState
from support.cases import for_each


def state(delivered: dict[int, int], **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "epoch": 2,
        "dataset": "d",
        "version": 1,
        "seed": 0,
        "shuffle": "window",
        "window": 8,
        "lanes": 4,
        "limit": None,
    }
    return StreamState(delivered=delivered, **(values | more)).to_dict()


def test_a_state_is_plain_values_and_comes_back_from_json() -> None:
    plain = state({1: 5, 3: 4}, repeated=1)
    assert plain == {
        "format": 1,
        "epoch": 2,
        "repeated": 1,
        "lanes": {"1": 5, "3": 4},
        "sources": [
            {"dataset": "d", "version": 1, "seed": 0, "shuffle": "window", "window": 8, "lanes": 4, "limit": None}
        ],
    }
    assert StreamState.from_dict(json.loads(json.dumps(plain))).to_dict() == plain


@for_each(
    "bad",
    [
        {},
        {"format": 2},
        {"epoch": -1},
        {"epoch": True},
        {"repeated": "1"},
        {"lanes": {}},
        {"lanes": {"x": 1}},
        {"lanes": {"4": 1}},
        {"lanes": {"-1": 1}},
        {"lanes": {"0": -1}},
        {"lanes": [1, 2]},
        {"lanes": None},
        {"sources": []},
        {"sources": [{"dataset": "d"}]},
    ],
)
def test_what_is_no_state_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        StreamState.from_dict(state({0: 1}) | bad if bad else bad)


def test_states_of_workers_and_ranks_are_put_together_wherever_they_lie() -> None:
    nested = {"snapshot": {"worker_0": {"dataset_state": state({0: 3}, repeated=1)}, "worker_1": None}, "other": [1]}
    assert merge_states([nested, state({2: 5, 1: 4})]) == state({0: 3, 1: 4, 2: 5})


@pytest.mark.parametrize(
    ("states", "match"),
    [
        ([], "no state"),
        ([{"a": {"b": 1}}], "no state"),
        ([state({0: 1}), state({1: 1}, epoch=3)], "different epochs"),
        ([state({0: 1}), state({1: 1}, seed=3)], "different epochs or runs"),
        ([state({0: 1}), state({0: 2})], "lane 0 is at position 1 in one state and at 2 in another"),
        ([{"_steps_since_snapshot": 2, "w": state({0: 1})}], "snapshot_every_n_steps=1"),
    ],
)
def test_states_that_do_not_belong_together_are_not_merged(states: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(StateError, match=match):
        merge_states(states)


def test_states_of_all_at_an_epochs_end_are_merged_to_the_start_of_the_next_as_a_loader_says_it() -> None:
    ended = [state({0: 5, 2: 4}, is_complete=True), state({1: 5, 3: 5}, is_complete=True, repeated=1)]
    start = state({0: 0, 1: 0, 2: 0, 3: 0}, epoch=3)
    assert merge_states(json.loads(json.dumps(ended))) == start
    assert merge_states(ended[:1])["epoch"] == 2, "lanes are missing"
    under_way = merge_states([ended[0], state({1: 5, 3: 4})])
    assert (under_way["epoch"], under_way["lanes"]) == (2, {"0": 5, "1": 5, "2": 4, "3": 4})
    assert "complete" not in under_way
