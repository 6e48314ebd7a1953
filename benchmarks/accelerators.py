"""Emulated accelerators: processes that read batches with a `Loader` and sleep for the time of a training step.

An accelerator is a rank of a data-parallel training. Its steps are those of DLIO, the program that MLPerf Storage runs:
take a batch, sleep, and wait for the other accelerators, as an all-reduce would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import mean
from threading import Barrier, BrokenBarrierError

from stoker_torch import Loader

__all__ = ["EpochTimes", "Run", "run_accelerators", "utilization"]

_BARRIER_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run of a number of accelerators.

    Attributes:
        url: URL of the packed data set.
        accelerators: number of accelerators, which is the world size.
        batch_size: samples per batch of an accelerator.
        step_seconds: time that an accelerator computes on a batch.
        epochs: number of epochs.
        columns: names of the columns to read; None for all.
        memory: memory budget of each loader.
        window: window of the shuffle, in super-samples.
    """

    url: str
    accelerators: int
    batch_size: int
    step_seconds: float
    epochs: int
    columns: Sequence[str] | None
    memory: str
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTimes:
    """Times of an epoch on one accelerator, in seconds.

    Attributes:
        seconds: duration, from before the request for the first batch to the end of the last step.
        step_seconds: duration of each step: waiting for the batch, and computing on it.
        compute_seconds: part of each step spent computing.
    """

    seconds: float
    step_seconds: Sequence[float]
    compute_seconds: Sequence[float]

    @property
    def accelerator_utilization(self) -> float:
        """Time spent computing as a fraction of all time, 0 to 1, both without the first step."""
        return sum(self.compute_seconds[1:]) / (self.seconds - self.step_seconds[0])


def utilization(times: Sequence[Sequence[EpochTimes]]) -> float:
    """Return the utilization of a run: the mean over its epochs and accelerators.

    Args:
        times: times of each epoch of each accelerator.
    """
    return mean(epoch.accelerator_utilization for epochs in times for epoch in epochs)


_step_barrier: Barrier | None = None


def _set_barrier(barrier: Barrier) -> None:
    global _step_barrier
    _step_barrier = barrier


def run_accelerators(run: Run) -> list[list[EpochTimes]]:
    """Return the times of each epoch of each accelerator; the environment variables tell where the bucket is."""
    context = get_context("spawn")
    barrier = context.Barrier(run.accelerators, timeout=_BARRIER_SECONDS)
    with ProcessPoolExecutor(
        run.accelerators, mp_context=context, initializer=_set_barrier, initargs=(barrier,)
    ) as pool:
        running = [pool.submit(_train, run, rank) for rank in range(run.accelerators)]
        failures = [failure for each in running if (failure := each.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, BrokenBarrierError)):
            raise failure
        return [each.result() for each in running]


def _train(run: Run, rank: int) -> list[EpochTimes]:
    barrier = _step_barrier
    assert barrier is not None
    try:
        with Loader(
            run.url,
            batch_size=run.batch_size,
            rank=rank,
            world_size=run.accelerators,
            epochs=run.epochs,
            columns=run.columns,
            memory=run.memory,
            window=run.window,
            drop_last=True,
        ) as loader:
            barrier.wait()
            return [_train_epoch(loader, run.step_seconds, barrier) for _ in range(run.epochs)]
    except BaseException:
        barrier.abort()
        raise


def _train_epoch(loader: Loader, step_seconds: float, barrier: Barrier) -> EpochTimes:
    steps, computing = [], []
    begun = asked = time.perf_counter()
    for _ in loader:
        received = time.perf_counter()
        time.sleep(step_seconds)
        computed = time.perf_counter()
        steps.append(computed - asked)
        computing.append(computed - received)
        barrier.wait()
        asked = time.perf_counter()
    return EpochTimes(seconds=time.perf_counter() - begun, step_seconds=steps, compute_seconds=computing)
