"""A machine that trains, in virtual time: the fetcher's own code, with a model of what is around it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker._base.recorder import Recorder
from stoker._base.task_group import task_group
from stoker._cache.future import Future
from stoker._diagnostics.latency import Constant, Latency
from stoker._fetch.feed import FeedConfig
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Prefetcher
from stoker._fetch.step_queue import StepQueue
from stoker._format.manifest import Manifest
from stoker._memory.budget import SlotPlan, plan_slots
from stoker._memory.ring import Ring, anonymous_memory
from stoker._order.steps import OrderSource, PlannedStep, Steps, Stretch
from stoker.abc import Readable, Tier

__all__ = ["EpochResult", "Node", "NodeParts", "Nothing"]

_log = logging.getLogger("stoker.simulated")
_log.addHandler(logging.NullHandler())
_log.propagate = False  # what is simulated is no warning to whoever plans


@dataclass(slots=True, kw_only=True)
class EpochResult:
    """What an epoch took on one node.

    Attributes:
        rank: of the node.
        epoch: its number.
        seconds: from its first step's beginning to its last step's end.
        wait_seconds: of these, for data.
        compute_seconds: of these, at work on batches.
        steps: batches.
        look_ups: super-samples that a batch asked for when it first needed them.
        misses: of these, those that were not in the ring yet.
        requests: ranged reads that were sent to the bucket meanwhile, for this epoch or the next.
        read_bytes: that these brought.
        hedges: of these requests, second ones for late bytes.
        tier_hits: super-samples that came from a nearer place, by its name.
        first_batch_seconds: from the start of the run to the first batch, in the first epoch; else None.
    """

    rank: int
    epoch: int
    seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    steps: int = 0
    look_ups: int = 0
    misses: int = 0
    requests: int = 0
    read_bytes: int = 0
    hedges: int = 0
    tier_hits: Counter[str] = field(default_factory=Counter)
    first_batch_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What a node is made of.

    Attributes:
        manifest: of the data set.
        feed: what it delivers, and with which memory, schedule and fetching.
        bucket: where the data set is.
        compute: what a step takes once its batch is there.
        epochs: how many it trains.
        seed: of what is drawn.
        tiers: makes the nearer places, for a rank that needs super-samples when the future says so.
        memory: stands for the ring's.
        order: gives the order of an epoch.
        meet: waited for after each step, where nodes go in step.
        recorder: follows fetches, and is told of waits.
    """

    manifest: Manifest
    feed: FeedConfig
    bucket: Readable
    compute: Latency = field(default_factory=lambda: Constant(0.0))
    epochs: int = 1
    seed: int = 0
    tiers: Callable[[Future], Sequence[Tier]] | None = None
    memory: Nothing
    order: OrderSource
    meet: asyncio.Barrier | None = None
    recorder: Recorder | None = None


class Nothing:
    """Stands for the memory of all rings: nothing that matters is ever written to it, so they share one slot."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot = anonymous_memory(slot_bytes)

    def ring(self, slots: int, slot_bytes: int) -> Ring:
        """Return a ring whose slots are all in one place."""
        return _RingOfNothing(slots, slot_bytes, self._slot)


class _RingOfNothing(Ring):
    """The states of slots, without memory of their own."""

    def __init__(self, slots: int, slot_bytes: int, slot: memoryview) -> None:
        super().__init__(slots, slot_bytes, allocate=lambda _: slot[:0])
        self._slot = slot

    def view(self, slot: int, length_bytes: int) -> memoryview:
        """Return the same bytes for every slot. Copying from one to another then costs nothing, either."""
        super().view(slot, length_bytes)
        return self._slot[:length_bytes]


class Node:
    """One rank's run; :meth:`run` it once, on a virtual clock."""

    def __init__(self, parts: NodeParts) -> None:
        manifest, feed = parts.manifest, parts.feed
        self._parts = parts
        self._dealing = feed.dealing(manifest.samples)
        self.slots: SlotPlan = plan_slots(
            manifest, manifest.file_bytes + feed.held_bytes, feed.order, self._dealing, feed.memory_bytes
        )
        self._ring = parts.memory.ring(self.slots.slots, self.slots.slot_bytes)
        self._stretch = Stretch(order=feed.order, partition=self._dealing, end_epoch=parts.epochs)
        self._future = Future(manifest.rows.samples, self._stretch, parts.order) if parts.tiers is not None else None
        self._rng = random.Random(f"{parts.seed} {feed.rank}")  # noqa: S311 - a model's
        self._fetcher = Fetcher(
            parts.bucket,
            ring=self._ring,
            rng=self._rng,
            config=feed.fetch,
            tiers=parts.tiers(self._future) if parts.tiers is not None and self._future is not None else (),
            is_start=True,
            log=_log,
            checksum=lambda _: 0,  # of what moves no bytes
        )
        self.results: list[EpochResult] = []
        self._counted = self._fetcher.stats

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        """Fetch a super-sample by its row: what the prefetcher asks for."""
        return await self._fetcher.fetch(self._parts.manifest.ref(ref), urgent=urgent)

    async def run(self) -> list[EpochResult]:
        """Train; return one result an epoch.

        Raises:
            StokerError: a super-sample could not be had.
        """
        parts = self._parts
        steps = Steps(parts.manifest.rows.samples, self._stretch, parts.order)
        queue = StepQueue(steps, None if self._future is None else self._future.take)
        prefetcher = Prefetcher(
            self,
            self._ring,
            parts.feed.schedule,
            queue.next_item,
            hedge_slots=self.slots.hedge_slots,
            recorder=parts.recorder,
        )
        async with task_group() as group:
            group.create_task(prefetcher.run())
            await self._train(queue, prefetcher)
        return self.results

    async def _train(self, queue: StepQueue[int], prefetcher: Prefetcher[int]) -> None:
        loop, used = asyncio.get_running_loop(), 0
        started_seconds = epoch_seconds = loop.time()
        while (step := queue.next_step()) is not None:
            if not self.results or self.results[-1].epoch != step.epoch:
                self.results.append(EpochResult(rank=self._parts.feed.rank, epoch=step.epoch))
            now = self.results[-1]
            used += len(step.first_uses)
            now.look_ups += len(step.first_uses)
            now.steps += 1
            prefetcher.reached(step.number, used)
            asked_seconds = loop.time()
            await self._take(step, prefetcher, now)
            self._fetcher.end_start()
            if self._parts.recorder is not None:
                self._parts.recorder.yielded(step.epoch, asked_seconds, loop.time())
            if step.number == 0:
                now.first_batch_seconds = loop.time() - started_seconds
            seconds = self._parts.compute.draw(self._rng)
            now.compute_seconds += seconds
            if seconds:
                await asyncio.sleep(seconds)
            if self._parts.meet is not None:
                await self._parts.meet.wait()
            if step.is_last:
                now.seconds, epoch_seconds = loop.time() - epoch_seconds, loop.time()
                self._count(now)

    async def _take(self, step: PlannedStep[int], prefetcher: Prefetcher[int], now: EpochResult) -> None:
        """Have all that a step needs, and give back what it has used."""
        loop = asyncio.get_running_loop()
        for segment in step.segments:
            for item in segment.passed:
                prefetcher.release(item)
            for item in segment.items:
                if prefetcher.ready(item) is None:
                    asked_seconds = loop.time()
                    await prefetcher.wait(item)
                    now.misses += 1
                    now.wait_seconds += loop.time() - asked_seconds
                    if self._parts.recorder is not None:
                        self._parts.recorder.waited_for(item, asked_seconds, loop.time())
            for item in segment.done:
                prefetcher.release(item)

    def _count(self, now: EpochResult) -> None:
        """Enter what was fetched since the last time."""
        before, self._counted = self._counted, self._fetcher.stats
        now.requests = self._counted.requests - before.requests
        now.read_bytes = self._counted.bytes - before.bytes
        now.hedges = self._counted.hedges - before.hedges
        now.tier_hits = Counter(self._counted.tier_hits) - Counter(before.tier_hits)
