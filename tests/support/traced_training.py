"""A training that writes a trace and is killed in the middle."""

from __future__ import annotations

import time
from pathlib import Path

from stoker_torch import Loader
from support.processes import die

__all__ = ["train_and_die"]


def train_and_die(url: str, trace: Path) -> None:
    """Train until the trace is long, since it buffers the last second, and be killed."""
    with Loader(url, batch_size=10, trace=trace) as loader:
        while trace.read_text().count('"cat":"batch"') < 30:
            for _ in loader:
                time.sleep(0.01)
        die()
