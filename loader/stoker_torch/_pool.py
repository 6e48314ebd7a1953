"""The worker threads of a loader: decode, transform and collate; batches in order, errors at the batch they are of."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import monotonic
from typing import Any

import torch
from torch.utils.data import default_collate

from stoker.errors import SampleError, SampleTimeoutError, StokerError
from stoker_torch._config import StreamConfig
from stoker_torch._options import WorkerOptions
from stoker_torch._tensors import pin_batch, stack_values
from stoker_torch._user_functions import ContextOf, ThreadPool, add_context_argument, takes_context

_log = logging.getLogger("stoker")

_PARTS_PER_THREAD = 4
"""Parts of a batch per thread: enough that a slow sample does not delay its batch, few enough to schedule cheaply."""

Columns = Mapping[str, Any]
NameOf = Callable[[int], str]


def has_functions(config: StreamConfig) -> bool:
    """Return whether the settings have functions to run in a pool."""
    functions = config.transform, config.collate, config.batch_transform
    return bool(config.decode) or any(function is not None for function in functions)


class PendingBatch:
    """A batch in the pool, part by part; the thread that ends the last part finishes the batch.

    Args:
        pool: pool that works on the batch.
        columns: column name → values: tensors or ragged columns of one length.
        name_of: function from a sample's place in the batch to its name in error messages.
        context_of: function from a sample's place in the batch to its context.
        samples: number of samples that are processed one by one; 0 if the batch is processed only as a whole.
        parts: number of parts, at least 1.
    """

    def __init__(
        self, pool: SamplePool, columns: Columns, name_of: NameOf, context_of: ContextOf, samples: int, parts: int
    ) -> None:
        self._pool, self.columns, self.name_of, self.context_of = pool, columns, name_of, context_of
        self.samples: list[Any] = [None] * samples
        self._parts_left = parts
        self._lock = threading.Lock()
        self._result: Future[Any] = Future()

    def work_on(self, part: range) -> None:
        """Process the samples of one part; :meth:`result` raises the errors."""
        try:
            for index in part:
                if self._result.done():  # another part failed, or the batch was dropped
                    return
                self.samples[index] = self._pool.make_sample(self, index)
            with self._lock:
                self._parts_left -= 1
                if self._parts_left:
                    return
            self._result.set_result(self._pool.finish(self))
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: whatever it is, the training loop gets it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Make :meth:`result` raise an error, unless the batch has ended already."""
        with contextlib.suppress(InvalidStateError):
            self._result.set_exception(error)

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` returns without waiting."""
        return self._result.done()

    def result(self) -> Any:
        """Wait for the batch and return it.

        Raises:
            SampleError: more samples failed than are allowed, or a function of the whole batch failed.
            SampleTimeoutError: a function has not returned in time.
            BaseException: a user's function raised it, and it is no ``Exception`` (for example ``SystemExit``).
        """
        return self._pool.wait_for(self._result)


class SamplePool:
    """Threads that run the user's functions, started with the first batch; only one thread at a time may submit.

    Args:
        config: settings with the functions, their time limit and the number of samples that may fail.
        threads: number of threads, if the settings name none.
        collate: function of the list of samples, instead of the one in the settings; default that one.
        pin_memory: whether batches are put into page-locked memory.

    Attributes:
        bad_samples: number of samples that have failed.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        threads: int,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._config, self._options = config, WorkerOptions.of(config.workers)
        self._workers = self._options.threads or threads
        self._collate, self._pin_memory = collate or config.collate, pin_memory
        decode, transform = config.decode or {}, config.transform
        self._decode = [(name, f"decode of column {name!r}", add_context_argument(decode[name])) for name in decode]
        self._transform = None if transform is None else add_context_argument(transform)
        self._is_by_sample = bool(decode) or transform is not None or self._collate is not None
        by_value = [*decode.values(), *([] if transform is None else [transform])]
        self._needs_context = any(map(takes_context, by_value))
        self.bad_samples = 0
        self._begin()

    def _begin(self) -> None:
        """Create the lock and the thread pool of this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._forget_threads()

    def _forget_threads(self) -> None:
        """Drop the references to threads and batches; the next batch starts new threads."""
        self._threads: ThreadPool | None = None
        self._calls: dict[int, _CurrentCall] = {}
        self._pending: weakref.WeakSet[PendingBatch] = weakref.WeakSet()

    def submit(self, columns: Columns, name_of: NameOf, context_of: ContextOf) -> PendingBatch:
        """Queue a batch.

        Args:
            columns: column name → values, as in :class:`PendingBatch`; none for a batch without samples.
            name_of: function that names a sample, as in :class:`PendingBatch`.
            context_of: function that returns a sample's context, as in :class:`PendingBatch`.

        Raises:
            StokerError: another thread or the end of the interpreter closed the pool.
        """
        if self._pid != os.getpid():
            self._begin()
        threads = self._threads
        if threads is None:
            threads = self._threads = ThreadPool(self._workers, "stoker-pool")
            self._finalizer = weakref.finalize(self, _close_threads, threads, self._calls)
        count = len(next(iter(columns.values()))) if self._is_by_sample and columns else 0
        size = max(1, -(-count // (self._workers * _PARTS_PER_THREAD)))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)] or [range(0)]
        batch = PendingBatch(self, columns, name_of, context_of, count, len(parts))
        self._pending.add(batch)
        for part in parts:
            threads.submit(partial(batch.work_on, part))
        return batch

    def close(self) -> None:
        """Drop queued batches, wait up to 5 s for running functions and end the threads; a new batch starts others."""
        if self._threads is not None and self._pid == os.getpid():  # a forked child's copy may have held locks
            for batch in list(self._pending):
                batch.fail(StokerError("the loader was closed while the batch was being worked on"))
            self._finalizer()
            self._forget_threads()

    def wait_for(self, result: Future[Any]) -> Any:
        """Wait for a batch; if it is late, abandon its threads, and start new ones for the next batch.

        Raises:
            SampleTimeoutError: the batch was not complete in time.
        """
        timeout_seconds = self._options.timeout_seconds or None
        with contextlib.suppress(TimeoutError):
            result.exception(timeout_seconds)
        if result.done():
            return result.result()
        late = SampleTimeoutError(
            f"no batch within timeout_seconds={timeout_seconds}: {_describe_longest_call(self._calls)}; "
            "fix the function, or give it more time"
        )
        if self._threads is not None:
            self._finalizer.detach()
            self._threads.dismiss()
        self._forget_threads()
        raise late

    def make_sample(self, batch: PendingBatch, index: int) -> Any:
        """Return one sample, or a ``_FailedSample`` with its error."""
        tasks, thread = self._calls, threading.get_ident()
        task = tasks[thread] = _CurrentCall(batch.name_of, index, "reading", monotonic())
        try:
            is_whole = self._transform is not None or self._collate is not None
            needed = batch.columns if is_whole else self._config.decode or ()
            sample: Any = {name: batch.columns[name][index] for name in needed}
            context = batch.context_of(index) if self._needs_context else None
            for name, stage, function in self._decode:
                task.stage = stage
                sample[name] = function(sample[name], context)
            task.stage = "transform"
            return sample if self._transform is None else self._transform(sample, context)
        except Exception as error:  # noqa: BLE001 - a task boundary: the user's function failed on this sample
            return _FailedSample(task.failure(error))
        finally:
            del tasks[thread]

    def finish(self, batch: PendingBatch) -> Any:
        """Replace bad samples, collate, and transform the batch.

        Raises:
            SampleError: more samples failed than are allowed, all samples of this batch failed, or a function of the
                whole batch did.
        """
        if not batch.columns:  # a batch whose samples are all elsewhere
            return {}
        places = self._good_places(batch.samples)
        tasks, thread = self._calls, threading.get_ident()
        task = tasks[thread] = _CurrentCall(batch.name_of, None, "collate", monotonic())
        try:
            result = self._collate_batch(batch.columns, [batch.samples[index] for index in places], places)
            if self._config.batch_transform is not None:
                task.stage = "batch_transform"
                result = self._config.batch_transform(result)
        except Exception as error:
            raise task.failure(error) from error
        finally:
            del tasks[thread]
        return pin_batch(result) if self._pin_memory else result

    def _collate_batch(self, columns: Columns, good: list[Any], places: list[int]) -> Any:
        if self._collate is not None:
            return self._collate(good)
        if self._transform is not None:
            return default_collate(good)
        if places != list(range(len(places))):
            columns = {name: values[torch.tensor(places)] for name, values in columns.items()}
        return {**columns, **{name: stack_values([sample[name] for sample in good]) for name, *_ in self._decode}}

    def _good_places(self, samples: list[Any]) -> list[int]:
        """Return the place of each sample of the batch; the good ones, in turn, replace the bad ones."""
        bad = [sample.error for sample in samples if isinstance(sample, _FailedSample)]
        good = [index for index, sample in enumerate(samples) if not isinstance(sample, _FailedSample)]
        if bad:
            allowed = self._options.max_bad_samples
            with self._lock:
                self.bad_samples += len(bad)
                too_many = self.bad_samples > allowed
            if too_many and allowed:
                bad[0].add_note(f"max_bad_samples={allowed} is used up: {self.bad_samples} samples have failed")
            if too_many or not good:
                raise bad[0]
        spare = cycle(good)
        return [next(spare) if isinstance(sample, _FailedSample) else index for index, sample in enumerate(samples)]


@dataclass(frozen=True, slots=True)
class _FailedSample:
    """The error of a sample that failed, in place of the sample."""

    error: SampleError


@dataclass(slots=True)
class _CurrentCall:
    """The current work of a thread.

    Attributes:
        name_of: function that names a sample of the batch.
        place: place of the sample in the batch, None for the whole batch.
        stage: name of the function that is running.
        begin_seconds: start of the work by the monotonic clock, in seconds.
    """

    name_of: NameOf
    place: int | None
    stage: str
    begin_seconds: float

    def name(self) -> str:
        """Return the name of the sample, or of the batch."""
        if self.place is None:
            return f"the batch that starts with {self.name_of(0)}"
        return self.name_of(self.place)

    def failure(self, error: Exception) -> SampleError:
        """Return the error that wraps an exception of the user's function."""
        failure = SampleError(f"{self.name()}: {self.stage} failed: {type(error).__name__}: {_error_text(error)}")
        failure.__cause__ = error
        return failure


def batch_failure(name_of: NameOf, stage: str, error: Exception) -> SampleError:
    """Return the error that wraps an exception of the user's function of a whole batch."""
    return _CurrentCall(name_of, None, stage, monotonic()).failure(error)


def _error_text(error: Exception) -> str:
    """Return the text of an error."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - a user's class: its broken __str__ must not hide the error
        return f"<its __str__ raises {type(another).__name__}>"


def _describe_longest_call(tasks: dict[int, _CurrentCall]) -> str:
    """Describe the function that has been running longest, its sample, and the number of other running functions."""
    under_way = sorted(tasks.copy().values(), key=lambda task: task.begin_seconds)
    if not under_way:
        return "no function is running"
    first = under_way[0]
    others = f" (and {len(under_way) - 1} more)" if len(under_way) > 1 else ""
    return f"{first.stage} of {first.name()} has not returned for {monotonic() - first.begin_seconds:.1f} s{others}"


def _close_threads(threads: ThreadPool, tasks: dict[int, _CurrentCall]) -> None:
    """End threads; warn if a function does not return."""
    if not threads.close():
        _log.warning("a thread of the loader is still running: %s", _describe_longest_call(tasks))
