"""Figures in documents: tables, and the markers around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["markers", "replace_between", "table"]


def markers(name: str) -> tuple[str, str]:
    """Return the markers before and after the figures of that name."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def replace_between(document: Path, name: str, text: str) -> None:
    """Replace the text between the markers of a name.

    Raises:
        ValueError: the document does not have them.
    """
    begin, end = markers(name)
    before, has_begin, rest = document.read_text().partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{document} has no {begin} and {end}")
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are figures."""
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
