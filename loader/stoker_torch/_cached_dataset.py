"""A map-style data set behind a cache that is filled ahead of training."""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Self, Unpack

from torch.utils.data import Dataset, IterableDataset

from stoker.errors import ConfigError
from stoker_torch._crew import Executor
from stoker_torch._fetch_service import FetchService, ServiceConfig, ServiceSettings
from stoker_torch._look_ups import CacheStatistics
from stoker_torch._sample_cache import DamagedEntryError, SampleCache

__all__ = ["CachedDataset"]


class CachedDataset(Dataset[Any]):
    """Gives a sample from the cache if it is there, else (a miss) from the data set; a miss adds nothing to the cache.

    What fills the cache is a :class:`~stoker_torch.PrefetchSampler`, through :attr:`service`: threads of this process
    that read ``dataset[index]``, so the data set must allow that. With a :class:`~stoker_torch.DiskCache` it works in
    the worker processes of a ``DataLoader``, however they are started; they look up, and this process fetches. Where
    they are forked, a data set that holds connections or locks must make its own in each process, as always.

    Args:
        dataset: map-style, any type of sample that the cache can hold.
        cache: a :class:`~stoker_torch.MemoryCache` or :class:`~stoker_torch.DiskCache`; not closed with this.
        clock: seconds, for :attr:`CacheStatistics.wait_seconds`.
        executor: does the fetching, in place of threads.
        **settings: of a :class:`~stoker_torch._fetch_service.ServiceConfig`: ``threads``, ``visible``, ``renew``,
            ``drop_late``.

    Raises:
        ConfigError: the data set is not map-style, or a setting is none.
    """

    def __init__(
        self,
        dataset: Any,
        cache: SampleCache,
        *,
        clock: Callable[[], float] = time.perf_counter,
        executor: Executor | None = None,
        **settings: Unpack[ServiceSettings],
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"a {type(dataset).__qualname__} has no samples to ask for by index")
        self.dataset = dataset
        self.cache = cache
        self._clock = clock
        self._pid = os.getpid()
        self._service: FetchService | None = FetchService(dataset, cache, ServiceConfig(**settings), executor)
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(self, _close, self._service, self._pid)

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
