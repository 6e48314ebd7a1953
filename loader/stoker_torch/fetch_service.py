"""The service that reads samples into a cache ahead of training, as DELI's pre-fetching service does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from stoker.errors import SampleError, StokerError
from stoker_torch.crew import Executor
from stoker_torch.sample_cache import SampleCache

__all__ = ["FetchCounts", "FetchService", "Visible"]

_log = logging.getLogger("stoker")

Visible = Literal["each", "together"]
"""When a sample can be seen: as soon as it is read, or when all of its fetch are, as in the paper."""


@dataclass(slots=True)
class FetchCounts:
    """What a service has done.

    Attributes:
        fetches: requests.
        fetched: samples that it put into the cache.
        already_cached: indices that it dropped because their sample was there, or on its way.
        failures: samples that it could not read or put.
    """

    fetches: int = 0
    fetched: int = 0
    already_cached: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Fetch:
    """A request whose samples become visible together, in the order they were asked for."""

    indices: list[int]
    read: dict[int, Any] = field(default_factory=dict)
    ended: int = 0


class FetchService:
    """Reads samples from a data set into a cache, in the background, and answers at once.

    N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-C.

    A sample that cannot be read is not cached: training has a miss, reads it itself, and gets the error.

    Args:
        dataset: map-style; read from the executor's threads.
        cache: where the samples go.
        executor: does the reading.
        visible: ``"each"`` sample as soon as it is read, or those of a fetch ``"together"``.
        renew: whether an index that is asked for and cached becomes the last to be evicted, and not the next.
    """

    def __init__(
        self, dataset: Any, cache: SampleCache, executor: Executor, *, visible: Visible = "each", renew: bool = True
    ) -> None:
        self._dataset, self._cache, self._executor = dataset, cache, executor
        self._visible, self._renew = visible, renew
        self._lock = threading.RLock()  # the collector may end a sampler's iteration, and so call forget, anywhere
        self._pid = os.getpid()
        self._wanted: set[int] = set()
        self._refusal: SampleError | None = None
        self._has_warned = self._is_closed = False
        self.counts = FetchCounts()

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read the samples that are neither cached nor on their way.

        Raises:
            StokerError: as :meth:`check`.
        """
        self.check()
        missing = []
        with self._lock:
            self.counts.fetches += 1
            for index in indices:
                if index in self._wanted or self._cache.holds(index, renew=self._renew):
                    self.counts.already_cached += 1
                else:
                    self._wanted.add(index)
                    missing.append(index)
        fetch = _Fetch(missing) if self._visible == "together" else None
        for index in missing:
            self._executor.submit(partial(self._work, index, fetch))

    def check(self) -> None:
        """Do nothing, as long as fetching has a point.

        Raises:
            SampleError: a sample was of a type that the cache cannot hold.
            StokerError: the service is closed.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._is_closed:
            raise StokerError("the CachedDataset is closed; it fetches nothing for a sampler any more")

    def forget(self, indices: Iterable[int]) -> None:
        """Do not begin to read samples that were asked for and are not needed any more."""
        if self._pid == os.getpid():  # a forked child may collect its copy of an iteration, with a lock held for ever
            with self._lock:
                self._wanted.difference_update(indices)

    def close(self) -> None:
        """Drop what is not begun, and return when what is has ended."""
        self._is_closed = True
        self._executor.close()

    def _work(self, index: int, fetch: _Fetch | None) -> None:
        """Read one sample, and put into the cache what becomes visible with it."""
        read = {}
        try:
            if index in self._wanted:
                read[index] = self._dataset[index]
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: training reads it again, and gets the error
            self._note_failure(index, error)
        if fetch is not None:
            with self._lock:
                fetch.read |= read
                fetch.ended += 1
                is_last = fetch.ended == len(fetch.indices)
            read = {each: fetch.read[each] for each in fetch.indices if each in fetch.read} if is_last else {}
        for each, sample in read.items():
            self._put(each, sample)

    def _put(self, index: int, sample: Any) -> None:
        try:
            is_cached = self._cache.put(index, sample)
        except Exception as error:  # noqa: BLE001 - a task boundary: the cache is full or closed, training goes on
            if isinstance(error, SampleError):
                self._refusal = error
            self._note_failure(index, error)
            return
        with self._lock:
            self._wanted.discard(index)
            self.counts.fetched += is_cached
            self.counts.failures += not is_cached

    def _note_failure(self, index: int, error: BaseException) -> None:
        with self._lock:
            self._wanted.discard(index)
            self.counts.failures += 1
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning("sample %d could not be fetched ahead, training will read it: %r", index, error)
