"""The operations of a mounted data set, as the FUSE library calls them: names, attributes and contents of files.

This module needs no FUSE library. All operations may run in several threads at once.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import stat
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from stoker._files.blocks import BLOCK_BYTES, BlockCache, Stream
from stoker._files.packed import Entry, PackedFiles
from stoker._files.paths import OBJECTS
from stoker.errors import ConfigError, StokerError

_PART_BYTES = 1 << 20
"""Size of the parts in which objects are read."""
_MAX_BLOCK_BYTES = 2 * BLOCK_BYTES
_MAX_NAME_BYTES = 255
_TIME_NS = 315_619_200 * 10**9  # 1980-01-02: archives of any kind, in any time zone, can hold it
_FIRST_SAMPLE_INODE, _FIRST_OBJECT_INODE = 1 << 40, 1 << 50
_SECTOR_BYTES = 512

_logger = logging.getLogger("stoker.mount")


class MountedFiles:
    """The files of a data set, with the methods that mfusepy calls. Their paths begin with a slash.

    Samples are read ahead in the order of their numbers within a folder, which is the order of listings, and objects in
    parts. The kernel keeps what it has read, so each file is read once as long as the machine has memory for it.

    Attributes:
        started: event that is set when the kernel has connected.

    Args:
        files: the files.
        cache_bytes: memory for what is read ahead, and for samples of which the kernel has read a part.

    Raises:
        ConfigError: a name is longer than a file system permits, or two samples have the same path.
        StokerError: the columns of the template could not be read.
    """

    use_ns = True  # times are in nanoseconds

    def __init__(self, files: PackedFiles, cache_bytes: int) -> None:
        self._files, self._paths = files, files.sample_paths()
        _check_names(files)
        self._blocks = BlockCache(self._read_positions, self._count_positions, cache_bytes)
        self._folder_inodes: dict[str, int] = {}
        self._lock = threading.Lock()
        common = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        common |= dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), _TIME_NS)
        self._of_folders = {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2, **common}
        self._of_files = {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, **common}
        self._end_requests: Callable[[], object] | None = None
        self._failed, self._has_warned = "", False
        self.started = threading.Event()

    def close(self, end_requests: Callable[[], object]) -> None:
        """Let reads in progress and later ones fail.

        Args:
            end_requests: function that the next request calls, which ends the loop of requests.
        """
        self._end_requests = end_requests
        self._blocks.close()
        self._files.close()

    # Names and attributes.

    def init(self, _path: str) -> None:
        """Note that the kernel has connected."""
        self.started.set()

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, int]:
        """Return the attributes of a file or folder."""
        if self._end_requests is not None:
            self._end_requests()
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        entry = self._find(path)
        if entry.number is None:
            return {**self._of_folders, "st_ino": self._inode(entry)}
        try:
            size_bytes = self._files.size(entry)
        except (OSError, StokerError) as error:
            self._fail(entry, error)
        blocks = -(-size_bytes // _SECTOR_BYTES)
        return {**self._of_files, "st_ino": self._inode(entry), "st_size": size_bytes, "st_blocks": blocks}

    def readdir(self, path: str, _handle: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield the names in a folder with their types."""
        folder = self._find(path)
        yield from ((name, {"st_mode": stat.S_IFDIR}, 0) for name in (".", ".."))
        for entry in self._files.entries(folder):
            mode = stat.S_IFDIR if entry.number is None else stat.S_IFREG
            yield entry.path.rpartition("/")[2], {"st_mode": mode, "st_ino": self._inode(entry)}, 0

    def statfs(self, _path: str) -> dict[str, int]:
        """Return the size of the data set, of which nothing is free."""
        manifest = self._files.manifest
        return {
            "f_bsize": _PART_BYTES,
            "f_frsize": _SECTOR_BYTES,
            "f_blocks": -(-manifest.size_bytes // _SECTOR_BYTES),
            "f_files": manifest.samples + len(manifest),
            "f_namemax": _MAX_NAME_BYTES,
        }

    def _find(self, path: str) -> Entry:
        if (entry := self._files.find(path[1:])) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return entry

    def _inode(self, entry: Entry) -> int:
        """Return a number that a file or folder has as long as the data set is mounted, in the order of samples."""
        if entry.number is not None:
            return entry.number + (_FIRST_OBJECT_INODE if entry.branch == OBJECTS else _FIRST_SAMPLE_INODE)
        if not entry.path:
            return 1
        with self._lock:
            return self._folder_inodes.setdefault(entry.path, len(self._folder_inodes) + 2)

    # Contents.

    def open(self, path: str, flags: int) -> int:
        """Permit reading. On Linux, the kernel then opens and closes this file and all others by itself.

        Raises:
            OSError: with ``EROFS``, the file would be written; with ``ENOSYS``, the kernel need not ask.
        """
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if platform.system() == "Linux":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
        return 0

    def read(self, path: str, size: int, offset: int, _handle: int) -> bytes:
        """Return bytes of a file, fewer than ``size`` only at its end."""
        entry = self._find(path)
        try:
            if entry.number is None:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if entry.branch == OBJECTS:
                return self._read_object(entry.number, offset, offset + size)
            folder, _, _ = entry.path.rpartition("/")
            position = bisect_left(self._paths.numbers(folder), entry.number)
            if offset and self._blocks.is_evicted(folder, position):
                self._warn_of_eviction(entry)
            data = self._blocks.get(folder, position)
            self._failed = ""
        except (OSError, StokerError) as error:
            self._fail(entry, error)
        return data[offset : offset + size]

    def _read_object(self, row: int, start: int, end: int) -> bytes:
        parts = []
        end = min(end, int(self._files.manifest.rows.size_bytes[row]))
        while start < end:
            position, skipped = divmod(start, _PART_BYTES)
            parts.append(self._blocks.get(row, position)[skipped : skipped + end - start])
            start += len(parts[-1])
        return b"".join(parts)

    def _count_positions(self, stream: Stream) -> int:
        """Return the number of samples in a folder, or of parts of an object."""
        if isinstance(stream, str):
            return len(self._paths.numbers(stream))
        return -(-int(self._files.manifest.rows.size_bytes[stream]) // _PART_BYTES)

    def _read_positions(self, stream: Stream, start: int, end: int) -> Sequence[bytes]:
        """Read samples of a folder, or parts of an object, as many as a block may have."""
        if isinstance(stream, str):
            numbers = self._paths.numbers(stream)[start:end]
            if len(numbers) > 1:
                ends = np.cumsum(self._files.sample_sizes(numbers))
                numbers = numbers[: max(1, int(np.searchsorted(ends, _MAX_BLOCK_BYTES, "right")))]
            return self._files.read_samples(numbers)
        first = start * _PART_BYTES
        last = min(end * _PART_BYTES, int(self._files.manifest.rows.size_bytes[stream]))
        data = memoryview(self._files.read_object(stream, first, last))
        return [bytes(data[place : place + _PART_BYTES]) for place in range(0, last - first, _PART_BYTES)]

    def _warn_of_eviction(self, entry: Entry) -> None:
        """Log, once, that the rest of a file was evicted before it was read."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s is read a second time: files that are read at the same time need more memory; raise --memory",
                entry.path,
            )

    def _fail(self, entry: Entry, error: Exception) -> NoReturn:
        """Log a failure, once for all attempts in a row at one file, and report an input/output error."""
        if self._end_requests is None and entry.path != self._failed:
            self._failed = entry.path
            _logger.warning("cannot read %s: %s", entry.path, error)
        raise OSError(errno.EIO, os.strerror(errno.EIO), entry.path) from error


def _check_names(files: PackedFiles) -> None:
    """Raise ConfigError if a file system cannot hold the name of a sample's file, or of a folder."""
    for name in files.sample_paths().all_names():
        if (size_bytes := len(name.encode())) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"the template {files.template.text!r} gives a name of {size_bytes} bytes, {name!r:.80}, but a file "
                f"system permits {_MAX_NAME_BYTES}; change the template"
            )
