"""Loader states that come from anywhere: loaded, or refused with a short reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.errors import StateError
from stoker_torch._state import RunState
from support.cases import for_each

STATE = RunState(
    epoch=3, position=70, dataset="digits", version=2, seed=7, shuffle="window", window=8, lanes=4, limit=None
)


def changed(**changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(STATE.to_dict()))
    for name, value in changes.items():
        (state if name in state else state["sources"][0])[name] = value
    return state


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_state_comes_back_from_plain_values() -> None:
    assert RunState.from_dict(changed()) == STATE
    assert RunState.from_dict(changed(limit=5)).limit == 5


NO_COUNTS: list[Any] = [-1, 2.0, True, "3", None, [], 1 << 64]
NO_TEXTS: list[Any] = [None, 3, [], b"digits"]


@for_each(
    ("name", "value"),
    [
        *((name, value) for name in ("epoch", "position", "seed") for value in NO_COUNTS),
        *((name, value) for name in ("version", "window", "lanes", "limit") for value in (0, 2.0, True, "3", 10**400)),
        *((name, value) for name in ("dataset", "shuffle") for value in NO_TEXTS),
        *(("format", value) for value in (0, 2, True, 1.0, "1", None, [1], "x" * 5000)),
        ("sources", []),
        ("sources", [{}, {}]),
        ("sources", "x"),
        ("sources", None),
        ("more", 1),
        ("x" * 5000, 1),
        ("limit", nested(500)),
        ("dataset", nested(500)),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_state_of_other_values_is_refused_in_a_few_words(name: str, value: Any) -> None:
    with pytest.raises(StateError) as refused:
        RunState.from_dict(changed(**{name: value}))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("state", [None, [], "state", 3, {}, {"format": 1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        RunState.from_dict(state)
