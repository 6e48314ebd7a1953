"""A model of a bucket from a trace: it is the bucket that the trace was recorded of."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from stoker import FetchConfig
from stoker._trace.recording import Recording, TraceEvent
from stoker.errors import ConfigError
from stoker.trace import ChromeTrace, read_trace
from stoker_sim import recorded_bucket, recorded_latency
from stoker_sim._bucket import read_durations
from support.faulty_store import StoreProfile
from support.traced import BODY, TracedRun

ALONE = FetchConfig(hedge=False, split_parts=1, start_concurrency=1, min_concurrency=1, max_concurrency=1)
FOUR = FetchConfig(hedge=False, split_parts=1, start_concurrency=4, min_concurrency=4, max_concurrency=4)


def recorded(
    path: Path, profile: StoreProfile, config: FetchConfig | None = None, objects: int = 200
) -> list[TraceEvent]:
    with ChromeTrace(path / "trace.json", clock=lambda: 0.0) as trace:
        TracedRun(objects=objects, slots=12, profile=profile, config=config, sinks=[trace]).run()
    return list(read_trace(path / "trace.json"))


def test_first_bytes_are_the_stores(tmp_path: Path) -> None:
    recording = recorded(tmp_path, StoreProfile(first_byte_seconds=0.05, tail_sigma=0.3), ALONE)
    latency = recorded_latency(recording)
    assert len(latency.seconds) == 200
    assert median(latency.seconds) == pytest.approx(0.05, rel=0.1)
    assert max(latency.seconds) > 1.5 * median(latency.seconds)


def test_the_first_bytes_of_a_trace_are_the_same_for_all_readers(tmp_path: Path) -> None:
    latency = recorded_latency(recorded(tmp_path, StoreProfile(tail_sigma=0.3), ALONE))
    assert read_durations(tmp_path / "trace.json").seconds == pytest.approx(latency.seconds)


def test_a_connections_rate_is_the_stores(tmp_path: Path) -> None:
    bucket = recorded_bucket(recorded(tmp_path, StoreProfile(bytes_per_second=5e6), ALONE))
    assert bucket.connection_bytes_per_second == pytest.approx(5e6, rel=0.01)
    assert bucket.total_bytes_per_second == pytest.approx(5e6, rel=0.01)


def test_the_rate_of_all_is_the_stores_where_they_fill_the_link(tmp_path: Path) -> None:
    profile = StoreProfile(first_byte_seconds=0.001, bytes_per_second=5e6, total_bytes_per_second=8e6)
    bucket = recorded_bucket(recorded(tmp_path, profile, FOUR))
    assert bucket.total_bytes_per_second == pytest.approx(8e6, rel=0.1)


def test_one_that_was_overtaken_counts_as_long_as_it_was_waited_for(tmp_path: Path) -> None:
    recording = recorded(tmp_path, StoreProfile(late_fraction=0.05, late_seconds=2.0))
    given_up = [answer for answer in Recording.of(recording).responses if not answer.is_begun]
    assert given_up
    latency = recorded_latency(recording)
    assert len(latency.seconds) == len(Recording.of(recording).responses)
    assert {answer.first_byte_seconds for answer in given_up} <= set(latency.seconds)


def test_a_run_against_the_recorded_bucket_takes_as_long_as_the_one_it_was_recorded_of(tmp_path: Path) -> None:
    profile = StoreProfile(first_byte_seconds=0.03, tail_sigma=0.3, bytes_per_second=4e6)
    recording = recorded(tmp_path, profile, FOUR)
    run = TracedRun(objects=200, slots=12, bucket=recorded_bucket(recording), config=FOUR).run()
    assert run.wait_seconds == pytest.approx(sum(wait.seconds for wait in Recording.of(recording).waits), rel=0.1)


@pytest.mark.parametrize("find", [recorded_latency, recorded_bucket])
def test_a_trace_without_requests_is_refused(find: object) -> None:
    with pytest.raises(ConfigError, match="the trace has no"):
        find([])  # type: ignore[operator]


def test_bytes_of_a_trace_are_those_that_were_read(tmp_path: Path) -> None:
    recording = recorded(tmp_path, StoreProfile(), ALONE, objects=20)
    assert sum(answer.size_bytes for answer in Recording.of(recording).responses) == 20 * len(BODY)
