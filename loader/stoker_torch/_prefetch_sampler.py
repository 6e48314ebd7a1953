"""A sampler that says ahead what it will yield, to the service that fills the cache."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import Sampler

from stoker._fetch.schedule import FetchSize, Progress
from stoker.errors import ConfigError
from stoker_torch._cached_dataset import CachedDataset

__all__ = ["PrefetchSampler"]


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
