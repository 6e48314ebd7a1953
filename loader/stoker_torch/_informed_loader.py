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
from stoker_torch._sample_cache import LookUpCounts, LookUpStatistics
from stoker_torch._user_functions import ThreadPool

_log = logging.getLogger("stoker")


class InformedDataLoader(DataLoader[Any]):
    """A ``DataLoader`` with ``num_workers=0`` whose next ``depth`` batches are loaded on a thread while one trains.

    X. Ruan, H. Chen, "Informed Prefetching in I/O Bounded Distributed Deep Learning" (PAISE 2021), algorithm 1: the
    first batch of an epoch is loaded when it is asked for, every other one while those before it train; if it is not
    complete when it is asked for, training waits for the rest. The paper's depth is 1.

    Batches are those of a plain ``DataLoader``, in the same order: the thread asks torch's own iterator for one after
    the other, so samplers, ``collate_fn``, ``pin_memory`` and iterable data sets do what they do there. An error is
    raised for the batch it belongs to. The thread records gradients if the loop does; it knows nothing of the loop's
    autocast and default device. Only where the data set draws from a random generator that the loop draws from as well
    does the outcome depend on which of them is first.

    An iteration that is left early ends its thread, after the batch it is loading.

    Args:
        *args: as for ``DataLoader``.
        depth: how many batches are loaded ahead; each takes memory.
        clock: seconds, for :attr:`LookUpStatistics.wait_seconds`.
        **settings: as for ``DataLoader``.

    Raises:
        ConfigError: there are worker processes, which load ahead by themselves; or ``depth`` is not positive.
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
        self._counts = LookUpCounts()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's annotation names a private class
        """Begin an epoch; nothing is loaded before its first batch is asked for."""
        return _Iteration(super().__iter__(), self.depth, self._clock, self._counts)

    def stats(self) -> LookUpStatistics:
        """Return how many batches were asked for, and how many of them (misses) were not loaded then.

        The first batch of an epoch is always a miss.
        """
        look_ups, misses, _, waited_ns = self._counts.read()
        return LookUpStatistics(look_ups=look_ups, misses=misses, wait_seconds=waited_ns / 1e9)


_Loaded = tuple[Any, BaseException | None]
"""A batch, or the error that came of loading it; ``StopIteration`` behind the last batch."""


def _next_of(batches: Iterator[Any]) -> _Loaded:
    try:
        return next(batches), None
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: whatever it is, the training loop gets it
        return None, error


def _is_end(error: BaseException | None) -> bool:
    """Return whether nothing more is to be loaded: as with a plain loader, a batch that failed is no reason."""
    return isinstance(error, StopIteration) or not (error is None or isinstance(error, Exception))


@dataclass(slots=True)
class _Line:
    """What the thread and the training loop share, and no more, so that an iteration that is dropped is collected.

    Attributes:
        batches: torch's iterator; of the thread, once that runs.
        loaded: in order.
        is_over: whether nothing more is to be loaded.
    """

    batches: Iterator[Any]
    loaded: SimpleQueue[_Loaded] = field(default_factory=SimpleQueue)
    is_over: bool = False


class _Iteration:
    """One epoch."""

    def __init__(self, batches: Iterator[Any], depth: int, clock: Callable[[], float], counts: LookUpCounts) -> None:
        self._line: _Line | None = _Line(batches)
        self._depth, self._clock, self._counts = depth, clock, counts
        self._pid = os.getpid()
        self._threads: ThreadPool | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._line is None:
            raise StopIteration
        if self._pid != os.getpid():
            raise StokerError("an iteration cannot go on in a forked process, where its thread is not; begin another")
        asked = self._clock()
        missed = self._line.loaded.empty()
        batch, error = self._taken(self._line)
        if _is_end(error):
            self.close()
        try:
            if not isinstance(error, StopIteration):
                self._counts.add(missed=missed, damaged=False, wait_seconds=self._clock() - asked)
            if error is not None:
                raise error
            return batch
        finally:
            del error  # or it would keep itself, and through this frame the thread, alive

    def close(self) -> None:
        """Yield nothing more, and end the thread after the batch that it is loading; idempotent."""
        self._line = None
        if self._threads is not None:
            self._finalizer()

    def _taken(self, line: _Line) -> _Loaded:
        """Return the next batch; load it if it is the first."""
        if self._threads is not None:
            try:
                return line.loaded.get()
            finally:
                self._threads.submit(self._load)
        loaded = _next_of(line.batches)
        if not _is_end(loaded[1]):
            self._begin(line)
        return loaded

    def _begin(self, line: _Line) -> None:
        """Start the thread, with what torch keeps by thread set as it is here."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        settings = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), device
        self._load = partial(contextvars.copy_context().run, _load, line, *settings)
        self._threads = ThreadPool(1, "stoker-informed")
        self._finalizer = weakref.finalize(self, _end, self._threads)
        for _ in range(self._depth):
            self._threads.submit(self._load)


def _load(line: _Line, inference: bool, gradients: bool, device: int | None) -> None:
    """Load a batch, unless that was the last one."""
    if line.is_over:
        return
    if device is not None:
        torch.cuda.set_device(device)  # or page-locked memory would be of the first device
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        loaded = _next_of(line.batches)
    line.is_over = _is_end(loaded[1])
    line.loaded.put(loaded)
    del loaded  # or an error would keep itself, through its traceback's frames


def _end(threads: ThreadPool) -> None:
    if not threads.close():
        _log.warning("a thread is left behind: the data set has not returned the batch that was being loaded ahead")
