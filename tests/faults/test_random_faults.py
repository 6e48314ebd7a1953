"""Five hundred random fault schedules: every item's bytes right, exactly once, or a typed error in time.

The mutation tests at the end show that the net holds: with the checksum off, or with a slot released twice, the same
run fails.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import Counter
from contextlib import ExitStack

import pytest

from stoker.clock import VirtualClockError, run_virtual
from stoker.errors import StoreError
from stoker.fetch import fetcher as fetch_module
from stoker.fetch.fetcher import CopiedBucketWarning, FetchConfig, Fetcher
from stoker.fetch.prefetcher import Item, Prefetcher
from stoker.fetch.range_reader import RangeReader
from stoker.ring import Ring, RingStateError
from stoker.schedule import Continuous, FetchSize, NextBatch, Schedule
from support.faulty_store import FAULTS, FaultyStore, Weather, pin

SCHEDULES = 500
DEADLINE_SECONDS = 12.0
OBJECTS = {f"data/{number:02}": random.Random(number).randbytes(3000 + 41 * number) for number in range(24)}
SLOT_BYTES = 4096


class Run:
    """One random schedule: a store in bad weather, a ring, a consumer with random hold times."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.store = FaultyStore(OBJECTS, weather=_weather(rng), seed=seed)
        self.ring = Ring(rng.randint(4, 12), SLOT_BYTES)
        self.refs = pin(OBJECTS)
        self._spoil_some_objects()
        config = FetchConfig(
            deadline_seconds=DEADLINE_SECONDS,
            attempt_seconds=rng.choice([1.0, 4.0]),
            attempts=rng.choice([3, 8, 24]),
            concurrency_start=rng.choice([4, 8]),
            concurrency_most=8,
            split_least_bytes=rng.choice([1000, 1 << 20]),
            hedge_first_seconds=0.2,
        )
        self.fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(seed + 1), config=config)
        items = iter([Item(index, ref, index // 3) for index, ref in enumerate(self.refs)])
        hedge_slots = rng.randint(0, 2)
        self.prefetcher = Prefetcher(
            self.fetcher,
            self.ring,
            _schedule(rng, self.ring.slots - hedge_slots),
            lambda: next(items, None),
            hedge_slots=hedge_slots,
        )
        self.delivered: list[int] = []
        self.raised: Counter[str] = Counter()

    async def play(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.prefetcher.run())
            await self._consume()
        now = self.ring.statistics()
        assert (now.free, self.store.active) == (self.ring.slots, 0), "something was left behind"
        assert len(self.delivered) + self.raised.total() == len(self.refs)
        assert len(set(self.delivered)) == len(self.delivered)
        stats = self.fetcher.stats
        assert stats.in_flight == 0
        assert stats.hedges <= 2 + 0.1 * stats.requests

    async def _consume(self) -> None:
        held: list[int] = []
        room = self.rng.randint(1, self.ring.slots - 2)
        for index in range(len(self.refs)):
            if self.rng.random() < 0.5:  # else the report of progress comes late
                self.prefetcher.reached(index // 3, index + 1)
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
            # In line before it: at most a ring of others, at least 4 at a time, each within its deadline.
            waited_seconds = asyncio.get_running_loop().time() - begun
            assert waited_seconds <= DEADLINE_SECONDS * (1 + self.ring.slots / 4) + 1.0
        return True

    def _use_and_release(self, index: int) -> None:
        """The bytes must be right at the end of the hold, too: no late transport may have written there."""
        slot = self.prefetcher.ready(index)
        assert slot is not None
        ref = self.refs[index]
        assert bytes(self.ring.view(slot, ref.size_bytes)) == OBJECTS[ref.key], "wrong bytes were delivered"
        self.prefetcher.release(index)
        self.delivered.append(index)

    def _spoil_some_objects(self) -> None:
        """Missing, overwritten, or copied under another tag; in a fifth of the runs each."""
        keys = self.rng.sample(sorted(OBJECTS), 3)
        if self.rng.random() < 0.2:
            del self.store.objects[keys[0]]
        if self.rng.random() < 0.2:
            self.store.objects[keys[1]] = OBJECTS[keys[1]][::-1]
            self.store.tags[keys[1]] = "overwritten"
        if self.rng.random() < 0.2:
            self.store.tags[keys[2]] = "copied"


def _weather(rng: random.Random) -> Weather:
    severity = rng.choice([0.0, 0.02, 0.1, 0.25])
    chosen = rng.sample(FAULTS, rng.randint(1, len(FAULTS)))
    begin = rng.uniform(0.0, 2.0)
    return Weather(
        bytes_per_second=1e6,
        tail_sigma=rng.choice([0.0, 0.5, 1.5]),
        probability={fault: severity * rng.random() for fault in chosen},
        outages=[(begin, begin + rng.choice([0.5, 5.0, 30.0]))] if rng.random() < 0.25 else [],
        retry_after_seconds=rng.choice([None, 0.5, 3.0]),
        credentials_expire_at=rng.uniform(0.5, 3.0) if rng.random() < 0.05 else float("inf"),
        closing_seconds=rng.choice([0.0, 0.2]),
    )


def _schedule(rng: random.Random, slots: int) -> Schedule:
    schedules: list[Schedule] = [Continuous(), FetchSize.half_and_half(slots), NextBatch(rng.randint(1, 3))]
    return rng.choice(schedules)


def play(seed: int) -> Run:
    async def main() -> Run:
        run = Run(seed)
        await run.play()
        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopiedBucketWarning)
        return run_virtual(main())


def test_no_weather_delivers_wrong_bytes_loses_an_item_or_leaves_anything_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    injected: Counter[str] = Counter()
    retried: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        run = play(seed)
        stats = run.fetcher.stats
        injected += run.store.faults
        retried += Counter(stats.retries)
        raised += run.raised
        counted += Counter(
            requests=stats.requests,
            delivered=len(run.delivered),
            hedges=stats.hedges,
            hedge_wins=stats.hedge_wins,
            hedge_losses=stats.hedges - stats.hedge_wins,
            throttled=stats.throttled,
            checksum_failures=stats.checksum_failures,
            waits=run.prefetcher.stats.waits,
            misses=run.prefetcher.stats.misses,
        )
    with capsys.disabled():
        print(f"\n{SCHEDULES} random fault schedules:")
        for what, counts in {"injected": injected, "retried": retried, "raised": raised, "counted": counted}.items():
            print(f"  {what}:", ", ".join(f"{name} {count}" for name, count in counts.most_common()))
    assert set(injected) >= {*FAULTS, "outage", "expired", "missing", "changed"}
    assert set(retried) == {
        "ThrottledError", "ServerError", "ConnectionLostError", "TruncatedError", "ChecksumError", "DeadlineError",
    }  # fmt: skip
    assert set(raised) == {"FetchError", "NotFoundError", "ObjectChangedError", "ExpiredCredentialsError"}
    assert all(count > 0 for count in counted.values()), counted
    assert len(counted) == 9


def test_the_same_seed_takes_the_same_course() -> None:
    first, second = play(77), play(77)
    assert first.store.sent_seconds == second.store.sent_seconds
    assert first.fetcher.stats == second.fetcher.stats


def test_without_the_checksum_the_net_catches_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_verify_whole", lambda ref, data: None)
    caught = 0
    for seed in range(40):
        try:
            play(seed)
        except BaseExceptionGroup as errors:
            caught += "wrong bytes were delivered" in str(errors.exceptions)
    assert caught > 0


def test_a_consumer_that_releases_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Ring.release

    def twice(ring: Ring, slot: int) -> None:
        release(ring, slot)
        release(ring, slot)

    monkeypatch.setattr(Ring, "release", twice)
    with pytest.raises(BaseExceptionGroup) as caught:
        play(1)
    assert caught.group_contains(RingStateError, match="is free: cannot release")


def test_a_slot_freed_before_its_transport_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetcher that does not wait for the losers of a race."""
    lend = RangeReader._lend

    def not_for_long(reader: RangeReader, size_bytes: int, lent: ExitStack) -> memoryview | None:
        with ExitStack() as at_once:
            return lend(reader, size_bytes, at_once)

    monkeypatch.setattr(RangeReader, "_lend", not_for_long)
    caught = 0
    for seed in range(100):
        try:
            play(seed)
        except (BaseExceptionGroup, AssertionError, VirtualClockError):
            caught += 1
    assert caught > 0
