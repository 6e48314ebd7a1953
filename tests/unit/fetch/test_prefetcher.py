"""Schedules performed in virtual time: times of issue, waits, and leftovers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from stoker import Continuous, FetchConfig, FetchSize, NextBatch, Schedule
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring, RingStateError
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, FetchError, NotFoundError, StokerError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin

OBJECTS = {f"data/{number:03}": bytes([number]) * (1000 + number) for number in range(40)}


class Bench:
    """Forty objects, two per step, each used once, and a prefetcher."""

    def __init__(
        self, *, slots: int = 8, hedge_slots: int = 1, schedule: Schedule | None = None, count: int = 40
    ) -> None:
        self.store = FaultyStore(OBJECTS, profile=StoreProfile(tail_sigma=0.0))
        self.refs = pin(OBJECTS)[:count]
        self.ring = Ring(slots, 2000)
        self.planned = 0
        fetcher = Fetcher(self.store, ring=self.ring, rng=random.Random(0), config=FetchConfig(attempts=2))
        self.prefetcher = Prefetcher(fetcher, self.ring, schedule or Continuous(), self.plan(), hedge_slots=hedge_slots)

    def plan(self) -> Callable[[], Item[ObjectRef] | None]:
        items = iter([Item(index, ref, index // 2) for index, ref in enumerate(self.refs)])

        def next_item() -> Item[ObjectRef] | None:
            self.planned += 1
            return next(items, None)

        return next_item

    async def take(self, index: int) -> None:
        slot = await self.prefetcher.wait(index)
        ref = self.refs[index]
        assert bytes(self.ring.view(slot, ref.size_bytes)) == OBJECTS[ref.key]
        self.prefetcher.release(index)


def test_a_consumer_gets_every_item_in_order_and_the_ring_is_free_at_the_end() -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.prefetcher.run())
            for index in range(40):
                await bench.take(index)
        stats = bench.prefetcher.stats
        assert (stats.issued, stats.fetched, stats.released, stats.failed) == (40, 40, 40, 0)
        assert bench.ring.statistics().free == 8

    run_virtual(main())


def test_continuous_fills_the_ring_but_for_the_hedges_share_and_plans_no_further() -> None:
    async def main() -> None:
        bench = Bench(slots=8, hedge_slots=3)
        running = asyncio.create_task(bench.prefetcher.run())
        await asyncio.sleep(10)
        assert [bench.prefetcher.ready(index) is not None for index in range(6)] == [True] * 5 + [False]
        assert bench.planned == 6
        await bench.take(0)
        await asyncio.sleep(10)
        assert bench.prefetcher.stats.issued == 6
        running.cancel()
        await asyncio.wait([running])
        bench.prefetcher.release_all()
        assert bench.ring.statistics().free == 8

    run_virtual(main())


def test_fetch_size_issues_whole_fetches_as_the_consumer_advances() -> None:
    async def main() -> None:
        bench = Bench(schedule=FetchSize(fetch_size=4, threshold=2), slots=8)
        running = asyncio.create_task(bench.prefetcher.run())
        issued = []
        for index in range(8):
            bench.prefetcher.advance(index // 2, index + 1)
            await asyncio.sleep(1)
            await bench.take(index)
            issued.append(bench.prefetcher.stats.issued)
        assert issued == [4, 8, 8, 8, 8, 12, 12, 12]
        assert bench.prefetcher.stats.misses == 0
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())


def test_next_batch_stays_one_step_ahead() -> None:
    async def main() -> None:
        bench = Bench(schedule=NextBatch(), slots=20)
        running = asyncio.create_task(bench.prefetcher.run())
        for step in range(5):
            bench.prefetcher.advance(step, 2 * step)
            await asyncio.sleep(1)
            assert bench.prefetcher.stats.issued == 2 * (step + 2)
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())


def test_an_item_that_is_waited_for_is_issued_against_the_schedule_and_counted() -> None:
    async def main() -> None:
        bench = Bench(schedule=NextBatch(), slots=20)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(bench.prefetcher.run())
            await asyncio.sleep(1)
            assert bench.prefetcher.stats.issued == 4
            await bench.prefetcher.wait(6)  # the consumer has not reported step 3
            stats = bench.prefetcher.stats
            assert (stats.issued, stats.misses, stats.waits) == (7, 3, 1)
            running.cancel()

    run_virtual(main())


def test_a_waiting_consumer_may_use_the_hedges_share_when_nothing_else_is_left() -> None:
    async def main() -> None:
        bench = Bench(slots=4, hedge_slots=2)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(bench.prefetcher.run())
            held = [await bench.prefetcher.wait(index) for index in range(4)]
            assert len(set(held)) == 4
            running.cancel()

    run_virtual(main())


def test_slots_are_given_in_order_of_first_use_however_long_each_fetch_takes() -> None:
    async def main() -> None:
        bench = Bench(slots=3, hedge_slots=0)
        bench.store.profile.tail_sigma = 2.0
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.prefetcher.run())
            for index in range(40):
                await bench.take(index)
                assert bench.prefetcher.stats.issued <= index + 1 + 3
        assert list(dict.fromkeys(key for key, _, _ in bench.store.sent_ranges)) == list(OBJECTS)

    run_virtual(main())


def test_a_failed_item_is_raised_at_that_item_and_the_others_continue() -> None:
    async def main() -> None:
        bench = Bench()
        del bench.store.objects["data/005"]
        bench.store.script = lambda number, key: "reset" if key == "data/007" else None
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.prefetcher.run())
            for index in range(40):
                if index == 5:
                    with pytest.raises(NotFoundError, match="data/005"):
                        await bench.take(index)
                    bench.prefetcher.release(index)
                elif index == 7:
                    with pytest.raises(FetchError, match="data/007"):
                        await bench.take(index)
                else:
                    await bench.take(index)
        assert bench.prefetcher.stats.failed == 2
        assert bench.ring.statistics().free == 8

    run_virtual(main())


def test_releasing_twice_or_too_early_names_the_item() -> None:
    async def main() -> None:
        bench = Bench(count=3)
        with pytest.raises(RingStateError, match="item 0"):
            bench.prefetcher.release(0)
        await bench.prefetcher.run()
        bench.prefetcher.release(0)
        with pytest.raises(RingStateError, match="item 0"):
            bench.prefetcher.release(0)
        assert bench.ring.statistics().ready == 2

    run_virtual(main())


def test_waiting_past_the_end_of_the_order_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        bench = Bench(count=3)
        waiter = asyncio.create_task(bench.prefetcher.wait(3))
        await bench.prefetcher.run()
        with pytest.raises(StokerError, match="only 3 items"):
            await waiter
        with pytest.raises(StokerError, match="only 3 items"):
            await bench.prefetcher.wait(99)

    run_virtual(main())


def test_an_error_of_the_plan_comes_after_the_items_before_it() -> None:
    def failing() -> Iterator[Item[ObjectRef]]:
        yield from (Item(index, ref, index) for index, ref in enumerate(pin(OBJECTS)[:2]))
        raise LookupError("manifest is broken")

    async def main() -> None:
        bench = Bench()
        items = failing()
        prefetcher = bench.prefetcher
        prefetcher._items = lambda: next(items, None)
        running = asyncio.create_task(prefetcher.run())
        await bench.take(0)
        await bench.take(1)
        with pytest.raises(LookupError, match="manifest"):
            await prefetcher.wait(2)
        with pytest.raises(LookupError, match="manifest"):
            await running

    run_virtual(main())


def test_cancelling_ends_every_transfer_frees_unready_slots_and_wakes_waiters() -> None:
    async def main() -> None:
        bench = Bench(slots=8, hedge_slots=0)
        bench.store.profile.closing_seconds = 3.0
        bench.store.script = lambda number, key: "stall" if number >= 4 else None
        running = asyncio.create_task(bench.prefetcher.run())
        waiter = asyncio.create_task(bench.prefetcher.wait(6))
        await asyncio.sleep(0.5)
        assert bench.store.active == 4
        running.cancel()
        with pytest.raises(StokerError, match="stopped"):
            await waiter
        assert running.done()
        assert bench.store.active == 0
        now = bench.ring.statistics()
        assert (now.free, now.filling, now.ready) == (4, 0, 4)
        bench.prefetcher.release_all()
        assert bench.ring.statistics().free == 8

    run_virtual(main())


def test_a_cancelled_waiter_does_not_disturb_the_others() -> None:
    async def main() -> None:
        bench = Bench()
        waiters = [asyncio.create_task(bench.prefetcher.wait(0)) for _ in range(3)]
        await asyncio.sleep(0.001)
        waiters[0].cancel()
        running = asyncio.create_task(bench.prefetcher.run())
        assert await waiters[1] == await waiters[2]
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())


def test_a_schedule_that_does_not_fit_the_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 8 slots in addition to 1 for hedges, but the ring has 8"):
        Bench(schedule=FetchSize.half_and_half(8), slots=8, hedge_slots=1)


def test_the_first_step_has_the_bandwidth_to_itself() -> None:
    async def main() -> None:
        bench = Bench(count=6)
        async with asyncio.TaskGroup() as group:
            group.create_task(bench.prefetcher.run())
            await asyncio.sleep(0.001)
            assert {key for key, _, _ in bench.store.sent_ranges} == {ref.key for ref in bench.refs[:2]}
            await bench.take(0)
            await bench.take(1)
            await asyncio.sleep(0.001)
            assert {key for key, _, _ in bench.store.sent_ranges} == {ref.key for ref in bench.refs[:5]}
            for index in range(2, 6):
                await bench.take(index)

    run_virtual(main())


def test_behind_the_first_step_a_run_starts_with_three_items_at_a_time_and_one_more_with_each_that_arrives() -> None:
    begun: list[tuple[float, bool]] = []

    class Reader:
        """Each item takes a second."""

        def __init__(self, ring: Ring) -> None:
            self.ring = ring

        def count_slots(self, ref: ObjectRef) -> int:
            return 1

        async def fetch(self, ref: ObjectRef, *, urgent: bool = False) -> int:
            slot = self.ring.acquire()
            assert slot is not None
            begun.append((asyncio.get_running_loop().time(), urgent))
            await asyncio.sleep(1.0)
            self.ring.commit(slot)
            return slot

    async def main() -> None:
        bench = Bench(slots=40)
        prefetcher = Prefetcher(Reader(bench.ring), bench.ring, Continuous(), bench.plan(), hedge_slots=0)
        await prefetcher.run()
        prefetcher.release_all()

    run_virtual(main())
    assert Counter(seconds for seconds, _ in begun) == {0.0: 2, 1.0: 3, 2.0: 6, 3.0: 29}
    assert [urgent for _, urgent in begun] == [True] * 16 + [False] * 24


def test_a_hedge_does_not_take_the_last_slot_from_an_item_that_is_being_issued() -> None:
    async def main() -> None:
        bench = Bench(slots=2, hedge_slots=0)
        taken: list[int | None] = []

        def hedge() -> None:
            """Stand in for a hedge whose turn comes between the decision to issue an item and the item's own."""
            if bench.ring.can_spare(1):
                taken.append(bench.ring.acquire())

        plan = bench.prefetcher._items

        def next_item() -> Item[ObjectRef] | None:
            for _ in range(2):
                asyncio.get_running_loop().call_soon(hedge)
            return plan()

        bench.prefetcher._items = next_item
        running = asyncio.create_task(bench.prefetcher.run())
        assert await bench.prefetcher.wait(0) is not None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(taken) == 1, "of the two slots one was to spare"

    run_virtual(main())
