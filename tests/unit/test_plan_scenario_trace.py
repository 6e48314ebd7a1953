"""The trace of a simulated run says what its result says."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker import OrderConfig
from stoker._diagnostics.latency import Constant, LateTail
from stoker._fetch.config import PipelineConfig
from stoker._trace.chrome import MAX_RANKS, rank_traces
from stoker._trace.recording import Recording, TraceEvent
from stoker.trace import read_trace
from stoker_sim import BucketModel
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._scenario import Scenario, simulate

NODES = 3


def scenario(nodes: int = NODES) -> Scenario:
    return Scenario(
        manifest=synthetic_manifest(super_samples=24 * nodes, samples=40, super_sample_bytes=1_000_000),
        feed=PipelineConfig(
            order=OrderConfig(lanes=nodes), batch_size=40, world_size=nodes, memory_bytes=30_000_000, end_epoch=2
        ),
        bucket=BucketModel(first_byte=LateTail(Constant(0.05), 0.1, 2.0), connection_bytes_per_second=5e6),
        compute=Constant(0.02),
        epochs=2,
    )


@pytest.fixture(scope="module")
def trace_events(tmp_path_factory: pytest.TempPathFactory) -> list[TraceEvent]:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    with rank_traces(path) as sinks_of:
        simulate(scenario(), sinks_of)
    return list(read_trace(path))


def test_each_rank_is_a_process_whose_waits_are_those_of_the_result(trace_events: list[TraceEvent]) -> None:
    run = simulate(scenario())
    for rank in range(NODES):
        mine = Recording.of(each for each in trace_events if each.process == rank + 1)
        results = [each for each in run.epochs if each.rank == rank]
        assert len(mine.waits) == sum(each.steps for each in results)
        for result in results:
            waits = [wait.seconds for wait in mine.waits if wait.epoch == result.epoch]
            assert sum(waits) == pytest.approx(result.wait_seconds, abs=1e-5)
    assert run.wait_seconds > 0.1


def test_its_requests_are_those_of_the_result(trace_events: list[TraceEvent]) -> None:
    recording, run = Recording.of(trace_events), simulate(scenario())
    assert len(recording.responses) == run.requests
    assert sum(answer.is_whole for answer in recording.responses) == len(recording.fetches)


def test_a_run_that_is_traced_is_the_run_that_is_not(tmp_path: Path) -> None:
    with rank_traces(tmp_path / "t.json") as sinks_of:
        assert simulate(scenario(), sinks_of) == simulate(scenario())


def test_no_more_than_the_first_ranks_are_traced(tmp_path: Path) -> None:
    with rank_traces(tmp_path / "t.json") as sinks_of:
        assert [bool(sinks_of(rank)) for rank in range(MAX_RANKS + 2)] == [True] * MAX_RANKS + [False] * 2


def test_a_large_one_ends_at_its_limit(tmp_path: Path) -> None:
    with rank_traces(tmp_path / "t.json", limit="50kB") as sinks_of:
        simulate(scenario(), sinks_of)
    assert (tmp_path / "t.json").stat().st_size <= 50_000
    assert Recording.of(read_trace(tmp_path / "t.json")).is_full
