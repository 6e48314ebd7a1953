"""A random fault schedule for whole objects: fetcher, prefetcher and ring on a faulty store, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from stoker import Continuous, FetchConfig, FetchSize, NextBatch, Schedule
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.errors import StoreError
from support.fault_profiles import DEADLINE_SECONDS, ClockJumps, Tables, random_profile
from support.faulty_store import FaultyStore, pin

__all__ = ["ObjectRun", "random_schedule"]

OBJECTS = {f"data/{number:02}": random.Random(number).randbytes(3000 + 41 * number) for number in range(24)}
SLOT_BYTES = 4096


class ObjectRun:
    """One random schedule: a faulty store, a ring, and a consumer with random hold times."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.store = FaultyStore(OBJECTS, profile=random_profile(rng), seed=seed)
        self.jumps = ClockJumps(rng, self.store)
        self.ring = Ring(rng.randint(4, 12), SLOT_BYTES)
        self.refs = pin(OBJECTS)
        self._spoil_some_objects()
        config = FetchConfig(
            deadline_seconds=DEADLINE_SECONDS,
            attempt_seconds=rng.choice([1.0, 4.0]),
            attempts=rng.choice([3, 8, 24]),
            start_concurrency=rng.choice([4, 8]),
            max_concurrency=8,
            split_min_bytes=rng.choice([1000, 1 << 20]),
            hedge_first_seconds=0.2,
        )
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(seed + 1), config=config)
        items = iter([Item(index, ref, index // 3) for index, ref in enumerate(self.refs)])
        hedge_slots = rng.randint(0, 2)
        self.prefetcher = Prefetcher(
            self.fetcher,
            self.ring,
            random_schedule(rng, self.ring.slots - hedge_slots),
            lambda: next(items, None),
            hedge_slots=hedge_slots,
        )
        self.delivered: list[int] = []
        self.raised: Counter[str] = Counter()

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.prefetcher.run())
            group.create_task(self.jumps.play())
            await self._consume()
        now = self.ring.statistics()
        assert (now.free, self.store.active) == (self.ring.slots, 0), "something was left behind"
        assert len(self.delivered) + self.raised.total() == len(self.refs)
        assert len(set(self.delivered)) == len(self.delivered)
        stats = self.fetcher.stats
        assert self.fetcher._reader._limiter.held == 0
        assert stats.hedges <= 2 + 0.1 * stats.requests

    def tables(self) -> Tables:
        tables = Tables(injected=Counter(self.store.faults), raised=Counter(self.raised))
        tables.add(self.fetcher.stats)
        tables.injected["clock jump"] += self.jumps.count
        stats = self.prefetcher.stats
        tables.counted.update(delivered=len(self.delivered), waits=stats.waits, misses=stats.misses)
        return tables

    async def _consume(self) -> None:
        held: list[int] = []
        room = self.rng.randint(1, self.ring.slots - 2)
        for index in range(len(self.refs)):
            if self.rng.random() < 0.5:  # otherwise progress is reported late
                self.prefetcher.advance(index // 3, index + 1)
            if await self._arrives(index):
                held.append(index)
            await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.3]))
            while len(held) > (room if self.rng.random() < 0.7 else 0):
                self._use_and_release(held.pop(self.rng.randrange(len(held))))
        for index in held:
            self._use_and_release(index)

    async def _arrives(self, index: int) -> bool:
        begun = asyncio.get_running_loop().time()
        try:
            await self.prefetcher.wait(index)
        except StoreError as error:
            self.raised[type(error).__name__ if self.refs[index].key in str(error) else "nameless"] += 1
            return False
        finally:
            # Before it in the queue are at most a ring of items, at least 4 at a time, each within its deadline.
            waited_seconds = asyncio.get_running_loop().time() - begun
            turns = (1 + self.ring.slots / 4) * (1 + self.jumps.count)
            assert waited_seconds <= DEADLINE_SECONDS * turns + self.jumps.jumped_seconds + 1.0
        return True

    def _use_and_release(self, index: int) -> None:
        """Check the bytes at the end of the hold, too: no late transport may have written there."""
        slot = self.prefetcher.ready(index)
        assert slot is not None
        ref = self.refs[index]
        assert bytes(self.ring.view(slot, ref.size_bytes)) == OBJECTS[ref.key], "wrong bytes were delivered"
        self.prefetcher.release(index)
        self.delivered.append(index)

    def _spoil_some_objects(self) -> None:
        """Delete, overwrite, or copy objects under another tag; each in a fifth of the runs."""
        keys = self.rng.sample(sorted(OBJECTS), 3)
        if self.rng.random() < 0.2:
            del self.store.objects[keys[0]]
        if self.rng.random() < 0.2:
            self.store.objects[keys[1]] = OBJECTS[keys[1]][::-1]
            self.store.tags[keys[1]] = "overwritten"
        if self.rng.random() < 0.2:
            self.store.tags[keys[2]] = "copied"


def random_schedule(rng: random.Random, slots: int) -> Schedule:
    schedules: list[Schedule] = [Continuous(), FetchSize.half_and_half(slots), NextBatch(rng.randint(1, 3))]
    return rng.choice(schedules)
