"""Samples in the memory of one process, first in, first out."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, Self

import numpy as np
import torch

from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch._look_ups import LocalCounts

__all__ = ["MemoryCache", "held_bytes"]


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
