"""A map-style data set behind a cache, and the service that fills the cache ahead of training, as DELI's does."""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, get_args

from torch.utils.data import Dataset, IterableDataset

from stoker._base.arguments import explain_arguments
from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch._sample_cache import CacheStatistics, DamagedEntryError, SampleCache
from stoker_torch._user_functions import Crew, Executor

__all__ = ["CachedDataset"]

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
        visible: when samples can be seen, as :class:`CachedDataset` says.
        renew: what becomes of an index that is cached already, likewise.
        drop_late: what becomes of a sample that training misses first, likewise.
    """

    def __init__(
        self, dataset: Any, cache: SampleCache, executor: Executor, *, visible: Visible, renew: bool, drop_late: bool
    ) -> None:
        self._dataset, self._cache, self._executor = dataset, cache, executor
        self._visible, self._renew, self._drop_late = visible, renew, drop_late
        self._lock = threading.RLock()  # the collector may end a sampler's iteration, and so call forget, anywhere
        self._pid = os.getpid()
        self._wanted: set[int] = set()
        self._being_read: set[int] = set()
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

    def note_miss(self, index: int) -> None:
        """Take note that training reads a sample itself."""
        if self._drop_late:
            self.forget((index,))

    def forget(self, indices: Iterable[int]) -> None:
        """Do not begin to read samples that were asked for and are not needed any more."""
        if self._pid == os.getpid():  # a forked child may collect its copy of an iteration, with a lock held for ever
            with self._lock:
                self._wanted.difference_update(indices)

    def close(self) -> None:
        """Drop what is not begun, and wait a while for what is."""
        self._is_closed = True
        if self._executor.close() is False:
            stuck = ", ".join(map(str, sorted(self._being_read)))
            _log.warning("threads are left behind: the data set has not returned sample %s", stuck)

    def _work(self, index: int, fetch: _Fetch | None) -> None:
        """Read one sample, and put into the cache what becomes visible with it."""
        read = {}
        try:
            if index in self._wanted:
                self._being_read.add(index)
                read[index] = self._dataset[index]
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: training reads it again, and gets the error
            self._note_failure(index, type(error).__name__)  # only that: its text may have a signed URL in it
        finally:
            self._being_read.discard(index)
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
            self._note_failure(index, str(error))
            return
        if not is_cached:
            self._note_failure(index, "it alone is more than the cache may take")
            return
        with self._lock:
            self._wanted.discard(index)
            self.counts.fetched += 1

    def _note_failure(self, index: int, reason: str) -> None:
        """Count a failure, and log the first."""
        with self._lock:
            self._wanted.discard(index)
            self.counts.failures += 1
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning("sample %d could not be fetched ahead, and training will read it: %s", index, reason)


@explain_arguments("CachedDataset")
class CachedDataset(Dataset[Any]):
    """Gives a sample from the cache if it is there, else (a miss) from the data set; a miss adds nothing to the cache.

    What fills the cache is a :class:`~stoker_torch.PrefetchSampler`, through :attr:`service`: threads of this process
    that read ``dataset[index]``, so the data set must allow that. With a :class:`~stoker_torch.DiskCache` it works in
    the worker processes of a ``DataLoader``, however they are started; they look up, and this process fetches. Where
    they are forked, a data set that holds connections or locks must make its own in each process, as always.

    Args:
        dataset: map-style, any type of sample that the cache can hold.
        cache: a :class:`~stoker_torch.MemoryCache` or :class:`~stoker_torch.DiskCache`; not closed with this.
        threads: number of samples that are read at a time.
        visible: ``"each"`` fetched sample can be seen as soon as it is read, or those of one fetch ``"together"`` when
            the slowest is, as in the paper.
        renew: whether an index to be fetched that is cached already becomes the last to be evicted, so that it is
            still there when it is used; False keeps its place, as in the paper.
        drop_late: whether a sample whose turn to be read has not come when training misses it is not read any more,
            for training does that; so a service that has fallen behind catches up. It cannot know what is missed in
            other processes. False reads it all the same, as in the paper.
        clock: function that returns seconds, for :attr:`CacheStatistics.wait_seconds`.
        executor: does the fetching, in place of threads.

    Raises:
        ConfigError: the data set is not map-style, or a setting is none.
    """

    def __init__(
        self,
        dataset: Any,
        cache: SampleCache,
        *,
        threads: int = 16,
        visible: Visible = "each",
        renew: bool = True,
        drop_late: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        executor: Executor | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"a {type(dataset).__qualname__} has no samples to ask for by index")
        if threads < 1 or visible not in get_args(Visible):
            raise ConfigError(f"threads must be at least 1 and visible each or together, not {threads} and {visible!r}")
        self.dataset = dataset
        self.cache = cache
        self._clock = clock
        self._pid = os.getpid()
        reading = executor or Crew(threads, "stoker-fetch")
        service = FetchService(dataset, cache, reading, visible=visible, renew=renew, drop_late=drop_late)
        self._service: FetchService | None = service
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(self, _close, service, self._pid)

    @property
    def service(self) -> FetchService:
        """What fetches samples into the cache.

        Raises:
            ConfigError: this is another process than the one that fetches.
        """
        if self._service is None or self._pid != os.getpid():
            raise ConfigError("a CachedDataset fetches in the process that made it: make sampler and data set there")
        return self._service

    def __getitem__(self, index: int) -> Any:
        """Return a sample, from the cache or the data set.

        Raises:
            Exception: what the data set raises.
        """
        asked = self._clock()
        missed = damaged = False
        try:
            try:
                return self.cache.get(operator.index(index))
            except KeyError as error:
                missed, damaged = True, isinstance(error, DamagedEntryError)
            if self._service is not None:
                self._service.note_miss(operator.index(index))
            return self.dataset[index]
        finally:
            self.cache.counts.add(missed=missed, damaged=damaged, wait_seconds=self._clock() - asked)

    def __len__(self) -> int:
        return len(self.dataset)

    def stats(self) -> CacheStatistics:
        """Return what was counted so far; look-ups of all processes, fetches of this one."""
        look_ups, misses, damaged, waited_ns = self.cache.counts.read()
        counts = self.service.counts
        return CacheStatistics(
            look_ups=look_ups,
            misses=misses,
            damaged=damaged,
            wait_seconds=waited_ns / 1e9,
            fetches=counts.fetches,
            fetched=counts.fetched,
            already_cached=counts.already_cached,
            failures=counts.failures,
        )

    def close(self) -> None:
        """Fetch nothing more: drop what is queued, wait for what is being read and end the threads; idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: it looks up and does not fetch."""
        return {**self.__dict__, "_service": None, "_finalizer": None}


def _close(service: FetchService, pid: int) -> None:
    if pid == os.getpid():  # a forked child has a copy without threads, with locks that may be held for ever
        service.close()
