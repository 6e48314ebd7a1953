"""The pool: decode, transform and collate on threads, batches in order, errors at the batch they belong to."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from time import monotonic
from typing import Any

import torch
from torch.utils.data import default_collate

from stoker.errors import SampleError, SampleTimeoutError, StokerError
from stoker_torch._config import StreamConfig, WorkerOptions
from stoker_torch._tensors import pinned, stacked
from stoker_torch._user_functions import ContextOf, Crew, asks_for_context, with_context

__all__ = ["PendingBatch", "SamplePool", "SampleWork"]

_log = logging.getLogger("stoker")

_PARTS_PER_WORKER = 4
"""Small enough that a slow sample does not hold up its batch, large enough that scheduling costs nothing."""

Columns = Mapping[str, Any]
NameOf = Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """What is done to the samples of a batch.

    Attributes:
        decode: column → function of one value.
        transform: function of one sample.
        collate: function of the list of samples.
        batch_transform: function of the batch.
        pin_memory: whether what came of it is put into page-locked memory.
        timeout_seconds: for which a batch is waited for; None: without a limit.
    """

    decode: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    transform: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None
    pin_memory: bool = False
    timeout_seconds: float | None = None

    @property
    def by_sample(self) -> bool:
        """Whether samples are handled one by one."""
        return bool(self.decode) or self.transform is not None or self.collate is not None

    @property
    def is_none(self) -> bool:
        """Whether there is nothing that a pool is needed for."""
        return not self.by_sample and self.batch_transform is None


class PendingBatch:
    """A batch that is being worked on, part by part; whoever ends the last part finishes it.

    Args:
        parts: how many; at least one.
        places: how many samples.
        sample: returns the sample at a place.
        finish: makes the batch of its samples.
        wait: waits for a result, or raises what says why there is none.
    """

    def __init__(
        self,
        parts: int,
        places: int,
        sample: Callable[[int], Any],
        finish: Callable[[list[Any]], Any],
        wait: Callable[[Future[Any]], Any],
    ) -> None:
        self._samples: list[Any] = [None] * places
        self._sample, self._finish, self._wait = sample, finish, wait
        self._parts_left = parts
        self._lock = threading.Lock()
        self._result: Future[Any] = Future()

    def work_on(self, part: range) -> None:
        """Work on the samples of one part; nothing is raised here, but by :meth:`result`."""
        try:
            for place in part:
                if self._result.done():  # another part failed, or nobody waits for the batch any more
                    return
                self._samples[place] = self._sample(place)
            with self._lock:
                self._parts_left -= 1
                if self._parts_left:
                    return
            self._result.set_result(self._finish(self._samples))
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: whatever it is, the training loop gets it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Have :meth:`result` raise an error, unless it is decided already."""
        with contextlib.suppress(InvalidStateError):
            self._result.set_exception(error)

    def result(self) -> Any:
        """Wait for the batch and return it.

        Raises:
            SampleError: a sample failed, and no more failures are allowed; or what is done to the batch did.
            SampleTimeoutError: a function has not returned in time.
            BaseException: what is not an ``Exception`` (``SystemExit``, say) comes as a user's function raised it.
        """
        return self._wait(self._result)


class SamplePool:
    """Threads that work on samples, started with the first batch; not to be fed by two threads at a time.

    Args:
        work: what to do.
        workers: how many threads.
        max_bad_samples: how many samples may fail over the life of the pool.

    Attributes:
        bad_samples: how many have failed.
    """

    def __init__(self, work: SampleWork, workers: int, max_bad_samples: int) -> None:
        self._work = work
        by_value = [*work.decode.values(), *([] if work.transform is None else [work.transform])]
        self._needs_context = any(map(asks_for_context, by_value))
        self._decode = [
            (name, f"decode of column {name!r}", with_context(function)) for name, function in work.decode.items()
        ]
        self._transform = None if work.transform is None else with_context(work.transform)
        self._workers = workers
        self._allowed = max_bad_samples
        self.bad_samples = 0
        self._begin()

    @classmethod
    def of(
        cls,
        config: StreamConfig,
        *,
        threads: int,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> SamplePool | None:
        """Return the pool that settings ask for, None if there is nothing to do.

        Args:
            config: the settings.
            threads: number of threads where the settings name none.
            collate: function of the list of samples, in place of the settings' own.
            pin_memory: whether batches are put into page-locked memory.
        """
        workers = WorkerOptions.of(config.workers)
        work = SampleWork(
            decode=config.decode or {},
            transform=config.transform,
            collate=collate or config.collate,
            batch_transform=config.batch_transform,
            pin_memory=pin_memory,
            timeout_seconds=workers.timeout_seconds or None,
        )
        return None if work.is_none else cls(work, workers.threads or threads, workers.max_bad_samples)

    def _begin(self) -> None:
        """Make what belongs to this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._forget_threads()

    def _forget_threads(self) -> None:
        """Leave threads and batches to themselves; the next batch starts new ones."""
        self._crew: Crew | None = None
        self._tasks: dict[int, _Task] = {}
        self._pending: weakref.WeakSet[PendingBatch] = weakref.WeakSet()

    def submit(self, columns: Columns, name_of: NameOf, context_of: ContextOf) -> PendingBatch:
        """Begin to work on a batch.

        Args:
            columns: name → values, tensors or ragged columns of one length.
            name_of: names a sample of the batch, for errors.
            context_of: returns a sample's context, for functions that ask for it.

        Raises:
            StokerError: the pool was closed meanwhile, by another thread or the end of the interpreter.
        """
        if self._pid != os.getpid():
            self._begin()
        crew = self._crew
        if crew is None:
            crew = self._crew = Crew(self._workers, "stoker-pool")
            self._finalizer = weakref.finalize(self, _end, crew, self._tasks)
        count = len(next(iter(columns.values()))) if self._work.by_sample else 0
        size = max(1, -(-count // (self._workers * _PARTS_PER_WORKER)))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)] or [range(0)]
        batch = PendingBatch(
            len(parts),
            count,
            partial(self._sample, columns, name_of, context_of),
            partial(self._finished, columns, name_of),
            self._result,
        )
        self._pending.add(batch)
        for part in parts:
            crew.submit(partial(batch.work_on, part))
        return batch

    def close(self) -> None:
        """Drop what is queued, wait 5 s for what is running and end the threads; the next batch starts new ones."""
        if self._crew is not None and self._pid == os.getpid():  # a forked child has a copy, with locks held for ever
            for batch in list(self._pending):
                batch.fail(StokerError("the loader was closed while the batch was being worked on"))
            self._finalizer()
            self._forget_threads()

    def _result(self, result: Future[Any]) -> Any:
        """Wait for a batch; where it is late, leave its threads to themselves, and the next batch to new ones.

        Raises:
            SampleTimeoutError: it was not there in time.
        """
        timeout_seconds = self._work.timeout_seconds
        with contextlib.suppress(TimeoutError):
            result.exception(timeout_seconds)
        if result.done():
            return result.result()
        late = SampleTimeoutError(
            f"no batch within timeout_seconds={timeout_seconds}: {_longest(self._tasks)}; "
            "mend the function, or give it more time"
        )
        if self._crew is not None:
            self._finalizer.detach()
            self._crew.dismiss()
        self._forget_threads()
        raise late

    def _sample(self, columns: Columns, name_of: NameOf, context_of: ContextOf, place: int) -> Any:
        """Return one sample, or what stands for a bad one."""
        work, tasks, thread = self._work, self._tasks, threading.get_ident()
        task = tasks[thread] = _Task(name_of, place, "reading", monotonic())
        try:
            needed = columns if work.transform is not None or work.collate is not None else work.decode
            sample: Any = {name: columns[name][place] for name in needed}
            context = context_of(place) if self._needs_context else None
            for name, stage, function in self._decode:
                task.stage = stage
                sample[name] = function(sample[name], context)
            task.stage = "transform"
            return sample if self._transform is None else self._transform(sample, context)
        except Exception as error:  # noqa: BLE001 - a task boundary: the user's function failed on this sample
            return _Bad(task.failure(error))
        finally:
            del tasks[thread]

    def _finished(self, columns: Columns, name_of: NameOf, samples: list[Any]) -> Any:
        """Replace bad samples, collate, and transform the batch.

        Raises:
            SampleError: more samples have failed than are allowed, all of this batch have, or the batch itself does.
        """
        places = self._good_places(samples)
        tasks, thread = self._tasks, threading.get_ident()
        task = tasks[thread] = _Task(name_of, None, "collate", monotonic())
        try:
            batch = self._collated(columns, samples, places)
            if self._work.batch_transform is not None:
                task.stage = "batch_transform"
                batch = self._work.batch_transform(batch)
        except Exception as error:
            raise task.failure(error) from error
        finally:
            del tasks[thread]
        return pinned(batch) if self._work.pin_memory else batch

    def _collated(self, columns: Columns, samples: list[Any], places: list[int]) -> Any:
        work = self._work
        good = [samples[place] for place in places]
        if work.collate is not None:
            return work.collate(good)
        if work.transform is not None:
            return default_collate(good)
        if places != list(range(len(places))):
            columns = {name: values[torch.tensor(places)] for name, values in columns.items()}
        return {**columns, **{name: stacked([sample[name] for sample in good]) for name in work.decode}}

    def _good_places(self, samples: list[Any]) -> list[int]:
        """Return the place of each sample of the batch, bad ones replaced by the next good ones in turn."""
        bad = [sample.error for sample in samples if isinstance(sample, _Bad)]
        good = [place for place, sample in enumerate(samples) if not isinstance(sample, _Bad)]
        if bad:
            with self._lock:
                self.bad_samples += len(bad)
                too_many = self.bad_samples > self._allowed
            if too_many and self._allowed:
                bad[0].add_note(f"max_bad_samples={self._allowed} is used up: {self.bad_samples} samples have failed")
            if too_many or not good:
                raise bad[0]
        spare = cycle(good)
        return [next(spare) if isinstance(sample, _Bad) else place for place, sample in enumerate(samples)]


@dataclass(frozen=True, slots=True)
class _Bad:
    """Stands for a sample that failed."""

    error: SampleError


@dataclass(slots=True)
class _Task:
    """What a thread is doing.

    Attributes:
        name_of: names a sample of the batch.
        place: of the sample; None for the whole batch.
        stage: which function is at work.
        begun: when, by the monotonic clock, in seconds.
    """

    name_of: NameOf
    place: int | None
    stage: str
    begun: float

    def name(self) -> str:
        """Name the sample, or the batch."""
        if self.place is None:
            return f"the batch that starts with {self.name_of(0)}"
        return self.name_of(self.place)

    def failure(self, error: Exception) -> SampleError:
        """Return the error that an exception of the user's function becomes."""
        failure = SampleError(f"{self.name()}: {self.stage} failed: {type(error).__name__}: {_text_of(error)}")
        failure.__cause__ = error
        return failure


def _text_of(error: Exception) -> str:
    """Return what an error says."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - of the user's class; what it was raised for must not be lost
        return f"<its __str__ raises {type(another).__name__}>"


def _longest(tasks: dict[int, _Task]) -> str:
    """Say which function has been at work for longest, on what, and how many others are."""
    under_way = sorted(tasks.copy().values(), key=lambda task: task.begun)
    if not under_way:
        return "no function is at work"
    first = under_way[0]
    others = f" (and {len(under_way) - 1} more)" if len(under_way) > 1 else ""
    return f"{first.stage} of {first.name()} has not returned for {monotonic() - first.begun:.1f} s{others}"


def _end(crew: Crew, tasks: dict[int, _Task]) -> None:
    """End threads; warn of a function that keeps one from ending."""
    if not crew.close():
        _log.warning("a thread of the loader is left behind: %s", _longest(tasks))
