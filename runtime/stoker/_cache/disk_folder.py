"""A folder of super-samples that the processes of a machine share, each the only writer of a part of its own.

Below the user's folder there is one a data set, and below that one an owner, numbered from 0. An owner's folder is
locked (``flock``) while its owner lives; the kernel frees the lock of a process that dies, so the next one takes the
folder over with what is in it. A file appears whole, by being renamed, and its name says its size and checksum: what
is not as its name says is removed by who finds it. No link is followed below the user's folder, and nothing is touched
whose name is not one of these.
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
from stoker._base.threads import WithdrawableMemory, in_children
from stoker._cache.keeper import is_name, size_of
from stoker.errors import ChecksumError

BLOCK_BYTES = 4096
"""What a file takes of a disk is counted in these."""
_PREFIX = "stoker-tier-"
_WRITING = ".writing"
_PIECE_BYTES = 1 << 20  # read into a thread's own memory, which stays in the processor's cache, and copied from there
_pieces = threading.local()
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVE_BYTES, _RESERVE_SHARE = 1 << 30, 20
"""Of a disk, one part in so many stays free, or a GiB if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """Whose part of which folder.

    Attributes:
        path: the user's folder; made if it is not there.
        dataset: id of the data set.
        owners: how many may write to it at a time.
        preferred: the number to take if it is free, below ``owners``.
        share_bytes: what each may hold.
    """

    path: Path
    dataset: str
    owners: int
    preferred: int
    share_bytes: int

    @property
    def folder(self) -> str:
        """Name of the data set's folder."""
        return _PREFIX + blake2b(self.dataset.encode(), digest_size=8).hexdigest()


class DiskFolder:
    """An owner's view of the folder. Blocks: for threads, of which one at a time writes.

    Args:
        config: whose part of which folder.
        fit: is given the names of what the part holds, and returns those that cannot stay.

    Raises:
        BlockingIOError: another process is just opening it.
        OSError: it is no folder of this user's, or cannot be made or locked.
    """

    def __init__(self, config: FolderConfig, fit: Callable[[list[str]], Sequence[str]]) -> None:
        self._config = config
        self._handles: dict[int, int] = {}
        self._opening = threading.Lock()
        self.own: int | None = None
        """The number of the owner that this process is, None if all are taken: then it only reads."""
        config.path.mkdir(parents=True, exist_ok=True)
        path = os.open(config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._root = _opened(path, config.folder, make=True)
        finally:
            os.close(path)
        in_children.add(self)
        try:
            with _locked(self._root):
                self._begin(fit)
        except BaseException:
            self.close()
            raise

    def _begin(self, fit: Callable[[list[str]], Sequence[str]]) -> None:
        preferred, owners = self._config.preferred, self._config.owners
        for number in sorted(range(owners), key=lambda each: (each != preferred, each)):
            with suppress(OSError):  # it is taken, or is no folder
                handle = _opened(self._root, str(number), make=True)
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
        self._hand_on(fit(_tidied(self._handles[self.own])))

    def _take_over(self) -> None:
        """Move what owners left behind that there are no more into the own part."""
        own = self._own_handle()
        _empty(self._root, lambda name, handle: _move(name, handle, own), from_number=self._config.owners)

    def _hand_on(self, surplus: Sequence[str]) -> None:
        """Move what the own part has no room for to those of owners that are to come, or else remove it."""
        own, left = self._own_handle(), list(surplus)
        for number in range(self._config.owners):
            if number != self.own and left:
                with suppress(OSError), _part(self._root, number, make=True) as handle:
                    room = self._config.share_bytes - sum(taken_bytes(size_of(name)) for name in _tidied(handle))
                    while left and room >= (needed := taken_bytes(size_of(left[-1]))):
                        _move(left.pop(), own, handle)
                        room -= needed
        self.remove(*left)

    def _own_handle(self) -> int:
        assert self.own is not None  # noqa: S101 - who only reads does not write
        return self._handles[self.own]

    @property
    def has_others(self) -> bool:
        """Whether there may be others to read from."""
        return self._config.owners > 1 or self.own is None

    def read(self, name: str, into: WithdrawableMemory, *, is_own: bool) -> bool:
        """Fill memory of an object's size, and return whether that was done, and the memory not withdrawn.

        Args:
            name: of the object.
            into: the memory.
            is_own: whether to read what this process has written, or else what others have.

        Raises:
            ChecksumError: there was a file that was damaged; if it is the own one, it is gone.
            OSError: the disk failed.
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
        """Return the numbers of the parts that others have, or had; a job of more ranks has more of them."""
        numbers = set(range(self._config.owners))
        with suppress(OSError):
            numbers.update(_numbers(self._root))
        return sorted(numbers - {self.own})

    def _part_of(self, number: int) -> int | None:
        with self._opening:
            if number not in self._handles:
                with suppress(OSError):
                    self._handles[number] = _opened(self._root, str(number))
            return self._handles.get(number)

    def write(self, name: str, data: memoryview, instead_of: Sequence[str]) -> bool:
        """Write an object into the own part, when what goes for it is gone.

        Returns:
            False if it would leave too little of the disk free.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        own = self._own_handle()
        self.remove(*instead_of)
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
        """Remove files from the own part, as far as they are there and are files."""
        for name in names:
            _unlink(name, self._own_handle())

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether the disk has room, once what nobody uses of other data sets is gone if that is needed."""
        if self._free_bytes() >= size_bytes:
            return True
        path = os.open(self._config.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in _by_age(path):
                if folder != self._config.folder:
                    with suppress(OSError):  # it is in use, or is somebody else's
                        _remove_unused(path, folder)
                    if self._free_bytes() >= size_bytes:
                        return True
        finally:
            os.close(path)
        return False

    def _free_bytes(self) -> int:
        """Return what of the disk may be taken."""
        found = os.fstatvfs(self._root)
        reserve_bytes = min(_RESERVE_BYTES, found.f_blocks * found.f_frsize // _RESERVE_SHARE)
        return found.f_bavail * found.f_frsize - reserve_bytes

    def close(self) -> None:
        """Give the part up; what is in it stays for the next. Idempotent."""
        if self.own is not None and self.own in self._handles:
            fcntl.flock(self._handles[self.own], fcntl.LOCK_UN)  # a child forked meanwhile may have the handle too
        self.forget_parent()

    def forget_parent(self) -> None:
        """In a forked child: close handles, whose locks are the parent's."""
        handles, self._handles = [self._root, *self._handles.values()], {}
        self.own, self._root = None, -1
        for handle in handles:
            with suppress(OSError):
                os.close(handle)


def taken_bytes(size_bytes: int) -> int:
    """Return what an object of a size takes of a limit."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _numbers(root: int) -> list[int]:
    """Return the numbers of the owners' folders in that of a data set."""
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if entry.name.isascii() and entry.name.isdecimal()]
    return [int(name) for name in names if name == str(int(name[:9]))]


def _empty(root: int, dispose: Callable[[str, int], object], from_number: int = 0) -> None:
    """Dispose of what is in the folders from a number on that have no owner, and remove these."""
    for number in _numbers(root):
        if number >= from_number:
            with suppress(OSError), _part(root, number) as handle:
                for name in _tidied(handle):
                    dispose(name, handle)
                os.rmdir(str(number), dir_fd=root)


def _opened(parent: int, name: str, *, make: bool = False) -> int:
    """Open a folder of this user's that nobody else may write to.

    Raises:
        OSError: it is none.
    """
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    handle = os.open(name, _FOLDER, dir_fd=parent)
    found = os.fstat(handle)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise PermissionError(errno.EPERM, "others than this user may write to the folder", name)
    return handle


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    """Hold a folder's lock.

    Raises:
        BlockingIOError: somebody else has it.
    """
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a child forked meanwhile may have the handle too


@contextmanager
def _part(root: int, number: int, *, make: bool = False) -> Iterator[int]:
    """Have an owner's folder that has no owner for a while.

    Raises:
        OSError: it has one, or is none.
    """
    handle = _opened(root, str(number), make=make)
    try:
        with _locked(handle):
            yield handle
    finally:
        os.close(handle)


def _tidied(handle: int) -> list[str]:
    """Return the names of the objects in an owner's folder, and remove what is left of unfinished and damaged ones."""
    names: list[str] = []
    with os.scandir(handle) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    for name, status in sorted(found, key=lambda each: each[1].st_mtime_ns):
        if is_name(name) and stat.S_ISREG(status.st_mode) and status.st_size == size_of(name):
            names.append(name)
        elif (is_name(name) or name == _WRITING) and not stat.S_ISDIR(status.st_mode):
            _unlink(name, handle)
    return names


def _move(name: str, source: int, target: int) -> None:
    """Move a file from one folder to another, or remove it if that cannot be."""
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError:
        _unlink(name, source)


def _unlink(name: str, folder: int) -> None:
    """Remove a file, if it is there and can be."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _read(folder: int, name: str, into: WithdrawableMemory) -> bool:
    try:
        handle = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ChecksumError(f"{name} is a link") from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != into.nbytes:
            raise ChecksumError(f"{name} is no file of {into.nbytes} bytes")
        return _filled(handle, name, into)
    finally:
        os.close(handle)


def _filled(handle: int, name: str, into: WithdrawableMemory) -> bool:
    if not hasattr(_pieces, "memory"):
        _pieces.memory = memoryview(bytearray(_PIECE_BYTES))
    filled = checksum = 0
    while filled < into.nbytes:
        piece: memoryview = _pieces.memory[: into.nbytes - filled]
        read = os.preadv(handle, [piece], filled)
        if not read:
            raise ChecksumError(f"{name} has become shorter")
        if not into.fill(filled, piece[:read]):
            return False
        checksum = crc32c(piece[:read], checksum)
        filled += read
    if checksum != int(name[:8], 16):
        raise ChecksumError(f"{name} is damaged")
    return True


def _by_age(path: int) -> list[str]:
    """Return the folders of data sets, that written to longest ago first."""
    with os.scandir(path) as entries:
        found = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.name) for entry in entries]
    return [name for _, name in sorted(found) if name.startswith(_PREFIX) and len(name) == len(_PREFIX) + 16]


def _remove_unused(path: int, folder: str) -> None:
    """Remove what owners that are gone left of a data set.

    Raises:
        OSError: it is in use, or is no folder of this user's.
    """
    root = _opened(path, folder)
    try:
        with _locked(root):
            _empty(root, _unlink)
            os.rmdir(folder, dir_fd=path)
    finally:
        os.close(root)
