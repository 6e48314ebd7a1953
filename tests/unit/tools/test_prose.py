"""The prose check reports what its table lists, where it is, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import prose

TABLE = {"phrases": {r"\bwhoever\b": "the subject"}, "names": {"participles": "^_?told$", "keep": ["told_anyway"]}}
NAME = "'told' is a participle: name what the function does or returns"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", '"""For whoever asks."""\n', ["a.py:1: 'whoever': write the subject"]),
        ("a.py", "x = 1\n# for\n# whoever\n# asks\n", ["a.py:2: 'whoever': write the subject"]),
        ("a.py", 'x = f"whoever {1}"\n', ["a.py:1: 'whoever': write the subject"]),
        ("a.py", "def told() -> None: ...\n", [f"a.py:1: {NAME}"]),
        ("a.py", "whoever = 1\n", []),
        ("a.md", "One.\n\nFor\nwhoever asks.\n", ["a.md:paragraph 2: 'whoever': write the subject"]),
        ("a.md", "One.\n\n```text\nwhoever\n```\n", []),
    ],
)
def test_what_the_table_lists_is_reported_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: list[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert list(prose.problems_of(tmp_path / name, TABLE)) == expected
