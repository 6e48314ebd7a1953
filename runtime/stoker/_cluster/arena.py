"""The memory of a cache process, which its clients map and only the process writes.

It is a file in memory (memfd) with seals: nobody can change its size, and nobody but the process, which has mapped it
before, can write to it. So a client may read it without a check of its size, and cannot spoil it for others. On a disk,
it is a file without a name, of which clients get a descriptor for reading.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from stoker.errors import ConfigError

_ADD_SEALS, _SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 1033, 0x1, 0x2, 0x4, 0x10  # <linux/fcntl.h>; the last since 5.1


class Arena:
    """Memory of a fixed size, of which the system provides the pages when they are written.

    Args:
        size_bytes: its size.
        folder: folder for a file on a disk; None for memory.

    Raises:
        ConfigError: the system does not provide it.

    Attributes:
        memory: the memory.
    """

    def __init__(self, size_bytes: int, folder: Path | None) -> None:
        self._readable: int | None = None
        try:
            if folder is not None:
                self._file = _unnamed_file(folder)
            elif hasattr(os, "memfd_create"):
                self._file = os.memfd_create("stoker-cluster", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            else:  # macOS
                self._file = _unnamed_file(Path(tempfile.gettempdir()))
            os.ftruncate(self._file, size_bytes)
            self._mapping = mmap.mmap(self._file, size_bytes)
        except OSError as error:
            where = "memory" if folder is None else str(folder)
            raise ConfigError(f"no cache of {size_bytes:,} bytes in {where}: {error}; lower limit=") from None
        with suppress(OSError):  # an older kernel, or macOS: clients then get copies
            if folder is None:
                fcntl.fcntl(self._file, _ADD_SEALS, _SEAL | _SHRINK | _GROW | _FUTURE_WRITE)
            self._readable = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        self.memory = memoryview(self._mapping)

    def reserve(self, offset: int, size_bytes: int) -> bool:
        """Have the system provide the pages of a range; return False if it cannot, where a write would be fatal."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, offset, size_bytes)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptors; the memory stays while something refers to it."""
        os.close(self._file)
        if self._readable is not None:
            os.close(self._readable)

    @property
    def readable(self) -> int | None:
        """Descriptor that clients map; None if they cannot."""
        return self._readable


def _unnamed_file(folder: Path) -> int:
    """Return a descriptor of a file that ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix="stoker-cluster-", dir=folder)
    Path(name).unlink()
    return descriptor


def map_arena(descriptor: int, size_bytes: int) -> memoryview:
    """Return the memory of an arena, for reading; the caller closes the descriptor.

    Raises:
        OSError: it cannot be mapped.
    """
    return memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))
