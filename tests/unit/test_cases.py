"""Many cases in one test: each is run, the one that fails is named, and fixtures are handed on."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from support.cases import for_each


def notes_of(caught: pytest.ExceptionInfo[Any]) -> list[str]:
    return list(caught.value.__notes__)


def test_every_case_is_run_with_the_fixtures_and_only_these_are_asked_for() -> None:
    seen = []

    @for_each("letter", "ab")
    @for_each(("one", "two"), [(1, 2), (3, 4)])
    def test(fixture: str, one: int, two: int, letter: str) -> None:
        seen.append((fixture, letter, one, two))

    assert list(inspect.signature(test).parameters) == ["fixture"]
    test(fixture="here")
    assert seen == [("here", "a", 1, 2), ("here", "a", 3, 4), ("here", "b", 1, 2), ("here", "b", 3, 4)]


def test_the_case_that_fails_is_named_by_its_values() -> None:
    @for_each("number, text", [(1, "one"), (2, "two")])
    def test(number: int, text: str) -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            int(text if number == 1 else "2")

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as caught:
        test()
    assert notes_of(caught) == ["in the case number=2, text='two'"]


@pytest.mark.parametrize("ids", [["low", "high"], {1: "low", 2: "high"}.get])
def test_a_case_can_have_a_name(ids: Any) -> None:
    @for_each("number", [1, 2], ids=ids)
    def test(number: int) -> None:
        assert number < 2

    with pytest.raises(AssertionError) as caught:
        test()
    assert notes_of(caught)[-1:] == ["in the case high"]


def test_a_test_without_cases_or_without_their_argument_is_none() -> None:
    with pytest.raises(AssertionError, match="there is no case of number"):
        for_each("number", [])
    with pytest.raises(AssertionError, match="does not take number"):
        for_each("number", [1])(lambda: None)
