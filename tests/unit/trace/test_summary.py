"""What a trace comes to is what all of it says, in memory that does not grow with it."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker._trace.picture import TraceSection, TraceSummary, ring_fill
from stoker._trace.quantiles import Quantiles
from stoker._trace.recording import Recording, SlotFill, SlotHold, TraceEvent
from stoker.errors import ConfigError
from stoker.trace import ChromeTrace, Phase, Span, Wait, read_trace
from support.faulty_store import StoreProfile
from support.memory import ROUNDS, Memory
from support.traced import TracedRun


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profile = StoreProfile(late_fraction=0.1, probability={"throttle_bare": 0.1}, total_bytes_per_second=2e6)
    with ChromeTrace(path, clock=lambda: 0.0) as trace:
        TracedRun(objects=60, profile=profile, compute_seconds=0.05, sinks=[trace]).run()
    return path


def test_a_summary_covers_all_recorded_events(path: Path) -> None:
    whole, summary = Recording.of(read_trace(path)), TraceSummary.of(read_trace(path))
    assert summary.batches == len(whole.waits) == 60
    assert summary.fetches == len(whole.fetches)
    assert summary.waited_seconds == pytest.approx(sum(wait.seconds for wait in whole.waits))
    by_phase: defaultdict[Phase, float] = defaultdict(float)
    for span in (span for wait in whole.waits for span in wait.spans if span.seconds):
        by_phase[span.phase] += span.seconds
    assert {phase: seconds for phase, (seconds, _) in summary.phases.items()} == pytest.approx(by_phase)
    for phase, (_, batches) in summary.phases.items():
        assert batches == sum(any(span.phase is phase and span.seconds for span in wait.spans) for wait in whole.waits)
    by_length = sorted((wait for wait in whole.waits if wait.seconds), key=lambda wait: -wait.seconds)
    assert [wait for _, wait in summary.worst()] == by_length[:10]
    assert summary.begin_seconds == min(each.begin_seconds for each in whole.fetches)
    assert summary.end_seconds == max(each.end_seconds for each in whole.held)
    assert summary.requests == len(whole.responses)
    assert summary.lost == sum(not answer.is_whole for answer in whole.responses) > 0
    begun = [answer.first_byte_seconds for answer in whole.responses if answer.is_begun]
    assert summary.first_bytes.quantile(0.5) == pytest.approx(float(np.median(begun)), rel=0.05)


def test_of_waits_that_are_equally_long_the_first_are_the_worst() -> None:
    told = [TraceEvent(0, Wait(batch=number, epoch=0, spans=(Span(Phase.TRANSFER, 0.0, 1.0),))) for number in range(30)]
    assert [wait.batch for _, wait in TraceSummary.of(told, 3).worst()] == [0, 1, 2]


def test_a_batch_that_was_not_waited_for_is_none_of_the_worst() -> None:
    summary = TraceSummary.of([TraceEvent(0, Wait(batch=0, epoch=0, spans=(Span(Phase.GATHER, 1.0, 1.0),)))])
    assert summary.batches == 1
    assert summary.worst() == []
    assert (summary.seconds, summary.begin_seconds, summary.end_seconds) == (0.0, 1.0, 1.0)


def test_quantiles_are_right_within_half_a_percent() -> None:
    rng = random.Random(0)
    numbers = sorted(rng.lognormvariate(-3.0, 2.0) for _ in range(10_000))
    quantiles = Quantiles()
    for number in numbers:
        quantiles.add(number)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        exact = numbers[max(0, math.ceil(share * len(numbers)) - 1)]
        assert quantiles.quantile(share) == pytest.approx(exact, rel=0.00501)


@pytest.mark.parametrize("number", [0.0, -1.0, 5e-324, 1e308, math.inf])
def test_numbers_outside_the_histogram_are_counted(number: float) -> None:
    quantiles = Quantiles()
    quantiles.add(number)
    assert 0 < quantiles.quantile(0.5) < math.inf


def written(path: Path, batches: int) -> Path:
    """Return a trace with a number of batches, each with a fetch of one request."""
    with path.open("w") as file:
        file.write('[\n{"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"stoker"}}')
        for number in range(batches):
            at, key = number * 1000, json.dumps(f"data/{number}")
            event = f',\n{{"ph":"X","pid":1,"ts":{at},"dur":500,'
            args = f'"batch":{number},"phase":"transfer","object":{key}'
            spans = '[["first_byte",0,0.25],["transfer",0.25,0.25]]'
            file.write(f'{event}"tid":1,"name":"b","cat":"batch","args":{{"batch":{number},"epoch":0}}}}')
            file.write(f'{event}"tid":1,"name":"w","cat":"wait","args":{{{args}}}}}')
            file.write(f'{event}"tid":1003,"name":{key},"cat":"fetch","args":{{"spans":{spans}}}}}')
            for name in ("first_byte", "transfer"):
                args = '"bytes":100,"whole":true'
                file.write(f'{event}"tid":1000000,"name":"{name}","cat":"request","args":{{{args}}}}}')
    return path


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    written(tmp_path / "t.json", 5_000)
    memory = Memory()
    for _ in range(ROUNDS):
        with memory.round():
            summary = TraceSummary.of(read_trace(tmp_path / "t.json"))
            section = TraceSection.of(summary, 3.0, 0.1)
            part = section.select(read_trace(tmp_path / "t.json"))
    assert summary.batches == summary.requests == 5_000
    assert len(part.waits) == len(part.fetches) == 100
    assert (tmp_path / "t.json").stat().st_size > 3_000_000
    assert memory.peak_bytes < 1_000_000


def test_more_than_can_be_drawn_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    taken = 0

    def counted() -> Iterator[TraceEvent]:
        nonlocal taken
        for each in read_trace(written(tmp_path / "t.json", 12_000)):
            taken += 1
            yield each

    with pytest.raises(ConfigError, match="name fewer with --seconds"):
        TraceSection(0.0, 100.0).select(counted())
    assert taken < 32_000


def test_what_a_killed_run_did_not_release_is_held_until_its_slot_is_used_again_or_the_end() -> None:
    told = [
        TraceEvent(0, what)
        for what in (
            SlotFill(0, "a", 0.0, 1.0, ()),
            SlotHold(0, 1.0, 2.0),
            SlotFill(0, "b", 3.0, 4.0, ()),
            SlotFill(1, "c", 0.0, 2.0, ()),
            SlotFill(1, "d", 6.0, 7.0, ()),
        )
    ]
    recording = TraceSection(0.0, 8.0).select(told)
    assert sorted(recording.held) == [
        SlotHold(0, 1.0, 2.0),
        SlotHold(0, 4.0, 8.0),
        SlotHold(1, 2.0, 6.0),
        SlotHold(1, 7.0, 8.0),
    ]
    moments, filling, ready = ring_fill(recording)
    assert dict(zip(moments.tolist(), zip(filling.tolist(), ready.tolist(), strict=True), strict=True))[7.0] == (0, 2)


X = '{"ph":"X","pid":1,"tid":%s,"ts":%s,"dur":%s,"name":%s,"cat":%s,"args":%s}'
BATCH = X % (1, 0, 1, '"b"', '"batch"', '{"batch":0,"epoch":0}')
WAIT = X % (1, 0, 1, '"w"', '"wait"', '{"batch":0,"phase":"transfer","object":""}')


@pytest.mark.parametrize(
    "events",
    [
        ["1"], ['"a"'], ["[]"], ["null"], ['{"ph":"X"}'], ['{"ph":"M","pid":"1","name":"x"}'], [WAIT],
        [f'{{"ph":"M","pid":{number}}}' for number in range(1001)],
        [X % (row, 0, 1, '"first_byte"', '"request"', '{"bytes":1,"whole":true}') for row in range(10_001)],
        [X % (1, 0, 1, '"no_answer"', '"request"', f'{{"bytes":{size},"whole":1}}') for size in (1e3, -1, 9**30)],
        [X % (1, at, 1, '"held"', '"held"', "{}") for at in ("null", '"1"', "1e999", "-1e16", "true", "9" * 400)],
        [X % (1, 0, 1, '"a"', "[]", "{}")], [X % (1, 0, 1, '"a"', '"fetch"', '{"spans":[[1,2]]}')],
        [X % (1, 0, 1, "7", '"fetch"', '{"spans":[]}')], [X % (1, 0, 1, '"a"', '"fetch"', '{"spans":[["x",1,2]]}')],
        [X % ('"1"', 0, 1, '"a"', '"held"', "{}")], [X % (1, 0, -1, '"a"', '"held"', "{}")],
        [BATCH, WAIT.replace('"batch":0', '"batch":1')], ['{"ph":"M","pid":1,"name":"process_name","args":{"name":1}}'],
    ],
)  # fmt: skip
def test_events_that_are_none_of_ours_are_refused(tmp_path: Path, events: list[str]) -> None:
    path = tmp_path / "t.json"
    each_alone = events if len(events) < 10 else ["\n".join(events)]
    for text in each_alone if BATCH not in events else [f"{BATCH}\n{events[1]}"]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"t\.json is not a trace"):
            TraceSummary.of(read_trace(path))


def test_a_batch_with_no_end_of_spans_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("\n".join([BATCH, *[WAIT] * 100_001]))
    with pytest.raises(ConfigError, match="more than 100,000 spans of a batch"):
        TraceSummary.of(read_trace(tmp_path / "t.json"))


def test_what_others_put_beside_it_is_left_out(tmp_path: Path) -> None:
    other = ['{"ph":"B","pid":2}', X % (1, 0, 1, '"a"', '"theirs"', "{}"), '{"ph":"C","pid":1}']
    (tmp_path / "t.json").write_text("\n".join([*other, BATCH, other[0], WAIT]))
    assert TraceSummary.of(read_trace(tmp_path / "t.json")).batches == 1
