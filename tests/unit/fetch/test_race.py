"""The watch of races: one timer for all of them, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import FetchConfig
from stoker._fetch.race import Attempt, Race, RaceWatch
from stoker.errors import FetchError
from stoker.testing import run_virtual
from support.fetching import BODY, Bench, seconds


@given(
    delays=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20), pause_seconds=st.floats(0.1, 5.0), looks=st.just(3)
)
def test_each_race_is_looked_after_at_its_times_whatever_the_others_do(
    delays: list[float], pause_seconds: float, looks: int
) -> None:
    seen: dict[Race, list[float]] = {}

    def look(race: Race, now_seconds: float) -> float:
        seen[race].append(now_seconds)
        return now_seconds + pause_seconds

    async def main() -> None:
        watch = RaceWatch(look)
        due: dict[Race, float] = {Race(): delay for delay in delays}
        for race, delay in due.items():
            seen[race] = []
            watch.add(race, delay)
        await asyncio.sleep(max(delays) + looks * pause_seconds)
        for race, delay in due.items():
            assert seen[race][:looks] == pytest.approx(
                [delay + look * pause_seconds for look in range(looks)], abs=0.002 * looks
            )
            watch.remove(race)
        before = sum(map(len, seen.values()))
        await asyncio.sleep(100.0)
        assert sum(map(len, seen.values())) == before, "removed races are left alone"

    run_virtual(main())


def test_races_may_be_looked_after_before_their_time() -> None:
    async def main() -> None:
        seen: list[tuple[Race, float]] = []

        def look(race: Race, now_seconds: float) -> float:
            seen.append((race, now_seconds))
            return now_seconds + 10.0

        watch, one, other = RaceWatch(look), Race(), Race()
        watch.look_soon()
        assert watch._timer is None
        watch.add(one, 5.0)
        watch.add(other, 7.0)
        await asyncio.sleep(1.0)
        watch.look_soon([other])
        await asyncio.sleep(1.0)
        assert seen == [(other, 1.0)]
        watch.look_soon()
        await asyncio.sleep(9.0)
        assert seen[1:] == [(one, 2.0), (other, 2.0)]

    run_virtual(main())


def test_a_watch_without_races_has_no_timer() -> None:
    async def main() -> None:
        watch, race = RaceWatch(lambda race, now_seconds: now_seconds + 1.0), Race()
        for _ in range(2):
            watch.add(race, 5.0)
            assert watch._timer is not None
            watch.remove(race)
            assert watch._timer is None

    run_virtual(main())


def test_an_attempt_is_ended_once_and_for_one_reason() -> None:
    async def main() -> None:
        attempt = Attempt(memoryview(b""), 0.0)
        attempt.task = asyncio.create_task(asyncio.sleep(10.0))
        await asyncio.sleep(0)
        attempt.lose()
        attempt.lose()
        attempt.expire()
        assert (attempt.is_lost, attempt.is_overdue, attempt.task.cancelling()) == (True, False, 1)
        await asyncio.wait([attempt.task])

    run_virtual(main())


@pytest.mark.parametrize("hedge", [False, True])
def test_an_attempt_that_reaches_its_limit_is_tried_again_and_its_task_is_not_cancelled(hedge: bool) -> None:
    async def main() -> None:
        config = FetchConfig(attempt_seconds=3.0, min_bytes_per_second=1e9, hedge=hedge, hedge_min_seconds=100.0)
        bench = Bench("stall", config=config)
        assert await bench.fetch() == BODY
        assert 3.0 <= seconds() <= 3.2
        assert dict(bench.fetcher.stats.failures) == {"DeadlineError": 1}
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(1.0)
        assert bench.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize("hedge", [False, True])
def test_limits_shorter_than_a_timer_are_limits(hedge: bool) -> None:
    async def main() -> None:
        config = FetchConfig(
            attempts=3, attempt_seconds=1e-4, min_bytes_per_second=1e12, hedge=hedge, hedge_min_seconds=0.0
        )
        bench = Bench(config=config)
        await bench.fails(FetchError, "a range failed 3 times")
        assert bench.leaves_nothing()

    run_virtual(main())


def test_a_limit_and_a_deadline_at_the_same_time_end_the_fetch() -> None:
    async def main() -> None:
        config = FetchConfig(attempt_seconds=3.0, deadline_seconds=3.0, min_bytes_per_second=1e9, hedge=False)
        bench = Bench(*["stall"] * 9, config=config)
        assert await bench.fails(FetchError, "deadline") == pytest.approx(3.0, abs=0.01)
        assert bench.leaves_nothing()

    run_virtual(main())


@pytest.mark.parametrize("at_seconds", [0.01 * number for number in range(1, 16)])
def test_a_fetch_that_is_cancelled_at_any_time_leaves_nothing(at_seconds: float) -> None:
    """Its first request stalls; a hedge is sent after 50 ms, begins 20 ms later and takes some milliseconds."""

    async def main() -> None:
        bench = Bench()
        for _ in range(16):
            assert await bench.fetch() == BODY
        stalled = bench.requests
        bench.store.script = lambda number, key: "stall" if number == stalled else None
        fetching = asyncio.create_task(bench.fetch())
        await asyncio.sleep(at_seconds)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled() or fetching.result() == BODY
        assert bench.leaves_nothing()

    run_virtual(main())
