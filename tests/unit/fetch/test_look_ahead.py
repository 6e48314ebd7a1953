"""How far ahead to fetch: what fills the link, a whole step's items, and more with time."""

from __future__ import annotations

import asyncio

import pytest

from stoker import Continuous
from stoker._fetch.concurrency import CompletedRequest, LinkUse
from stoker._fetch.look_ahead import MIN_ITEMS, LookAhead
from stoker._fetch.prefetcher import Item, Prefetcher
from stoker._memory.ring import Ring
from stoker.testing import run_virtual

SLOTS = 60
ITEM_BYTES = 10_000_000
GROWTH_SECONDS = 0.1
FETCH_SECONDS = 0.02


class Reader:
    """Fills a slot per item in the same time, however many are read at once."""

    def __init__(self, ring: Ring, seconds: float = FETCH_SECONDS) -> None:
        self._ring, self._seconds, self.at_once, self.peak = ring, seconds, 0, 0

    def count_slots(self, ref: int) -> int:
        return 1

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        with self._ring.fill_slot(str(ref), 1) as slot:
            self.at_once += 1
            self.peak = max(self.peak, self.at_once)
            await asyncio.sleep(self._seconds)
            self.at_once -= 1
        return slot


class Link(LinkUse):
    """A link whose requests slow each other down to the same extent, however many there are."""

    def __init__(self, useful_fraction: float, alone_seconds: float = FETCH_SECONDS) -> None:
        super().__init__()
        self._useful_fraction, self._alone_seconds = useful_fraction, alone_seconds

    def alone_seconds(self, size_bytes: float) -> float:
        return self._alone_seconds

    @property
    def useful_fraction(self) -> float:
        return self._useful_fraction


class Bench:
    """A prefetcher with a look-ahead; the given numbers of items belong to the steps 0, 1, 2 …"""

    def __init__(
        self,
        items_of_steps: list[int],
        useful_fraction: float,
        item_bytes: float = ITEM_BYTES,
        alone_seconds: float = FETCH_SECONDS,
    ) -> None:
        self.ring, self.link = Ring(SLOTS, 1), Link(useful_fraction, alone_seconds)
        self.reader = Reader(self.ring)
        steps = [step for step, items in enumerate(items_of_steps) for _ in range(items)]
        items = iter([Item(index, index, step) for index, step in enumerate(steps)])
        self.prefetcher: Prefetcher[int] = Prefetcher(
            self.reader,
            self.ring,
            Continuous(),
            lambda: next(items, None),
            hedge_slots=1,
            look_ahead=LookAhead(item_bytes, self.link),
        )

    @property
    def ahead(self) -> int:
        return self.prefetcher.stats.issued

    async def take(self, index: int, step: int) -> None:
        self.prefetcher.advance(step, index + 1)
        await self.prefetcher.wait(index)
        self.prefetcher.release(index)


async def end(running: asyncio.Task[None], bench: Bench) -> None:
    running.cancel()
    await asyncio.wait([running])
    bench.prefetcher.release_all()
    assert bench.ring.statistics().free == SLOTS


def test_a_paused_consumer_gets_a_full_ring_with_time_but_not_at_once() -> None:
    async def main() -> None:
        bench = Bench([1] * 200, useful_fraction=0.1)
        running = asyncio.create_task(bench.prefetcher.run())
        await asyncio.sleep(5 * GROWTH_SECONDS)
        early = bench.ahead
        assert MIN_ITEMS + 4 <= early <= MIN_ITEMS + 8
        await asyncio.sleep(10 * GROWTH_SECONDS)
        assert bench.ahead == early + 10
        await asyncio.sleep(100 * GROWTH_SECONDS)
        assert bench.ahead == SLOTS - 1, "all but the slot for hedges"
        await end(running, bench)

    run_virtual(main())


@pytest.mark.parametrize(("useful_fraction", "least", "most"), [(1.0, 12, SLOTS), (0.1, 3, 7)])
def test_the_fetches_at_once_double_only_while_they_do_not_slow_each_other_down(
    useful_fraction: float, least: int, most: int
) -> None:
    async def main() -> None:
        bench = Bench([1] * 200, useful_fraction)
        running = asyncio.create_task(bench.prefetcher.run())
        for index in range(20):
            await bench.take(index, index)
        assert least <= bench.reader.peak <= most
        await end(running, bench)

    run_virtual(main())


def test_the_items_of_one_whole_step_are_fetched_beside_the_look_ahead() -> None:
    async def main() -> None:
        bench = Bench([1, *[20] * 10], useful_fraction=0.0)
        running = asyncio.create_task(bench.prefetcher.run())
        await bench.take(0, 0)
        for index in range(1, 21):
            await bench.take(index, 1)
        await asyncio.sleep(0.5 * GROWTH_SECONDS)
        assert all(bench.prefetcher.ready(index) is not None for index in range(21, 41)), "all that step 2 needs"
        assert bench.ahead <= 41 + MIN_ITEMS + 20
        await end(running, bench)

    run_virtual(main())


@pytest.mark.parametrize(("item_bytes", "begun"), [(8 << 20, 0), (1 << 20, 3)])
def test_the_tail_of_a_first_step_of_small_items_shares_the_link_with_the_next_items(
    item_bytes: int, begun: int
) -> None:
    async def main() -> None:
        items = 3 + max(1, LookAhead(item_bytes, Link(1.0)).tail_items)
        bench = Bench([items, *[1] * 20], useful_fraction=1.0, item_bytes=item_bytes)
        late = asyncio.Event()
        fetch = bench.reader.fetch

        async def fetch_late(ref: int, *, urgent: bool = False) -> int:
            if 3 <= ref < items:
                await late.wait()
            return await fetch(ref, urgent=urgent)

        bench.reader.fetch = fetch_late  # type: ignore[method-assign]
        running = asyncio.create_task(bench.prefetcher.run())
        await asyncio.sleep(1.5 * FETCH_SECONDS)
        assert bench.ahead - items == begun
        late.set()
        await end(running, bench)

    run_virtual(main())


def test_only_items_of_the_first_epoch_are_split() -> None:
    ahead = LookAhead(ITEM_BYTES, Link(0.9, 0.115), epoch_items=20)
    assert [index for index in range(40) if ahead.gains_from_ranges(index)] == list(range(20))


@pytest.mark.parametrize(("epoch_items", "at_once"), [(12, 3), (48, 24), (10_000, 96)])
def test_of_a_short_epoch_few_small_items_are_fetched_at_once(epoch_items: float, at_once: int) -> None:
    assert LookAhead(400, Link(1.0), epoch_items).start_items == at_once


def test_one_item_follows_the_first_step_before_its_items_have_arrived_once_bytes_arrive() -> None:
    async def main() -> None:
        bench = Bench([3, 5, 5], useful_fraction=1.0)
        running = asyncio.create_task(bench.prefetcher.run())
        await asyncio.sleep(0.3 * FETCH_SECONDS)
        assert bench.reader.at_once == 3, "the first step alone"
        bench.link.record(CompletedRequest(1000, 0.01, 0.001))
        await asyncio.sleep(0.3 * FETCH_SECONDS)
        assert bench.reader.at_once == 4, "and one item of the next step"
        await asyncio.sleep(0.5 * FETCH_SECONDS)
        assert bench.reader.at_once == 3, "the others, now that the first step is complete"
        assert bench.prefetcher.ready(3) is None
        await end(running, bench)

    run_virtual(main())


def record(link: LinkUse, seconds: float, *, first_byte_seconds: float = 0.0, count: int = 8) -> None:
    for _ in range(count):
        link.record(CompletedRequest(1_000_000, seconds, first_byte_seconds))


def test_requests_that_share_a_full_link_are_as_many_times_too_many_as_they_take_longer() -> None:
    link = LinkUse()
    assert link.useful_fraction == 1.0
    record(link, 0.12, first_byte_seconds=0.02)
    assert link.useful_fraction == pytest.approx(1.0)
    record(link, 0.42, first_byte_seconds=0.02)
    assert link.useful_fraction == pytest.approx(0.12 / 0.42)
    record(link, 0.12, first_byte_seconds=0.02)
    assert link.useful_fraction == pytest.approx(1.0)


def test_one_request_that_is_fast_by_chance_does_not_change_the_time_alone() -> None:
    link = LinkUse()
    record(link, 0.1)
    record(link, 0.001, count=1)
    record(link, 0.1)
    assert link.useful_fraction == pytest.approx(1.0)


def test_empty_objects_and_instants_tell_nothing_of_the_link() -> None:
    link = LinkUse()
    for _ in range(20):
        link.record(CompletedRequest(0, 0.1, 0.1))
        link.record(CompletedRequest(100, 0.0, 0.0))
    assert link.useful_fraction == 1.0


PIECES, CONNECTIONS = 4, 7


class SharedLinkReader(Reader):
    """Reads an item through one of seven connections in 115 ms, or in four ranges; each range has a connection."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self.split: list[bool] = []

    async def fetch(self, ref: int, *, urgent: bool = False) -> int:
        pieces = PIECES if urgent else 1
        with self._ring.fill_slot(str(ref), 1) as slot:
            self.split.append(urgent)
            await asyncio.gather(*(self._read(0.09 / pieces) for _ in range(pieces)))
        return slot

    async def _read(self, seconds: float) -> None:
        await asyncio.sleep(0.025)
        async with self._connections:
            await asyncio.sleep(seconds)


async def count_split_items(useful_fraction: float, alone_seconds: float, step_seconds: float) -> tuple[int, list[int]]:
    """Return how many items are split at the start of a run, and the steps that wait for items, after the first."""
    bench = Bench([3] * 40, useful_fraction, alone_seconds=alone_seconds)
    bench.reader = bench.prefetcher._reader = SharedLinkReader(bench.ring)
    running = asyncio.create_task(bench.prefetcher.run())
    late_steps = []
    for step in range(30):
        items = range(3 * step, 3 * step + 3)
        bench.prefetcher.advance(step, items[-1] + 1)
        if step and any(bench.prefetcher.ready(index) is None for index in items):
            late_steps.append(step)
        for index in items:
            await bench.prefetcher.wait(index)
            bench.prefetcher.release(index)
        await asyncio.sleep(step_seconds)
    split = bench.reader.split
    await end(running, bench)
    return split.index(False), late_steps


@pytest.mark.parametrize(("useful_fraction", "alone_seconds"), [(0.2, 0.115), (0.9, 0.01)])
def test_items_behind_the_first_16_are_split_if_the_consumer_would_wait_and_the_link_is_neither_full_nor_fast(
    useful_fraction: float, alone_seconds: float
) -> None:
    split, late_steps = run_virtual(count_split_items(useful_fraction, alone_seconds, 0.05))
    assert split == 16
    assert late_steps == [1, 5]
    split, late_steps = run_virtual(count_split_items(0.9, 0.115, 0.05))
    assert split > 16
    assert late_steps == [1]


@pytest.mark.parametrize(("step_seconds", "least", "most"), [(0.0, 64, 64), (0.1, 32, 48), (0.3, 17, 24)])
def test_items_are_split_until_enough_are_ready_but_no_more_than_64(step_seconds: float, least: int, most: int) -> None:
    assert least <= run_virtual(count_split_items(0.9, 0.115, step_seconds))[0] <= most
