"""The pool: decode, transform and collate on threads, batches in order, errors at the batch they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from stoker.errors import SampleError

__all__ = ["PendingBatch", "SamplePool", "SampleWork"]

_CHUNKS_PER_WORKER = 4
"""Small enough that a slow sample does not hold up its batch, large enough that scheduling costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """What is done to the samples of a batch.

    Attributes:
        decode: column → function of one value.
        transform: function of one sample.
        collate: function of the list of samples.
        batch_transform: function of the batch.
    """

    decode: Mapping[str, Callable[[Any], Any]]
    transform: Callable[[dict[str, Any]], Any] | None
    collate: Callable[[list[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None


class BadSamples:
    """Counts failed samples against what the user allows. Thread-safe.

    Attributes:
        count: how many have failed.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self.count = 0

    def add(self, error: SampleError) -> None:
        """Count one failed sample.

        Raises:
            SampleError: ``error`` itself, if no more are allowed.
        """
        with self._lock:
            self.count += 1
            if self.count > self._allowed:
                raise error


class PendingBatch:
    """A batch that is being worked on; made by :meth:`SamplePool.submit`."""

    def __init__(self, places: int, parts: int, finish: Callable[[list[Any]], Any]) -> None:
        self._samples: list[Any] = [None] * places
        self._parts_left = parts
        self._finish = finish
        self._lock = threading.Lock()
        self._result: Future[Any] = Future()

    def part_done(self, start: int, samples: list[Any]) -> None:
        """Take the samples from place ``start`` on; whoever brings the last part finishes the batch."""
        self._samples[start : start + len(samples)] = samples
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        try:
            self._result.set_result(self._finish(self._samples))
        except Exception as error:  # noqa: BLE001 - a task boundary: it is raised where the batch is asked for
            self._result.set_exception(error)

    def result(self) -> Any:
        """Wait for the batch and return it.

        Raises:
            SampleError: a sample failed, and no more failures are allowed.
        """
        return self._result.result()


class SamplePool:
    """Threads that work on samples.

    Args:
        work: what to do.
        workers: how many threads.
        max_bad_samples: how many samples may fail over the life of the pool.
    """

    def __init__(self, work: SampleWork, workers: int, max_bad_samples: int) -> None:
        self._work = work
        self._workers = workers
        self.bad = BadSamples(max_bad_samples)
        self._by_sample = bool(work.decode) or work.transform is not None or work.collate is not None
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="stoker-pool")

    def submit(self, columns: Mapping[str, Any], name_of: Callable[[int], str]) -> PendingBatch:
        """Begin to work on a batch.

        Args:
            columns: name → values, tensors or ragged columns of one length.
            name_of: names a sample of the batch, for errors.
        """
        count = len(next(iter(columns.values()))) if self._by_sample else 0
        size = max(1, -(-count // (self._workers * _CHUNKS_PER_WORKER)))
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)] or [range(0)]
        batch = PendingBatch(count, len(parts), lambda samples: self._finished(columns, samples))
        for part in parts:
            self._executor.submit(self._work_on, batch, columns, part, name_of)
        return batch

    def close(self) -> None:
        """Wait for what is running and end the threads. Idempotent."""
        self._executor.shutdown(cancel_futures=True)

    def _work_on(
        self, batch: PendingBatch, columns: Mapping[str, Any], part: range, name_of: Callable[[int], str]
    ) -> None:
        batch.part_done(part.start, [self._sample(columns, place, name_of) for place in part])

    def _sample(self, columns: Mapping[str, Any], place: int, name_of: Callable[[int], str]) -> Any:
        """Return one sample, or the exception of a bad one."""
        work = self._work
        doing = "transform"
        try:
            if work.transform is None and work.collate is None:
                sample: dict[str, Any] = {}
                for doing, function in work.decode.items():
                    sample[doing] = function(columns[doing][place])
                return sample
            sample = {name: values[place] for name, values in columns.items()}
            for doing, function in work.decode.items():
                sample[doing] = function(sample[doing])
            doing = "transform"
            return sample if work.transform is None else work.transform(sample)
        except Exception as error:  # noqa: BLE001 - a task boundary: the user's function failed on this sample
            stage = "transform" if doing == "transform" else f"decode of column {doing!r}"
            bad = SampleError(f"{name_of(place)}: {stage} failed: {type(error).__name__}: {error}")
            bad.__cause__ = error
            return bad

    def _finished(self, columns: Mapping[str, Any], samples: list[Any]) -> Any:
        """Replace bad samples, collate, and transform the batch."""
        work = self._work
        batch: Any = dict(columns)
        if samples:
            places = self._good_places(samples)
            samples = [samples[place] for place in places]
            if work.collate is not None:
                batch = work.collate(samples)
            elif work.transform is not None:
                batch = default_collate(samples)
            else:
                if places != list(range(len(places))):
                    batch = {name: values[torch.tensor(places)] for name, values in batch.items()}
                for name in work.decode:
                    batch[name] = _stacked([sample[name] for sample in samples])
        return batch if work.batch_transform is None else work.batch_transform(batch)

    def _good_places(self, samples: list[Any]) -> list[int]:
        """Return the place of each sample of the batch, bad ones replaced by the next good ones in turn.

        Raises:
            SampleError: more samples have failed than are allowed, or all of this batch have.
        """
        bad = [sample for sample in samples if isinstance(sample, SampleError)]
        for error in bad:
            self.bad.add(error)
        good = [place for place, sample in enumerate(samples) if not isinstance(sample, SampleError)]
        if bad and not good:
            raise bad[0]
        spare = cycle(good)
        return [next(spare) if isinstance(sample, SampleError) else place for place, sample in enumerate(samples)]


def _stacked(values: Sequence[Any]) -> Any:
    """Return tensors, arrays or numbers of one shape as one tensor, anything else as a list."""
    first = values[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(value, np.ndarray) and value.shape == first.shape and value.dtype == first.dtype for value in values
    ):
        return torch.from_numpy(np.stack(values))
    if isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and value.shape == first.shape for value in values
    ):
        return torch.stack(list(values))
    if all(type(value) is type(first) and isinstance(value, bool | int | float) for value in values):
        return torch.tensor(values)
    return list(values)
