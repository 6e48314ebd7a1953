"""A map-style data set behind a cache that is filled ahead of training, as in DELI.

A sampler announces the indices that it will yield, and a background service fetches their samples into the cache.
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

from stoker._base.arguments import explain_arguments, rename_arguments
from stoker._base.closeable import Closeable
from stoker._fetch.config import FetchSize, Progress
from stoker.errors import ConfigError, SampleError, StokerError
from stoker_torch._sample_cache import CacheStatistics, DamagedEntryError, SampleCache
from stoker_torch._user_functions import BackgroundExecutor, ThreadPool

_log = logging.getLogger("stoker")

Visible = Literal["each", "together"]
"""When a sample becomes visible: when it is read, or when all samples of its fetch are read, as in the paper."""


@dataclass(slots=True)
class _FetchGroup:
    """Samples that become visible together, in the order of the request.

    Attributes:
        indices: indices of the samples.
        samples: index → sample, as far as they are read.
        ended_count: number of samples that were read or failed.
    """

    indices: Sequence[int]
    samples: dict[int, Any] = field(default_factory=dict)
    ended_count: int = 0


class FetchService:
    """Reads samples from a data set into a cache, in the background.

    N. Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-C.

    A sample that cannot be read is not cached: training has a miss, reads it itself, and gets the error.

    Args:
        dataset: map-style data set, read from the executor's threads.
        cache: cache that gets the samples.
        executor: executor that reads.
        visible: when samples become visible, as in :class:`CachedDataset`.
        renew: whether a request renews a sample that is cached already, as in :class:`CachedDataset`.
        drop_late: whether a queued read is dropped after a miss, as in :class:`CachedDataset`.
    """

    def __init__(
        self,
        dataset: Any,
        cache: SampleCache,
        executor: BackgroundExecutor,
        *,
        visible: Visible,
        renew: bool,
        drop_late: bool,
    ) -> None:
        self._dataset, self._cache, self._executor = dataset, cache, executor
        self._visible, self._renew, self._drop_late = visible, renew, drop_late
        self._lock = threading.RLock()  # garbage collection may end a sampler's iteration, which calls forget, anywhere
        self._pid = os.getpid()
        self._requested: set[int] = set()
        self._being_read: set[int] = set()
        self._sample_error: SampleError | None = None
        self._has_warned = self._is_closed = False
        self.counts = dict.fromkeys(("fetches", "fetched", "already_cached", "failures"), 0)

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read the samples that are neither cached nor being fetched, and return at once.

        Raises:
            SampleError: see :meth:`check`.
            StokerError: see :meth:`check`.
        """
        self.check()
        missing = []
        with self._lock:
            self.counts["fetches"] += 1
            for index in indices:
                if index in self._requested or self._cache.holds(index, renew=self._renew):
                    self.counts["already_cached"] += 1
                else:
                    self._requested.add(index)
                    missing.append(index)
        groups = [missing] if self._visible == "together" else [[index] for index in missing]
        for fetch in map(_FetchGroup, groups):
            for index in fetch.indices:
                self._executor.submit(partial(self._read_sample, index, fetch))

    def check(self) -> None:
        """Check that the service can fetch.

        Raises:
            SampleError: a fetched sample had a type that the cache cannot hold.
            StokerError: the service is closed.
        """
        if self._sample_error is not None:
            raise self._sample_error
        if self._is_closed:
            raise StokerError("the CachedDataset is closed; it fetches nothing for a sampler any more")

    def note_miss(self, index: int) -> None:
        """Record that training missed a sample and reads it itself."""
        if self._drop_late:
            self.forget((index,))

    @property
    def is_own(self) -> bool:
        """Whether this process made the service; a forked child's copy has no threads, and may have held locks."""
        return self._pid == os.getpid()

    def forget(self, indices: Iterable[int]) -> None:
        """Drop requests whose read has not begun, for samples that are no longer needed."""
        if self.is_own:  # a forked child may collect its copy of an iteration
            with self._lock:
                self._requested.difference_update(indices)

    def close(self) -> None:
        """Drop queued reads, and wait up to 5 s for current ones; no effect in a forked child."""
        if not self.is_own:
            return
        self._is_closed = True
        if self._executor.close() is False:
            stuck = ", ".join(map(str, sorted(self._being_read)))
            _log.warning("fetching threads are still running: the data set has not returned sample %s", stuck)

    def _read_sample(self, index: int, fetch: _FetchGroup) -> None:
        """Read one sample, and put the samples that become visible with it into the cache."""
        try:
            if index in self._requested:
                self._being_read.add(index)
                fetch.samples[index] = self._dataset[index]
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: training reads it again, and gets the error
            self._note_failure(index, type(error).__name__)  # not its text, which may contain a signed URL
        finally:
            self._being_read.discard(index)
        with self._lock:
            fetch.ended_count += 1
            is_last = fetch.ended_count == len(fetch.indices)
        for each in fetch.indices if is_last else ():
            if each in fetch.samples:
                self._put(each, fetch.samples[each])

    def _put(self, index: int, sample: Any) -> None:
        try:
            is_cached = self._cache.put(index, sample)
        except Exception as error:  # noqa: BLE001 - a task boundary: the cache is full or closed, training continues
            if isinstance(error, SampleError):
                self._sample_error = error
            self._note_failure(index, str(error))
            return
        if not is_cached:
            self._note_failure(index, "it alone is larger than max_bytes of the cache")
            return
        with self._lock:
            self._requested.discard(index)
            self.counts["fetched"] += 1

    def _note_failure(self, index: int, reason: str) -> None:
        """Count a failure, and log the first one."""
        with self._lock:
            self._requested.discard(index)
            self.counts["failures"] += 1
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            _log.warning("sample %d could not be fetched ahead, and training will read it: %s", index, reason)


@explain_arguments("CachedDataset")
class CachedDataset(Dataset[Any], Closeable):
    """Returns samples from a cache, and on a miss from the data set; a miss does not add the sample to the cache.

    A :class:`~stoker_torch.PrefetchSampler` fills the cache through :attr:`service`: threads of this process read
    ``dataset[index]``, so the data set must be thread-safe. With a :class:`~stoker_torch.DiskCache` the data set works
    in the worker processes of a ``DataLoader``, with any start method: they look up samples, and this process fetches
    them. If they are forked, a data set that holds connections or locks must make new ones in each process.

    Args:
        dataset: map-style data set, with samples of any type that the cache can hold.
        cache: a :class:`~stoker_torch.MemoryCache` or :class:`~stoker_torch.DiskCache`, which the caller closes.
        threads: number of samples that are read at a time.
        visible: when fetched samples become visible: ``"each"`` when it is read, or those of one fetch ``"together"``
            when the slowest is read, as in the paper.
        renew: whether a request for a cached sample makes it the last to be evicted, so that it is still cached when
            it is used. False leaves its place in the queue, as in the paper.
        drop_late: whether a queued read is dropped when training misses its sample, and so reads it itself; this lets
            a service that is late catch up. Misses in other processes are not seen. False reads it anyway, as in the
            paper.
        clock: function that returns the time in seconds, for :attr:`CacheStatistics.wait_seconds`.
        executor: executor that fetches instead of ``threads``; default none.

    Raises:
        ConfigError: the data set is not map-style, or a setting is not valid.

    Example:
        >>> from torch.utils.data import DataLoader, RandomSampler
        >>> dataset = CachedDataset(images, DiskCache("samples", 20_000))
        >>> sampler = PrefetchSampler(RandomSampler(images), dataset, fetch_size=1024, threshold=1024)
        >>> for image, label in DataLoader(dataset, sampler=sampler, batch_size=64):
        ...     train_step(image, label)
        >>> dataset.stats().lookups
        128
        >>> dataset.close()
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
        executor: BackgroundExecutor | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"a {type(dataset).__qualname__} has no samples by index: give CachedDataset a map-style data set"
            )
        if threads < 1 or visible not in get_args(Visible):
            raise ConfigError(f"threads must be at least 1 and visible each or together, not {threads} and {visible!r}")
        self.dataset = dataset
        self.cache = cache
        self._clock = clock
        reading = executor or ThreadPool(threads, "stoker-fetch")
        service = FetchService(dataset, cache, reading, visible=visible, renew=renew, drop_late=drop_late)
        self._fetch_service: FetchService | None = service
        self._finalizer: weakref.finalize[..., Any] | None = weakref.finalize(self, service.close)

    @property
    def service(self) -> FetchService:
        """The service that fetches samples into the cache.

        Raises:
            ConfigError: another process constructed the data set, and fetches.
        """
        if self._fetch_service is None or not self._fetch_service.is_own:
            raise ConfigError(
                "a CachedDataset fetches only in the process that constructed it: construct sampler and data set there"
            )
        return self._fetch_service

    def __getitem__(self, index: int) -> Any:
        """Return a sample, from the cache or the data set.

        Raises:
            Exception: any error of the data set.
        """
        started = self._clock()
        missed = damaged = False
        try:
            try:
                return self.cache.get(operator.index(index))
            except KeyError as error:
                missed, damaged = True, isinstance(error, DamagedEntryError)
            if self._fetch_service is not None:
                self._fetch_service.note_miss(operator.index(index))
            return self.dataset[index]
        finally:
            self.cache.counts.add(missed=missed, damaged=damaged, wait_seconds=self._clock() - started)

    def __len__(self) -> int:
        return len(self.dataset)

    def stats(self) -> CacheStatistics:
        """Return the statistics so far: look-ups of all processes, and fetches of this process."""
        lookups, misses, damaged, waited_ns = self.cache.counts.read()
        seconds, fetches = waited_ns / 1e9, self.service.counts
        return CacheStatistics(lookups=lookups, misses=misses, damaged=damaged, wait_seconds=seconds, **fetches)

    def close(self) -> None:
        """Stop fetching: drop queued reads, wait up to 5 s for current ones and end the threads. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a worker process needs, which looks up samples and does not fetch them."""
        return {**self.__dict__, "_fetch_service": None, "_finalizer": None}


class PrefetchSampler(Sampler[int]):
    """Yields the indices of another sampler, and has a :class:`~stoker_torch.CachedDataset` fetch their samples ahead.

    It keeps a queue of indices to be yielded. Before each one, if at most ``threshold`` are left in the queue, it draws
    ``fetch_size`` more from the sampler and requests their samples, whether or not earlier fetches have ended: N.
    Krichevsky, R. St. Louis, T. Guo, "Quantifying and Improving Performance of Distributed Deep Learning with Cloud
    Storage" (IC2E 2021), section IV-C.

    Unlike the paper's sampler, it continues into the next epoch, so that the first samples of that epoch are cached
    when it begins. It draws the next epoch's order as soon as the current one is all drawn: after ``set_epoch(n)``,
    which it passes to the sampler, that is epoch ``n + 1``; if another epoch is set afterwards, that order is
    discarded. A sampler without ``set_epoch`` is iterated over again, so every epoch is whole; but if it shares a
    random generator with other code (for example torch's global one), it draws from it earlier than it would alone, and
    so draws other numbers.

    Leaving an epoch early ends it: its queued fetches are dropped.

    Args:
        sampler: sampler of indices (not of batches of indices); any iterable with a length.
        dataset: data set whose cache is filled. The cache needs room for ``threshold + fetch_size`` samples, or it
            evicts unread ones, and for the samples that are drawn and not yet read: a batch, or with worker processes
            ``num_workers * prefetch_factor`` batches.
        fetch_size: number of indices of a fetch.
        threshold: number of indices left in the queue when the next fetch begins.
        across_epochs: whether fetches continue into the next epoch; False ends them with the epoch, as in the paper.
        epochs: number of epochs to iterate over, so that nothing is fetched beyond the last; default unknown.

    Raises:
        ConfigError: the cache has no room for these samples, or a setting is not valid.

    Example:
        >>> from torch.utils.data import DataLoader, RandomSampler
        >>> dataset = CachedDataset(images, MemoryCache(20_000))
        >>> sampler = PrefetchSampler(RandomSampler(images), dataset, fetch_size=1024, threshold=1024)
        >>> loader = DataLoader(dataset, sampler=sampler, batch_size=64)
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
                f"samples or more, and this one is for {dataset.cache.samples}: it would evict samples before their "
                "use. Make the cache larger, or the fetches smaller"
            )
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1, not {epochs}")
        self._across_epochs, self._epochs = across_epochs, epochs
        self._epochs_begun = 0
        self._number: int | None = None
        self._next_epoch: _SamplerEpoch | None = None

    @classmethod
    @rename_arguments("PrefetchSampler.full_fetch", {"in_hand": "unread_samples"})
    def full_fetch(
        cls,
        sampler: Any,
        dataset: CachedDataset,
        *,
        unread_samples: int = 0,
        across_epochs: bool = True,
        epochs: int | None = None,
    ) -> PrefetchSampler:
        """Return a sampler that fills the whole cache whenever its queue is empty: the paper's "full fetch".

        Args:
            sampler: sampler of indices.
            dataset: data set whose cache is filled.
            unread_samples: number of samples that are drawn and not yet read, for which room is left in the cache.
            across_epochs: whether fetches continue into the next epoch.
            epochs: number of epochs to iterate over; default unknown.
        """
        size = dataset.cache.samples - unread_samples
        return cls(sampler, dataset, fetch_size=size, across_epochs=across_epochs, epochs=epochs)

    @classmethod
    @rename_arguments("PrefetchSampler.half_and_half", {"in_hand": "unread_samples"})
    def half_and_half(
        cls,
        sampler: Any,
        dataset: CachedDataset,
        *,
        unread_samples: int = 0,
        across_epochs: bool = True,
        epochs: int | None = None,
    ) -> PrefetchSampler:
        """Return a sampler that fills half of the cache whenever the other half is left: the paper's "50/50".

        Args:
            sampler: sampler of indices.
            dataset: data set whose cache is filled.
            unread_samples: number of samples that are drawn and not yet read, for which room is left in the cache.
            across_epochs: whether fetches continue into the next epoch.
            epochs: number of epochs to iterate over; default unknown.
        """
        half = FetchSize.half_and_half(dataset.cache.samples - unread_samples)
        size, threshold = half.fetch_size, half.threshold
        return cls(sampler, dataset, fetch_size=size, threshold=threshold, across_epochs=across_epochs, epochs=epochs)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it has ``set_epoch``, from the next iteration on."""
        if hasattr(self.sampler, "set_epoch"):
            self._number = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of one epoch.

        Raises:
            ConfigError: the sampler yields values that are not indices, or another process constructed the data set.
            SampleError: a fetched sample has a type that the cache cannot hold.
        """
        service = self.dataset.service
        epoch = self._begin()
        try:
            while True:
                service.check()
                if indices := self._draw_fetch(epoch):
                    service.fetch(indices)
                if not epoch.queue:
                    return
                yield epoch.queue.popleft()
        finally:
            service.forget(epoch.queue)

    def _begin(self) -> _SamplerEpoch:
        """Return the next epoch: the one drawn from ahead, if it has the number that was set."""
        self._epochs_begun += 1
        ahead, self._next_epoch = self._next_epoch, None
        if ahead is not None:
            if ahead.number == self._number:
                return ahead
            self.dataset.service.forget(ahead.queue)
        return self._begin_epoch(self._number)

    def _begin_epoch(self, number: int | None) -> _SamplerEpoch:
        if number is not None:
            self.sampler.set_epoch(number)
        return _SamplerEpoch(number, iter(self.sampler))

    def _draw_fetch(self, epoch: _SamplerEpoch) -> list[int]:
        """Return the indices to fetch now by the paper's rule, and queue them."""
        queued = len(epoch.queue) + (len(self._next_epoch.queue) if self._next_epoch is not None else 0)
        count = self._schedule.admit(Progress(issued=queued, consumed=0, next_item_step=None, step=0))
        indices = epoch.draw(count)
        if len(indices) < count and self._across_epochs and (self._epochs is None or self._epochs_begun < self._epochs):
            if self._next_epoch is None:
                self._next_epoch = self._begin_epoch(None if epoch.number is None else epoch.number + 1)
            indices += self._next_epoch.draw(count - len(indices))
        return indices


@dataclass(slots=True)
class _SamplerEpoch:
    """One iteration of the sampler.

    Attributes:
        number: epoch that the sampler was set to, None if it was not.
        undrawn: iterator of the indices that are not drawn yet.
        queue: indices that are drawn and not yielded yet.
    """

    number: int | None
    undrawn: Iterator[Any]
    queue: deque[int] = field(default_factory=deque)

    def draw(self, count: int) -> list[int]:
        """Move up to ``count`` indices from the rest to the queue, and return them."""
        indices = []
        for index in islice(self.undrawn, count):
            try:
                indices.append(operator.index(index))
            except TypeError:
                raise ConfigError(
                    f"PrefetchSampler needs a sampler of indices, this one yields {index!r:.80}; put a batch sampler "
                    "around the PrefetchSampler, not inside"
                ) from None
        self.queue.extend(indices)
        return indices
