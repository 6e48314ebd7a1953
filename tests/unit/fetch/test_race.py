"""A warm tier that may be late, beside a store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker.clock import run_virtual
from stoker.errors import ConnectionLostError, FetchError
from stoker.fetch.fetcher import FetchConfig
from stoker.tier import ObjectRef
from support.faulty_store import Weather
from support.fetching import BODY, Bench, seconds

QUICK = Weather(tail_sigma=0.0)


class Warm:
    """A tier that answers each read as the next of a script says, and its last for ever; it counts what is under way.

    Args:
        answers: coroutine functions that are given the memory.
    """

    name = "warm"

    def __init__(self, *answers: Callable[[memoryview], Awaitable[bool]]) -> None:
        self.answers = list(answers)
        self.reads = self.under_way = 0
        self.offered: list[bytes] = []

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        answer = self.answers[min(self.reads, len(self.answers) - 1)]
        self.reads += 1
        self.under_way += 1
        try:
            return await answer(into)
        finally:
            self.under_way -= 1

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        self.offered.append(bytes(data))

    async def close(self) -> None:
        pass


def after(
    wait_seconds: float, answer: bool | Exception = True, body: bytes = BODY
) -> Callable[[memoryview], Awaitable[bool]]:
    async def read(into: memoryview) -> bool:
        await asyncio.sleep(wait_seconds)
        if isinstance(answer, Exception):
            raise answer
        if answer:
            into[:] = body
        return answer

    return read


def bench(warm: Warm, *faults: str | None, slots: int = 4, config: FetchConfig | None = None) -> Bench:
    return Bench(*faults, warm=warm, weather=QUICK, slots=slots, config=config)


def test_a_warm_read_in_time_asks_the_store_for_nothing() -> None:
    async def main() -> None:
        warm = Warm(after(0.01))
        place = bench(warm)
        assert await place.fetch() == BODY
        assert place.requests == 0
        assert dict(place.fetcher.stats.tier_hits) == {"warm": 1}
        assert place.leaves_nothing()

    run_virtual(main())


def test_a_late_warm_read_is_beaten_by_the_store_and_writes_nothing_more() -> None:
    async def main() -> None:
        warm = Warm(*[after(0.01)] * 8, after(5.0, body=BODY[::-1]))
        place = bench(warm)
        for _ in range(8):
            await place.fetch()
        begun = seconds()
        assert await place.fetch() == BODY
        assert seconds() - begun < 0.2
        assert warm.under_way == 0
        assert (place.requests, place.fetcher.stats.hedges, place.fetcher.stats.hedge_wins) == (1, 1, 1)
        assert warm.offered == [BODY]
        assert place.leaves_nothing()

    run_virtual(main())


def test_a_store_that_is_later_still_is_cancelled() -> None:
    async def main() -> None:
        warm = Warm(*[after(0.01)] * 8, after(0.3))
        place = bench(warm, "stall")
        for _ in range(8):
            await place.fetch()
        assert await place.fetch() == BODY
        assert place.fetcher.stats.tier_hits["warm"] == 9
        assert place.fetcher.stats.hedge_wins == 0
        assert place.store.active == 0
        assert place.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize("answer", [False, ConnectionLostError("gone")])
def test_a_late_tier_that_then_cannot_leaves_it_to_the_store(answer: bool | Exception) -> None:
    async def main() -> None:
        place = bench(Warm(after(1.01, answer)))
        assert await place.fetch() == BODY
        assert place.leaves_nothing()

    run_virtual(main())


def test_spoilt_bytes_of_the_tier_never_arrive() -> None:
    async def main() -> None:
        warm = Warm(after(0.01, body=BODY[::-1]))
        place = bench(warm)
        assert await place.fetch() == BODY
        assert place.fetcher.stats.checksum_failures == 1
        assert warm.offered == [BODY]

    run_virtual(main())


def test_a_store_that_fails_leaves_it_to_the_late_tier() -> None:
    async def main() -> None:
        place = bench(Warm(after(3.0)), *["reset"] * 50, config=FetchConfig(attempts=1))
        assert await place.fetch() == BODY
        assert place.fetcher.stats.tier_hits["warm"] == 1
        assert place.leaves_nothing()

    run_virtual(main())


def test_when_neither_can_the_stores_error_is_raised() -> None:
    async def main() -> None:
        place = bench(Warm(after(3.0, False)), *["reset"] * 50, config=FetchConfig(attempts=1))
        await place.fails(FetchError, "a range failed 1 times")
        assert place.leaves_nothing()

    run_virtual(main())


def test_without_a_free_slot_the_late_tier_is_waited_for() -> None:
    async def main() -> None:
        place = bench(Warm(after(3.0)), slots=1)
        assert await place.fetch() == BODY
        assert place.requests == 0
        assert seconds() == pytest.approx(3.0)

    run_virtual(main())


def test_races_are_paid_from_the_budget_of_hedges() -> None:
    async def main() -> None:
        place = bench(Warm(after(2.0)), config=FetchConfig(hedge_fraction=0.1, hedge_burst=1))
        for _ in range(40):
            await place.fetch()
        assert place.requests <= 1 + 0.1 * (40 + place.requests)

    run_virtual(main())


def test_without_hedges_nothing_races() -> None:
    async def main() -> None:
        place = bench(Warm(after(10.0)), config=FetchConfig(hedge=False))
        assert await place.fetch() == BODY
        assert place.requests == 0

    run_virtual(main())


@pytest.mark.parametrize("at", [0.005, 0.5, 1.005, 1.02, 1.5])
def test_cancelling_ends_both_and_frees_the_slots(at: float) -> None:
    async def main() -> None:
        warm = Warm(after(9.0))
        place = bench(warm, "stall")
        task = asyncio.ensure_future(place.fetcher.fetch(place.ref))
        await asyncio.sleep(at)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (warm.under_way, place.store.active) == (0, 0)
        assert place.leaves_nothing()

    run_virtual(main())
