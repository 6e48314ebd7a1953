"""A DataLoader that loads the next batches while the current one trains."""

from __future__ import annotations

import contextvars
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader

from stoker.errors import ConfigError, StokerError
from stoker_torch._sample_cache import LookupCounts, LookupStatistics
from stoker_torch._user_functions import ThreadPool

_log = logging.getLogger("stoker")


class InformedDataLoader(DataLoader[Any]):
    """A ``DataLoader`` with ``num_workers=0`` that loads the next ``depth`` batches on a thread while one trains.

    X. Ruan, H. Chen, "Informed Prefetching in I/O Bounded Distributed Deep Learning" (PAISE 2021), algorithm 1: the
    first batch of an epoch is loaded on request, every other one while the batches before it train; if a batch is not
    complete when training requests it, training waits for the rest. The paper's depth is 1.

    The batches are those of a plain ``DataLoader``, in the same order: the thread calls torch's own iterator, so
    samplers, ``collate_fn``, ``pin_memory`` and iterable data sets work as usual. An error is raised for its own batch.
    The thread records gradients if the loop does; it does not see the loop's autocast and default device. If the data
    set and the loop draw from the same random generator, the result depends on which of them draws first.

    Leaving an iteration early ends its thread, after the batch that it is loading.

    Args:
        *args: positional arguments of ``DataLoader``.
        depth: number of batches to load ahead, which are kept in memory.
        clock: function that returns the time in seconds, for :attr:`LookupStatistics.wait_seconds`.
        **settings: keyword arguments of ``DataLoader``.

    Raises:
        ConfigError: there are worker processes, which load ahead themselves; or ``depth`` is not positive.

    Example:
        >>> loader = InformedDataLoader(images, batch_size=64, shuffle=True, depth=2)
        >>> for image, label in loader:
        ...     train_step(image, label)
        >>> loader.stats().lookups
        2
    """

    def __init__(
        self, *args: Any, depth: int = 1, clock: Callable[[], float] = time.perf_counter, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        if self.num_workers:
            raise ConfigError(
                f"InformedDataLoader loads on a thread of this process; num_workers={self.num_workers} is for a plain "
                "DataLoader, whose workers load ahead by themselves (prefetch_factor=)"
            )
        if depth < 1:
            raise ConfigError(f"depth must be at least 1, not {depth}")
        self.depth = depth
        self._clock = clock
        self._counts = LookupCounts()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's annotation names a private class
        """Begin an epoch; loading begins when its first batch is requested."""
        return _InformedIteration(super().__iter__(), self.depth, self._clock, self._counts)

    def stats(self) -> LookupStatistics:
        """Return the number of batches requested, and of those that were not loaded yet (misses).

        The first batch of an epoch is always a miss.
        """
        lookups, misses, _, waited_ns = self._counts.read()
        return LookupStatistics(lookups=lookups, misses=misses, wait_seconds=waited_ns / 1e9)


_LoadedBatch = tuple[Any, BaseException | None]
"""A batch, or the error of loading it; ``StopIteration`` after the last batch."""


def _load_next(batches: Iterator[Any]) -> _LoadedBatch:
    try:
        return next(batches), None
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: whatever it is, the training loop gets it
        return None, error


def _is_end(error: BaseException | None) -> bool:
    """Return whether loading ends: at the last batch, but, as with a plain loader, not after a batch that failed."""
    return isinstance(error, StopIteration) or not (error is None or isinstance(error, Exception))


@dataclass(slots=True)
class _SharedQueue:
    """The state that the thread and the training loop share, apart from the iteration, so that this can be collected.

    Attributes:
        batches: torch's iterator, used only by the thread once that runs.
        loaded: queue of loaded batches, in order.
        is_over: whether loading has ended.
    """

    batches: Iterator[Any]
    loaded: SimpleQueue[_LoadedBatch] = field(default_factory=SimpleQueue)
    is_over: bool = False


class _InformedIteration:
    """One iteration over an epoch."""

    def __init__(self, batches: Iterator[Any], depth: int, clock: Callable[[], float], counts: LookupCounts) -> None:
        self._queue: _SharedQueue | None = _SharedQueue(batches)
        self._depth, self._clock, self._counts = depth, clock, counts
        self._pid = os.getpid()
        self._threads: ThreadPool | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._queue is None:
            raise StopIteration
        if self._pid != os.getpid():
            raise StokerError("an iteration cannot continue in a forked process, without its thread; begin another one")
        started = self._clock()
        is_miss = self._queue.loaded.empty()
        batch, error = self._take_batch(self._queue)
        if _is_end(error):
            self.close()
        try:
            if not isinstance(error, StopIteration):
                self._counts.add(missed=is_miss, damaged=False, wait_seconds=self._clock() - started)
            if error is not None:
                raise error
            return batch
        finally:
            del error  # or it would keep itself, and through this frame the thread, alive

    def close(self) -> None:
        """End the iteration, and its thread after the batch that it is loading. Idempotent."""
        self._queue = None
        if self._threads is not None:
            self._finalizer()

    def _take_batch(self, line: _SharedQueue) -> _LoadedBatch:
        """Return the next batch; the first one is loaded here, the others by the thread."""
        if self._threads is not None:
            try:
                return line.loaded.get()
            finally:
                self._threads.submit(self._load)
        loaded = _load_next(line.batches)
        if not _is_end(loaded[1]):
            self._begin(line)
        return loaded

    def _begin(self, queue: _SharedQueue) -> None:
        """Start the thread, with this thread's context variables, gradient modes and CUDA device."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        settings = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), device
        self._load = partial(contextvars.copy_context().run, _load, queue, *settings)
        self._threads = ThreadPool(1, "stoker-informed")
        self._finalizer = weakref.finalize(self, _close_threads, self._threads)
        for _ in range(self._depth):
            self._threads.submit(self._load)


def _load(queue: _SharedQueue, inference: bool, gradients: bool, device: int | None) -> None:
    """Load a batch, unless the last one was loaded."""
    if queue.is_over:
        return
    if device is not None:
        torch.cuda.set_device(device)  # or page-locked memory would belong to the first device
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        loaded = _load_next(queue.batches)
    queue.is_over = _is_end(loaded[1])
    queue.loaded.put(loaded)
    del loaded  # or an error would keep itself, through its traceback's frames


def _close_threads(threads: ThreadPool) -> None:
    if not threads.close():
        _log.warning("a loading thread is still running: the data set has not returned the batch being loaded ahead")
