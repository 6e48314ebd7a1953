"""Attempts, their deadline, and hedges: in virtual time, against a store with scripted faults."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from stoker import FetchConfig
from stoker._base.batch_read import RangePart
from stoker._base.checksum import crc32c
from stoker._fetch import range_reader
from stoker._fetch.race import Race
from stoker.errors import (
    ConnectionLostError,
    CredentialsError,
    FetchError,
    NotFoundError,
    ObjectDamagedError,
    StoreError,
)
from stoker.testing import VirtualClockLoop, run_virtual
from support.faulty_store import StoreProfile
from support.fetching import BODY, Bench, seconds


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("throttle", "ThrottledError"),
        ("error", "ServerError"),
        ("reset", "ConnectionLostError"),
        ("truncate", "TruncatedError"),
        ("corrupt", "ChecksumError"),
        ("stall", "DeadlineError"),
    ],
)
def test_every_transient_fault_is_tried_again_and_counted_by_type(fault: str, error: str) -> None:
    async def main() -> None:
        bench = Bench(fault, fault, config=FetchConfig(hedge=False))
        assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert dict(stats.retries) == dict(stats.failures) == {error: 2}
        assert (stats.requests, stats.objects, stats.failed) == (3, 1, 0)
        assert bench.leaves_nothing()

    run_virtual(main())


def test_an_object_spoilt_at_rest_is_one_error_that_names_it_and_says_what_to_do() -> None:
    async def main() -> None:
        bench = Bench(*["corrupt"] * 100)
        await bench.fails(
            FetchError,
            r"^faulty://bucket/x is corrupt: its checksum always differs \(CRC-32C is .*, but the manifest has .*\)\. "
            r"'stoker verify faulty://bucket'",
        )
        assert isinstance(bench.error, ObjectDamagedError)
        assert bench.requests == 3
        assert bench.error.__cause__ is None
        assert bench.error.__suppress_context__
        assert bench.fetcher.stats.checksum_failures == 3
        assert bench.leaves_nothing()

    run_virtual(main())


def test_attempts_are_bounded_and_the_last_cause_is_chained() -> None:
    async def main() -> None:
        bench = Bench(*["reset"] * 100, config=FetchConfig(attempts=5))
        await bench.fails(FetchError, r"x was not fetched with 5 requests.*reset by peer")
        assert isinstance(bench.error.__cause__, ConnectionLostError)
        assert bench.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize("fault", ["stall", "reset", "drip"])
def test_the_deadline_ends_whatever_does_not_end_itself(fault: str) -> None:
    async def main() -> None:
        config = FetchConfig(attempts=10_000, deadline_seconds=30.0, min_bytes_per_second=1e9)
        bench = Bench(*[fault] * 10_000, config=config, body=BODY * 40)
        assert 20.0 <= await bench.fails(FetchError, "deadline") <= 30.1
        assert bench.error.__cause__ is not None
        assert bench.leaves_nothing()

    run_virtual(main())


def test_waiting_in_line_does_not_count_against_the_deadline() -> None:
    async def main() -> None:
        config = FetchConfig(
            start_concurrency=1, min_concurrency=1, max_concurrency=1, deadline_seconds=1.0, hedge=False
        )
        bench = Bench(config=config, slots=10, profile=StoreProfile(first_byte_seconds=0.9, tail_sigma=0.0))
        slots = await asyncio.gather(*(bench.fetcher.fetch(bench.ref) for _ in range(10)))
        assert seconds() > 9.0
        assert len(set(slots)) == 10

    run_virtual(main())


@pytest.mark.parametrize(("fault_key", "error"), [("missing", NotFoundError), ("expired", CredentialsError)])
def test_what_cannot_succeed_is_raised_at_once_and_unchanged(fault_key: str, error: type[StoreError]) -> None:
    async def main() -> None:
        bench = Bench(profile=StoreProfile(credentials_expire_at=0.0 if fault_key == "expired" else 1e9))
        if fault_key == "missing":
            del bench.store.objects["x"]
        await bench.fails(error)
        assert bench.requests == 1
        assert bench.fetcher.stats.failed == 1
        assert bench.leaves_nothing()

    run_virtual(main())


def test_what_the_store_asks_to_wait_is_waited() -> None:
    async def main() -> None:
        bench = Bench("throttle", profile=StoreProfile(retry_after_seconds=7.0))
        assert await bench.fetch() == BODY
        assert 7.0 <= bench.store.sent_seconds[1] - bench.store.sent_seconds[0] <= 7.2

    run_virtual(main())


@pytest.mark.parametrize("asked_seconds", [120.0, 7200.0])
def test_a_wait_that_would_pass_the_deadline_is_cut_and_logged(
    asked_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        bench = Bench("throttle", profile=StoreProfile(retry_after_seconds=asked_seconds))
        assert await bench.fetch() == BODY
        assert 25.0 <= bench.store.sent_seconds[1] - bench.store.sent_seconds[0] <= 30.1

    with caplog.at_level(logging.WARNING, logger="stoker"):
        run_virtual(main())
    assert "faulty://bucket/x: retrying in 30 s: x: slow down" in caplog.text


def test_a_store_that_requests_more_than_there_is_until_the_end_ends_the_fetch_at_its_deadline() -> None:
    async def main() -> None:
        bench = Bench(*["throttle"] * 100, profile=StoreProfile(retry_after_seconds=7200.0))
        assert 50.0 <= await bench.fails(FetchError, "deadline") <= 62.0
        assert bench.requests <= 40

    run_virtual(main())


def test_an_object_that_takes_longer_than_deadline_and_attempt_on_a_slow_link_is_fetched() -> None:
    async def main() -> None:
        config = FetchConfig(deadline_seconds=10.0, attempt_seconds=5.0, min_bytes_per_second=1000, hedge=False)
        bench = Bench(config=config, profile=StoreProfile(tail_sigma=0.0, bytes_per_second=1500))
        assert await bench.fetch() == BODY
        assert seconds() > 60.0
        assert (bench.requests, dict(bench.fetcher.stats.retries)) == (1, {})

    run_virtual(main())


def test_a_process_that_was_stopped_for_an_hour_continues_as_if_it_had_not_been() -> None:
    async def main() -> None:
        bench = Bench(profile=StoreProfile(tail_sigma=0.0, bytes_per_second=1e5), config=FetchConfig(hedge=False))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop.call_later(0.7, bench.store.lose_connections)
        loop.call_later(0.7, loop.jump, 3600.0)
        assert await bench.fetch() == BODY
        assert sum(bench.fetcher.stats.retries.values()) == 1
        assert bench.leaves_nothing()

    run_virtual(main())


async def warm_up(bench: Bench, fetches: int = 16) -> None:
    for _ in range(fetches):
        assert await bench.fetch() == BODY


def scripted_after_warm_up(bench: Bench, *faults: str | None) -> None:
    begin = bench.requests
    bench.store.script = lambda number, key: faults[number - begin] if begin <= number < begin + len(faults) else None


def test_where_answers_take_milliseconds_a_late_request_has_the_least_time() -> None:
    async def main() -> None:
        bench = Bench(profile=StoreProfile(tail_sigma=0.0, first_byte_seconds=0.001))
        await warm_up(bench)
        scripted_after_warm_up(bench, "stall")
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(FetchConfig().hedge_min_seconds)

    run_virtual(main())


def test_a_late_request_is_hedged_after_two_and_a_half_times_the_expected_time() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_min_seconds=0.01))
        await warm_up(bench)
        scripted_after_warm_up(bench, "stall")
        expected_seconds = 0.02 + len(BODY) / 90e6
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(2.5 * expected_seconds, rel=0.01)
        assert seconds() - begun == pytest.approx(3.5 * expected_seconds, rel=0.01)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, stats.hedged_bytes) == (1, 1, len(BODY))
        assert not stats.retries
        assert bench.leaves_nothing()

    run_virtual(main())


def late_after_warm_up(bench: Bench, *late_seconds: float) -> None:
    """Delay the first byte of the next requests."""
    begin = bench.requests
    bench.store.late = {begin + position: late for position, late in enumerate(late_seconds)}


SLOW_LINK = StoreProfile(tail_sigma=0.0, bytes_per_second=len(BODY) / 2)  # a first byte after 20 ms, the last after 2 s
PATIENT = FetchConfig(hedge_first_seconds=10.0)


def test_an_answer_that_does_not_begin_is_hedged_long_before_the_last_byte_would_be_late() -> None:
    async def main() -> None:
        bench = Bench(profile=SLOW_LINK, config=PATIENT)
        await warm_up(bench)
        late_after_warm_up(bench, 60.0, 60.0)
        begun = seconds()
        assert await bench.fetch() == BODY
        sent = [second - begun for second in bench.store.sent_seconds[-3:]]
        assert sent == pytest.approx([0.0, 0.08, 0.16])
        assert seconds() - begun == pytest.approx(0.16 + 0.02 + 2.0)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, stats.hedged_bytes) == (2, 1, 0)
        assert bench.fetcher._hedges.times.expected_first_byte_seconds() == pytest.approx(0.02)
        assert bench.leaves_nothing()

    run_virtual(main())


def test_where_the_late_answer_begins_first_after_all_the_hedge_is_taken_back() -> None:
    async def main() -> None:
        bench = Bench(profile=SLOW_LINK, config=PATIENT)
        await warm_up(bench)
        late_after_warm_up(bench, 0.07, 60.0)
        begun = seconds()
        fetching = asyncio.create_task(bench.fetch())
        await asyncio.sleep(0.085)
        assert bench.store.active == 2
        await asyncio.sleep(0.01)
        assert bench.store.active == 1
        assert await fetching == BODY
        assert seconds() - begun == pytest.approx(0.07 + 0.02 + 2.0)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, stats.hedged_bytes) == (1, 0, 0)
        assert bench.leaves_nothing()

    run_virtual(main())


def test_an_answer_that_has_begun_is_late_only_when_it_should_have_ended() -> None:
    async def main() -> None:
        bench = Bench(profile=SLOW_LINK, config=PATIENT)
        await warm_up(bench)
        scripted_after_warm_up(bench, "stall")  # half-way
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(2.5 * 2.02)
        assert bench.fetcher.stats.hedged_bytes == len(BODY)

    run_virtual(main())


def test_a_store_that_does_not_tell_when_it_begins_has_until_the_answer_should_have_ended() -> None:
    async def main() -> None:
        profile = StoreProfile(tail_sigma=0.0, bytes_per_second=len(BODY) / 2, tells_when_it_begins=False)
        bench = Bench(profile=profile, config=PATIENT)
        await warm_up(bench)
        late_after_warm_up(bench, 60.0)
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(2.5 * 2.02)
        assert bench.fetcher._hedges.times.expected_seconds(0) == pytest.approx(2.02), "as if all were one byte"

    run_virtual(main())


def test_a_loser_that_still_writes_while_it_closes_does_no_harm() -> None:
    async def main() -> None:
        bench = Bench(profile=StoreProfile(tail_sigma=0.0, closing_seconds=2.0))
        await warm_up(bench)
        for _ in range(2):
            scripted_after_warm_up(bench, "drip")  # the first one loses
            assert await bench.fetch() == BODY
            await warm_up(bench)
            scripted_after_warm_up(bench, "drip", *["stall"] * 3)  # none is quick, the first one wins
            assert await bench.fetch() == BODY
            await warm_up(bench)
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins) == (8, 2)
        assert bench.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize(
    ("faults", "hedge_wins", "retries"),
    [
        (("drip", "error", "error", "error"), 0, 0),  # all hedges fail, the late one arrives
        (("drip", "corrupt"), 1, 1),  # the hedge brings wrong bytes: read again
    ],
)
def test_a_hedge_that_fails_leaves_the_late_request_its_chance(
    faults: tuple[str, ...], hedge_wins: int, retries: int
) -> None:
    async def main() -> None:
        bench = Bench()
        await warm_up(bench)
        scripted_after_warm_up(bench, *faults)
        assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert (stats.hedges, stats.hedge_wins, sum(stats.retries.values())) == (len(faults) - 1, hedge_wins, retries)
        assert bench.leaves_nothing()

    run_virtual(main())


def test_no_hedge_without_a_spare_slot_or_when_switched_off() -> None:
    async def main() -> None:
        for bench in (Bench(slots=1), Bench(config=FetchConfig(hedge=False))):
            await warm_up(bench)
            scripted_after_warm_up(bench, "stall")
            assert await bench.fetch() == BODY
            stats = bench.fetcher.stats
            assert (stats.hedges, dict(stats.retries)) == (0, {"DeadlineError": 1})

    run_virtual(main())


def look_times(bench: Bench) -> list[float]:
    """Record from now on when a race is looked after."""
    times: list[float] = []
    watch = bench.fetcher._reader._watch
    look = watch._look

    def recorded(race: Race, now_seconds: float) -> float:
        times.append(now_seconds)
        return look(race, now_seconds)

    watch._look = recorded
    return times


NO_BUDGET = FetchConfig(hedge_fraction=0.1, hedge_burst=1)


@pytest.mark.parametrize(("slots", "tokens"), [(1, 1), (4, 0)], ids=["no memory", "no budget"])
def test_a_late_request_is_not_looked_after_while_no_hedge_is_possible(slots: int, tokens: int) -> None:
    async def main() -> None:
        bench = Bench(config=NO_BUDGET, slots=slots)
        await warm_up(bench)
        while not tokens and bench.fetcher._hedges.budget.spend():
            pass
        scripted_after_warm_up(bench, "stall")
        times, begun = look_times(bench), seconds()
        assert await bench.fetch() == BODY
        limit_seconds = NO_BUDGET.attempt_limit_seconds(len(BODY))
        assert [time - begun for time in times] == pytest.approx([NO_BUDGET.hedge_min_seconds, limit_seconds], rel=0.1)
        assert bench.fetcher.stats.hedges == 0

    run_virtual(main())


def test_a_late_request_is_hedged_as_soon_as_a_slot_is_free() -> None:
    async def main() -> None:
        bench = Bench(slots=2)
        await warm_up(bench)
        used = bench.ring.acquire()
        assert used is not None
        scripted_after_warm_up(bench, "stall")
        asyncio.get_running_loop().call_later(1.234, bench.ring.abort, used)
        begun = seconds()
        assert await bench.fetch() == BODY
        assert bench.store.sent_seconds[-1] - begun == pytest.approx(1.234)
        assert bench.fetcher.stats.hedge_wins == 1

    run_virtual(main())


def test_a_late_request_is_hedged_as_soon_as_another_one_earns_the_budget() -> None:
    async def main() -> None:
        bench = Bench(config=NO_BUDGET)
        await warm_up(bench)
        while bench.fetcher._hedges.budget.spend():
            pass
        scripted_after_warm_up(bench, "stall")
        begun = seconds()
        late = asyncio.create_task(bench.fetcher.fetch(bench.ref))
        await asyncio.sleep(1.0)
        requests = 0
        while not bench.fetcher.stats.hedges:
            bench.ring.release(await bench.fetcher.fetch(bench.ref))
            requests += 1
        assert 1 < requests <= 10, "each earns a tenth"
        await late
        assert seconds() - begun < 2.0

    run_virtual(main())


@pytest.mark.parametrize(("begins", "transfers"), [(False, 4), (True, 4)])
def test_a_request_is_late_as_soon_as_others_tell_what_to_expect(begins: bool, transfers: int) -> None:
    """Five requests are sent together; without the others, the first would be late after 10 s."""

    async def main() -> None:
        bench = Bench("drip" if begins else "stall", config=PATIENT, slots=8)
        first = asyncio.create_task(bench.fetcher.fetch(bench.ref))
        await asyncio.gather(*(bench.fetcher.fetch(bench.ref) for _ in range(transfers)))
        await first
        assert bench.store.sent_seconds[-1] == pytest.approx(0.1, abs=0.05)
        assert bench.fetcher.stats.hedge_wins == 1

    run_virtual(main())


def test_small_ranges_are_hedged_in_a_few_buffers_when_no_slot_is_spare() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_burst=2, hedge_fraction=1.0), small_hedge_bytes=100)
        await warm_up(bench)
        while bench.ring.free:
            bench.ring.acquire()
        into = memoryview(bytearray(600))

        async def read(number: int, size_bytes: int = 100) -> int:
            part = RangePart(100 * number, 100 * number + size_bytes, 100 * number)
            await bench.fetcher.fetch_ranges(bench.ref, [part], into=into, verify=lambda data: None)
            return bench.fetcher.stats.hedges

        scripted_after_warm_up(bench, "stall")
        assert await read(0) == 1
        scripted_after_warm_up(bench, "stall")
        assert await read(1, 101) == 1, "larger than a buffer, and no slot is free"
        scripted_after_warm_up(bench, *["stall"] * 4)
        async with asyncio.TaskGroup() as tasks:
            for number in (2, 3):
                tasks.create_task(read(number))
            await asyncio.sleep(1.0)
            assert bench.fetcher.stats.hedges == 3
            scripted_after_warm_up(bench, None, None, "stall")
            assert [await read(number) for number in (4, 5)] == [3, 3]
            late = tasks.create_task(read(0))
            await asyncio.sleep(1.0)
            assert bench.fetcher.stats.hedges == 3, "both buffers are in use"
            assert await late == 4, "it waited for one"
        assert bytes(into) == BODY[:600]
        assert bench.fetcher._reader._limiter.held == 0

    run_virtual(main())


def test_reads_that_were_given_up_in_line_earn_no_hedges() -> None:
    async def main() -> None:
        config = FetchConfig(start_concurrency=1, min_concurrency=1, max_concurrency=1, hedge_fraction=1.0)
        bench = Bench(*["stall"] * 1000, config=config, slots=20)
        fetches = [asyncio.create_task(bench.fetcher.fetch(bench.ref)) for _ in range(12)]
        await asyncio.sleep(0.5)
        for fetching in fetches[1:]:
            fetching.cancel()
        await asyncio.sleep(100.0)
        with pytest.raises(FetchError):
            await fetches[0]
        stats = bench.fetcher.stats
        assert stats.hedges <= config.hedge_burst + 1

    run_virtual(main())


def test_hedges_of_very_small_ranges_share_the_memory_of_a_few_buffers() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_burst=2, hedge_fraction=1.0), small_hedge_bytes=100)
        await warm_up(bench)
        while bench.ring.free:
            bench.ring.acquire()
        into = memoryview(bytearray(240))
        scripted_after_warm_up(bench, *["stall"] * 12)

        async def read(number: int) -> None:
            part = RangePart(20 * number, 20 * number + 20, 20 * number)
            await bench.fetcher.fetch_ranges(bench.ref, [part], into=into, verify=lambda data: None)

        begun = seconds()
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(read(number))
        assert seconds() - begun < 1.0
        assert bench.fetcher.stats.hedge_wins == 12
        assert bytes(into) == BODY[:240]

    run_virtual(main())


def test_when_everything_is_late_hedges_stay_within_their_budget() -> None:
    async def main() -> None:
        bench = Bench(config=FetchConfig(hedge_fraction=0.1, hedge_burst=2))
        await warm_up(bench, 20)
        bench.store.profile.bytes_per_second /= 1000
        await warm_up(bench, 8)  # slower and slower until it is what is expected
        bench.store.script = lambda number, key: "stall" if number % 2 else None
        for _ in range(100):
            assert await bench.fetch() == BODY
        stats = bench.fetcher.stats
        assert 2 <= stats.hedges <= 2 + 0.1 * stats.requests

    run_virtual(main())


@pytest.mark.parametrize("cores", [2, 4])
def test_where_there_are_cores_another_thread_verifies_large_ranges(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "_THREAD_BYTES", len(BODY))
    monkeypatch.setattr(range_reader, "count_cores", lambda: cores)
    threads: list[threading.Thread] = []

    def checksum(data: memoryview) -> int:
        threads.append(threading.current_thread())
        return crc32c(data)

    async def main() -> None:
        bench = Bench("corrupt")
        bench.fetcher._checksum = checksum
        assert await bench.fetch() == BODY
        assert bench.fetcher.stats.checksum_failures == 1

    asyncio.run(main())
    assert len(threads) == 2
    assert (threading.main_thread() in threads) == (cores < 4)


def test_a_cancelled_fetch_does_not_wait_for_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "_THREAD_BYTES", len(BODY))
    monkeypatch.setattr(range_reader, "count_cores", lambda: 4)
    begun, may_end = threading.Event(), threading.Event()

    def checksum(data: memoryview) -> int:
        begun.set()
        assert may_end.wait(60)
        return crc32c(data)

    async def main() -> None:
        bench = Bench()
        bench.fetcher._checksum = checksum
        fetching = asyncio.create_task(bench.fetch())
        while not begun.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert not may_end.is_set()
        assert bench.leaves_nothing()
        may_end.set()

    asyncio.run(main())
