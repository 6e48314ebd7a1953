"""PyTorch's DataLoader in virtual time: worker processes that load whole batches, handed out in order.

As in torch.utils.data (versions 1.4 to 2): every worker has a queue, batches are dealt to workers in turn, as many as
``prefetch_factor`` for each at first and one more whenever the training loop takes one. A batch that is ready early
waits for those before it. Without workers the loop loads its batches itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from stoker._base.task_group import task_group
from stoker.errors import ConfigError

__all__ = ["LoaderModel", "train"]

Load = Callable[[int], Awaitable[object]]
"""Loads a sample, given by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderModel:
    """How batches are loaded.

    Attributes:
        workers: processes; 0 loads in the training loop.
        prefetch_factor: batches that a worker is asked for ahead.
        hand_over_seconds: that the training loop takes for a batch of a worker's.
    """

    workers: int
    prefetch_factor: int = 2
    hand_over_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch_factor < 1:
            raise ConfigError(f"a loader needs workers >= 0 and prefetch_factor >= 1, not {self}")
        if not self.hand_over_seconds >= 0:
            raise ConfigError(f"hand_over_seconds must be at least 0, not {self.hand_over_seconds}")


async def train(
    model: LoaderModel, batches: Sequence[Iterable[int]], load: Load, step: Callable[[], Awaitable[object]]
) -> None:
    """Load batches in their order and take a step on each.

    Args:
        model: how they are loaded.
        batches: the samples of each.
        load: loads a sample; a worker loads one after the other.
        step: trains on the batch that is there.
    """
    if not model.workers:
        for batch in batches:
            for sample in batch:
                await load(sample)
            await step()
        return
    ready = [asyncio.Event() for _ in batches]
    queues: list[asyncio.Queue[int | None]] = [asyncio.Queue() for _ in range(model.workers)]

    def ask(number: int) -> None:
        queues[number % model.workers].put_nowait(number if number < len(batches) else None)

    async def work(queue: asyncio.Queue[int | None]) -> None:
        while (number := await queue.get()) is not None:
            for sample in batches[number]:
                await load(sample)
            ready[number].set()

    async with task_group() as group:
        for queue in queues:
            group.create_task(work(queue))
        ahead = model.workers * model.prefetch_factor
        for number in range(ahead):
            ask(number)
        for number, is_ready in enumerate(ready):
            await is_ready.wait()
            ask(number + ahead)
            await asyncio.sleep(model.hand_over_seconds)
            await step()
