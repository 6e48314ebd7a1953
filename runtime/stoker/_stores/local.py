"""A store in a local folder.

An object is a file. A write creates a hidden file beside its target and renames it, so a reader sees either the old or
the new object. A writer that is killed leaves only the hidden file, which listings skip; it holds a lock (``flock``)
that ends with the writer, so the next store that writes to or deletes from the folder removes it. Writers also lock the
target's folder while they check conditions and rename. If the file system has no locks (some NFS and FUSE mounts), a
new object is hard-linked to its name, which succeeds only once, a write that depends on an object's tag is refused, and
hidden files stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path

from stoker._base.meter import Operation
from stoker._base.threads import run_in_thread
from stoker._base.upload import ObjectUpload
from stoker._stores.location import Location, check_key, check_tag_and_range, check_text
from stoker._stores.object_store import ObjectStore
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    ServerError,
    StoreError,
    TruncatedError,
)

_READ_BYTES = 4 << 20  # between two checks for cancellation
_PAGE_KEYS = 1000
_MAX_WHOLE_BYTES = 1 << 30  # a manifest of thirty million super-samples fits

_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (NotFoundError, "does not exist"),
    errno.ENOTDIR: (NotFoundError, "does not exist: a part of its path is a file"),
    errno.EISDIR: (StoreError, "is a folder; a local store cannot hold both the keys 'a' and 'a/b'"),
    errno.EEXIST: (StoreError, "lies below a file; a local store cannot hold both the keys 'a' and 'a/b'"),
    errno.EACCES: (PermissionDeniedError, "is not permitted; check owner and mode of the file and its folders"),
    errno.EPERM: (PermissionDeniedError, "is not permitted; check owner and mode of the file and its folders"),
    errno.EROFS: (PermissionDeniedError, "is on a read-only file system"),
    errno.ENAMETOOLONG: (StoreError, "has a name too long for this file system; use shorter keys"),
    errno.ENOSPC: (StoreError, "does not fit: the disk is full; free some space and try again"),
    errno.EDQUOT: (StoreError, "does not fit: the disk quota is used up; free some space and try again"),
    errno.EMFILE: (StoreError, "cannot be opened: too many open files; raise 'ulimit -n'"),
    errno.EIO: (ServerError, "could not be read or written: input/output error"),
}


class LocalStore(ObjectStore):
    """A store in a local folder, which the first write creates. File operations run in the event loop's executor."""

    def __init__(self, location: Location, _options: None = None) -> None:
        super().__init__(location.url)
        self._location = location
        self._root = Path(location.bucket)
        self._swept: set[Path] = set()

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        def read(cancelled: threading.Event) -> tuple[bytes, ObjectInfo]:
            with self._open_object(key) as (file, info):
                if info.size_bytes > _MAX_WHOLE_BYTES:
                    raise StoreError(
                        f"{self._location.object_url(key)} has {info.size_bytes} bytes, too many to read at once"
                    )
                data = bytearray(info.size_bytes)
                self._read_into(file, info, memoryview(data), 0, cancelled)
                return bytes(data), info

        return await run_in_thread(read)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        """Read a range. Cancellation waits for the copy in progress, at most 4 MiB; ``begun`` is not called."""

        def read(cancelled: threading.Event) -> ObjectInfo:
            with self._open_object(key) as (file, info):
                check_tag_and_range(self._location.object_url(key), info, start, end, tag)
                self._read_into(file, info, into, start, cancelled)
                return info

        return await run_in_thread(read)

    async def _head(self, key: str) -> ObjectInfo:
        def read_status(_: threading.Event) -> ObjectInfo:
            with self._open_object(key) as (_file, info):
                return info

        return await run_in_thread(read_status)

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield the files below the folder, following links; files that appear or vanish meanwhile may be left out."""
        for text in (prefix, start_after):
            check_text("object key or prefix", text)
        entries = _walk(self._root, "", prefix, start_after)

        def page(_: threading.Event) -> list[ObjectInfo]:
            with self._translate_errors(self.url):
                return list(islice(entries, _PAGE_KEYS))

        try:
            while infos := await run_in_thread(page):
                for info in infos:
                    yield info
        finally:
            entries.close()

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        """Write an object; a cancelled write may or may not have taken effect, and no longer uses ``data``."""
        path = self._path(key)

        def write(_: threading.Event) -> ObjectInfo:
            with self.translate_errors(key):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sweep_once(path.parent)
                with _partial_file(path.parent) as (partial, file):
                    rest = memoryview(data).cast("B")
                    while rest:
                        rest = rest[file.write(rest) :]
                    return self.publish(key, partial, file, if_absent=if_absent, if_tag=if_tag)

        return await run_in_thread(write)

    async def begin_upload(self, key: str, size_bytes: int) -> ObjectUpload:
        """Create the hidden file of a new object; a process that is killed leaves it for the next sweep."""
        path = self._path(key)

        def begin(_: threading.Event) -> LocalUpload:
            with self.translate_errors(key):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sweep_once(path.parent)
                return LocalUpload(self, key, *_create_partial_file(path.parent))

        return await run_in_thread(begin)

    def publish(self, key: str, partial: Path, file: FileIO, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        """Give a complete hidden file, written durably, the name of its object."""
        path = self._path(key)
        # The kernel's file clock ticks every 1 to 4 ms; nanoseconds distinguish two quick writes even if the second
        # reuses the inode of the first.
        now = time.time_ns()
        os.utime(file.fileno(), ns=(now, now))
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        with lock_folder(path.parent) as has_locks:
            current = _current_tag(path)
            if (if_absent and current is not None) or (if_tag is not None and current != if_tag):
                raise self._precondition_error(key)
            if has_locks or not (if_absent or if_tag is not None):
                partial.replace(path)
            else:
                self._write_without_lock(key, partial, path, if_absent=if_absent)
        return _info(key, status)

    def _write_without_lock(self, key: str, partial: Path, path: Path, *, if_absent: bool) -> None:
        """Give ``partial`` its name if no file has it; without locks, conditions on an object's tag are impossible."""
        if not if_absent:
            raise StoreError(
                f"{self._location.object_url(key)} cannot be replaced safely: its file system has no locks (flock), so "
                "another writer might go unnoticed; write to a local disk or a bucket, or mount it with locks"
            )
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            raise self._precondition_error(key) from None

    def _precondition_error(self, key: str) -> PreconditionFailedError:
        return PreconditionFailedError(
            f"{self._location.object_url(key)} was written by another writer; read it again and decide"
        )

    async def _delete(self, key: str) -> None:
        """Delete an object; the folder that held it stays."""
        path = self._path(key)

        def remove(_: threading.Event) -> None:
            with self.translate_errors(key):
                try:
                    self._sweep_once(path.parent)
                    with lock_folder(path.parent):
                        path.unlink(missing_ok=True)
                except (FileNotFoundError, NotADirectoryError):
                    self._check_root()

        await run_in_thread(remove)

    def _sweep_once(self, folder: Path) -> None:
        """Remove files that killed writers left in a folder, before this store's first change to it."""
        if folder not in self._swept:
            remove_partial_files(folder)
            self._swept.add(folder)

    def _path(self, key: str) -> Path:
        check_key(key)
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"object key {key!r} has an empty, '.' or '..' part: it cannot be a file's path")
        if is_partial(parts[-1]):
            raise ConfigError(f"object key {key!r} is reserved for unfinished writes; choose another")
        return self._root.joinpath(*parts)

    def _check_root(self) -> None:
        if not self._root.is_dir():
            if self._root.exists():
                raise BucketNotFoundError(f"{self.url} is a file, not a folder; choose another path")
            raise BucketNotFoundError(
                f"the folder {self.url} does not exist; check the path (the first write creates it, reading does not)"
            )

    @contextmanager
    def translate_errors(self, key: str) -> Iterator[None]:
        """Raise the typed error of an object instead of an OSError."""
        with self._translate_errors(self._location.object_url(key)):
            yield

    @contextmanager
    def _translate_errors(self, address: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            kind, problem = _ERRORS.get(error.errno or 0, (StoreError, f"could not be used: {error.strerror}"))
            if kind is NotFoundError:
                self._check_root()
            raise kind(f"{address} {problem}") from error

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        path, address = self._path(key), self._location.object_url(key)
        with self._translate_errors(address):
            # O_NONBLOCK: opening a named pipe must not wait for its writer.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFoundError(f"{address} is not a regular file")
                yield file, _info(key, status)
            finally:
                os.close(file)

    def _read_into(self, file: int, info: ObjectInfo, into: memoryview, start: int, cancelled: threading.Event) -> None:
        """Fill ``into`` from offset ``start``, and verify that the file did not change meanwhile."""
        done = 0
        while done < into.nbytes and not cancelled.is_set():
            count = os.preadv(file, [into[done : done + _READ_BYTES]], start + done)
            if count == 0:
                raise TruncatedError(f"{self._location.object_url(info.key)} became shorter while it was read")
            done += count
        if _tag(os.fstat(file)) != info.tag:
            raise ObjectChangedError(f"{self._location.object_url(info.key)} was modified while it was read")


class LocalUpload:
    """An upload into a hidden file, which gets its name at the end.

    Args:
        store: store of the object.
        key: key of the object.
        path: path of the hidden file.
        file: the open file, which is locked.
    """

    concurrency = 1  # a disk gains nothing from several

    def __init__(self, store: LocalStore, key: str, path: Path, file: FileIO) -> None:
        self._store, self._key, self._path, self._file = store, key, path, file
        self._info: ObjectInfo | None = None

    async def put_part(self, number: int, start: int, data: Buffer) -> None:
        """Write a part at its offset."""

        def write(_: threading.Event) -> None:
            rest, position = memoryview(data).cast("B"), start
            with self._store.translate_errors(self._key):
                while rest:
                    written = os.pwrite(self._file.fileno(), rest, position)
                    rest, position = rest[written:], position + written

        await run_in_thread(write)
        self._store.meter.add_written(memoryview(data).nbytes)

    async def complete(self) -> ObjectInfo:
        """Give the file its name, unless an object has it."""

        def publish(_: threading.Event) -> ObjectInfo:
            with self._store.translate_errors(self._key):
                return self._store.publish(self._key, self._path, self._file, if_absent=True, if_tag=None)

        if self._info is None:
            with self._store.meter.count_request(Operation.PUT):
                self._info = await run_in_thread(publish)
            self._file.close()
        return self._info

    async def abort(self) -> None:
        """Remove the file, unless it has its name."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _tag(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=status.st_size, tag=_tag(status))


def _current_tag(path: Path) -> str | None:
    try:
        return _tag(path.stat())
    except FileNotFoundError:
        return None


_PREFIX, _SUFFIX = ".stoker-", ".partial"

# EBADF: NFS turns flock into a lock that needs write access, and a folder cannot be opened for writing.
_NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EBADF})


def is_partial(name: str) -> bool:
    """Return whether a file of this name is an unfinished write."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


@contextmanager
def _partial_file(folder: Path) -> Iterator[tuple[Path, FileIO]]:
    """Yield a new hidden file, and remove it on exit unless it was renamed."""
    path, file = _create_partial_file(folder)
    try:
        yield path, file
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _create_partial_file(folder: Path) -> tuple[Path, FileIO]:
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
        file.close()  # another process removed it between its creation and its lock


def remove_partial_files(folder: Path) -> None:
    """Remove the hidden files that killed writers left in a folder, except those that cannot be locked or removed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [Path(entry) for entry in entries if is_partial(entry.name)]:
            with suppress(OSError):  # its writer lives, removal is not permitted, or another sweep was first
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a file unless another process has locked it.

    Raises:
        OSError: The file is locked, cannot be locked, or cannot be removed.
    """
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yield False, without a lock, if its file system has none."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        has_locks = _lock(handle)
        try:
            yield has_locks
        finally:
            if has_locks:
                # Closing is not enough: a child process forked meanwhile inherits the handle and would keep the lock.
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Wait for the lock of a file or folder; return False if its file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _walk(
    folder: Path, path: str, prefix: str, start_after: str, above: frozenset[tuple[int, int]] = frozenset()
) -> Generator[ObjectInfo, None, None]:
    """Yield the regular files below a folder whose keys start with ``path``, in ascending UTF-8 order of key.

    Links are followed; a folder that contains itself through links is entered once per path.

    Raises:
        OSError: A folder cannot be read. A folder that vanishes during the walk is skipped, unless it is the root.
        StoreError: A file's name is not valid UTF-8, so it has no key.
    """
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:
        return
    for name, is_folder in _entries(folder):
        key = path + name
        if not _may_match(key, prefix, start_after, is_folder):
            continue
        try:
            if is_folder:
                yield from _walk(folder / name, key, prefix, start_after, above | {here})
            elif not is_partial(name) and stat.S_ISREG((status := (folder / name).stat()).st_mode):
                yield _info(key, status)
        except FileNotFoundError:
            continue


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """Return (name, is a folder), sorted in key order: folders end with a slash, as in the keys of their files."""
    with os.scandir(folder) as entries:
        pairs = [(entry.name, entry.is_dir()) for entry in entries]
    try:
        return sorted(
            ((f"{name}/" if is_folder else name, is_folder) for name, is_folder in pairs),
            key=lambda entry: entry[0].encode(),
        )
    except UnicodeEncodeError as error:
        raise StoreError(f"{folder} holds a file whose name is not valid UTF-8: {error.object!r}; rename it") from None


def _may_match(key: str, prefix: str, start_after: str, is_folder: bool) -> bool:
    if not is_folder:
        return key.startswith(prefix) and key.encode() > start_after.encode()
    overlaps = key.startswith(prefix) or prefix.startswith(key)
    return overlaps and (start_after.startswith(key) or key.encode() > start_after.encode())
