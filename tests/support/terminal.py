"""A stream that says it is a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """Text in memory whose ``isatty`` is true."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True
