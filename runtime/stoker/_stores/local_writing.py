"""How files are written in a folder that others write to: under a hidden name first, with locks that die with writers.

The hidden file is locked (``flock``) as long as its writer lives, and the kernel frees a dead process's locks: a hidden
file that nobody has locked was left by a writer that was killed, and may go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from stoker.abc import Buffer

__all__ = ["is_partial", "locked", "partial_file", "sweep"]

_PREFIX, _SUFFIX = ".stoker-", ".partial"

# EBADF: NFS makes of flock a lock that needs writing, for which no folder can be opened.
_NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF})


def is_partial(name: str) -> bool:
    """Return whether a file of this name is an unfinished write."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


@contextmanager
def partial_file(folder: Path, data: Buffer) -> Iterator[tuple[Path, os.stat_result]]:
    """Write ``data`` durably to a new hidden file, which is gone afterwards unless it was renamed."""
    path, file = _created(folder)
    try:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]
        # The kernel stamps files with a clock of 1 to 4 ms; nanoseconds tell two quick writes apart even if the
        # second got the inode that the first had.
        now = time.time_ns()
        os.utime(file.fileno(), ns=(now, now))
        os.fsync(file.fileno())
        yield path, os.fstat(file.fileno())
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _created(folder: Path) -> tuple[Path, FileIO]:
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        file = path.open("xb", buffering=0)
        try:
            _lock(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            file.close()
            raise
        if path.exists():
            return path, file
        file.close()  # swept between its creation and its lock


def sweep(folder: Path) -> None:
    """Remove the hidden files that killed writers left in a folder, as far as that can be done and told."""
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry) for entry in entries if is_partial(entry.name)]:
            with suppress(OSError):  # its writer lives, or it is not ours to remove, or another sweep was first
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a file unless somebody has locked it.

    Raises:
        OSError: it is locked, or there are no locks, or it cannot be removed.
    """
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, and tell whether there is such a thing on its file system."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        has_locks = _lock(handle)
        try:
            yield has_locks
        finally:
            if has_locks:
                # Closing is not enough: a process forked meanwhile has the handle too, and would keep the lock.
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Wait for the lock of a file or folder, and tell whether its file system has locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
