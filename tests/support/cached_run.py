"""A training process with a cache on disk, which may be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from stoker import FetchConfig
from stoker_torch import Loader
from support.datasets import numbers
from support.processes import die

__all__ = ["SETTINGS", "leave_a_child", "read_epoch", "read_until_killed"]

# No hedges: on a slow disk they would read the bucket, too.
SETTINGS: dict[str, Any] = {
    "batch_size": 16,
    "seed": 5,
    "window": 4,
    "memory": "300KB",
    "fetch": FetchConfig(hedge=False),
}


def read_epoch(url: str, cache: str, report: str) -> None:
    """Read an epoch, and report its samples and the number of reads from the bucket and the cache."""
    with Loader(url, **SETTINGS, epochs=1, cache=cache) as loader:
        found = numbers(loader)
        stats = loader.stats()
        (kept,) = stats.caches.values()
        told = {
            "numbers": found,
            "requests": stats.get_requests,
            "hits": kept.hits,
            "lookups": kept.lookups,
            "damaged": kept.damaged,
            "limit_bytes": kept.limit_bytes,
        }
        Path(report).write_text(json.dumps(told))


def read_until_killed(url: str, cache: str, batches: int) -> None:
    """Read a number of batches, and then be killed while background work goes on."""
    with Loader(url, **SETTINGS, cache=cache) as loader:
        for number, _ in enumerate(loader):
            if number == batches:
                die()
            time.sleep(0.002)  # as training does, so that the disk tier can write


def leave_a_child(url: str, cache: str, pid_file: str) -> None:
    """Be killed in the middle of an epoch, and leave an idle forked child."""
    with Loader(url, **SETTINGS, cache=cache) as loader:
        next(iter(loader))
        child = os.fork()
        if not child:
            signal.pause()
        Path(pid_file).write_text(str(child))
        die()
