"""What `stoker trace` prints and draws of a run whose faults are known."""

from __future__ import annotations

import gzip
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs_version

from stoker._trace.picture import TraceSection, TraceSummary, html_figure, ring_fill
from stoker._trace.recording import Recording, SlotFill, SlotHold
from stoker.cli import main
from stoker.errors import ConfigError
from stoker.trace import ChromeTrace, Phase, Span, Wait, read_trace
from support.traced import TracedRun


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the request for object 20 is late, and slots are few."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with ChromeTrace(path, clock=lambda: 0.0) as sink:
        run = TracedRun(objects=40, slots=6, compute_seconds=0.001, sinks=[sink])
        run.store.late = {20: 5.0}
        run.run()
    return path


def test_view_prints_the_worst_waits_with_object_and_phase(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "40 batches in" in out
    worst = out[out.index("worst waits") :].splitlines()
    assert worst[1].split() == ["at", "batch", "waited", "most", "of", "it", "object"]
    assert worst[2].split()[2:] == ["0/20", *worst[2].split()[3:5], "hedge", *worst[2].split()[6:7], "data/20"]
    assert len(worst) <= 2 + 10 + 1
    assert "41 requests; first byte after" in out
    assert "1 failed or were overtaken by a hedge" in out


def test_view_prints_the_requested_number(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", str(trace), "--worst", "1"]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if "data/" in line]) == 1


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_view_refuses_no_worst_waits(trace: Path, count: str) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "view", str(trace), "--worst", count])


def test_view_tells_of_a_trace_that_reached_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChromeTrace(tmp_path / "t.json", limit="20kB", clock=lambda: 0.0) as sink:
        TracedRun(objects=200, sinks=[sink]).run()
    assert main(["trace", "view", str(tmp_path / "t.json")]) == 0
    assert "reached its limit" in capsys.readouterr().out


def test_an_empty_trace_is_viewed_and_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ChromeTrace(tmp_path / "t.json").close()
    assert main(["trace", "view", str(tmp_path / "t.json")]) == 0
    assert "0 batches in 0.000 s" in capsys.readouterr().out
    assert main(["trace", "picture", str(tmp_path / "t.json"), "--out", str(tmp_path / "t.png")]) == 2
    assert "the trace has no waits or fetches to draw" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t.png", "t.html"])
def test_a_picture_is_drawn(trace: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "picture", str(trace), "--out", str(tmp_path / name)]) == 0
    data = (tmp_path / name).read_bytes()
    if name == "t.png":
        assert data.startswith(b"\x89PNG")
    else:
        assert b"hedge" in data
        assert b'src="http' not in data
    assert str(tmp_path / name) in capsys.readouterr().out


def test_a_page_is_small_and_its_script_has_the_version_that_makes_its_figures(trace: Path, tmp_path: Path) -> None:
    assert main(["trace", "picture", str(trace), "--out", str(tmp_path / "t.html")]) == 0
    text = (tmp_path / "t.html").read_text()
    assert len(text) < 2_000_000
    bundled = re.search(r"plotly\.js \(basic - minified\) v(\d+)\.", text)
    assert bundled is not None
    assert bundled[1] == get_plotlyjs_version().partition(".")[0]


def test_a_page_has_the_layout_of_the_picture() -> None:
    """Short waits keep their width, since their colour is not opaque; slots stand from the first, at the top, down."""
    span = Span(Phase.TRANSFER, 0.0, 1.0, "data/0")
    waits = [Wait(batch=0, epoch=0, spans=(span,))]
    fetches = [SlotFill(slot, "data/0", 0.0, 1.0, (span,)) for slot in (7, 2, 11)]
    recording = Recording(waits=waits, fetches=fetches, held=[SlotHold(7, 1.0, 2.0)])
    figure = html_figure(recording, TraceSection(0.0, 2.0), "title")
    assert [each.text for each in figure.layout.annotations[:3]] == [
        "training loop: what it waits for",
        "fill of the ring",
        "fetches: how a slot is filled, and how long it is held",
    ]
    slots = figure.layout.yaxis3
    assert list(slots.ticktext) == ["2", "7", "11"]
    assert slots.range[0] > slots.range[1]
    in_legend = [each.name for each in figure.data if each.showlegend]
    assert sorted(in_legend) == ["filling", "ready, or in use", "training", "transfer"]
    bars = [each for each in figure.data if each.type == "bar"]
    assert bars
    assert all(each.marker.color.endswith("0.999)") for each in bars)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out", "t.gif"], "a .png or an .html"),
        (["--out", "none/t.png"], "cannot be written to"),
        (["--out", "t.png", "--begin", "1e9"], "the trace is from second"),
        (["--out", "t.png", "--seconds", "0"], "the trace is from second"),
        (["--out", "t.png", "--seconds", "nan"], "the trace is from second"),
        (["--out", "t.png", "--begin", "nan"], "the trace is from second"),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_is_refused(
    trace: Path,
    args: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "picture", str(trace), *args]) == 2
    assert said in capsys.readouterr().err


def test_without_what_draws_the_extra_is_named(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["trace", "picture", str(trace), "--out", str(tmp_path / "t.png")]) == 1
    assert "stoker[plan]" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("{}")
    assert main(["trace", "view", str(tmp_path / "x")]) == 2
    assert main(["trace", "view", str(tmp_path / "none")]) == 2
    assert "is not a trace" in capsys.readouterr().err


def test_a_trace_that_comes_through_a_pipe_is_viewed_and_not_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(trace.read_bytes()))
    writer.start()
    assert main(["trace", "view", str(tmp_path / "pipe")]) == 0
    writer.join()
    assert "40 batches" in capsys.readouterr().out
    assert main(["trace", "picture", str(tmp_path / "pipe"), "--out", str(tmp_path / "t.png")]) == 2
    assert "is not a file" in capsys.readouterr().err


def test_a_compressed_trace_is_viewed_and_drawn(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    assert main(["trace", "view", str(tmp_path / "t.json.gz")]) == 0
    assert main(["trace", "picture", str(tmp_path / "t.json.gz"), "--out", str(tmp_path / "t.png")]) == 0


def test_names_in_a_trace_do_not_reach_the_terminal_or_the_page_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "\x1b[31m</script><b>$x$%{y}"
    with ChromeTrace(tmp_path / "$t$.json", clock=lambda: 0.0) as sink:
        sink.waited(Wait(batch=0, epoch=0, spans=(Span(Phase.TRANSFER, 0.0, 1.0, key),)))
    for name in ("t.png", "t.html"):
        assert main(["trace", "picture", str(tmp_path / "$t$.json"), "--out", str(tmp_path / name)]) == 0
    assert "</script><b>" not in (tmp_path / "t.html").read_text()
    assert main(["trace", "view", str(tmp_path / "$t$.json")]) == 0
    assert "\x1b" not in capsys.readouterr().out


SCENARIO = """
nodes = 18
epochs = 2
[dataset]
super_samples = 36
samples = 40
super_sample_bytes = "1MB"
[bucket]
connection_bytes_per_second = "20MB"
[node]
batch_size = 40
memory_bytes = "24MB"
compute = { seconds = 0.001 }
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "s.toml").write_text(SCENARIO)
    args = [str(folder / "s.toml"), "--out", str(folder), "--no-html", "--trace", str(folder / "t.json")]
    assert main(["simulate", *args]) == 0
    return folder / "t.json"


def test_a_simulated_run_is_viewed_rank_by_rank(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", str(simulated)]) == 0
    out = capsys.readouterr().out
    assert "64 batches on 16 ranks in" in out
    worst = out[out.index("worst waits") :].splitlines()
    assert worst[1].split()[-1] == "rank"
    assert worst[2].split()[-2] == "rank"


def test_a_simulated_run_is_the_same_trace_each_time(simulated: Path) -> None:
    folder = simulated.parent
    assert main(["simulate", str(folder / "s.toml"), "--json", "--trace", str(folder / "again.json")]) == 0
    assert (folder / "again.json").read_bytes() == simulated.read_bytes()


def test_a_rank_of_a_simulated_run_is_drawn(
    simulated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in ([], ["--rank", "15"]):
        assert main(["trace", "picture", str(simulated), "--out", str(tmp_path / "t.png"), *args]) == 0
    assert main(["trace", "picture", str(simulated), "--out", str(tmp_path / "t.png"), "--rank", "16"]) == 2
    assert "no rank 16; it has rank 0, rank 1" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["scale"], ["all"], ["a.toml", "b.toml"]])
def test_the_trace_of_more_than_a_scenario_is_refused(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *names, "--trace", str(tmp_path / "t.json")]) == 2
    assert "--trace needs a single SCENARIO.toml" in capsys.readouterr().err


def test_the_fill_of_the_ring_is_what_the_ring_had(trace: Path) -> None:
    moments, filling, ready = ring_fill(Recording.of(read_trace(trace)))
    assert (np.diff(moments) >= 0).all()
    assert (filling >= 0).all()
    assert (ready >= 0).all()
    assert (filling + ready).max() <= 6
    assert filling[-1] == ready[-1] == 0


def test_a_long_trace_is_shown_around_its_worst_wait(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with ChromeTrace(path, clock=lambda: 0.0) as sink:
        run = TracedRun(objects=2000, compute_seconds=0.01, sinks=[sink])
        run.store.late = {1500: 5.0}
        run.run()
    summary = TraceSummary.of(read_trace(path))
    (_, worst), *_ = summary.worst()
    section = TraceSection.of(summary, None, None)
    assert section.begin_seconds < worst.spans[0].begin_seconds < section.end_seconds
    assert 300 < len(section.select(read_trace(path)).fetches) < 800
    assert TraceSection.of(summary, 1.0, 2.0) == TraceSection(1.0, 3.0)


def test_a_section_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no waits or fetches to draw"):
        TraceSection.of(TraceSummary(), None, None)
