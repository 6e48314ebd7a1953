"""Samples in files on a local disk, first in, first out, for one process that writes and many that read.

Only the process that made the cache writes. It keeps the order in memory, so nothing is ever listed, and readers need
no more than a path. A file appears whole, by being renamed, and is checked when it is read; a reader that finds none,
or one that is damaged, has a miss.

The folder belongs to one process, and goes when it does: it is locked itself (``flock``), so there are no lock files,
and a killed process leaves none locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stoker._base.checksum import crc32c
from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError, FormatError, SampleError, StokerError
from stoker_torch._sample_cache import NO_LOOK_UPS, Amounts, DamagedEntryError, add_look_up
from stoker_torch._sample_codec import decode_sample, encode_sample

__all__ = ["CacheSession", "DiskCache", "SharedCounts", "locked"]

_ROW = struct.Struct("<4Q")  # look-ups, misses, damaged entries, nanoseconds
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


class SharedCounts:
    """Counts of all processes that know the path of the file they are in.

    The file is opened and locked for each addition (some 20 µs). So there is nothing that a forked child could inherit
    in a bad state, a process that is killed leaves no lock, and any copy of this object, in any process, is as good as
    another.

    Args:
        path: of the file, which :meth:`create` makes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = NO_LOOK_UPS

    def create(self) -> None:
        """Make the file, with zeros."""
        self._path.write_bytes(_ROW.pack(*NO_LOOK_UPS))

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up; when the file was removed, nobody counts any more."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            before: Amounts = _ROW.unpack(os.pread(file, _ROW.size, 0))
            os.pwrite(file, _ROW.pack(*add_look_up(before, missed, damaged, wait_seconds)), 0)

    def read(self) -> Amounts:
        """Return what was counted so far; when the file was removed, what was read last."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            self._last = _ROW.unpack(os.pread(file, _ROW.size, 0))
        return self._last


_KEY = struct.Struct("<Qq")  # session, index
_FRAME_BYTES = _KEY.size + 8  # and the checksum, in 8 bytes to keep values aligned
_BLOCK_BYTES = 4096


class DiskCache:
    """A capped collection on disk, which the worker processes of a ``DataLoader`` share.

    Each object is a session of its own, in a folder of its own beneath ``path``; ranks of one node may so share a
    ``path``. The folder is removed when the cache is closed, collected or the interpreter ends; what a killed process
    left is removed when the next cache is made at the same ``path``. A forked or spawned process gets a reader.

    Args:
        path: a folder on a local disk; made if it is not there.
        samples: how many it holds at most.
        max_bytes: how much disk they may take, a number or ``"20GB"``, counted in blocks of 4 KiB; default any.
        encode: function of a sample that returns it as something that can be stored without pickle: tensors, numpy
            arrays and scalars, bytes, str, int, float, bool and None, and tuples, lists and dicts of these.
        decode: its reverse.

    Raises:
        ConfigError: a limit is not positive, or ``path`` is not a folder that can be written to and locked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        samples: int,
        *,
        max_bytes: int | str | None = None,
        encode: Callable[[Any], Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        limit_bytes = None if max_bytes is None else parse_bytes(max_bytes)
        if samples < 1 or limit_bytes == 0:
            raise ConfigError(f"a DiskCache needs room for a sample, not samples={samples}, max_bytes={max_bytes}")
        if (encode is None) != (decode is None):
            raise ConfigError("encode= and decode= are each other's reverse: give both or none")
        self._capacity = samples
        self._encode, self._decode = encode, decode
        try:
            session = CacheSession.begin(Path(path).absolute())
        except OSError as error:
            raise ConfigError(f"{path} cannot hold a DiskCache, it needs a folder on a local disk: {error}") from error
        self._folder, self._session = session.folder, session.number
        self._writer: _Writer | None = _Writer(session.folder, samples, limit_bytes)
        self._finalizer = weakref.finalize(self, _end, self._writer, session)
        self.counts = SharedCounts(session.folder / "counts")
        self.counts.create()

    @property
    def samples(self) -> int:
        """How many samples it holds at most."""
        return self._capacity

    def get(self, index: int) -> Any:
        """Return a sample; works in every process.

        Raises:
            KeyError: it is not in the cache; :class:`DamagedEntryError`, if its file cannot be read or is damaged.
            SampleError: ``decode`` failed.
        """
        try:
            with (self._folder / str(index)).open("rb", buffering=0) as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(data)
            sample = self._checked(index, data)
        except FileNotFoundError:
            raise KeyError(index) from None
        except (OSError, FormatError) as error:
            raise DamagedEntryError(index) from error
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            raise SampleError(f"sample {index} cannot be decoded from disk: {error}") from error

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache; with ``renew``, it then becomes the one that came in last.

        Raises:
            StokerError: this process only reads.
        """
        return self._own_writer().holds(index, renew=renew)

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample that is not there yet, in place of those that came in first if there is no room.

        Returns:
            Whether it is in the cache; it is not if it alone takes more than ``max_bytes``.

        Raises:
            SampleError: the sample cannot be stored without pickle, or ``encode`` failed.
            OSError: the file cannot be written.
            StokerError: the cache is closed, or this process only reads.
        """
        writer = self._own_writer()
        try:
            data = encode_sample(sample if self._encode is None else self._encode(sample))
        except Exception as error:
            raise SampleError(f"sample {index} cannot be put on disk: {error}") from error
        return writer.put(index, self._frame(index, data), data)

    def close(self) -> None:
        """Remove all files; idempotent. What other processes ask for is a miss from now on."""
        if self._writer is not None:
            self.counts.read()
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._own_writer())

    def __repr__(self) -> str:
        return f"<DiskCache of {self._capacity} samples in {self._folder}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a reader in another process needs."""
        return {**self.__dict__, "_writer": None, "_finalizer": None}

    def _own_writer(self) -> _Writer:
        if self._writer is None or not self._writer.is_own:
            raise StokerError("this DiskCache is a reader: only the process that made it writes")
        return self._writer

    def _frame(self, index: int, data: bytearray | memoryview) -> bytes:
        """Return what stands before an encoded sample: whose it is, and the checksum of that and the sample."""
        key = _KEY.pack(self._session, index)
        return key + crc32c(data, crc32c(key)).to_bytes(_FRAME_BYTES - len(key), "little")

    def _checked(self, index: int, data: bytearray) -> Any:
        """Return the sample in a file.

        Raises:
            FormatError: it is not the file that was written for this sample.
        """
        if data[:_FRAME_BYTES] != self._frame(index, memoryview(data)[_FRAME_BYTES:]):
            raise FormatError(f"{self._folder / str(index)} is damaged")
        return decode_sample(data, _FRAME_BYTES)


class _Writer:
    """The files of one folder, and in memory their order and sizes. Thread-safe; one file is written at a time.

    Two locks, so that who asks what is there does not wait for the disk: ``_writing`` is held during a write,
    ``_looking`` for a moment, also within the other.
    """

    def __init__(self, folder: Path, samples: int, max_bytes: int | None) -> None:
        self._folder = folder
        self._capacity, self._max_bytes = samples, max_bytes
        self._writing, self._looking = threading.Lock(), threading.Lock()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this is not a copy that a forked child has, with locks that may be held for ever."""
        return self._pid == os.getpid()

    def __len__(self) -> int:
        return len(self._sizes)

    def holds(self, index: int, *, renew: bool) -> bool:
        with self._looking:
            if renew and index in self._sizes:
                self._sizes[index] = self._sizes.pop(index)
            return index in self._sizes

    def put(self, index: int, *parts: bytes | bytearray) -> bool:
        size_bytes = -(-sum(map(len, parts)) // _BLOCK_BYTES) * _BLOCK_BYTES
        if self._max_bytes is not None and size_bytes > self._max_bytes:
            return False
        with self._writing:
            if self._is_closed:
                raise StokerError("the DiskCache is closed")
            if not self.holds(index, renew=False):
                while self._is_full(size_bytes):
                    self._evict()
                self._write(str(index), parts)
                self._note(index, size_bytes)
        return True

    def close(self) -> None:
        with self._writing, self._looking:
            self._is_closed = True
            self._sizes.clear()

    def _is_full(self, size_bytes: int) -> bool:
        is_over = self._max_bytes is not None and self._bytes + size_bytes > self._max_bytes
        return bool(self._sizes) and (len(self._sizes) >= self._capacity or is_over)

    def _evict(self) -> None:
        with self._looking:
            oldest = next(iter(self._sizes))
            size_bytes = self._sizes.pop(oldest)
            self._bytes -= size_bytes
        try:
            (self._folder / str(oldest)).unlink(missing_ok=True)
        except OSError:
            self._note(oldest, size_bytes)  # it still takes its room
            raise

    def _note(self, index: int, size_bytes: int) -> None:
        with self._looking:
            self._sizes[index] = size_bytes
            self._bytes += size_bytes

    def _write(self, name: str, parts: tuple[bytes | bytearray, ...]) -> None:
        writing = self._folder / "writing"
        try:
            with writing.open("wb") as file:
                file.writelines(parts)
            writing.rename(self._folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                writing.unlink()
            raise


def _end(writer: _Writer, session: CacheSession) -> None:
    if writer.is_own:  # a forked child has a copy of all this, and must leave alone what is its parent's
        writer.close()
        session.end()
