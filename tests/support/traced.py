"""A traced run in virtual time: a store with faults, a ring, and a consumer that uses items in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from stoker import Continuous, FetchConfig, Schedule
from stoker._base.checksum import crc32c
from stoker._base.recorder import Recorder
from stoker._base.task_group import task_group
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.abc import ObjectRef, Readable, Tier, TraceSink
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import BucketView, SimulatedBucket
from support.faulty_store import FaultyStore, StoreProfile, pin

BODY = random.Random(0).randbytes(100_000)


class TracedRun:
    """Uses objects one after the other; each is a step of its own, and takes ``compute_seconds``."""

    def __init__(
        self,
        *,
        objects: int = 12,
        slots: int = 8,
        profile: StoreProfile | None = None,
        config: FetchConfig | None = None,
        compute_seconds: float = 0.0,
        tiers: Sequence[Tier] = (),
        sinks: Sequence[TraceSink] = (),
        schedule: Schedule | None = None,
        bucket: BucketModel | None = None,
    ) -> None:
        bodies = {f"data/{number:02}": BODY for number in range(objects)}
        self.store = FaultyStore(bodies, profile=profile or StoreProfile(tail_sigma=0.0))
        self.refs = pin(bodies)
        self.ring = Ring(slots, len(BODY))
        self.recorder = Recorder(sinks)
        self.wait_seconds = 0.0
        self._compute_seconds = compute_seconds
        self._schedule = schedule or Continuous()
        store: Readable = self.store
        if bucket is not None:  # a model, which transfers no bytes
            store = BucketView(SimulatedBucket(bucket, lambda key: len(BODY)), random.Random(2))
        checksum = crc32c if bucket is None else lambda data: self.refs[0].crc32c
        self.fetcher = Fetcher(
            store, ring=self.ring, rng=random.Random(1), config=config, tiers=tiers, checksum=checksum
        )

    def run(self) -> TracedRun:
        run_virtual(self._run())
        return self

    async def _run(self) -> None:
        items = iter([Item(number, ref, number) for number, ref in enumerate(self.refs)])
        prefetcher: Prefetcher[ObjectRef] = Prefetcher(
            self.fetcher, self.ring, self._schedule, lambda: next(items, None), hedge_slots=2, recorder=self.recorder
        )
        async with task_group() as group:
            group.create_task(prefetcher.run())
            await self._consume(prefetcher)

    async def _consume(self, prefetcher: Prefetcher[ObjectRef]) -> None:
        loop = asyncio.get_running_loop()
        for number in range(len(self.refs)):
            prefetcher.advance(number, number + 1)
            asked = loop.time()
            if prefetcher.ready(number) is None:
                await prefetcher.wait(number)
                self.recorder.add_item_wait(number, asked, loop.time())
            self.recorder.add_batch(0, asked, loop.time())
            self.wait_seconds += loop.time() - asked
            await asyncio.sleep(self._compute_seconds)
            prefetcher.release(number)


__all__ = ["BODY", "TracedRun"]
