"""A folder of super-samples that the processes of a machine share; each process writes only its own part.

The user's folder has a subfolder per data set, and that one a subfolder per owner, numbered from 0. An owner holds a
lock (``flock``) on its subfolder; the kernel releases the lock of a process that dies, and the next owner takes over
the subfolder with its files. A file is created by a rename, so it is always complete, and its name states its size and
checksum; the process that finds a mismatch removes the file. Below the user's folder no link is followed, and files
with other names are not touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from stoker._base.checksum import crc32c
from stoker._base.threads import RevocableBuffer, fork_aware_objects
from stoker._cache.index import is_name, size_of
from stoker.errors import ChecksumError

BLOCK_BYTES = 4096
"""Unit in which the disk space of a file is counted."""
_PREFIX = "stoker-tier-"
_WRITING = ".writing"
_READ_BYTES = 1 << 20  # read into a buffer per thread, which stays in the CPU cache, and copied from there
_read_buffers = threading.local()
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVE_BYTES, _RESERVE_SHARE = 1 << 30, 20
"""Free space to leave on a disk: 1/20 of it, but at most 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """Location and division of a shared folder.

    Attributes:
        path: The user's folder; created if it does not exist.
        dataset: Id of the data set.
        owners: Number of parts, each with at most one writing process at a time.
        preferred: Number of the part to own if it is free, below ``owners``.
        share_bytes: Maximum size of each part, in bytes.
    """

    path: Path
    dataset: str
    owners: int
    preferred: int
    share_bytes: int

    @property
    def folder_name(self) -> str:
        """Name of the data set's folder."""
        return _PREFIX + blake2b(self.dataset.encode(), digest_size=8).hexdigest()


class DiskFolder:
    """One process's view of the folder. Methods block, so they run in threads; only one thread writes at a time.

    Args:
        config: Location and division of the folder.
        select_surplus: Receives the names of the files in this process's part, and returns those that do not fit.

    Raises:
        BlockingIOError: Another process is opening the folder at the moment.
        OSError: The folder belongs to another user, or cannot be created or locked.
    """

    def __init__(self, config: FolderConfig, select_surplus: Callable[[list[str]], Sequence[str]]) -> None:
        self._config = config
        self._handles: dict[int, int] = {}
        self._opening = threading.Lock()
        self.own: int | None = None
        """Number of the part that this process owns; None if all have an owner, and this process only reads."""
        config.path.mkdir(parents=True, exist_ok=True)
        path = os.open(config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._root = _open_folder(path, config.folder_name, make=True)
        finally:
            os.close(path)
        fork_aware_objects.add(self)
        try:
            with _lock_folder(self._root):
                self._claim_part(select_surplus)
        except BaseException:
            self.close()
            raise

    def _claim_part(self, fit: Callable[[list[str]], Sequence[str]]) -> None:
        preferred, owners = self._config.preferred, self._config.owners
        for number in sorted(range(owners), key=lambda each: (each != preferred, each)):
            with suppress(OSError):  # it has an owner, or is no folder
                handle = _open_folder(self._root, str(number), make=True)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(handle)
                    raise
                self.own, self._handles[number] = number, handle
                break
        if self.own is None:
            return
        self._take_over()
        self._distribute_surplus(fit(_clean_up_part(self._handles[self.own])))

    def _take_over(self) -> None:
        """Move the files of parts beyond the present number of owners into this process's part."""
        own = self._own_handle()
        _empty_unowned_parts(self._root, lambda name, handle: _move(name, handle, own), from_number=self._config.owners)

    def _distribute_surplus(self, surplus: Sequence[str]) -> None:
        """Move files that do not fit into this part to parts without an owner, or else remove them."""
        own, left = self._own_handle(), list(surplus)
        for number in range(self._config.owners):
            if number != self.own and left:
                with suppress(OSError), _lock_part(self._root, number, make=True) as handle:
                    room = self._config.share_bytes - sum(
                        disk_space_bytes(size_of(name)) for name in _clean_up_part(handle)
                    )
                    while left and room >= (needed := disk_space_bytes(size_of(left[-1]))):
                        _move(left.pop(), own, handle)
                        room -= needed
        self.remove(*left)

    def _own_handle(self) -> int:
        assert self.own is not None  # noqa: S101 - a process without a part never writes
        return self._handles[self.own]

    @property
    def has_others(self) -> bool:
        """Whether there may be other parts to read from."""
        return self._config.owners > 1 or self.own is None

    def read(self, name: str, into: RevocableBuffer, *, is_own: bool) -> bool:
        """Read an object; return False if there is no such file, or the memory was withdrawn meanwhile.

        Args:
            name: Name of the object.
            into: Memory of the object's size.
            is_own: Whether to read from this process's part; otherwise from the parts of others.

        Raises:
            ChecksumError: The file was damaged; one in this process's part was removed.
            OSError: The disk failed.
        """
        spoilt: ChecksumError | None = None
        for number in [self.own] if is_own else self._others():
            handle = None if number is None else self._part_of(number)
            if handle is None:
                continue
            try:
                return _read(handle, name, into)
            except FileNotFoundError:
                continue
            except ChecksumError as error:
                spoilt = error
                if is_own:
                    self.remove(name)
        if spoilt is not None:
            raise spoilt
        return False

    def _others(self) -> list[int]:
        """Return the numbers of all other parts, including those of earlier jobs with more ranks."""
        numbers = set(range(self._config.owners))
        with suppress(OSError):
            numbers.update(_list_parts(self._root))
        return sorted(numbers - {self.own})

    def _part_of(self, number: int) -> int | None:
        with self._opening:
            if number not in self._handles:
                with suppress(OSError):
                    self._handles[number] = _open_folder(self._root, str(number))
            return self._handles.get(number)

    def write(self, name: str, data: memoryview, evicted: Sequence[str]) -> bool:
        """Remove the objects that are evicted for an object, then write it into this process's part.

        Returns:
            False if the write would leave too little free space on the disk.

        Raises:
            OSError: The write failed; the partial file was removed.
        """
        own = self._own_handle()
        self.remove(*evicted)
        if not self._has_room(data.nbytes):
            return False
        _unlink(_WRITING, own)
        handle = os.open(_WRITING, _NEW_FILE, 0o600, dir_fd=own)
        try:
            rest = data
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.rename(_WRITING, name, src_dir_fd=own, dst_dir_fd=own)
        except BaseException:
            _unlink(_WRITING, own)
            raise
        finally:
            os.close(handle)
        return True

    def remove(self, *names: str) -> None:
        """Remove files from this process's part; missing ones and folders are ignored."""
        for name in names:
            _unlink(name, self._own_handle())

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether the disk has room, after removing unused folders of other data sets if necessary."""
        if self._free_bytes() >= size_bytes:
            return True
        path = os.open(self._config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in _list_folders_by_age(path):
                if folder != self._config.folder_name:
                    with suppress(OSError):  # it is in use, or belongs to another user
                        _remove_unused(path, folder)
                    if self._free_bytes() >= size_bytes:
                        return True
        finally:
            os.close(path)
        return False

    def _free_bytes(self) -> int:
        """Return the free space on the disk beyond the reserve, in bytes."""
        usage = os.fstatvfs(self._root)
        reserve_bytes = min(_RESERVE_BYTES, usage.f_blocks * usage.f_frsize // _RESERVE_SHARE)
        return usage.f_bavail * usage.f_frsize - reserve_bytes

    def close(self) -> None:
        """Release the part; its files stay for the next owner. Idempotent."""
        if self.own is not None and self.own in self._handles:
            fcntl.flock(self._handles[self.own], fcntl.LOCK_UN)  # a child forked meanwhile may share the handle
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Close the handles in a forked child; their locks belong to the parent."""
        handles, self._handles = [self._root, *self._handles.values()], {}
        self.own, self._root = None, -1
        for handle in handles:
            with suppress(OSError):
                os.close(handle)


def disk_space_bytes(size_bytes: int) -> int:
    """Return the disk space of an object of a size, in bytes: the size rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _list_parts(root: int) -> list[int]:
    """Return the numbers of the owners' folders in a data set's folder."""
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.name.isascii() and entry.name.isdecimal()]
    return [int(name) for name in names if name == str(int(name[:9]))]


def _empty_unowned_parts(root: int, dispose: Callable[[str, int], object], from_number: int = 0) -> None:
    """Dispose of the files in the folders without an owner, from a number on, and remove these folders."""
    for number in _list_parts(root):
        if number >= from_number:
            with suppress(OSError), _lock_part(root, number) as handle:
                for name in _clean_up_part(handle):
                    dispose(name, handle)
                os.rmdir(str(number), dir_fd=root)


def _open_folder(parent: int, name: str, *, make: bool = False) -> int:
    """Open a folder that belongs to this user and that no other user may write to.

    Raises:
        OSError: It is no such folder.
    """
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    handle = os.open(name, _FOLDER, dir_fd=parent)
    status = os.fstat(handle)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise PermissionError(errno.EPERM, "the folder belongs to another user, or others may write to it", name)
    return handle


@contextmanager
def _lock_folder(handle: int) -> Iterator[None]:
    """Hold a folder's lock.

    Raises:
        BlockingIOError: Another process holds it.
    """
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child forked meanwhile may share the handle


@contextmanager
def _lock_part(root: int, number: int, *, make: bool = False) -> Iterator[int]:
    """Hold the lock of a part that has no owner.

    Raises:
        OSError: The part has an owner, or is no folder.
    """
    handle = _open_folder(root, str(number), make=make)
    try:
        with _lock_folder(handle):
            yield handle
    finally:
        os.close(handle)


def _clean_up_part(handle: int) -> list[str]:
    """Return the names of the objects in an owner's folder, oldest first, and remove unfinished and damaged files."""
    names: list[str] = []
    with os.scandir(handle) as entries:
        files = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    for name, status in sorted(files, key=lambda each: each[1].st_mtime_ns):
        if is_name(name) and stat.S_ISREG(status.st_mode) and status.st_size == size_of(name):
            names.append(name)
        elif (is_name(name) or name == _WRITING) and not stat.S_ISDIR(status.st_mode):
            _unlink(name, handle)
    return names


def _move(name: str, source: int, target: int) -> None:
    """Move a file from one folder to another, or remove it if that fails."""
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError:
        _unlink(name, source)


def _unlink(name: str, folder: int) -> None:
    """Remove a file; failures are ignored."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _read(folder: int, name: str, into: RevocableBuffer) -> bool:
    try:
        handle = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ChecksumError(f"{name} is a link") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != into.nbytes:
            raise ChecksumError(f"{name} is not a regular file of {into.nbytes} bytes")
        return _read_verified(handle, name, into)
    finally:
        os.close(handle)


def _read_verified(handle: int, name: str, into: RevocableBuffer) -> bool:
    if not hasattr(_read_buffers, "memory"):
        _read_buffers.memory = memoryview(bytearray(_READ_BYTES))
    filled = checksum = 0
    while filled < into.nbytes:
        piece: memoryview = _read_buffers.memory[: into.nbytes - filled]
        read = os.preadv(handle, [piece], filled)
        if not read:
            raise ChecksumError(f"{name} became shorter while it was read")
        if not into.fill(filled, piece[:read]):
            return False
        checksum = crc32c(piece[:read], checksum)
        filled += read
    if checksum != int(name[:8], 16):
        raise ChecksumError(f"{name} is damaged: its checksum does not match its name")
    return True


def _list_folders_by_age(path: int) -> list[str]:
    """Return the folders of data sets, the one modified longest ago first."""
    with os.scandir(path) as entries:
        folders = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.name) for entry in entries]
    return [name for _, name in sorted(folders) if name.startswith(_PREFIX) and len(name) == len(_PREFIX) + 16]


def _remove_unused(path: int, folder: str) -> None:
    """Remove the folder of a data set that no process uses.

    Raises:
        OSError: The folder is in use, or belongs to another user.
    """
    root = _open_folder(path, folder)
    try:
        with _lock_folder(root):
            _empty_unowned_parts(root, _unlink)
            os.rmdir(folder, dir_fd=path)
    finally:
        os.close(root)
