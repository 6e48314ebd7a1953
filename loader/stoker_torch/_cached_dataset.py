"""A map-style data set behind a cache, and what fills the cache ahead of training, as DELI's does.

That is a service in the background, and a sampler that says ahead to it what it will yield.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, get_args

from torch.utils.data import Dataset, IterableDataset, Sampler

from stoker._base.arguments import explain_arguments
from stoker._base.closing import Closing
from stoker._fetch.config import FetchSize, Progress
from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch._sample_cache import CacheStatistics, DamagedEntryError, SampleCache
from stoker_torch._user_functions import Executor, ThreadPool

_log = logging.getLogger("stoker")

Visible = Literal["each", "together"]
"""When a sample can be seen: as soon as it is read, or when all of its fetch are, as in the paper."""


@dataclass(slots=True)
class _Fetch:
    """Samples that become visible together, in the order they were asked for."""

    indices: Sequence[int]
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
        self.counts = dict.fromkeys(("fetches", "fetched", "already_cached", "failures"), 0)

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read the samples that are neither cached nor on their way.

        Raises:
            StokerError: as :meth:`check`.
        """
        self.check()
        missing = []
        with self._lock:
            self.counts["fetches"] += 1
            for index in indices:
                if index in self._wanted or self._cache.holds(index, renew=self._renew):
                    self.counts["already_cached"] += 1
                else:
                    self._wanted.add(index)
                    missing.append(index)
        groups = [missing] if self._visible == "together" else [[index] for index in missing]
        for fetch in map(_Fetch, groups):
            for index in fetch.indices:
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

    @property
    def is_own(self) -> bool:
        """Whether this is not a forked child's copy, without threads and with locks that may be held for ever."""
        return self._pid == os.getpid()

    def forget(self, indices: Iterable[int]) -> None:
        """Do not begin to read samples that were asked for and are not needed any more."""
        if self.is_own:  # a forked child may collect its copy of an iteration
            with self._lock:
                self._wanted.difference_update(indices)

    def close(self) -> None:
        """Drop what is not begun, and wait a while for what is; of no effect in a forked child."""
        if not self.is_own:
            return
        self._is_closed = True
        if self._executor.close() is False:
            stuck = ", ".join(map(str, sorted(self._being_read)))
            _log.warning("threads are left behind: the data set has not returned sample %s", stuck)

    def _work(self, index: int, fetch: _Fetch) -> None:
        """Read one sample, and put into the cache what becomes visible with it."""
        try:
            if index in self._wanted:
                self._being_read.add(index)
                fetch.read[index] = self._dataset[index]
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: training reads it again, and gets the error
            self._note_failure(index, type(error).__name__)  # only that: its text may have a signed URL in it
        finally:
            self._being_read.discard(index)
        with self._lock:
            fetch.ended += 1
            is_last = fetch.ended == len(fetch.indices)
        for each in fetch.indices if is_last else ():
            if each in fetch.read:
                self._put(each, fetch.read[each])

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
            self.counts["fetched"] += 1

    def _note_failure(self, index: int, reason: str) -> None:
        """Count a failure, and log the first."""
        with self._lock:
            self._wanted.discard(index)
            self.counts["failures"] += 1
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning("sample %d could not be fetched ahead, and training will read it: %s", index, reason)


@explain_arguments("CachedDataset")
class CachedDataset(Dataset[Any], Closing):
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
        reading = executor or ThreadPool(threads, "stoker-fetch")
        service = FetchService(dataset, cache, reading, visible=visible, renew=renew, drop_late=drop_late)
        self._service: FetchService | None = service
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(self, service.close)

    @property
    def service(self) -> FetchService:
        """What fetches samples into the cache.

        Raises:
            ConfigError: this is another process than the one that fetches.
        """
        if self._service is None or not self._service.is_own:
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
        seconds, fetches = waited_ns / 1e9, self.service.counts
        return CacheStatistics(look_ups=look_ups, misses=misses, damaged=damaged, wait_seconds=seconds, **fetches)

    def close(self) -> None:
        """Fetch nothing more: drop what is queued, wait for what is being read and end the threads; idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: it looks up and does not fetch."""
        return {**self.__dict__, "_service": None, "_finalizer": None}


class PrefetchSampler(Sampler[int]):
    """Yields what another sampler does, and has a :class:`~stoker_torch.CachedDataset` fetch it some time before.

    It keeps a queue of indices to be yielded. Before each, if at most ``threshold`` are left in the queue, it takes
    ``fetch_size`` more from the sampler and has them fetched, whether or not earlier fetches have ended: N.
    Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-C.

    Unlike the paper's, it goes on into the next epoch, so that the beginning of that is there when it begins. The next
    epoch's order is drawn when the current one is all drawn: after ``set_epoch(n)``, which is passed on to the sampler,
    that is epoch ``n + 1``; if another one is set then, it is thrown away. A sampler without ``set_epoch`` is iterated
    over again, so every epoch is whole; but if it shares a random generator with others (torch's global one, say), it
    draws from it earlier than it would alone, and so draws other numbers.

    An epoch that is left early is over: its fetches that are not begun are dropped.

    Args:
        sampler: of indices, not of batches of them; any iterable with a length.
        dataset: whose cache is filled. It needs room for ``threshold + fetch_size`` samples, since it evicts unread
            ones otherwise, and as many besides as are drawn and not yet read: a batch, or with worker processes
            ``num_workers * prefetch_factor`` batches.
        fetch_size: how many indices a fetch has.
        threshold: how many are left to be yielded when the next fetch begins.
        across_epochs: whether fetches go on into the next epoch, or end with it as in the paper.
        epochs: how many epochs will be iterated over, so that nothing is fetched beyond the last; default unknown.

    Raises:
        ConfigError: the cache has no room for that, or a setting is none.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: CachedDataset,
        *,
        fetch_size: int,
        threshold: int = 0,
        across_epochs: bool = True,
        epochs: int | None = None,
    ) -> None:
        self.sampler = sampler
        self.dataset = dataset
        self._schedule = FetchSize(fetch_size=fetch_size, threshold=threshold)
        if self._schedule.needed_slots > dataset.cache.samples:
            raise ConfigError(
                f"threshold={threshold} and fetch_size={fetch_size} need a cache for {self._schedule.needed_slots} "
                f"samples or more, and this one is for {dataset.cache.samples}: it would evict samples before their use"
            )
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1, not {epochs}")
        self._across_epochs, self._epochs = across_epochs, epochs
        self._begun = 0
        self._number: int | None = None
        self._ahead: _Epoch | None = None

    @classmethod
    def full_fetch(
        cls,
        sampler: Any,
        dataset: CachedDataset,
        *,
        in_hand: int = 0,
        across_epochs: bool = True,
        epochs: int | None = None,
    ) -> PrefetchSampler:
        """Fetch as many samples as the cache holds whenever none is left: the paper's "full fetch".

        Args:
            sampler: as for the class.
            dataset: as for the class.
            in_hand: samples that are drawn and not yet read, for which room is left in the cache.
            across_epochs: as for the class.
            epochs: as for the class.
        """
        size = dataset.cache.samples - in_hand
        return cls(sampler, dataset, fetch_size=size, across_epochs=across_epochs, epochs=epochs)

    @classmethod
    def half_and_half(
        cls,
        sampler: Any,
        dataset: CachedDataset,
        *,
        in_hand: int = 0,
        across_epochs: bool = True,
        epochs: int | None = None,
    ) -> PrefetchSampler:
        """Fetch half of what the cache holds whenever the other half is left: the paper's "50/50".

        Args:
            sampler: as for the class.
            dataset: as for the class.
            in_hand: samples that are drawn and not yet read, for which room is left in the cache.
            across_epochs: as for the class.
            epochs: as for the class.
        """
        half = FetchSize.half_and_half(dataset.cache.samples - in_hand)
        size, threshold = half.fetch_size, half.threshold
        return cls(sampler, dataset, fetch_size=size, threshold=threshold, across_epochs=across_epochs, epochs=epochs)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it has such a thing; it is in force from the next iteration on."""
        if hasattr(self.sampler, "set_epoch"):
            self._number = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of one epoch.

        Raises:
            ConfigError: the sampler yields something else than indices, or this is not the data set's own process.
            SampleError: a fetched sample is of a type that the cache cannot hold.
        """
        service = self.dataset.service
        epoch = self._begin()
        try:
            while True:
                service.check()
                if indices := self._drawn(epoch):
                    service.fetch(indices)
                if not epoch.queue:
                    return
                yield epoch.queue.popleft()
        finally:
            service.forget(epoch.queue)

    def _begin(self) -> _Epoch:
        """Return the next epoch: the one that was drawn from ahead, if that is the one that is wanted."""
        self._begun += 1
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.number == self._number:
                return ahead
            self.dataset.service.forget(ahead.queue)
        return self._opened(self._number)

    def _opened(self, number: int | None) -> _Epoch:
        if number is not None:
            self.sampler.set_epoch(number)
        return _Epoch(number, iter(self.sampler))

    def _drawn(self, epoch: _Epoch) -> list[int]:
        """Return the indices to fetch now, and queue them; the paper's rule."""
        queued = len(epoch.queue) + (len(self._ahead.queue) if self._ahead is not None else 0)
        count = self._schedule.admit(Progress(issued=queued, consumed=0, next_item_step=None, step=0))
        indices = epoch.draw(count)
        if len(indices) < count and self._across_epochs and (self._epochs is None or self._begun < self._epochs):
            if self._ahead is None:
                self._ahead = self._opened(None if epoch.number is None else epoch.number + 1)
            indices += self._ahead.draw(count - len(indices))
        return indices


@dataclass(slots=True)
class _Epoch:
    """One iteration of the sampler.

    Attributes:
        number: what the sampler's epoch was set to, None if it was not.
        rest: what has not been drawn of it.
        queue: what has been drawn and not yielded.
    """

    number: int | None
    rest: Iterator[Any]
    queue: deque[int] = field(default_factory=deque)

    def draw(self, count: int) -> list[int]:
        """Move up to ``count`` indices from the rest to the queue, and return them."""
        indices = []
        for index in islice(self.rest, count):
            try:
                indices.append(operator.index(index))
            except TypeError:
                raise ConfigError(
                    f"PrefetchSampler needs a sampler of indices, this one yields {index!r:.80}; a batch sampler goes "
                    "around a PrefetchSampler, not into it"
                ) from None
        self.queue.extend(indices)
        return indices
