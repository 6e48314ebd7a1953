"""First-in, first-out caches of samples: the base class, its statistics, and the cache in one process's memory."""

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

from stoker._base.arguments import explain_arguments
from stoker._base.closeable import Closeable
from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError, SampleError, StokerError

LookupAmounts = tuple[int, int, int, int]
"""Look-ups, misses, damaged entries, and nanoseconds of waiting."""

_NO_LOOKUPS: LookupAmounts = (0, 0, 0, 0)
_AMOUNTS = struct.Struct("<4Q")
"""Amounts in a file."""


@explain_arguments("LookupStatistics", renamed={"look_ups": "lookups"})
@dataclass(frozen=True, slots=True, kw_only=True)
class LookupStatistics:
    """Counts since construction; the difference of two has the counts between them, for example of an epoch.

    Attributes:
        lookups: number of samples or batches that training looked up.
        misses: number of look-ups that did not find the sample or batch.
        wait_seconds: total time of all look-ups, added up over worker processes.
    """

    lookups: int
    misses: int
    wait_seconds: float

    @property
    def miss_rate(self) -> float:
        """Misses per look-up, 0 to 1."""
        return self.misses / self.lookups if self.lookups else 0.0

    def __sub__(self, earlier: Self) -> Self:
        """Return the counts since ``earlier``."""
        return type(self)(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


@explain_arguments("CacheStatistics", renamed={"look_ups": "lookups"})
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics(LookupStatistics):
    """Counts of a :class:`~stoker_torch.CachedDataset` and of the service that fills its cache.

    Attributes:
        lookups: number of samples that training looked up.
        misses: number of look-ups that did not find the sample.
        wait_seconds: total time of all look-ups, added up over worker processes.
        damaged: number of misses whose entry was found and did not match its checksum.
        fetches: number of requests to the service, each with several indices.
        fetched: number of samples that the service read and put into the cache.
        already_cached: number of requested indices whose sample was cached or being fetched already.
        failures: number of samples that the service could not read or cache; training reads them itself.

    Example:
        >>> dataset = CachedDataset(images, MemoryCache(10_000))
        >>> before = dataset.stats()
        >>> image, label = dataset[0]
        >>> f"{(dataset.stats() - before).miss_rate:.1%} of the samples were not cached"
        '100.0% of the samples were not cached'
    """

    damaged: int
    fetches: int
    fetched: int
    already_cached: int
    failures: int


def _add_lookup(amounts: LookupAmounts, missed: bool, damaged: bool, wait_seconds: float) -> LookupAmounts:
    lookups, misses, damages, waited_ns = amounts
    return lookups + 1, misses + missed, damages + damaged, waited_ns + round(wait_seconds * 1e9)


class LookupCounts:
    """Adds up the look-ups of all threads of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts = _NO_LOOKUPS

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up."""
        with self._lock:
            self._amounts = _add_lookup(self._amounts, missed, damaged, wait_seconds)

    def read(self) -> LookupAmounts:
        """Return the counts so far."""
        return self._amounts


@contextlib.contextmanager
def lock_path(path: Path, flags: int = os.O_RDONLY, *, wait: bool = True) -> Iterator[int]:
    """Open a file or folder and hold its exclusive lock (``flock``), also against other openings in this process.

    Raises:
        BlockingIOError: the lock is held elsewhere, and ``wait`` is off.
        OSError: the path cannot be opened or locked.
    """
    opening = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(opening, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield opening
        finally:
            fcntl.flock(opening, fcntl.LOCK_UN)  # a child forked meanwhile shares the descriptor, and so the lock
    finally:
        os.close(opening)


class SharedCounts:
    """Adds up look-ups in a file, for all processes that know its path.

    The file is opened and locked for each addition (some 20 µs). So a forked child inherits no lock, a killed process
    leaves none, and all copies of this object, in any process, are equivalent.

    Args:
        path: path of the file, which is created with zeros.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, _NO_LOOKUPS
        path.write_bytes(_AMOUNTS.pack(*_NO_LOOKUPS))

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up; no effect after the file was removed."""
        with contextlib.suppress(FileNotFoundError), lock_path(self._path, os.O_RDWR) as file:
            before: LookupAmounts = _AMOUNTS.unpack(os.pread(file, _AMOUNTS.size, 0))
            os.pwrite(file, _AMOUNTS.pack(*_add_lookup(before, missed, damaged, wait_seconds)), 0)

    def read(self) -> LookupAmounts:
        """Return the counts so far; after the file was removed, those that were read last."""
        with contextlib.suppress(FileNotFoundError), lock_path(self._path, os.O_RDWR) as file:
            self._last = _AMOUNTS.unpack(os.pread(file, _AMOUNTS.size, 0))
        return self._last


class DamagedEntryError(KeyError):
    """The cache's entry of an index is not the one that was written; for a reader, the sample is not cached."""


class SampleCache(Closeable):
    """A bounded collection of samples with first-in, first-out eviction, for one run.

    All methods may be called from any thread; each subclass says which may be called from other processes. One entry
    is written at a time. There are two locks, so that a look-up does not wait for a disk: ``_write_lock`` is held
    during a write, ``_index_lock`` only for changes of the index, also inside the other.

    Args:
        samples: maximum number of samples.
        max_bytes: maximum size of all samples, a number or text like ``"20GB"``; None for no limit.

    Raises:
        ConfigError: a limit is not positive.

    Attributes:
        samples: maximum number of samples.
        counts: look-up counts of all processes that share the cache.
    """

    counts: LookupCounts | SharedCounts

    def __init__(self, samples: int, max_bytes: int | str | None) -> None:
        self.samples, self._max_bytes = samples, None if max_bytes is None else parse_bytes(max_bytes)
        if samples < 1 or self._max_bytes == 0:
            name = type(self).__name__
            raise ConfigError(f"a {name} needs room for a sample, not samples={samples}, max_bytes={max_bytes}")
        self._write_lock, self._index_lock = threading.Lock(), threading.Lock()
        self._sizes: dict[int, int] = {}
        self._total_bytes = 0
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process made the cache; in a forked child's copy, locks may be held for ever."""
        return self._pid == os.getpid()

    @abstractmethod
    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: the sample is not in the cache; :class:`DamagedEntryError` if its entry is damaged.
        """

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache.

        Args:
            index: index of the sample.
            renew: whether to move the sample to the end of the eviction queue.

        Raises:
            StokerError: this process does not fill the cache.
        """
        self._check_own()
        with self._index_lock:
            if renew and index in self._sizes:
                self._sizes[index] = self._sizes.pop(index)
            return index in self._sizes

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample unless it is cached already; if there is no room, evict the oldest samples.

        Args:
            index: index of the sample.
            sample: the sample.

        Returns:
            Whether the sample is in the cache; it is not if it alone is larger than ``max_bytes``.

        Raises:
            SampleError: the cache cannot hold samples of this type.
            OSError: the sample cannot be written, or another cannot be removed.
            StokerError: the cache is closed, or this process does not fill it.
        """
        self._check_own()
        entry, size_bytes = self._encode_entry(index, sample)
        if self._max_bytes is not None and size_bytes > self._max_bytes:
            return False
        with self._write_lock:
            if self._is_closed:
                raise StokerError(f"the {type(self).__name__} is closed")
            if index not in self._sizes:
                while self._is_full(size_bytes):
                    self._evict()
                self._write(index, entry)
                self._add_size(index, size_bytes)
        return True

    def close(self) -> None:
        """Remove all samples and accept no more. Idempotent."""
        if self.is_own:
            with self._write_lock, self._index_lock:
                self._is_closed = True
                self._sizes.clear()

    def __len__(self) -> int:
        self._check_own()
        return len(self._sizes)

    def _is_full(self, size_bytes: int) -> bool:
        is_over = self._max_bytes is not None and self._total_bytes + size_bytes > self._max_bytes
        return bool(self._sizes) and (len(self._sizes) >= self.samples or is_over)

    def _evict(self) -> None:
        with self._index_lock:
            oldest = next(iter(self._sizes))
            size_bytes = self._sizes.pop(oldest)
            self._total_bytes -= size_bytes
        try:
            self._remove(oldest)
        except OSError:
            self._add_size(oldest, size_bytes)  # it still uses space
            raise

    def _add_size(self, index: int, size_bytes: int) -> None:
        with self._index_lock:
            self._sizes[index] = size_bytes
            self._total_bytes += size_bytes

    @abstractmethod
    def _encode_entry(self, index: int, sample: Any) -> tuple[Any, int]:
        """Return the entry of a sample, as it is stored, and its size in bytes."""

    @abstractmethod
    def _write(self, index: int, entry: Any) -> None:
        """Store an entry."""

    @abstractmethod
    def _remove(self, index: int) -> None:
        """Delete an entry."""

    @abstractmethod
    def _check_own(self) -> None:
        """Raise an error if another process fills the cache."""


def sample_bytes(sample: Any) -> int:
    """Return the bytes of memory that a sample keeps alive; a view counts with the whole storage below it.

    Raises:
        SampleError: the sample contains a value of a type whose size is unknown.
    """
    if isinstance(sample, torch.Tensor):
        return sample.untyped_storage().nbytes()
    if isinstance(sample, np.ndarray):
        return sample_bytes(sample.base) if isinstance(sample.base, np.ndarray) else sample.nbytes
    if isinstance(sample, dict):
        return sys.getsizeof(sample) + sum(sample_bytes(key) + sample_bytes(value) for key, value in sample.items())
    if isinstance(sample, list | tuple):
        return sys.getsizeof(sample) + sum(map(sample_bytes, sample))
    if sample is None or isinstance(sample, bool | int | float | complex | str | bytes | bytearray | np.generic):
        return sys.getsizeof(sample)
    kind = type(sample)
    raise SampleError(
        f"MemoryCache cannot tell how large a {kind.__module__}.{kind.__qualname__} is; give size_of= with max_bytes="
    )


class MemoryCache(SampleCache):
    """A bounded cache of samples in memory, for a ``DataLoader`` with ``num_workers=0``.

    It returns the cached objects themselves: copy a sample before you change it in place.

    Args:
        samples: maximum number of samples.
        max_bytes: maximum memory of all samples, a number or ``"512MB"``; default no limit.
        size_of: function of a sample that returns its size in bytes, for ``max_bytes``; default :func:`sample_bytes`.

    Raises:
        ConfigError: a limit is not positive.

    Example:
        >>> dataset = CachedDataset(images, MemoryCache(10_000, max_bytes="2GB"))
        >>> image, label = dataset[0]
    """

    def __init__(
        self, samples: int, *, max_bytes: int | str | None = None, size_of: Callable[[Any], int] = sample_bytes
    ) -> None:
        super().__init__(samples, max_bytes)
        self._size_of = size_of
        self._samples_by_index: dict[int, Any] = {}
        self.counts = LookupCounts()

    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: the sample is not in the cache.
            ConfigError: another process fills the cache.
        """
        self._check_own()
        return self._samples_by_index[index]

    def close(self) -> None:
        """Remove all samples and accept no more. Idempotent."""
        super().close()
        self._samples_by_index.clear()

    def __repr__(self) -> str:
        return f"<MemoryCache {len(self._samples_by_index)} of {self.samples} samples>"

    def __reduce__(self) -> NoReturn:
        raise ConfigError(_ONE_PROCESS_MESSAGE)

    def _encode_entry(self, index: int, sample: Any) -> tuple[Any, int]:
        return sample, 0 if self._max_bytes is None else self._size_of(sample)

    def _write(self, index: int, entry: Any) -> None:
        self._samples_by_index[index] = entry

    def _remove(self, index: int) -> None:
        del self._samples_by_index[index]

    def _check_own(self) -> None:
        if not self.is_own:
            raise ConfigError(_ONE_PROCESS_MESSAGE)


_ONE_PROCESS_MESSAGE = "a MemoryCache is visible only in the process that made it: use num_workers=0, or a DiskCache"
