"""What a stream can show: lines that are redrawn, and colours."""

from __future__ import annotations

import os
from typing import Literal, TextIO

Style = Literal["error", "warning", "ok"]
_CODES: dict[Style, str] = {"error": "1;31", "warning": "33", "ok": "32"}


def can_redraw(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can redraw a line: not if ``TERM`` is ``dumb``."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colors(stream: TextIO) -> bool:
    """Return whether to write colours: to terminals only, unless ``NO_COLOR`` or ``FORCE_COLOR`` says otherwise.

    Both variables count if they are set and not empty; ``NO_COLOR`` wins (no-color.org, force-color.org).
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or can_redraw(stream)


def styled(text: str, style: Style, stream: TextIO) -> str:
    """Return a text with the escape codes of a style, or as it is if the stream shows no colours."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colors(stream) else text
