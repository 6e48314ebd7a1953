"""A loader writes a trace, which agrees with the loader's statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker._trace.picture import TraceSummary
from stoker._trace.recording import Recording
from stoker.errors import ConfigError
from stoker.trace import ChromeTrace, Wait, read_trace
from stoker_torch import Loader
from support.datasets import numbers, pack_numbers


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(500)


def test_a_trace_has_every_batch_and_the_waits_of_the_statistics(url: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Loader(url, batch_size=50, trace=path) as loader:
        for _ in range(2):
            numbers(loader)
        next(iter(loader))
        stats = loader.stats()
    recording = Recording.of(read_trace(path))
    assert len(recording.waits) == stats.batches == 21
    assert [wait.epoch for wait in recording.waits] == [0] * 10 + [1] * 10 + [2]
    for phase, (seconds, _) in TraceSummary.of(read_trace(path)).phases.items():
        assert seconds == pytest.approx(stats.waits[phase], abs=1e-4)
    assert {each.object for each in recording.fetches} == {
        loader.manifest.key(row) for row in range(len(loader.manifest))
    }


def test_times_of_the_training_thread_and_of_the_loop_are_on_one_clock(url: str, tmp_path: Path) -> None:
    """A fetch that was waited for ends within its wait."""
    path = tmp_path / "trace.json"
    with Loader(url, batch_size=500, epochs=1, trace=path) as loader:
        numbers(loader)
    recording = Recording.of(read_trace(path))
    (wait,) = recording.waits
    begin, end = wait.spans[0].begin_seconds, wait.spans[-1].end_seconds
    assert all(begin <= fetch.begin_seconds <= fetch.end_seconds <= end for fetch in recording.fetches)


def test_each_rank_has_a_file_of_its_own(url: str, tmp_path: Path) -> None:
    for rank in range(2):
        with Loader(url, batch_size=50, rank=rank, world_size=2, trace=tmp_path / "trace.json") as loader:
            numbers(loader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]


def test_a_loader_that_continues_after_its_end_continues_in_its_trace(url: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    loader = Loader(url, batch_size=50, trace=path)
    for _ in range(2):
        numbers(loader)
        loader.close()
        json.loads(path.read_text())
    assert len(Recording.of(read_trace(path)).waits) == 20


def test_a_user_s_sink_gets_events_and_stays_open(url: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    told: list[Wait] = []

    class Sink:
        def waited(self, wait: Wait) -> None:
            told.append(wait)

    with ChromeTrace(path) as trace, Loader(url, batch_size=50, trace=[trace, Sink()]) as loader:
        numbers(loader)
        loader.close()
        assert len(Recording.of(read_trace(path)).waits) == len(told) == 10
        assert not path.read_text().endswith("]\n")
    json.loads(path.read_text())


@pytest.mark.parametrize("trace", [7, [7], b"trace.json", object()])
def test_what_is_no_trace_is_refused(url: str, trace: Any) -> None:
    with pytest.raises(ConfigError, match="name of a file, or a sink"):
        Loader(url, batch_size=50, trace=trace)


def test_a_file_that_cannot_be_written_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to"):
        Loader(url, batch_size=50, trace=tmp_path / "none" / "trace.json")


def test_statistics_and_trace_carry_on_over_a_loaded_state(url: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Loader(url, batch_size=50, trace=path) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        numbers(loader)
        assert sum(loader.stats().waits.values()) == pytest.approx(loader.stats().wait_seconds)
    assert len(Recording.of(read_trace(path)).waits) == 10
