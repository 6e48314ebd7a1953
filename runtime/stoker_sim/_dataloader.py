"""A machine that loads data as PyTorch's DataLoader does, in the loop's time: its disk, its processors, its workers.

As in torch.utils.data (versions 1.4 to 2): every worker has a queue, batches are dealt to workers in turn, as many
as ``prefetch_factor`` for each at first and one more whenever the training loop takes one. A batch that is ready
early waits for those before it. Without workers the loop loads its batches itself.

The disk has one head: what it reads next is what lies nearest of what it is asked for. Serving the nearest request
never waits for a better one. So a lone reader, which asks for the next piece only when it has the last one, finds
the head where it left it; two readers take the head away from each other between two pieces of one file (S. Iyer, P.
Druschel, "Anticipatory scheduling", SOSP 2001, section 1); and of many requests one is near.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stoker._base.meter import Operation, ReaderWrapper
from stoker._base.task_group import task_group
from stoker.abc import Readable
from stoker.errors import ConfigError
from stoker_sim._bucket import ModelledReader, Shared

__all__ = ["DecodingView", "Disk", "DiskModel", "DiskView", "LoaderModel", "Processors", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskModel:
    """How long a disk takes.

    Attributes:
        settle_seconds: of the shortest move of the head.
        stroke_seconds: of the longest; others grow with the root of the distance.
        turn_seconds: of a turn of the platter, of which each read waits for a part.
        bytes_per_second: while the head reads.
        pieces: places that a file is read from, one after the other, all near: its record, and its bytes.
    """

    settle_seconds: float = 0.001
    stroke_seconds: float = 0.016
    turn_seconds: float = 60 / 7200
    bytes_per_second: float = 150e6
    pieces: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.settle_seconds <= self.stroke_seconds < math.inf:
            raise ConfigError(f"a disk needs 0 <= settle_seconds <= stroke_seconds, not {self}")
        if not (0 <= self.turn_seconds < math.inf and self.bytes_per_second > 0 and self.pieces >= 1):
            raise ConfigError(f"a disk needs turn_seconds >= 0, bytes_per_second > 0 and pieces >= 1, not {self}")

    def seek_seconds(self, distance: float) -> float:
        """Return how long the head takes for a distance, in parts of its whole way; 0 for none."""
        if not distance:
            return 0.0
        return self.settle_seconds + (self.stroke_seconds - self.settle_seconds) * math.sqrt(distance)


class Disk:
    """One disk, which many may read from.

    Args:
        model: how long it takes.
        rng: for the platter's place.
    """

    def __init__(self, model: DiskModel, rng: random.Random) -> None:
        self.model, self._rng = model, rng
        self._head = 0.5
        self._is_busy = False
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    async def read_file(self, place: float, size_bytes: int) -> None:
        """Take the time of a file; cancelled, let the head go on to the next one.

        Args:
            place: where it lies, 0 to 1.
            size_bytes: of its last piece; the others take none.
        """
        for piece in range(self.model.pieces):
            await self._read(place + piece * 1e-9, size_bytes if piece == self.model.pieces - 1 else 0)

    async def _read(self, place: float, size_bytes: int) -> None:
        await self._turn(place)
        try:
            seek_seconds = self.model.seek_seconds(abs(place - self._head))
            self._head = place
            turn_seconds = self._rng.random() * self.model.turn_seconds
            await asyncio.sleep(seek_seconds + turn_seconds + size_bytes / self.model.bytes_per_second)
        finally:
            self._pass_on()

    async def _turn(self, place: float) -> None:
        """Return when the head may be moved to a place."""
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the head to whoever is nearest to it."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        if not self._waiting:
            self._is_busy = False
            return
        nearest = min(self._waiting, key=lambda each: abs(each[0] - self._head))
        self._waiting.remove(nearest)
        nearest[1].set_result(None)


class DiskView(ModelledReader):
    """A disk's files as objects.

    Args:
        disk: where they are.
        size_of: the size in bytes of the file under a key; raises KeyError if there is none.
        place_of: where it lies, 0 to 1.
    """

    def __init__(self, disk: Disk, size_of: Callable[[str], int], place_of: Callable[[str], float]) -> None:
        super().__init__("simulated://disk", size_of)
        self._disk, self._place_of = disk, place_of

    async def _transfer(self, key: str, size_bytes: int) -> None:
        await self._disk.read_file(self._place_of(key), size_bytes)


T = TypeVar("T")


class Processors:
    """Cores that jobs share evenly, each on one of them at most.

    Attributes:
        cores: how many.
        busy_seconds: of work that was given to them, in seconds of one core.
    """

    def __init__(self, cores: int) -> None:
        if cores < 1:
            raise ConfigError(f"a machine has at least 1 core, not {cores}")
        self.cores = cores
        self.busy_seconds = 0.0
        self._shared = Shared(lambda jobs: min(1.0, cores / jobs))

    async def work(self, seconds: float) -> None:
        """Take what so many seconds of a core take beside the other jobs."""
        self.busy_seconds += seconds
        await self._shared.serve(seconds)


class DecodingView(ReaderWrapper[Readable]):
    """Another store to read from, each of whose answers is decoded once it is there.

    Args:
        wrapped: what is read.
        processors: CPU cores that decode.
        seconds: decode time of one answer, in seconds.
    """

    def __init__(self, wrapped: Readable, processors: Processors, seconds: float) -> None:
        super().__init__(wrapped)
        self._processors, self._seconds = processors, seconds

    async def _perform(self, operation: Operation, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Read, and decode what has bytes."""
        answer = await request()
        if operation is Operation.GET:
            await self._processors.work(self._seconds)
        return answer


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
