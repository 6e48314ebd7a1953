"""How often a sample or batch was asked for, how often it was not there, and how long that took."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self

from stoker_torch._cache_session import locked

__all__ = ["CacheStatistics", "LocalCounts", "LookUpCounts", "LookUpStatistics", "SharedCounts"]

Amounts = tuple[int, int, int, int]
"""Look-ups, misses, damaged entries, and nanoseconds of waiting."""

_ZERO: Amounts = (0, 0, 0, 0)
_ROW = struct.Struct("<4Q")


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


def _one(missed: bool, damaged: bool, wait_seconds: float) -> Amounts:
    return 1, int(missed), int(damaged), round(wait_seconds * 1e9)


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


class LocalCounts:
    """Counts of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts = _ZERO

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up."""
        with self._lock:
            self._amounts = _sum(self._amounts, _one(missed, damaged, wait_seconds))

    def read(self) -> Amounts:
        """Return what was counted so far."""
        return self._amounts


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
        self._last = _ZERO

    def create(self) -> None:
        """Make the file, with zeros."""
        self._path.write_bytes(_ROW.pack(*_ZERO))

    def add(self, *, missed: bool, damaged: bool, wait_seconds: float) -> None:
        """Count one look-up; when the file was removed, nobody counts any more."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            before: Amounts = _ROW.unpack(os.pread(file, _ROW.size, 0))
            os.pwrite(file, _ROW.pack(*_sum(before, _one(missed, damaged, wait_seconds))), 0)

    def read(self) -> Amounts:
        """Return what was counted so far; when the file was removed, what was read last."""
        with contextlib.suppress(FileNotFoundError), locked(self._path, os.O_RDWR) as file:
            self._last = _ROW.unpack(os.pread(file, _ROW.size, 0))
        return self._last
