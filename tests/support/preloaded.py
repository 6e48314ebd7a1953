"""A server that forks processes with what they need imported; they get their work pickled, as spawned ones do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

__all__ = ["preloaded_forkserver"]


@contextmanager
def preloaded_forkserver(*modules: str) -> Iterator[None]:
    """Have the start method ``forkserver`` import modules once instead of in every process.

    A process of it inherits nothing from this one. It differs from a spawned process in how it begins and how it ends.
    """
    server: Any = forkserver._forkserver  # it has no public way to stop
    server._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    forkserver.ensure_running()
    try:
        yield
    finally:
        server._stop()
        multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
