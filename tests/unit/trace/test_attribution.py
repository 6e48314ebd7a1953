"""What is told of a wait is what was done to the fetch."""

from __future__ import annotations

import asyncio
import gc
import math
from itertools import pairwise

import pytest

from stoker import FetchConfig, FetchSize
from stoker._base.fetch_record import Activity, start_activity
from stoker._base.recorder import Recorder, explain_wait
from stoker.abc import ObjectRef
from stoker.errors import StoreError, TransientError
from stoker.testing import VirtualClockLoop, run_virtual
from stoker.trace import Fetch, Phase, Request, Span
from support.faulty_store import StoreProfile
from support.traced import BODY, TracedRun

UNHEDGED = FetchConfig(hedge=False, split_parts=1)


def main_phase(run: TracedRun) -> Phase:
    """The phase in which most of the run's waits were, which must add up to what the consumer measured itself."""
    assert sum(run.recorder.seconds.values()) == pytest.approx(run.wait_seconds)
    return max(run.recorder.seconds, key=lambda phase: run.recorder.seconds[phase])


def test_a_slow_first_byte() -> None:
    run = TracedRun(profile=StoreProfile(tail_sigma=0.0, first_byte_seconds=0.5), config=UNHEDGED).run()
    assert main_phase(run) is Phase.FIRST_BYTE


def test_a_slow_link() -> None:
    run = TracedRun(profile=StoreProfile(tail_sigma=0.0, bytes_per_second=len(BODY) / 0.5), config=UNHEDGED).run()
    assert main_phase(run) is Phase.TRANSFER


@pytest.mark.parametrize("fault", ["throttle_bare", "error", "reset", "truncate", "corrupt"])
def test_requests_that_fail(fault: str) -> None:
    run = TracedRun(config=UNHEDGED)
    run.store.script = lambda number, key: fault if number < 2 else None
    assert main_phase(run.run()) is Phase.RETRY
    assert run.recorder.worst_waits()[0].spans[0].object == run.refs[0].key


def test_a_pause_that_the_store_requests() -> None:
    run = TracedRun(config=UNHEDGED, profile=StoreProfile(tail_sigma=0.0, retry_after_seconds=3.0))
    run.store.script = lambda number, key: "throttle" if number == 0 else None
    assert main_phase(run.run()) is Phase.RETRY
    assert run.recorder.seconds[Phase.RETRY] == pytest.approx(3.02, abs=0.1)


def test_a_ring_that_is_too_small() -> None:
    """One slot beside those for hedges: the next item has none before the last one is given back."""
    slow = StoreProfile(tail_sigma=0.0, first_byte_seconds=0.3)
    assert main_phase(TracedRun(slots=3, profile=slow, config=UNHEDGED, compute_seconds=0.5).run()) is Phase.QUEUE


def test_a_ring_that_is_large_enough() -> None:
    slow = StoreProfile(tail_sigma=0.0, first_byte_seconds=0.3)
    run = TracedRun(slots=8, profile=slow, config=UNHEDGED, compute_seconds=0.5).run()
    assert main_phase(run) is Phase.FIRST_BYTE
    assert run.wait_seconds < 0.5


def test_a_small_ring_is_not_reported_if_the_link_is_slow() -> None:
    """The network is never idle, so that more room would bring nothing."""
    slow = StoreProfile(tail_sigma=0.0, total_bytes_per_second=len(BODY) / 0.5)
    run = TracedRun(slots=6, profile=slow, config=UNHEDGED, compute_seconds=0.01).run()
    assert main_phase(run) is Phase.TRANSFER


def test_a_schedule_that_looks_less_far_ahead_than_it_could() -> None:
    slow = StoreProfile(tail_sigma=0.0, first_byte_seconds=0.3)
    run = TracedRun(profile=slow, config=UNHEDGED, compute_seconds=0.2, schedule=FetchSize(2, 0)).run()
    assert main_phase(run) is Phase.QUEUE


def test_a_wait_for_a_permit_is_a_wait_in_line() -> None:
    config = FetchConfig(hedge=False, split_parts=1, start_concurrency=1, min_concurrency=1, max_concurrency=1)
    fetches: list[Fetch] = []
    profile = StoreProfile(tail_sigma=0.0, first_byte_seconds=0.5)
    TracedRun(profile=profile, config=config, sinks=[Kept(fetches)]).run()
    waited = [span for fetch in fetches for span in fetch.path() if span.phase is Phase.QUEUE]
    assert sum(span.seconds for span in waited) > 3.0


def test_a_late_request_that_is_hedged() -> None:
    run = TracedRun(profile=StoreProfile(tail_sigma=0.0), config=FetchConfig(split_parts=1))
    run.store.late = {4: 5.0}
    assert main_phase(run.run()) is Phase.HEDGE
    worst = run.recorder.worst_waits()[0]
    assert run.fetcher.stats.hedge_wins == 1
    assert next(iter(worst.by_cause())) == (Phase.HEDGE, run.refs[4].key)
    assert f"hedge of {run.refs[4].key}" in str(worst)


class SlowTier:
    name = "slow"

    def __init__(self, error: StoreError | None = None) -> None:
        self._error = error

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        await asyncio.sleep(1.0)
        if self._error is not None:
            raise self._error
        into[:] = BODY
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("error", [None, TransientError("lost")])
def test_a_nearer_place_that_is_slow(error: StoreError | None) -> None:
    assert main_phase(TracedRun(tiers=[SlowTier(error)], config=UNHEDGED).run()) is Phase.TIER


def test_a_checksum_that_takes_long() -> None:
    run = TracedRun(objects=1, config=UNHEDGED)

    def slow(data: memoryview) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop.jump(0.5)
        return run.refs[0].crc32c

    run.fetcher._checksum = slow
    assert main_phase(run.run()) is Phase.VERIFY


class Kept:
    """Keeps what it is told of."""

    def __init__(self, fetches: list[Fetch]) -> None:
        self.fetches = fetches

    def fetched(self, fetch: Fetch, offset_seconds: float) -> None:
        self.fetches.append(fetch)

    def waited(self, wait: object) -> None: ...


def fetch_of(*activities: tuple[str, list[tuple[Phase, float]], float], ready: float) -> Fetch:
    """A fetch of activities: object, phases with their begin, end."""
    fetch = Fetch(0, 0, 0.0, ready_seconds=ready)
    for key, marks, end in activities:
        activity = Activity(fetch, key, *marks[0])
        activity.phase_starts += marks[1:]
        activity.end_seconds = end
        fetch.add_activity(activity)
    return fetch


def test_of_parallel_parts_the_last_one_is_reported() -> None:
    fetch = fetch_of(
        ("a", [(Phase.FIRST_BYTE, 0.0), (Phase.TRANSFER, 0.2)], 1.0),
        ("b", [(Phase.FIRST_BYTE, 0.0), (Phase.TRANSFER, 2.5)], 3.0),
        ("b", [(Phase.VERIFY, 3.0)], 3.5),
        ready=3.5,
    )
    assert fetch.path() == [
        Span(Phase.FIRST_BYTE, 0.0, 2.5, "b"),
        Span(Phase.TRANSFER, 2.5, 3.0, "b"),
        Span(Phase.VERIFY, 3.0, 3.5, "b"),
    ]


def test_a_part_in_line_behind_another_waits_for_what_that_one_does() -> None:
    fetch = fetch_of(
        ("a", [(Phase.QUEUE, 0.0), (Phase.TRANSFER, 1.0)], 2.0),
        ("b", [(Phase.QUEUE, 0.0), (Phase.TRANSFER, 2.0)], 3.0),
        ready=3.0,
    )
    assert fetch.path() == [
        Span(Phase.QUEUE, 0.0, 1.0, "a"),
        Span(Phase.TRANSFER, 1.0, 2.0, "a"),
        Span(Phase.TRANSFER, 2.0, 3.0, "b"),
    ]


def test_time_between_two_activities_is_nobodys() -> None:
    fetch = fetch_of(("a", [(Phase.TRANSFER, 0.0)], 1.0), ("a", [(Phase.TRANSFER, 1.5)], 2.0), ready=2.5)
    assert [span.phase for span in fetch.path()] == [
        Phase.TRANSFER,
        Phase.OTHER,
        Phase.TRANSFER,
        Phase.OTHER,
    ]


def test_a_wait_that_begins_before_the_issue_and_ends_behind_the_arrival_is_explained_without_a_gap() -> None:
    fetch = fetch_of(("a", [(Phase.TRANSFER, 1.0)], 2.0), ready=2.0)
    fetch.issued_seconds = 1.0
    spans = explain_wait(fetch, 0.5, 2.25)
    assert spans == [
        Span(Phase.QUEUE, 0.5, 1.0, "a"),
        Span(Phase.TRANSFER, 1.0, 2.0, "a"),
        Span(Phase.OTHER, 2.0, 2.25, "a"),
    ]
    assert explain_wait(fetch, 1.25, 1.5) == [Span(Phase.TRANSFER, 1.25, 1.5, "a")]
    assert explain_wait(None, 1.0, 2.0) == [Span(Phase.OTHER, 1.0, 2.0)]


WHOLE, LOST = True, False
TWICE = ["first_byte", "transfer", "hedge", "transfer"]


@pytest.mark.parametrize(
    ("requests", "phases"),
    [
        ([Request(0.0, 1.0, 2.0, 1, WHOLE)], ["first_byte", "transfer"]),
        ([Request(0.0, None, 2.0, 1, WHOLE)], ["transfer"]),
        ([Request(0.0, 1.0, 2.0, 1, LOST)], ["retry"]),
        ([Request(0.0, None, 1.5, 1, LOST), Request(1.0, 1.5, 2.0, 1, WHOLE)], ["hedge", "transfer"]),
        ([Request(0.0, 1.5, 2.0, 1, WHOLE), Request(1.0, None, 1.5, 1, LOST)], ["hedge", "transfer"]),
        ([Request(0.0, None, 2.0, 1, LOST), Request(1.0, None, 2.0, 1, WHOLE)], ["hedge"]),
        ([Request(0.0, 0.5, 2.0, 1, LOST), Request(1.0, 1.5, 2.0, 1, WHOLE)], TWICE),
        ([Request(0.0, 0.5, 2.0, 1, WHOLE), Request(1.0, 1.5, 2.0, 1, LOST)], ["first_byte", "transfer"]),
    ],
)  # fmt: skip
def test_phases_of_an_attempt(requests: list[Request], phases: list[str]) -> None:
    fetch = Fetch(0, 0, 0.0)
    activity = Activity(fetch, "a", Phase.QUEUE, 0.0)
    activity.add_attempt(requests)
    activity.end_seconds = 2.0
    fetch.add_activity(activity)
    fetch.ready_seconds = 2.0
    assert [span.phase for span in fetch.path()] == phases
    assert sum(span.seconds for span in fetch.path()) == 2.0


@pytest.mark.parametrize("at_once", [1, 7])
def test_the_path_of_thousands_of_activities_takes_little_memory_and_leaves_out_no_time(at_once: int) -> None:
    """As many at a time as are given, in turn, each of two phases."""
    marks = [(float(number // at_once), f"{number}") for number in range(5000)]
    activities = [(key, [(Phase.FIRST_BYTE, at), (Phase.TRANSFER, at + 0.75)], at + 1.0) for at, key in marks]
    end = activities[-1][2]
    fetch = fetch_of(*activities, ready=end)
    assert len(fetch.activities) + len(fetch.earlier_spans) < 1000
    path = fetch.path()
    assert math.fsum(span.seconds for span in path) == end
    assert all(before.end_seconds == after.begin_seconds for before, after in pairwise(path))
    assert path[-1] == Span(Phase.TRANSFER, end - 0.25, end, "4999")
    assert {span.phase for span in path} == {Phase.FIRST_BYTE, Phase.TRANSFER}


def test_an_unreferenced_fetch_is_freed_without_garbage_collection() -> None:
    """Looking for them walks over all that the program has."""

    async def fetched() -> None:
        recorder = Recorder()
        for item in range(20):
            with recorder.track(item, 0) as fetch:
                with start_activity("a", Phase.QUEUE) as activity:
                    activity.add_attempt([Request(0.0, 1.0, 2.0, 1, WHOLE)])
                with start_activity("a", Phase.VERIFY):
                    pass
                fetch.slot = 0
            recorder.remove_fetch(item)

    gc.collect()
    gc.disable()
    try:
        run_virtual(fetched())
        assert sum(type(each) is Fetch for each in gc.get_objects()) <= 1
    finally:
        gc.enable()


def test_of_very_many_requests_the_last_are_kept() -> None:
    fetch = Fetch(0, 0, 0.0)
    activity = Activity(fetch, "a", Phase.QUEUE, 0.0)
    for number in range(10_000):
        activity.add_attempt([Request(number, None, number + 1.0, 1, WHOLE)])
    assert 2000 < len(fetch.requests) <= 4096
    assert fetch.requests[-1].sent_seconds == 9_999


def test_a_path_that_was_requested_is_reckoned_once() -> None:
    fetch = fetch_of(("a", [(Phase.TRANSFER, 0.0)], 1.0), ready=1.0)
    assert fetch.path() is fetch.path()
