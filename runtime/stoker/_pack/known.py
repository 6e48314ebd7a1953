"""What a data set has already: raw objects, and runs that name none, whatever became of their super-samples since."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stoker._format.manifest import Manifest
from stoker._pack.record import SOURCE_BYTES, PackRecord, no_sources

__all__ = ["REMEMBERED_SECONDS", "Known", "Memory", "remembered"]

_log = logging.getLogger("stoker.pack.known")

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


class Memory:
    """What the records of committed runs remember.

    Args:
        records: of all runs.
        now_seconds: of the Unix epoch.
    """

    def __init__(self, records: Iterable[PackRecord], now_seconds: float) -> None:
        self._now_seconds = now_seconds
        self._committed = {record.run: record for record in records if record.is_committed}

    @cached_property
    def known(self) -> Known:
        """All of it: millions of names, which are sorted only where something waits for a commit."""
        return Known(remembered(self._committed.values(), self._now_seconds))

    def left_by(self, record: PackRecord, left: Manifest) -> Manifest | None:
        """Return what is left of a manifest when a compaction takes the place of its rows.

        None where some of them are not there, or where it would be the end of a run whose names it does not hand on:
        when the compaction began there was more of that run, and that went to another. Nor is a finished one believed
        that does not have as many samples as those rows.
        """
        rest = left.without(record.replaces)
        if len(rest) != len(left) - sum(run.rows for run in record.replaces):
            return None
        if record.state != "packing" and record.samples != left.samples - rest.samples:
            _log.warning("run %s has %d samples in place of others; leaving it out", record.run, record.samples)
            return None
        ended = {run.run for run in left.runs} - {run.run for run in rest.runs}
        names = remembered((self._committed[run] for run in ended if run in self._committed), self._now_seconds)
        return rest if Known(record.sources).has(names).all() else None


def _texts(names: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return the names as what numpy sorts: bytes of one length, so that zeros at an end make no difference."""
    return np.ascontiguousarray(names).view(f"S{SOURCE_BYTES}").reshape(-1)
