"""Caches of samples, first in, first out: what each can do and counts, and the one in the memory of one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch

from stoker._base.closing import Closing
from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError, SampleError, StokerError

Amounts = tuple[int, int, int, int]
"""Look-ups, misses, damaged entries, and nanoseconds of waiting."""

_NO_LOOK_UPS: Amounts = (0, 0, 0, 0)
_ROW = struct.Struct("<4Q")
"""Amounts in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpStatistics:
    """Counts since the beginning; the difference of two is what happened between them (an epoch, say).

    Attributes:
        look_ups: how often training asked for a sample or batch.
        misses: how often it was not there.
        wait_seconds: all time between asking and having, added up over worker processes.
    """

    look_ups: int
    misses: int
    wait_seconds: float

    @property
    def miss_rate(self) -> float:
        """Misses per look-up, 0 to 1."""
        return self.misses / self.look_ups if self.look_ups else 0.0

    def __sub__(self, earlier: Self) -> Self:
        """Return what was counted since ``earlier``."""
        return type(self)(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics(LookUpStatistics):
    """What a cached data set and the service that fills its cache have counted.

    Attributes:
        damaged: misses whose entry was there and was not what had been written.
        fetches: how often the service was given indices to fetch.
        fetched: samples that it read and put into the cache.
        already_cached: indices that it dropped because their sample was in the cache, or on its way there.
        failures: samples that it could not read or put into the cache; training reads them itself.
    """

    damaged: int
    fetches: int
    fetched: int
    already_cached: int
    failures: int


def _with_look_up(amounts: Amounts, missed: bool, damaged: bool, wait_seconds: float) -> Amounts:
    look_ups, misses, damages, waited_ns = amounts
    return look_ups + 1, misses + missed, damages + damaged, waited_ns + round(wait_seconds * 1e9)


class LookUpCounts:
    """Adds up the look-ups of one process, from whatever threads make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts = _NO_LOOK_UPS

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up."""
        with self._lock:
            self._amounts = _with_look_up(self._amounts, missed, damaged, wait_seconds)

    def read(self) -> Amounts:
        """Return what was counted so far."""
        return self._amounts


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


class SharedCounts:
    """Counts of all processes that know the path of the file they are in.

    The file is opened and locked for each addition (some 20 µs). So there is nothing that a forked child could inherit
    in a bad state, a process that is killed leaves no lock, and any copy of this object, in any process, is as good as
    another.

    Args:
        path: of the file, which is made with zeros.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, _NO_LOOK_UPS
        path.write_bytes(_ROW.pack(*_NO_LOOK_UPS))

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up; when the file was removed, nobody counts any more."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            before: Amounts = _ROW.unpack(os.pread(file, _ROW.size, 0))
            os.pwrite(file, _ROW.pack(*_with_look_up(before, missed, damaged, wait_seconds)), 0)

    def read(self) -> Amounts:
        """Return what was counted so far; when the file was removed, what was read last."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            self._last = _ROW.unpack(os.pread(file, _ROW.size, 0))
        return self._last


class DamagedEntryError(KeyError):
    """What a cache has for an index is not what was put there. To a reader, the sample is not in the cache."""


class SampleCache(Closing):
    """A capped collection of samples, first in, first out, for the length of one run.

    What is read is what was put. All methods may be called from any thread; which of them from other processes, each
    cache says. One entry is written at a time. There are two locks, so that who asks what is there does not wait for a
    disk: ``_writing`` is held during a write, ``_looking`` for a moment, also within the other.

    Args:
        samples: how many are held at most.
        max_bytes: what they may take, a number or text; None for any.

    Raises:
        ConfigError: a limit is not positive.

    Attributes:
        samples: how many it holds at most.
        counts: where the look-ups of all processes that share the cache are added up.
    """

    counts: LookUpCounts | SharedCounts

    def __init__(self, samples: int, max_bytes: int | str | None) -> None:
        self.samples, self._max_bytes = samples, None if max_bytes is None else parse_bytes(max_bytes)
        if samples < 1 or self._max_bytes == 0:
            name = type(self).__name__
            raise ConfigError(f"a {name} needs room for a sample, not samples={samples}, max_bytes={max_bytes}")
        self._writing, self._looking = threading.Lock(), threading.Lock()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this is not a copy: a forked child's has locks that may be held for ever."""
        return self._pid == os.getpid()

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: it is not in the cache; :class:`DamagedEntryError`, if it should be.
        """

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache; with ``renew``, it then becomes the one that came in last.

        Raises:
            StokerError: this process does not fill the cache.
        """
        self._check_own()
        with self._looking:
            if renew and index in self._sizes:
                self._sizes[index] = self._sizes.pop(index)
            return index in self._sizes

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample that is not there yet, in place of those that came in first if there is no room.

        Returns:
            Whether it is in the cache; it is not if it alone takes more than ``max_bytes``.

        Raises:
            SampleError: the cache cannot hold samples of such a type.
            OSError: it cannot be written, or another cannot be removed.
            StokerError: the cache is closed, or this process does not fill it.
        """
        self._check_own()
        entry, size_bytes = self._entry(index, sample)
        if self._max_bytes is not None and size_bytes > self._max_bytes:
            return False
        with self._writing:
            if self._is_closed:
                raise StokerError(f"the {type(self).__name__} is closed")
            if index not in self._sizes:
                while self._is_full(size_bytes):
                    self._evict()
                self._write(index, entry)
                self._note(index, size_bytes)
        return True

    def close(self) -> None:
        """Forget all samples, and take no more; idempotent."""
        if self.is_own:
            with self._writing, self._looking:
                self._is_closed = True
                self._sizes.clear()

    def __len__(self) -> int:
        self._check_own()
        return len(self._sizes)

    def _is_full(self, size_bytes: int) -> bool:
        is_over = self._max_bytes is not None and self._bytes + size_bytes > self._max_bytes
        return bool(self._sizes) and (len(self._sizes) >= self.samples or is_over)

    def _evict(self) -> None:
        with self._looking:
            oldest = next(iter(self._sizes))
            size_bytes = self._sizes.pop(oldest)
            self._bytes -= size_bytes
        try:
            self._remove(oldest)
        except OSError:
            self._note(oldest, size_bytes)  # it still takes its room
            raise

    def _note(self, index: int, size_bytes: int) -> None:
        with self._looking:
            self._sizes[index] = size_bytes
            self._bytes += size_bytes

    @abstractmethod
    def _entry(self, index: int, sample: Any) -> tuple[Any, int]:
        """Return what is held of a sample, and its size in bytes."""

    @abstractmethod
    def _write(self, index: int, entry: Any) -> None:
        """Hold an entry."""

    @abstractmethod
    def _remove(self, index: int) -> None:
        """Hold an entry no more."""

    @abstractmethod
    def _check_own(self) -> None:
        """Raise an error that says which process fills the cache, if it is another one."""


def held_bytes(sample: Any) -> int:
    """Return how much memory a sample keeps: the whole storage of tensors and arrays, even if they are views of it.

    Raises:
        SampleError: there is something in it that does not tell its size.
    """
    if isinstance(sample, torch.Tensor):
        return sample.untyped_storage().nbytes()
    if isinstance(sample, np.ndarray):
        return held_bytes(sample.base) if isinstance(sample.base, np.ndarray) else sample.nbytes
    if isinstance(sample, dict):
        return sys.getsizeof(sample) + sum(held_bytes(key) + held_bytes(value) for key, value in sample.items())
    if isinstance(sample, list | tuple):
        return sys.getsizeof(sample) + sum(map(held_bytes, sample))
    if sample is None or isinstance(sample, bool | int | float | complex | str | bytes | bytearray | np.generic):
        return sys.getsizeof(sample)
    kind = type(sample)
    raise SampleError(
        f"MemoryCache cannot tell how large a {kind.__module__}.{kind.__qualname__} is; give size_of= with max_bytes="
    )


class MemoryCache(SampleCache):
    """A capped collection in memory, for a ``DataLoader`` with ``num_workers=0``.

    It gives out the very objects that were put: who writes to a sample in place has to copy it first.

    Args:
        samples: how many it holds at most.
        max_bytes: how much memory they may take, a number or ``"512MB"``; default any.
        size_of: function of a sample that returns its size in bytes, for ``max_bytes``; default :func:`held_bytes`.

    Raises:
        ConfigError: a limit is not positive.
    """

    def __init__(
        self, samples: int, *, max_bytes: int | str | None = None, size_of: Callable[[Any], int] = held_bytes
    ) -> None:
        super().__init__(samples, max_bytes)
        self._size_of = size_of
        self._held: dict[int, Any] = {}
        self.counts = LookUpCounts()

    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: it is not in the cache.
            ConfigError: this is another process than the one that fills the cache.
        """
        self._check_own()
        return self._held[index]

    def close(self) -> None:
        """Forget all samples, and take no more; idempotent."""
        super().close()
        self._held.clear()

    def __repr__(self) -> str:
        return f"<MemoryCache {len(self._held)} of {self.samples} samples>"

    def __reduce__(self) -> NoReturn:
        raise ConfigError(_OF_ONE_PROCESS)

    def _entry(self, index: int, sample: Any) -> tuple[Any, int]:
        return sample, 0 if self._max_bytes is None else self._size_of(sample)

    def _write(self, index: int, entry: Any) -> None:
        self._held[index] = entry

    def _remove(self, index: int) -> None:
        del self._held[index]

    def _check_own(self) -> None:
        if not self.is_own:
            raise ConfigError(_OF_ONE_PROCESS)


_OF_ONE_PROCESS = "a MemoryCache is seen by its own process only: use num_workers=0, or a DiskCache"
