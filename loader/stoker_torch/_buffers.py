"""Output buffers that are used again: only when nobody holds them, and the GPU has read what was copied from them.

A buffer is lent as an array whose tensors and views all keep it alive, so its reference count says whether a batch made
of it still exists. When it does not, copies to a GPU that were started from it may still run: an event recorded then,
behind them on their stream, must pass before the buffer is lent again.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["BufferPool", "can_pin_memory"]

_log = logging.getLogger("stoker")

_HELD_BY_POOL = 2
"""References to a buffer that nobody else holds: the pool's own, and getrefcount's argument."""
_LEAST_BYTES = 4096


@dataclass(slots=True)
class _Buffer:
    memory: NDArray[np.uint8]
    event: torch.cuda.Event | None = None


@dataclass(slots=True)
class BufferPool:
    """Buffers for gathered rows; one thread uses it.

    Attributes:
        pinned: whether they are page-locked.
        made: how many buffers were made; it stays small where batches are dropped in time.
    """

    pinned: bool = False
    made: int = 0
    _buffers: dict[int, list[_Buffer]] = field(default_factory=dict)

    def gather_rows(self, memory: memoryview, addresses: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Return rows as :func:`stoker._fetch.gather.gather_rows` does, in a buffer of the pool."""
        size_bytes = len(addresses) * row_bytes
        target = self._borrowed(size_bytes)[:size_bytes].reshape(len(addresses), row_bytes)
        starts = max(0, len(memory) - row_bytes + 1)
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        overlapping = everything.as_strided((starts, row_bytes), (1, 1))
        torch.index_select(overlapping, 0, torch.from_numpy(addresses), out=torch.from_numpy(target))
        return target

    def _borrowed(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return a free buffer of at least ``size_bytes``; sizes are powers of two, so that columns find theirs."""
        rounded_bytes = 1 << (max(size_bytes, _LEAST_BYTES) - 1).bit_length()
        buffers = self._buffers.setdefault(rounded_bytes, [])
        for buffer in buffers:
            if self._is_free(buffer):
                buffer.event = None
                return buffer.memory.view()
        self.made += 1
        buffers.append(_Buffer(_allocated(rounded_bytes, self.pinned)))
        return buffers[-1].memory.view()

    def _is_free(self, buffer: _Buffer) -> bool:
        if sys.getrefcount(buffer.memory) > _HELD_BY_POOL:
            return False
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if buffer.event is None:
                buffer.event = torch.cuda.Event()
                buffer.event.record()
            return bool(buffer.event.query())
        return True


def _allocated(size_bytes: int, pinned: bool) -> NDArray[Any]:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()


def can_pin_memory() -> bool:
    """Return whether there is a GPU to page-lock memory for; warns where there is none, as torch's own loader does."""
    if not torch.cuda.is_available():
        _log.warning("pin_memory has no effect: there is no CUDA device")
        return False
    return True
