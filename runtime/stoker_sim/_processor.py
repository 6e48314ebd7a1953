"""The processor time of loaders: ranks share the cores of a machine, and the threads of a rank one interpreter lock.

A rank has a thread that fetches and one that gathers. They hold the lock in turn, for a switch interval of the
interpreter at a time, so a rank uses at most one core. Fetched items are ready once they are received and verified. A
batch is gathered as :class:`stoker_torch._readahead.Readahead` does it: while the accelerator computes, as soon
as all its items are ready, unless it is the first one of an epoch.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from stoker._base.arguments import BoundedConfig, NotNegative, Positive
from stoker._base.task_group import end_tasks
from stoker._fetch.prefetcher import Prefetcher
from stoker._order.steps import PlannedStep
from stoker_sim._bucket import ProcessorSharing

_SWITCH_SECONDS = 0.005
"""Switch interval of the interpreter: a thread that waits for the lock gets it after this time."""
_NEW_BATCHES = 3
"""Batches of a run in new memory: the one in use, the next one, and the one that is being gathered."""
_MIN_BUSY_SECONDS = 0.002
"""Computation of a step from which the next batch is gathered meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorModel(BoundedConfig):
    """The cores of a machine, and the processor time of the loader of each of its ranks; by default none is taken.

    Attributes:
        cores: number of cores of a machine, which its ranks share; it may have a fraction.
        request_seconds: time of one core for each request.
        fetched_byte_seconds: time of one core to receive and verify a byte.
        sample_seconds: time of one core to gather a sample into a batch.
        new_byte_seconds: time of one core for the first write to a byte of memory, of the ring or of a batch.
        sample_bytes: mean size of a sample in a batch, in bytes.
    """

    cores: Positive[float] = math.inf
    request_seconds: NotNegative[float] = 0.0
    fetched_byte_seconds: NotNegative[float] = 0.0
    sample_seconds: NotNegative[float] = 0.0
    new_byte_seconds: NotNegative[float] = 0.0
    sample_bytes: NotNegative[float] = 0.0

    def share_cores(self) -> ProcessorSharing:
        """Return the cores of one machine: each thread that runs gets one, or an equal share if there are too few."""
        return ProcessorSharing(lambda threads: min(1.0, self.cores / threads))


class RankProcessor:
    """The processor time of one rank's loader, on the cores of its machine.

    Args:
        model: processor time of the loader.
        cores: cores of the machine, from :meth:`ProcessorModel.share_cores`.
        batch_size: samples of a batch.
    """

    def __init__(self, model: ProcessorModel, cores: ProcessorSharing, batch_size: int) -> None:
        self._model, self._cores, self._batch_size = model, cores, batch_size
        self._lock = asyncio.Lock()
        self._used_slots: set[int] = set()
        self._batches = 0
        self._arrived = asyncio.Event()
        self._ahead: asyncio.Task[None] | None = None
        self._has_begun = False

    async def receive(self, slots: range, size_bytes: int, requests: int) -> None:
        """Take the time to fetch an item into slots of the ring."""
        model = self._model
        new_share = len(set(slots) - self._used_slots) / len(slots)
        self._used_slots.update(slots)
        byte_seconds = model.fetched_byte_seconds + new_share * model.new_byte_seconds
        await self._run(requests * model.request_seconds + size_bytes * byte_seconds)
        self._arrived.set()

    async def gather(self) -> None:
        """Take the time to gather the batch whose items are ready, or what is left if it is gathered ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._has_begun:
            await ahead
            return
        if ahead is not None:
            await end_tasks([ahead])
        await self._gather()

    def gather_ahead(
        self, group: asyncio.TaskGroup, prefetcher: Prefetcher[int], step: PlannedStep[int], compute_seconds: float
    ) -> None:
        """Gather the next batch while the accelerator computes, once all its items are ready.

        Args:
            group: group of the task that gathers.
            prefetcher: fetches the items.
            step: step of the batch.
            compute_seconds: time of the computation, in seconds.
        """
        if compute_seconds > _MIN_BUSY_SECONDS and (self._model.sample_seconds or self._model.new_byte_seconds):
            self._has_begun = False
            self._ahead = group.create_task(self._gather_when_ready(prefetcher, step))

    async def _gather_when_ready(self, prefetcher: Prefetcher[int], step: PlannedStep[int]) -> None:
        for item in [item for segment in step.segments for item in segment.items]:
            while prefetcher.ready(item) is None:
                self._arrived.clear()
                await self._arrived.wait()
        self._has_begun = True
        await self._gather()

    async def _gather(self) -> None:
        model = self._model
        self._batches += 1
        new_bytes = model.sample_bytes if self._batches <= _NEW_BATCHES else 0.0
        await self._run(self._batch_size * (model.sample_seconds + new_bytes * model.new_byte_seconds))

    async def _run(self, seconds: float) -> None:
        """Return when one core has worked for a time, while the other thread of the rank does not run."""
        while seconds > 0.0:
            async with self._lock:
                await self._cores.serve(min(seconds, _SWITCH_SECONDS))
            seconds -= _SWITCH_SECONDS
