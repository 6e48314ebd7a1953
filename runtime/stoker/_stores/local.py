"""A store in a local folder.

An object is a file. A write goes to a hidden file beside its target and is renamed over it, so a reader sees the old
object or the new one and a writer that is killed leaves nothing but that hidden file, which no listing shows and which
the next store that writes to or deletes from the folder removes. Writers hold a kernel lock (``flock``) on the target's
folder while they check conditions and rename; the kernel frees it when a process dies, so there are no stale locks.
Where the file system has no such locks (some NFS and FUSE mounts), a new object is linked to its name, which happens
only once, a write that depends on an object's tag is refused, and hidden files stay.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from stoker._base.threads import in_thread
from stoker._stores.local_files import Found, is_partial, locked, partial_file, sweep, walk
from stoker._stores.location import Location, check_key, check_text
from stoker._stores.object_store import ObjectStore
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    RangeBeyondEndError,
    ServerError,
    StoreError,
    TruncatedError,
)

__all__ = ["LocalStore"]

_READ_BYTES = 4 << 20  # between two looks at whether the reader was cancelled
_PAGE_KEYS = 1000
_MAX_WHOLE_BYTES = 1 << 30  # what is read whole is small: a manifest of thirty million super-samples fits

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
    """A folder, which the first write creates. All file operations run in threads of the loop's executor."""

    def __init__(self, location: Location, _options: None = None) -> None:
        super().__init__(location.url)
        self._at = location
        self._root = Path(location.bucket)
        self._swept: set[Path] = set()

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        path = self._path(key)

        def read(cancelled: threading.Event) -> tuple[bytes, ObjectInfo]:
            with self._opened(key, path) as (file, info):
                if info.size_bytes > _MAX_WHOLE_BYTES:
                    raise StoreError(
                        f"{self._at.object_url(key)} has {info.size_bytes} bytes, too many to read at once"
                    )
                data = bytearray(info.size_bytes)
                self._fill(file, info, memoryview(data), 0, cancelled)
                return bytes(data), info

        return await in_thread(read)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        """Cancellation waits for the copy in progress, at most 4 MiB. Nobody is told that it begins."""
        path = self._path(key)

        def read(cancelled: threading.Event) -> ObjectInfo:
            with self._opened(key, path) as (file, info):
                if tag not in (None, info.tag):
                    raise ObjectChangedError(f"{self._at.object_url(key)} changed: its tag is no longer {tag}")
                if end > info.size_bytes:
                    raise RangeBeyondEndError(
                        f"{self._at.object_url(key)} has {info.size_bytes} bytes; "
                        f"range [{start}, {end}) goes beyond its end"
                    )
                self._fill(file, info, into, start, cancelled)
                return info

        return await in_thread(read)

    async def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)

        def look(_: threading.Event) -> ObjectInfo:
            with self._opened(key, path) as (_file, info):
                return info

        return await in_thread(look)

    async def _list(self, prefix: str, start_after: str) -> AsyncIterator[ObjectInfo]:
        """Yield the files under the folder, links followed; files that come or go meanwhile may or may not appear."""
        for text in (prefix, start_after):
            check_text("object key or prefix", text)
        found = walk(self._root, prefix, start_after, hidden=is_partial)

        def page(_: threading.Event) -> list[ObjectInfo]:
            with self._translated(self.url):
                return [_info(item) for item in islice(found, _PAGE_KEYS)]

        try:
            while infos := await in_thread(page):
                for info in infos:
                    yield info
        finally:
            found.close()

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        """A cancelled write has happened or has not; ``data`` is no longer used either way."""
        path = self._path(key)

        def write(_: threading.Event) -> ObjectInfo:
            with self._translated(self._at.object_url(key)):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sweep_once(path.parent)
                with partial_file(path.parent, data) as (partial, status), locked(path.parent) as has_locks:
                    current = _current_tag(path)
                    if (if_absent and current is not None) or (if_tag is not None and current != if_tag):
                        raise self._lost(key)
                    if has_locks or not (if_absent or if_tag is not None):
                        partial.replace(path)
                    else:
                        self._write_without_lock(key, partial, path, if_absent=if_absent)
                return ObjectInfo(key=key, size_bytes=status.st_size, tag=_tag(status))

        return await in_thread(write)

    def _write_without_lock(self, key: str, partial: Path, path: Path, *, if_absent: bool) -> None:
        """Give ``partial`` its name if nothing has it; what depends on an old object's tag cannot be done."""
        if not if_absent:
            raise StoreError(
                f"{self._at.object_url(key)} cannot be replaced safely: its file system has no locks (flock), so "
                "another writer might go unnoticed; write to a local disk or a bucket, or mount it with locks"
            )
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            raise self._lost(key) from None

    def _lost(self, key: str) -> PreconditionFailedError:
        return PreconditionFailedError(
            f"{self._at.object_url(key)} was written by somebody else; read it again and decide"
        )

    async def _delete(self, key: str) -> None:
        """Its folder stays."""
        path = self._path(key)

        def remove(_: threading.Event) -> None:
            with self._translated(self._at.object_url(key)):
                try:
                    self._sweep_once(path.parent)
                    with locked(path.parent):
                        path.unlink(missing_ok=True)
                except (FileNotFoundError, NotADirectoryError):
                    self._check_root()

        await in_thread(remove)

    def _sweep_once(self, folder: Path) -> None:
        """Remove what killed writers left in a folder, before the first change that this store makes to it."""
        if folder not in self._swept:
            sweep(folder)
            self._swept.add(folder)

    def _path(self, key: str) -> Path:
        check_key(key)
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ConfigError(f"object key {key!r} has an empty, '.' or '..' part: it cannot be a file's path")
        if is_partial(parts[-1]):
            raise ConfigError(f"object key {key!r} is a name kept for unfinished writes; choose another")
        return self._root.joinpath(*parts)

    def _check_root(self) -> None:
        if not self._root.is_dir():
            if self._root.exists():
                raise BucketNotFoundError(f"{self.url} is a file, not a folder; choose another path")
            raise BucketNotFoundError(
                f"the folder {self.url} does not exist; check the path (the first write makes it, reading does not)"
            )

    @contextmanager
    def _translated(self, address: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            kind, what = _ERRORS.get(error.errno or 0, (StoreError, f"could not be used: {error.strerror}"))
            if kind is NotFoundError:
                self._check_root()
            raise kind(f"{address} {what}") from error

    @contextmanager
    def _opened(self, key: str, path: Path) -> Iterator[tuple[int, ObjectInfo]]:
        address = self._at.object_url(key)
        with self._translated(address):
            # O_NONBLOCK: opening a named pipe must not wait for its writer.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise NotFoundError(f"{address} is not a regular file")
                yield file, _info((key, status))
            finally:
                os.close(file)

    def _fill(self, file: int, info: ObjectInfo, into: memoryview, start: int, cancelled: threading.Event) -> None:
        """Read ``into``'s bytes from ``start`` on, and make sure that the file did not change while we read."""
        done = 0
        while done < into.nbytes and not cancelled.is_set():
            count = os.preadv(file, [into[done : done + _READ_BYTES]], start + done)
            if count == 0:
                raise TruncatedError(f"{self._at.object_url(info.key)} became shorter while it was read")
            done += count
        if _tag(os.fstat(file)) != info.tag:
            raise ObjectChangedError(f"{self._at.object_url(info.key)} was modified while it was read")


def _tag(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def _info(found: Found) -> ObjectInfo:
    key, status = found
    return ObjectInfo(key=key, size_bytes=status.st_size, tag=_tag(status))


def _current_tag(path: Path) -> str | None:
    try:
        return _tag(path.stat())
    except FileNotFoundError:
        return None
