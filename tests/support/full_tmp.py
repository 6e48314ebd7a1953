"""Handlers whose instance has no space left in /tmp."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stoker_functions import aws

PIECE_BYTES = 1 << 24


def pack(event: Any, context: Any) -> Any:
    """Fill /tmp, then pack."""
    with Path(tempfile.gettempdir(), "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PIECE_BYTES))
        except OSError:
            pass
    return aws.pack(event, context)
