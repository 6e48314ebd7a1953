"""The service that reads samples into a cache ahead of training, as DELI's pre-fetching service does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypedDict, get_args

from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch._crew import Crew, Executor
from stoker_torch._sample_cache import SampleCache

__all__ = ["FetchCounts", "FetchService", "ServiceConfig", "ServiceSettings", "Visible"]

_log = logging.getLogger("stoker")

Visible = Literal["each", "together"]
"""When a sample can be seen: as soon as it is read, or when all of its fetch are, as in the paper."""


class ServiceSettings(TypedDict, total=False):
    """The settings of a :class:`ServiceConfig`, for those who pass them on."""

    threads: int
    visible: Visible
    renew: bool
    drop_late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """How samples are fetched; ``visible="together", renew=False, drop_late=False`` is the paper's way.

    Attributes:
        threads: how many samples are read at a time.
        visible: ``"each"`` fetched sample can be seen as soon as it is read, or those of one fetch ``"together"`` when
            the slowest is.
        renew: whether an index to be fetched that is cached already becomes the last to be evicted, so that it is
            still there when it is used; or it keeps its place.
        drop_late: whether a sample whose turn to be read has not come when training misses it is not read any more,
            for training does that; so a service that has fallen behind catches up. It cannot know what is missed in
            other processes.

    Raises:
        ConfigError: a setting is none.
    """

    threads: int = 16
    visible: Visible = "each"
    renew: bool = True
    drop_late: bool = True

    def __post_init__(self) -> None:
        if self.threads < 1 or self.visible not in get_args(Visible):
            raise ConfigError(
                f"threads must be at least 1 and visible each or together, not {self.threads} and {self.visible!r}"
            )


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
        config: how to fetch.
        executor: does the reading; default so many threads.
    """

    def __init__(
        self, dataset: Any, cache: SampleCache, config: ServiceConfig, executor: Executor | None = None
    ) -> None:
        self._dataset, self._cache, self._config = dataset, cache, config
        self._executor = executor or Crew(config.threads, "stoker-fetch")
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
                if index in self._wanted or self._cache.holds(index, renew=self._config.renew):
                    self.counts.already_cached += 1
                else:
                    self._wanted.add(index)
                    missing.append(index)
        fetch = _Fetch(missing) if self._config.visible == "together" else None
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
        if self._config.drop_late:
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
