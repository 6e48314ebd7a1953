"""Names that the outside sees do not change by accident: each is in a checked-in list, and each in a list exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.outside_names import COLLECTORS, GOLDEN, collected, difference


@pytest.mark.parametrize("kind", COLLECTORS)
def test_names_that_the_outside_sees_are_those_of_the_checked_in_list(kind: str, tmp_path: Path) -> None:
    found = difference(kind, collected(kind, tmp_path))
    if found:
        pytest.fail(found, pytrace=False)


def test_each_checked_in_list_is_compared() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(COLLECTORS)
