"""A random fault schedule for samples: everything between a bucket and a batch, for every rank, in virtual time.

It replaces :class:`stoker._fetch.batch_stream.BatchStream` on one loop; memory, ring, fetcher and reader are those of
a feed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import numpy as np

from stoker import Array, Bytes, Continuous, FetchConfig, NextBatch, OrderConfig, Schedule, Schema
from stoker._base.threads import LoopThread
from stoker._fetch.config import PipelineConfig
from stoker._fetch.gather import gather
from stoker._fetch.groups import SampleGroupReader
from stoker._fetch.pipeline import BatchPipeline
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.budget import window_items
from stoker._order.order import Shuffle
from stoker._order.steps import PlannedStep, PositionRange, Segment
from stoker.errors import StoreError
from support.fault_profiles import DEADLINE_SECONDS, ClockJumps, Tables, random_profile
from support.faulty_store import FaultyStore
from support.packed_objects import packed_objects, value_at

__all__ = ["SampleRun"]

SCHEMA = Schema({"number": Array("int64"), "image": Array("uint8", (20, 15)), "sound": Bytes()})
COUNTS = [5, 1, 9, 7, 8, 3, 6, 9, 4, 8]
_RNG = np.random.default_rng(0)
SAMPLES: list[dict[str, Any]] = [
    {"number": i, "image": _RNG.integers(0, 256, (20, 15), np.uint8), "sound": _RNG.bytes(i % 9 * 40)}
    for i in range(sum(COUNTS))
]
EXPECTED: list[dict[str, Any]] = [sample | {"image": sample["image"].tolist()} for sample in SAMPLES]
MANIFEST, OBJECTS = packed_objects(SCHEMA, SAMPLES, COUNTS)
FIRSTS = np.cumsum([0, *COUNTS])


class SampleRun:
    """One epoch of one data set on all ranks at once."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.store = FaultyStore(OBJECTS, profile=random_profile(rng), seed=seed)
        self.jumps = ClockJumps(rng, self.store)
        self._spoil_an_object()
        world_size = rng.randint(1, 3)
        shuffles: list[Shuffle] = ["none", "block", "window", "full", "full"]
        order = OrderConfig(
            seed=seed, shuffle=rng.choice(shuffles), window=rng.randint(1, 4), lanes=rng.choice([1, 2, 3, 4])
        )
        self.batch_size = rng.randint(1, 16)
        self.drop_last = rng.random() < 0.3
        columns = rng.choice([None, ("number",), ("sound", "number")])
        schedules: list[Schedule] = [Continuous(), NextBatch(rng.randint(1, 3))]
        schedule = rng.choice(schedules)
        fetch = FetchConfig(
            deadline_seconds=DEADLINE_SECONDS,
            attempt_seconds=rng.choice([1.0, 4.0]),
            attempts=rng.choice([3, 24]),
            start_concurrency=4,
            max_concurrency=8,
            split_min_bytes=rng.choice([1000, 1 << 20]),
            hedge_first_seconds=0.2,
        )
        in_groups = order.shuffle == "full" and rng.random() < 0.6
        spare_slots = rng.randint(2, 8)
        self.feeds = [
            self._feed(
                PipelineConfig(
                    order=order,
                    batch_size=self.batch_size,
                    rank=rank,
                    world_size=world_size,
                    drop_last=self.drop_last,
                    columns=columns,
                    schedule=schedule,
                    fetch=fetch,
                    end_epoch=1,
                ),
                0 if in_groups else spare_slots,
            )
            for rank in range(world_size)
        ]
        self.delivered: list[list[int]] = [[] for _ in self.feeds]
        self.repeated = [0 for _ in self.feeds]
        self.waits = 0
        self.raised: Counter[str] = Counter()

    def _feed(self, config: PipelineConfig, spare_slots: int) -> BatchPipeline:
        """Return a feed with slots for the order's open items and ``spare_slots`` more; with none, for groups only."""
        dealing = config.sharding(MANIFEST.samples)
        slot_bytes = -(-MANIFEST.largest_bytes // 64) * 64
        slots = window_items(len(MANIFEST), config.order, dealing) + spare_slots
        memory_bytes = MANIFEST.file_bytes + (slots * slot_bytes if spare_slots else 40_000)
        feed = BatchPipeline(self.store, MANIFEST, replace(config, memory_bytes=memory_bytes), LoopThread())
        feed.source.fetcher._reader._rng = random.Random(self.rng.random())
        return feed

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            for rank in range(len(self.feeds)):
                group.create_task(self._play_rank(rank))
            group.create_task(self.jumps.play())
        assert self.store.active == 0, "something was left behind"
        for feed in self.feeds:
            ring, fetcher = feed.source.ring.statistics(), feed.source.fetcher
            held = fetcher._reader._limiter.held
            assert (ring.free, held) == (feed.source.ring.slots, 0), "something was left behind"
            stats = fetcher.stats
            assert stats.hedges - stats.start_hedges <= 2 + 0.1 * stats.requests
        self._check_exactly_once()
        assert asyncio.get_running_loop().time() <= 3600.0 + self.jumps.jumped_seconds

    def _check_exactly_once(self) -> None:
        counts = Counter(number for delivered in self.delivered for number in delivered)
        if self.raised:
            assert counts.total() - len(counts) <= max(self.repeated)
            return
        steps = len(SAMPLES) // (self.batch_size * len(self.feeds))
        whole = steps * self.batch_size * len(self.feeds) if self.drop_last else len(SAMPLES)
        assert len(counts) == whole, "samples were lost"
        assert counts.total() == whole + self.repeated[0], "samples were delivered twice"

    async def _play_rank(self, rank: int) -> None:
        feed = self.feeds[rank]
        try:
            await feed.source.reader.prepare()
            await self._consume(rank, feed)
        except StoreError as error:
            named = any(key in str(error) for key in OBJECTS)
            self.raised[type(error).__name__ if named else "nameless"] += 1

    async def _consume(self, rank: int, feed: BatchPipeline) -> None:
        steps = feed.source.reader.steps(PositionRange(order=feed.config.order, sharding=feed.partition, end_epoch=1))
        planned: deque[PlannedStep[Any]] = deque()
        items: deque[Item[Any]] = deque()

        def next_item() -> Item[Any] | None:
            while not items and (step := steps.next()) is not None:
                planned.append(step)
                items.extend(Item(index, ref, step.number) for index, ref in step.first_uses)
            return items.popleft() if items else None

        opened, hedge_slots = feed.source, feed.source.slots.hedge_slots
        prefetcher = Prefetcher(opened.reader, opened.ring, feed.config.schedule, next_item, hedge_slots=hedge_slots)
        running = asyncio.create_task(prefetcher.run())
        await asyncio.sleep(0)
        used = 0
        try:
            while planned or not running.done():
                if not planned:
                    await asyncio.sleep(0.001)
                    continue
                step = planned.popleft()
                used += len(step.first_uses)
                prefetcher.advance(step.number, used)
                self.repeated[rank] += step.repeated
                for segment in step.segments:
                    await self._use(rank, feed, prefetcher, segment)
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self.waits += prefetcher.stats.waits
            prefetcher.release_all()

    async def _use(self, rank: int, feed: BatchPipeline, prefetcher: Prefetcher[Any], segment: Segment) -> None:
        for item in segment.released_before:
            prefetcher.release(item)
        slots = [await prefetcher.wait(item) for item in segment.items]
        await asyncio.sleep(self.rng.choice([0.0, 0.01]))
        picked = feed.source.reader.locate(slots, *segment.row_indices())
        values = gather(picked, feed.source.columns)
        for place, number in enumerate((FIRSTS[picked.super_samples] + picked.rows).tolist()):
            found = {name: value_at(column, place) for name, column in values.items()}
            assert found == {name: EXPECTED[number][name] for name in feed.source.columns}, "wrong bytes were delivered"
            self.delivered[rank].append(number)
        for item in segment.released_after:
            prefetcher.release(item)

    def _spoil_an_object(self) -> None:
        """Delete, overwrite, or copy an object under another tag; each in a tenth of the runs."""
        key = self.rng.choice(sorted(OBJECTS))
        lot = self.rng.random()
        if lot < 0.1:
            del self.store.objects[key]
        elif lot < 0.2:
            self.store.objects[key] = OBJECTS[key][::-1]
            self.store.tags[key] = "overwritten"
        elif lot < 0.3:
            self.store.tags[key] = "copied"

    def tables(self) -> Tables:
        tables = Tables(injected=Counter(self.store.faults), raised=Counter(self.raised))
        tables.injected["clock jump"] += self.jumps.count
        for feed in self.feeds:
            tables.add(feed.source.fetcher.stats)
            in_groups = isinstance(feed.source.reader, SampleGroupReader)
            tables.counted["read in groups" if in_groups else "read whole or by columns"] += 1
        tables.counted.update(delivered=sum(map(len, self.delivered)), waits=self.waits)
        return tables
