"""Names that the outside sees do not change by accident: each is in a checked-in list, and each in a list exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.outside_names import COLLECTORS, GOLDEN, REWRITE, collected, difference
from support.outside_names.deployment import read_variables

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in read_variables():
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", COLLECTORS)
def test_externally_visible_names_are_those_of_the_checked_in_list(kind: str, tmp_path: Path) -> None:
    found = difference(kind, collected(kind, tmp_path))
    if found:
        pytest.fail(found, pytrace=False)


def test_each_checked_in_list_is_compared() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(COLLECTORS)


def test_a_difference_says_what_went_what_came_and_what_to_do() -> None:
    golden = (GOLDEN / "entry-points.txt").read_text(encoding="utf-8").splitlines()
    assert difference("entry-points", golden) == ""
    first, *_, advice = difference("entry-points", [*golden[1:], "stoker.stores ftp"]).splitlines()
    assert first == "names that the outside sees, entry-points.txt: 1 gone, 1 new"
    assert f"- {golden[0]}" in difference("entry-points", golden[1:]).splitlines()
    assert "+ stoker.stores ftp" in difference("entry-points", [*golden, "stoker.stores ftp"]).splitlines()
    assert REWRITE in advice


def test_each_environment_variable_is_documented() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert not {name for name in read_variables() if f"`{name}" not in text and f"{name}=" not in text}
