"""Folders on disk that belong to one process, and go when it does; the kernel's locks say who still lives.

A folder in use is locked itself (``flock``), so there are no lock files, and a killed process leaves none locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CacheSession", "locked"]

_NAME = re.compile(r"stoker-cache-[0-9a-f]{16}", re.ASCII)
"""Folders of sessions; nothing else beside them is ever touched."""


@dataclass(frozen=True, slots=True)
class CacheSession:
    """A folder that is locked, and so in use, for as long as its owner lives.

    Attributes:
        folder: its path.
        lock: the file descriptor that holds the lock.
    """

    folder: Path
    lock: int

    @property
    def number(self) -> int:
        """A number of 64 bits that no other session has."""
        return int(self.folder.name[-16:], 16)

    @classmethod
    def begin(cls, path: Path) -> CacheSession:
        """Make a folder beneath ``path``, and remove those that nobody uses any more.

        Raises:
            OSError: ``path`` is not a folder that can be made, written to and locked.
        """
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):  # or another process that begins could take a folder that is not locked yet for a dead one
            for left in path.iterdir():
                if _NAME.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                    _remove_unless_in_use(left)
            folder = path / f"stoker-cache-{secrets.token_hex(8)}"
            folder.mkdir(mode=0o700)
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(folder, lock)

    def end(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


@contextlib.contextmanager
def locked(path: Path, flags: int = os.O_RDONLY, *, wait: bool = True) -> Iterator[int]:
    """Open a file or folder, and hold its lock against every other opening, in this process and in others.

    Raises:
        BlockingIOError: somebody else has the lock, and ``wait`` is off.
        OSError: it cannot be opened or locked.
    """
    opening = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(opening, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield opening
        finally:
            fcntl.flock(opening, fcntl.LOCK_UN)  # a child forked meanwhile has the opening too, and would keep the lock
    finally:
        os.close(opening)


def _remove_unless_in_use(folder: Path) -> None:
    with contextlib.suppress(OSError), locked(folder, wait=False):  # if it is in use, or somebody else's, it stays
        shutil.rmtree(folder)
