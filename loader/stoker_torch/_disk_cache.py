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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker._base.checksum import crc32c
from stoker.errors import ConfigError, FormatError, SampleError, StokerError
from stoker_torch._sample_cache import DamagedEntryError, SampleCache, SharedCounts, locked
from stoker_torch._sample_codec import decode_sample, encode_sample

_NAME = re.compile(r"stoker-cache-[0-9a-f]{16}", re.ASCII)
"""Folders of sessions; nothing else beside them is ever touched."""


def _begin_session(path: Path) -> tuple[Path, int]:
    """Make a folder beneath ``path``, and remove those that nobody uses any more.

    Returns:
        The folder and the file descriptor that holds its lock, so that it is in use for as long as its owner lives.

    Raises:
        OSError: ``path`` is not a folder that can be made, written to and locked.
    """
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):  # or another process that begins could take a folder that is not locked yet for a dead one
        for left in path.iterdir():
            if _NAME.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                with contextlib.suppress(OSError), locked(left, wait=False):  # one in use, or somebody else's, stays
                    shutil.rmtree(left)
        folder = path / f"stoker-cache-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


_KEY = struct.Struct("<Qq")  # session, index
_FRAME_BYTES = _KEY.size + 8  # and the checksum, in 8 bytes to keep values aligned
_BLOCK_BYTES = 4096


class DiskCache(SampleCache):
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
        super().__init__(samples, max_bytes)
        if (encode is None) != (decode is None):
            raise ConfigError("encode= and decode= are each other's reverse: give both or none")
        self._encode, self._decode = encode, decode
        try:
            self._folder, lock = _begin_session(Path(path).absolute())
        except OSError as error:
            raise ConfigError(f"{path} cannot hold a DiskCache, it needs a folder on a local disk: {error}") from error
        self._session = int(self._folder.name[-16:], 16)  # a number of 64 bits that no other has
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(
            self, _end, self._pid, self._writing, self._folder, lock
        )
        self.counts: SharedCounts = SharedCounts(self._folder / "counts")
        self.counts.create()

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

    def close(self) -> None:
        """Remove all files; idempotent. What other processes ask for is a miss from now on."""
        super().close()
        if self._finalizer is not None:
            self.counts.read()
            self._finalizer()

    def __repr__(self) -> str:
        return f"<DiskCache of {self.samples} samples in {self._folder}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a reader in another process needs: nobody's own."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_writing", "_looking", "_sizes")}
        return state | {"_pid": -1, "_finalizer": None}

    def _check_own(self) -> None:
        if not self.is_own:
            raise StokerError("this DiskCache is a reader: only the process that made it writes")

    def _entry(self, index: int, sample: Any) -> tuple[tuple[bytes, bytearray], int]:
        try:
            data = encode_sample(sample if self._encode is None else self._encode(sample))
        except Exception as error:
            raise SampleError(f"sample {index} cannot be put on disk: {error}") from error
        parts = self._frame(index, data), data
        return parts, -(-sum(map(len, parts)) // _BLOCK_BYTES) * _BLOCK_BYTES

    def _write(self, index: int, entry: tuple[bytes, bytearray]) -> None:
        writing = self._folder / "writing"
        try:
            with writing.open("wb") as file:
                file.writelines(entry)
            writing.rename(self._folder / str(index))
        except OSError:
            with contextlib.suppress(OSError):
                writing.unlink()
            raise

    def _remove(self, index: int) -> None:
        (self._folder / str(index)).unlink(missing_ok=True)

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


def _end(pid: int, writing: threading.Lock, folder: Path, lock: int) -> None:
    if pid == os.getpid():  # a forked child has a copy of all this, and must leave alone what is its parent's
        with writing:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
