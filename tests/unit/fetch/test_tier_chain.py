"""Tiers that are late, frozen, silent, lying, failing and flapping, beside a store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker import FetchConfig
from stoker._fetch.tier_chain import Patience
from stoker.abc import ObjectRef
from stoker.errors import ConnectionLostError, FetchError
from stoker.testing import run_virtual
from support.faulty_store import StoreProfile
from support.fetching import BODY, Bench, seconds

QUICK = StoreProfile(tail_sigma=0.0)
BUCKET_SECONDS = 0.022
"""What the store takes for the object, a little more than 0.0211 s."""


class Warm:
    """A tier with a script of outcomes, one per read, the last of which is repeated; counts reads in flight.

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


class SingleFlight(Warm):
    """A tier that waits for other clients; counts what it is asked without and with the intention to fetch."""

    name = "cluster"

    def __init__(self, *answers: Callable[[memoryview], Awaitable[bool]]) -> None:
        super().__init__(*answers)
        self.peeks: list[str] = []
        self.declined: list[str] = []
        self.responds = True

    async def peek(self, ref: ObjectRef, into: memoryview) -> bool:
        self.peeks.append(ref.key)
        return False

    def decline(self, ref: ObjectRef) -> None:
        self.declined.append(ref.key)

    def is_responsive(self, ref: ObjectRef) -> bool:
        return self.responds


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
    return Bench(*faults, warm=warm, profile=QUICK, slots=slots, config=config)


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


def test_a_faulty_tier_costs_a_store_read_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Warm):
        def offer(self, ref: ObjectRef, data: memoryview) -> None:
            raise KeyError(ref.key)

    async def main() -> None:
        place = bench(Faulty(after(0.01, TypeError("no memoryview"))))
        assert [await place.fetch() for _ in range(2)] == [BODY] * 2
        assert place.fetcher.stats.tier_errors["warm"] == 2
        assert place.requests == 2
        assert place.leaves_nothing()

    run_virtual(main())
    (fault,) = [record.getMessage() for record in caplog.records if "fault" in record.getMessage()]
    assert "the tier warm" in fault
    assert "TypeError('no memoryview')" in fault


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


def test_without_a_free_slot_a_late_tier_is_cancelled_and_the_store_fills_its_slot() -> None:
    async def main() -> None:
        warm = Warm(after(3.0, body=BODY[::-1]))
        place = bench(warm, slots=1)
        assert await place.fetch() == BODY
        assert seconds() < BUCKET_SECONDS + 0.1
        assert (warm.under_way, place.requests, place.fetcher.stats.hedges) == (0, 1, 0)
        assert dict(place.fetcher.stats.tier_late) == {"warm": 1}
        assert warm.offered == [BODY]
        assert place.leaves_nothing()

    run_virtual(main())


def test_without_hedges_a_late_tier_is_cancelled_too() -> None:
    async def main() -> None:
        place = bench(Warm(after(10.0)), config=FetchConfig(hedge=False))
        assert await place.fetch() == BODY
        assert seconds() < BUCKET_SECONDS + 0.1
        assert (place.requests, place.fetcher.stats.hedges) == (1, 0)

    run_virtual(main())


def test_races_are_paid_from_the_budget_of_hedges() -> None:
    async def main() -> None:
        place = bench(Warm(after(2.0)), config=FetchConfig(hedge_fraction=0.1, hedge_burst=1))
        for _ in range(40):
            await place.fetch()
        assert place.fetcher.stats.hedges <= 1 + 0.1 * (40 + place.requests)

    run_virtual(main())


def test_three_late_reads_in_a_row_open_the_breaker_and_one_probe_in_five_seconds_closes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        warm = Warm(*[after(9.0)] * 5, after(0.01))
        place = bench(warm, slots=1)
        for reads, state in ((1, "closed"), (2, "closed"), (3, "open"), (3, "open"), (3, "open")):
            await place.fetch()
            assert (warm.reads, place.fetcher.tiers.states()) == (reads, {"warm": state})
        for reads in (4, 5):
            await asyncio.sleep(5.0)
            await place.fetch()
            assert (warm.reads, place.fetcher.tiers.states()) == (reads, {"warm": "open"})
        await asyncio.sleep(5.0)
        requests = place.requests
        await place.fetch()
        assert place.requests == requests
        assert place.fetcher.tiers.states() == {"warm": "closed"}

    run_virtual(main())
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("the tier warm was late or failed 3 times in a row")


def test_only_one_read_probes_a_tier_whose_breaker_is_half_open() -> None:
    async def main() -> None:
        warm = Warm(*[after(0.0, ConnectionLostError("gone"))] * 3, after(0.05))
        place = bench(warm, slots=8)
        for _ in range(3):
            await place.fetch()
        await asyncio.sleep(5.0)
        slots = await asyncio.gather(*(place.fetcher.fetch(place.ref) for _ in range(8)))
        assert warm.reads == 4
        assert len(set(slots)) == 8
        assert place.fetcher.tiers.states() == {"warm": "closed"}

    run_virtual(main())


def test_an_outage_of_the_store_asks_a_tier_whose_breaker_is_open() -> None:
    async def main() -> None:
        warm = Warm(*[after(0.0, ConnectionLostError("gone"))] * 3, after(2.0))
        place = bench(warm, *[None] * 3, *["reset"] * 50, config=FetchConfig(attempts=2))
        for _ in range(4):
            assert await place.fetch() == BODY
        assert place.leaves_nothing()

    run_virtual(main())


def frozen(into: memoryview) -> Awaitable[bool]:
    return after(1e6)(into)


SICK: dict[str, list[Callable[[memoryview], Awaitable[bool]]]] = {
    "late": [after(0.5)],
    "frozen": [frozen],
    "silent": [after(20.0, False)],
    "lying": [after(0.01, body=BODY[::-1])],
    "lying late": [after(0.07, body=BODY[::-1])],
    "failing": [after(0.0, ConnectionLostError("gone"))],
    "failing late": [after(0.3, ConnectionLostError("gone"))],
    "flapping": [after(0.01), frozen, after(0.01, False), frozen, after(0.3)] * 40,
    "freezing": [*[after(0.005)] * 20, frozen],
    "thawing": [*[frozen] * 20, after(0.005)],
}


@pytest.mark.parametrize("hedge", [True, False])
@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize("sickness", SICK)
def test_no_fetch_waits_longer_than_for_the_store_and_a_tenth_of_a_second(
    sickness: str, slots: int, hedge: bool
) -> None:
    async def main() -> None:
        warm = Warm(*SICK[sickness])
        place = bench(warm, slots=slots, config=FetchConfig(hedge=hedge))
        waits: list[float] = []

        async def fetch_some() -> None:
            for _ in range(60):
                begun = seconds()
                slot = await place.fetcher.fetch(place.ref)
                waits.append(seconds() - begun)
                assert place.ring.view(slot, len(BODY)) == BODY
                await asyncio.sleep(0.05)
                assert place.ring.view(slot, len(BODY)) == BODY, "written to after the end"
                place.ring.release(slot)

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, slots // 2)):
                group.create_task(fetch_some())
        assert max(waits) <= BUCKET_SECONDS + 0.1
        assert warm.under_way == 0
        assert place.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize("at", [0.005, 0.07, 0.085, 0.1, 0.9])
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


class Places(Warm):
    """A tier of two places, of which one has the given outcome and the other delivers."""

    def __init__(self, *answers: Callable[[memoryview], Awaitable[bool]]) -> None:
        super().__init__(*answers)
        self.at = "sick"
        self.rejected: list[ObjectRef] = []

    def place(self, ref: ObjectRef) -> str:
        return self.at

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        if self.at == "well":
            into[:] = BODY
            return True
        return await super().read(ref, into)

    def reject(self, ref: ObjectRef) -> None:
        self.rejected.append(ref)


def test_a_sick_place_of_a_tier_is_left_alone_and_the_others_are_read() -> None:
    async def main() -> None:
        tier = Places(after(0.01, ConnectionLostError("gone")))
        place = bench(tier)
        for _ in range(4):
            assert await place.fetch() == BODY
        assert tier.reads == 3
        tier.at = "well"
        assert await place.fetch() == BODY
        stats = place.fetcher.stats
        assert dict(stats.tier_hits) == {"warm": 1}
        assert place.fetcher.tiers.states() == {"warm sick": "open", "warm well": "closed"}

    run_virtual(main())


def test_a_tier_is_notified_of_wrong_bytes() -> None:
    async def main() -> None:
        tier = Places(after(0.01, body=BODY[::-1]))
        place = bench(tier)
        assert await place.fetch() == BODY
        assert len(tier.rejected) == 1
        assert place.fetcher.stats.checksum_failures == 1

    run_virtual(main())


@pytest.mark.parametrize(("wait_seconds", "requests"), [(0.9, 0), (1.5, 1)])
def test_a_fetch_of_another_client_is_waited_for_a_second(wait_seconds: float, requests: int) -> None:
    async def main() -> None:
        place = bench(SingleFlight(after(wait_seconds)))
        assert await place.fetch() == BODY
        assert seconds() <= 1.1
        assert place.requests == requests
        assert place.leaves_nothing()

    run_virtual(main())


def test_waits_of_one_caller_for_other_clients_add_up_to_a_second_and_what_the_store_takes() -> None:
    async def main() -> None:
        tier = SingleFlight(after(0.001, answer=False))
        place = bench(tier)
        for _ in range(4):  # then the usual time is known
            await place.fetch()
        tier.answers = [after(0.3)]
        begun, patience = seconds(), Patience(1.0)
        for _ in range(8):
            await place.fetcher.fetch_whole(place.ref, memoryview(bytearray(len(BODY))), patience=patience)
        assert 1.0 < seconds() - begun <= 1.0 + 8 * 2 * BUCKET_SECONDS
        assert patience.seconds <= 0.02

    run_virtual(main())


@pytest.mark.parametrize("responds", [True, False])
def test_only_a_silent_tier_is_avoided_for_what_others_fetch_late(responds: bool) -> None:
    async def main() -> None:
        tier = SingleFlight(after(100.0))
        tier.responds = responds
        place = bench(tier)
        for _ in range(4):
            assert await place.fetch() == BODY
        assert place.fetcher.tiers.states() == {"cluster": "closed" if responds else "open"}

    run_virtual(main())


def test_an_object_that_this_client_cannot_fetch_is_declined() -> None:
    async def main() -> None:
        tier = SingleFlight(after(0.001, answer=False))
        place = bench(tier, *["error"] * 20, config=FetchConfig(attempts=2))
        await place.fails(FetchError)
        assert set(tier.declined) == {place.ref.key}
        assert tier.peeks == [place.ref.key]  # after the failure, in case that another one has it
        assert tier.offered == []

    run_virtual(main())


def test_a_cancelled_fetch_is_declined() -> None:
    async def main() -> None:
        tier = SingleFlight(after(0.001, answer=False))
        place = bench(tier, "stall")
        fetching = asyncio.create_task(place.fetch())
        await asyncio.sleep(0.05)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert tier.declined == [place.ref.key]
        assert place.leaves_nothing()

    run_virtual(main())


def test_a_reader_of_parts_of_an_object_peeks() -> None:
    async def main() -> None:
        tier = SingleFlight(after(0.001))
        place = bench(tier)
        assert not await place.fetcher.tiers.read(place.ref, memoryview(bytearray(len(BODY))))
        assert (tier.peeks, tier.reads, tier.declined) == ([place.ref.key], 0, [])

    run_virtual(main())
