"""Files below a folder as objects: listed in a bucket's order, and written so that readers never see half of one.

A write goes to a hidden file first. That is locked (``flock``) as long as its writer lives, and the kernel frees a dead
process's locks: a hidden file that nobody has locked was left by a writer that was killed, and may go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from stoker.abc import Buffer
from stoker.errors import StoreError

__all__ = ["is_partial", "locked", "partial_file", "sweep", "Found", "walk"]

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


Found: TypeAlias = tuple[str, os.stat_result]


def walk(root: Path, prefix: str, start_after: str, *, hidden: Callable[[str], bool]) -> Generator[Found, None, None]:
    """Yield (key, status) of the regular files below ``root``, in ascending UTF-8 order of key.

    Links are followed; a folder that contains itself through links is entered once per path. ``hidden(name)`` leaves
    a file out.

    Raises:
        OSError: a folder cannot be read. One that vanishes during the walk is left out, unless it is ``root``.
        StoreError: a file's name is not valid UTF-8, so that it has no key.
    """
    status = root.stat()
    yield from _folder(root, "", prefix, start_after, hidden, frozenset([(status.st_dev, status.st_ino)]))


def _folder(
    folder: Path,
    path: str,
    prefix: str,
    start_after: str,
    hidden: Callable[[str], bool],
    above: frozenset[tuple[int, int]],
) -> Generator[Found, None, None]:
    for name, is_folder in _entries(folder):
        key = path + name
        if not _may_match(key, prefix, start_after, is_folder) or (not is_folder and hidden(name)):
            continue
        try:
            status = (folder / name.rstrip("/")).stat()
        except FileNotFoundError:
            continue
        if not is_folder:
            if stat.S_ISREG(status.st_mode):
                yield key, status
        elif (here := (status.st_dev, status.st_ino)) not in above:
            try:
                yield from _folder(folder / name, key, prefix, start_after, hidden, above | {here})
            except FileNotFoundError:
                continue


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """Return (name, is a folder), folders with a slash at the end: so they stand where their keys belong."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir()) for entry in entries]
    try:
        return sorted(
            ((f"{name}/" if is_folder else name, is_folder) for name, is_folder in found),
            key=lambda entry: entry[0].encode(),
        )
    except UnicodeEncodeError as error:
        raise StoreError(f"{folder} holds a file whose name is not valid UTF-8: {error.object!r}; rename it") from None


def _may_match(key: str, prefix: str, start_after: str, is_folder: bool) -> bool:
    if not is_folder:
        return key.startswith(prefix) and key.encode() > start_after.encode()
    overlaps = key.startswith(prefix) or prefix.startswith(key)
    return overlaps and (start_after.startswith(key) or key.encode() > start_after.encode())
