"""The examples in the specifications print what the page says they print."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"```python\n(.*?)```\n\s*```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["format.md", "order.md", "shuffle.md"])
def test_the_examples_of_a_page_print_what_it_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    examples = EXAMPLE.findall((DOCS / page).read_text("utf-8"))
    assert examples
    names: dict[str, Any] = {}
    for number, (code, shown) in enumerate(examples):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page}, example {number}", "exec"), names)  # noqa: S102 - our own pages
        assert printed.getvalue() == shown
