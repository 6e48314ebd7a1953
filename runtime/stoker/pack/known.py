"""What a data set has already: raw objects, and runs that name none, whatever became of their super-samples since."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stoker.pack.record import SOURCE_BYTES, PackRecord, no_sources

__all__ = ["REMEMBERED_SECONDS", "Known", "remembered"]

REMEMBERED_SECONDS = 15 * 86_400
"""How long records name raw objects; a queue of Amazon keeps messages for 14 days at most, Google's for 7."""


def remembered(records: Iterable[PackRecord], now_seconds: float) -> NDArray[np.uint8]:
    """Return the names that the records of runs in the manifest still tell, ``uint8 [names, 16]``."""
    young = now_seconds - REMEMBERED_SECONDS
    return np.concatenate(
        [no_sources(), *(r.names for r in records if not r.is_committed or r.committed_seconds >= young)]
    )


class Known:
    """Names, of which there may be tens of millions: 16 bytes each, where a set of Python's takes a hundred.

    Args:
        names: ``uint8 [names, 16]``.
    """

    def __init__(self, names: NDArray[np.uint8]) -> None:
        self._sorted = np.sort(_texts(names))
        self._taken: set[bytes] = set()

    def has(self, names: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which of the names are known, ``bool [names]``."""
        wanted = _texts(names)
        if not len(self._sorted):
            return np.zeros(len(wanted), np.bool_)
        places = np.searchsorted(self._sorted, wanted)
        found: NDArray[np.bool_] = self._sorted[np.minimum(places, len(self._sorted) - 1)] == wanted
        return found

    def take(self, names: NDArray[np.uint8]) -> list[bool]:
        """Return which of the names were neither known nor taken before, and take them."""
        fresh = []
        for name, is_known in zip(map(bytes, names), self.has(names).tolist(), strict=True):
            fresh.append(not is_known and name not in self._taken)
            self._taken.add(name)
        return fresh


def _texts(names: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return the names as what numpy sorts: bytes of one length, so that zeros at an end make no difference."""
    return np.ascontiguousarray(names).view(f"S{SOURCE_BYTES}").reshape(-1)
