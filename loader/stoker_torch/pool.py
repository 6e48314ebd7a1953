"""The pool: decode, transform and collate on threads, batches in order, errors at the batch they belong to."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import default_collate

from stoker.errors import SampleError, StokerError
from stoker_torch.tensors import pinned, stacked

__all__ = ["PendingBatch", "SamplePool", "SampleWork"]

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
    """

    decode: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    transform: Callable[[dict[str, Any]], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None
    pin_memory: bool = False

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
    """

    def __init__(
        self, parts: int, places: int, sample: Callable[[int], Any], finish: Callable[[list[Any]], Any]
    ) -> None:
        self._samples: list[Any] = [None] * places
        self._sample, self._finish = sample, finish
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
            BaseException: what is not an ``Exception`` (``SystemExit``, say) comes as a user's function raised it.
        """
        return self._result.result()


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
        self._workers = workers
        self._allowed = max_bad_samples
        self.bad_samples = 0
        self._begin()

    def _begin(self) -> None:
        """Make what belongs to this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._crew: _Crew | None = None

    def submit(self, columns: Columns, name_of: NameOf) -> PendingBatch:
        """Begin to work on a batch.

        Args:
            columns: name → values, tensors or ragged columns of one length.
            name_of: names a sample of the batch, for errors.
        """
        if self._pid != os.getpid():
            self._begin()
        if self._crew is None:
            self._crew = _Crew(self._workers)
            self._finalizer = weakref.finalize(self, self._crew.stop)
        count = len(next(iter(columns.values()))) if self._work.by_sample else 0
        size = max(1, -(-count // (self._workers * _PARTS_PER_WORKER)))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)] or [range(0)]
        batch = PendingBatch(
            len(parts), count, partial(self._sample, columns, name_of), partial(self._finished, columns, name_of)
        )
        for part in parts:
            self._crew.parts.put((batch, part))
        return batch

    def close(self) -> None:
        """Drop what is queued, wait for what is running and end the threads; the next batch starts new ones."""
        if self._crew is not None:
            self._crew = None
            self._finalizer()

    def _sample(self, columns: Columns, name_of: NameOf, place: int) -> Any:
        """Return one sample, or what stands for a bad one."""
        work = self._work
        stage = "reading"
        try:
            needed = columns if work.transform is not None or work.collate is not None else work.decode
            sample: Any = {name: columns[name][place] for name in needed}
            for name, function in work.decode.items():
                stage = f"decode of column {name!r}"
                sample[name] = function(sample[name])
            stage = "transform"
            return sample if work.transform is None else work.transform(sample)
        except Exception as error:  # noqa: BLE001 - a task boundary: the user's function failed on this sample
            return _Bad(_failure(name_of(place), stage, error))

    def _finished(self, columns: Columns, name_of: NameOf, samples: list[Any]) -> Any:
        """Replace bad samples, collate, and transform the batch.

        Raises:
            SampleError: more samples have failed than are allowed, all of this batch have, or the batch itself does.
        """
        places = self._good_places(samples)
        stage = "collate"
        try:
            batch = self._collated(columns, samples, places)
            if self._work.batch_transform is not None:
                stage = "batch_transform"
                batch = self._work.batch_transform(batch)
        except Exception as error:
            raise _failure(f"the batch that starts with {name_of(0)}", stage, error) from error
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


def _failure(what: str, stage: str, error: Exception) -> SampleError:
    failure = SampleError(f"{what}: {stage} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _Crew:
    """Daemon threads that work on parts of batches in the order they are put.

    An executor's threads would do all that is queued before they let the interpreter exit.
    """

    def __init__(self, workers: int) -> None:
        self._pid = os.getpid()
        self.parts: SimpleQueue[tuple[PendingBatch, range] | None] = SimpleQueue()
        names = (f"stoker-pool-{number}" for number in range(workers))
        self._threads = [threading.Thread(target=_serve, args=(self.parts,), name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Fail what is queued, wait for the parts being worked on, and end the threads. Idempotent."""
        if self._pid != os.getpid():  # a forked child has none of the threads, and what they locked stays locked
            return
        with contextlib.suppress(Empty):
            while True:
                if (queued := self.parts.get_nowait()) is not None:
                    queued[0].fail(StokerError("the loader was closed while the batch was being worked on"))
        for _ in self._threads:
            self.parts.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector runs anywhere
                thread.join()


def _serve(parts: SimpleQueue[tuple[PendingBatch, range] | None]) -> None:
    while (queued := parts.get()) is not None:
        batch, part = queued
        batch.work_on(part)
        del queued, batch  # or an idle thread would keep the batch alive
