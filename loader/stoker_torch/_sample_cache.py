"""Caches of samples: what each can do and counts, and the one in the memory of one process, first in, first out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import torch

from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError, SampleError, StokerError

__all__ = [
    "Amounts",
    "CacheStatistics",
    "DamagedEntryError",
    "LocalCounts",
    "LookUpCounts",
    "LookUpStatistics",
    "MemoryCache",
    "NO_LOOK_UPS",
    "SampleCache",
    "add_look_up",
    "held_bytes",
]

Amounts = tuple[int, int, int, int]
"""Look-ups, misses, damaged entries, and nanoseconds of waiting."""

NO_LOOK_UPS: Amounts = (0, 0, 0, 0)


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


class LookUpCounts(Protocol):
    """Adds up look-ups, from whatever threads and processes make them."""

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up."""
        ...

    def read(self) -> Amounts:
        """Return what was counted so far."""
        ...


def add_look_up(amounts: Amounts, missed: bool, damaged: bool, wait_seconds: float) -> Amounts:
    """Return amounts with one look-up more."""
    look_ups, misses, damages, waited_ns = amounts
    return look_ups + 1, misses + missed, damages + damaged, waited_ns + round(wait_seconds * 1e9)


class LocalCounts:
    """Counts of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts = NO_LOOK_UPS

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up."""
        with self._lock:
            self._amounts = add_look_up(self._amounts, missed, damaged, wait_seconds)

    def read(self) -> Amounts:
        """Return what was counted so far."""
        return self._amounts


class DamagedEntryError(KeyError):
    """What a cache has for an index is not what was put there. To a reader, the sample is not in the cache."""


class SampleCache(Protocol):
    """A capped collection of samples, first in, first out, for the length of one run.

    What is read is what was put. All methods may be called from any thread; which of them from other processes, each
    cache says.
    """

    @property
    def samples(self) -> int:
        """How many samples it holds at most."""
        ...

    @property
    def counts(self) -> LookUpCounts:
        """Where the look-ups of all processes that share the cache are added up."""
        ...

    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: it is not in the cache; :class:`DamagedEntryError`, if it should be.
        """
        ...

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache; with ``renew``, it then becomes the one that came in last."""
        ...

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample that is not there yet, in place of those that came in first if there is no room.

        Returns:
            Whether it is in the cache; it is not if it alone would be too much.

        Raises:
            SampleError: the cache cannot hold samples of such a type.
            OSError: it cannot be written.
        """
        ...

    def close(self) -> None:
        """Forget all samples; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


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


class MemoryCache:
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
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes)
        if samples < 1 or self._max_bytes == 0:
            raise ConfigError(f"a MemoryCache needs room for a sample, not samples={samples}, max_bytes={max_bytes}")
        self._capacity = samples
        self._size_of = size_of
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Any, int]] = {}
        self._bytes = 0
        self._pid = os.getpid()
        self._is_closed = False
        self.counts = LocalCounts()

    @property
    def samples(self) -> int:
        """How many samples it holds at most."""
        return self._capacity

    def get(self, index: int) -> Any:
        """Return a sample.

        Raises:
            KeyError: it is not in the cache.
            ConfigError: this is another process than the one that fills the cache.
        """
        if self._pid != os.getpid():
            self._refuse()
        with self._lock:
            return self._held[index][0]

    def holds(self, index: int, *, renew: bool) -> bool:
        """Return whether a sample is in the cache; with ``renew``, it then becomes the one that came in last."""
        with self._lock:
            if renew and index in self._held:
                self._held[index] = self._held.pop(index)
            return index in self._held

    def put(self, index: int, sample: Any) -> bool:
        """Add a sample that is not there yet, in place of those that came in first if there is no room.

        Returns:
            Whether it is in the cache; it is not if it alone takes more than ``max_bytes``.

        Raises:
            SampleError: there is a ``max_bytes``, and the sample does not tell its size.
            StokerError: the cache is closed.
        """
        size_bytes = 0 if self._max_bytes is None else self._size_of(sample)
        if self._max_bytes is not None and size_bytes > self._max_bytes:
            return False
        with self._lock:
            if self._is_closed:
                raise StokerError("the MemoryCache is closed")
            if index not in self._held:
                while self._held and (len(self._held) >= self._capacity or self._is_over(size_bytes)):
                    _, freed_bytes = self._held.pop(next(iter(self._held)))
                    self._bytes -= freed_bytes
                self._held[index] = sample, size_bytes
                self._bytes += size_bytes
        return True

    def close(self) -> None:
        """Forget all samples; idempotent."""
        with self._lock:
            self._is_closed = True
            self._held.clear()
            self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<MemoryCache {len(self._held)} of {self._capacity} samples>"

    def __reduce__(self) -> NoReturn:
        self._refuse()

    def _is_over(self, size_bytes: int) -> bool:
        return self._max_bytes is not None and self._bytes + size_bytes > self._max_bytes

    @staticmethod
    def _refuse() -> NoReturn:
        raise ConfigError("a MemoryCache is seen by its own process only: use num_workers=0, or a DiskCache")
