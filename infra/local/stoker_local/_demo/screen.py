"""The demo's output: lines that are redrawn on a terminal and plain lines elsewhere, and tables."""

from __future__ import annotations

import math
import shutil
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from stoker._base.terminal import can_redraw

_REDRAW_SECONDS = 0.1
_MAX_COLUMNS = 100
_LABEL_COLUMNS = 8
_CLEAR = "\r\x1b[K"


class Screen:
    """Writes text to a terminal or another stream; leaving the context erases the redrawn lines.

    Attributes:
        is_terminal: whether lines can be redrawn.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_terminal = can_redraw(stream)
        self._last_draw_at = -math.inf
        self._lines_above = 0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_terminal:
            self._write(self._wipe_sequence())

    def line(self, text: str = "") -> None:
        """Write a permanent text, wrapped at the screen's width."""
        self._write_lines(self._wrap(text))

    def item(self, label: str, text: str) -> None:
        """Write a label and a permanent text in a column beside it."""
        self._write_lines(self._wrap(f"  {label:<{_LABEL_COLUMNS}} {text}", indent=" " * (_LABEL_COLUMNS + 3)))

    def rows(self, lines: list[str]) -> None:
        """Write permanent lines and an empty line after them."""
        self._write_lines([*(f"  {line}" for line in lines), ""])

    def exit_code(self, failures: list[str]) -> int:
        """Write the failures; return the program's exit code, which is 1 if there are any."""
        for failure in failures:
            self.item("failed", failure)
        return 1 if failures else 0

    def draw(self, *lines: str) -> None:
        """Replace the redrawn lines, on a terminal only; at most ten times a second, clipped to its size."""
        now = time.monotonic()
        if self.is_terminal and now - self._last_draw_at >= _REDRAW_SECONDS:
            self._last_draw_at = now
            size = shutil.get_terminal_size()
            wipe = self._wipe_sequence()
            visible = [f"  {line}"[: size.columns - 1] for line in lines[: size.lines - 1]]
            self._lines_above = len(visible) - 1
            self._write(wipe + "\n".join(visible))

    def milestone(self, text: str) -> None:
        """Write a progress line if lines cannot be redrawn."""
        if not self.is_terminal:
            self._write(f"  {text}\n")

    def _write_lines(self, lines: list[str]) -> None:
        self._write((self._wipe_sequence() if self.is_terminal else "") + "".join(f"{line}\n" for line in lines))
        self._last_draw_at = -math.inf

    def _wrap(self, text: str, indent: str = "") -> list[str]:
        columns = min(shutil.get_terminal_size().columns, _MAX_COLUMNS)
        return textwrap.wrap(text, columns - 1, subsequent_indent=indent, break_on_hyphens=False) or [""]

    def _wipe_sequence(self) -> str:
        """Return the control sequence that erases the redrawn lines and moves to their start."""
        above, self._lines_above = self._lines_above, 0
        return f"\r\x1b[{above}A\x1b[J" if above else _CLEAR

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress_bar(fraction: float, width: int = 24) -> str:
    """Return a progress bar that is filled to ``fraction``, 0 to 1."""
    return f"[{'#' * round(fraction * width):.<{width}}]"


def align_columns(rows: Sequence[Sequence[str]], *, header_rows: int = 1) -> list[str]:
    """Return the lines of a table: the first column left-aligned, the others right-aligned, a rule below the heads."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        "  ".join([f"{label:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, others, strict=True))])
        for label, *cells in rows
    ]
    return [*lines[:header_rows], "-" * len(lines[0]), *lines[header_rows:]]
