"""A trace on disk: what Perfetto asks of one, what is read back, and what a run that is killed or too long leaves."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from stoker._trace.picture import TraceSummary
from stoker._trace.recording import Recording
from stoker.errors import ConfigError
from stoker.trace import ChromeTrace, Phase, Span, Wait, read_trace
from support.faulty_store import StoreProfile
from support.traced import TracedRun

ROUGH = StoreProfile(late_fraction=0.1, probability={"throttle_bare": 0.1, "corrupt": 0.05}, total_bytes_per_second=2e6)


def traced(path: Path, objects: int = 40, **settings: Any) -> TracedRun:
    with ChromeTrace(path, clock=lambda: 0.0, **settings) as trace:
        run = TracedRun(objects=objects, profile=ROUGH, compute_seconds=0.05, sinks=[trace])
        return run.run()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, Path]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    return traced(path), path


def test_every_event_is_one_of_the_trace_event_format(run: tuple[TracedRun, Path]) -> None:
    """Of the fields that the format demands for each type: complete events, counters and metadata."""
    events = json.loads(run[1].read_text())
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float)
            assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] == "X"} == named


def test_events_of_a_row_lie_inside_each_other_or_apart(run: tuple[TracedRun, Path]) -> None:
    """Else a viewer cannot stack them."""
    rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in json.loads(run[1].read_text()):
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            rows[event["tid"]].append((begin, -(begin + round(event["dur"] * 1000))))
    for times in rows.values():
        inside: list[int] = []
        for begin, negative_end in sorted(times):
            end = -negative_end
            while inside and inside[-1] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1]
            inside.append(end)


def test_what_is_read_back_is_what_was_recorded(run: tuple[TracedRun, Path]) -> None:
    recorder, recording = run[0].recorder, Recording.of(read_trace(run[1]))
    assert len(recording.waits) == len(recording.fetches) == len(recording.held) == 40
    for phase, (seconds, _) in TraceSummary.of(read_trace(run[1])).phases.items():
        assert seconds == pytest.approx(recorder.seconds[phase], abs=1e-6)
    worst = max(recording.waits, key=lambda wait: wait.seconds)
    assert worst.batch == recorder.worst_waits()[0].batch
    assert {each.object for each in recording.fetches} == {ref.key for ref in run[0].refs}
    for fetch in recording.fetches:
        assert fetch.spans[0].begin_seconds == pytest.approx(fetch.begin_seconds, abs=1e-5)
        assert sum(span.seconds for span in fetch.spans) == pytest.approx(
            fetch.end_seconds - fetch.begin_seconds, abs=1e-5
        )


def test_every_request_is_on_record(run: tuple[TracedRun, Path]) -> None:
    answers, stats = Recording.of(read_trace(run[1])).responses, run[0].fetcher.stats
    assert len(answers) == stats.requests
    assert sum(answer.is_whole for answer in answers) == 40 + stats.checksum_failures
    assert not any(answer.is_whole and not answer.is_begun for answer in answers)


@pytest.mark.parametrize("cut", [3, 10, 200])
def test_a_file_that_ends_in_the_middle_is_read_as_far_as_it_goes(
    run: tuple[TracedRun, Path], tmp_path: Path, cut: int
) -> None:
    whole = run[1].read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[:-cut])
    recording = Recording.of(read_trace(tmp_path / "cut.json"))
    assert len(recording.waits) in (39, 40)


def test_a_killed_run_leaves_a_trace(tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from stoker.trace import ChromeTrace
from stoker.trace import Phase, Span
from stoker.trace import Wait
now = 0.0
trace = ChromeTrace({str(tmp_path / "trace.json")!r}, clock=lambda: now)
for batch in range(100):
    now = float(batch)
    trace.waited(Wait(batch=batch, epoch=0, spans=(Span(Phase.TRANSFER, now, now + 0.5, "data/1"),)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    text = (tmp_path / "trace.json").read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    json.loads(text + "]")  # all that is missing
    assert len(Recording.of(read_trace(tmp_path / "trace.json")).waits) >= 98  # but for the last second


def wait(batch: int) -> Wait:
    return Wait(batch=batch, epoch=0, spans=(Span(Phase.TRANSFER, batch, batch + 0.5, "data/1"),))


def test_a_trace_stays_within_its_limit_and_records_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.WARNING), ChromeTrace(path, limit="32kB") as trace:
        for batch in range(10_000):
            trace.waited(wait(batch))
    assert path.stat().st_size <= 32_000
    recording = Recording.of(read_trace(path))
    assert recording.is_full
    assert [each.batch for each in recording.waits] == list(range(len(recording.waits)))
    assert "is full" in caplog.text
    assert "full" in json.loads(path.read_text())[-1]["name"]


def test_events_after_a_close_continue_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = ChromeTrace(path)
    for batch in range(3):
        trace.waited(wait(batch))
        trace.close()
        trace.close()
        json.loads(path.read_text())
    assert [each.batch for each in Recording.of(read_trace(path)).waits] == [0, 1, 2]


def test_of_two_that_write_to_one_name_each_has_a_file_of_its_own_and_the_later_one_the_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    first, second = ChromeTrace(path), ChromeTrace(path)
    for batch in range(6):
        (first if batch % 2 else second).waited(wait(batch))
        first.flush()
        second.flush()
    first.close()
    first.waited(wait(7))
    first.close()  # goes on in what is no longer there
    assert "ends here: another file has replaced it" in caplog.text
    second.close()
    assert [each.batch for each in Recording.of(read_trace(path)).waits] == [0, 2, 4]


def test_a_file_that_is_gone_when_the_trace_continues_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = ChromeTrace(path)
    trace.close()
    path.unlink()
    trace.waited(wait(0))
    trace.close()
    assert "ends here: No such file or directory" in caplog.text


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "trace.json")
    for _ in range(2):
        ChromeTrace(tmp_path / "link").close()
    assert json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "link").is_symlink()


def test_an_unclosed_trace_is_ended(tmp_path: Path) -> None:
    program = f"""
from stoker.trace import ChromeTrace
trace = ChromeTrace({str(tmp_path / "trace.json")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert json.loads((tmp_path / "trace.json").read_text())[0]["name"] == "process_name"


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = ChromeTrace(path)
    trace.waited(wait(0))
    child = os.fork()
    if not child:
        trace.waited(wait(1))
        trace.flush()
        trace.close()
        os._exit(0)
    os.waitpid(child, 0)
    trace.waited(wait(2))
    trace.close()
    assert [each.batch for each in Recording.of(read_trace(path)).waits] == [0, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ChromeTrace("/dev/full") as trace:
        for batch in range(3):
            trace.waited(wait(batch))
            trace.flush()
    assert "ends here: No space left on device" in caplog.text


def test_an_unwritable_file_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to"):
        ChromeTrace(tmp_path / "none" / "trace.json")
    with pytest.raises(ConfigError, match="limit="):
        ChromeTrace(tmp_path / "trace.json", limit=10)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "7", '{"traceEvents": []}', "[1]", '["a"]', "[[]]", "[" * 100_000,
        '[{"ph":"X"}]',
        '[{"ph":"X","cat":"wait","ts":0,"dur":1,"args":{"batch":0,"phase":"transfer","object":""}}]',
        '[{"ph":"X","cat":"batch","ts":0,"dur":-1,"args":{"batch":0,"epoch":0}}]',
        '[{"ph":"X","cat":"batch","ts":NaN,"dur":1,"args":{"batch":0,"epoch":0}}]',
        '[{"ph":"X","cat":"batch","ts":1e999,"dur":1,"args":{"batch":0,"epoch":0}}]',
        '[{"ph":"X","cat":"batch","ts":"0","dur":1,"args":{"batch":0,"epoch":0}}]',
        '[{"ph":"X","cat":"batch","ts":0,"dur":1,"args":{"batch":[],"epoch":0}}]',
        '[\n{"ph":"M"},\n{"ph"\n{"ph":"M"},\n',
    ],
)  # fmt: skip
def test_what_is_not_a_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is not"):
        Recording.of(read_trace(path))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording.of(read_trace(tmp_path / "none.json"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        Recording.of(read_trace(tmp_path / "binary"))


def test_counters_say_how_many_items_are_ready(run: tuple[TracedRun, Path]) -> None:
    events = [event for event in json.loads(run[1].read_text()) if event["ph"] == "C"]
    assert len(events) == 80
    assert events[-1]["args"] == {"items": 0}
    assert Counter(event["name"] for event in events) == {"ready": 80}
