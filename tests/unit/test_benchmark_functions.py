"""What the benchmarks of functions make of what they measured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from benchmarks.document import markers, replace_between, table
from benchmarks.functions import __main__ as program
from benchmarks.functions import latency, packing, quiet, scaling
from benchmarks.functions.stage import Usage

from stoker import Prices

KIND = packing.Kind(name="3 KB", samples=1000, size_bytes=3000)


def packed(seconds: float = 2.0, billed_gb_seconds: float = 4.0, **requests: int) -> packing.Figure:
    usage = Usage(function_cpu_seconds=1.0, other_cpu_seconds=0.4, requests=Counter(requests))
    return packing.figure(KIND, usage, seconds, billed_gb_seconds)


def test_rates_are_of_the_invocation_and_of_what_is_billed() -> None:
    figure = packed(seconds=2.0, billed_gb_seconds=4.0)
    assert (figure.samples_per_second, figure.mb_per_second) == (500.0, 1.5)
    assert (figure.samples_per_gb_second, figure.mb_per_gb_second) == (250.0, 0.75)


def test_a_million_samples_cost_their_gb_seconds_invocations_and_requests() -> None:
    figure, prices = (
        packed(billed_gb_seconds=4.0, GetObject=1000, HeadObject=1, PutObject=3, ListObjectsV2=2),
        Prices.load(),
    )
    assert (figure.gets, figure.puts) == (1001, 5)
    assert figure.request_dollars(prices) == pytest.approx(1000 * (1001 * 0.0004 + 5 * 0.005) / 1000)
    exact = 1000 * (4.0 * 0.0000166667 + 0.0000002)
    assert figure.function_dollars(prices) == pytest.approx(exact, rel=1e-3)  # a duration is rounded up to 1 ms


def test_the_table_of_packing_has_medians() -> None:
    figures = [packed(seconds=seconds, GetObject=1000) for seconds in (1.0, 2.0, 8.0)]
    rows = packing.text({("3 KB", "pack"): figures}).splitlines()
    assert len(rows) == 3
    assert rows[2].startswith("| 3 KB, `pack` | 500 | 1.5 | 50%, 20% | 250 | 0.8 | 1,000 | 0 | 0.067 | 0.400 | 0.47 |")


def test_the_table_of_latencies_has_cold_and_warm_of_both_buckets() -> None:
    def calls(*seconds: float, init_seconds: float = 0.0, requests: int = 2) -> list[latency.Sample]:
        return [latency.Sample(init_seconds=init_seconds, seconds=each, requests=requests) for each in seconds]

    found = {
        ("pack", "none", "cold"): calls(0.3, 0.4, 0.5, init_seconds=0.15, requests=7),
        ("pack", "none", "warm"): calls(0.01, 0.02, 0.06),
        ("pack", "cloud", "cold"): calls(0.6, init_seconds=0.25),
        ("pack", "cloud", "warm"): calls(0.1),
    }
    row = latency.text(found, {"pack": "`pack`"}).splitlines()[2]
    assert row == "| `pack` | 150 | 400 | 20 | 600 | 100 | 7, 2 |"


def test_the_table_of_scaling_says_how_many_times_one_function_and_what_computed() -> None:
    def figure(rate: float, processors: float) -> scaling.Figure:
        return scaling.Figure(
            seconds=1.0, samples_per_second=rate, mb_per_second=rate / 100,
            function_processors=processors, other_processors=0.25,
        )  # fmt: skip

    found = {("3 KB", 1): [figure(100, 0.5)], ("3 KB", 2): [figure(150, 1.0), figure(150, 1.0), figure(999, 1.0)]}
    rows = scaling.text(found).splitlines()[2:]
    assert rows[0].startswith("| 3 KB | 1 | 100 | 1.0 | 1.00 | 0.50 | 0.25 |")
    assert rows[1].startswith("| 3 KB | 2 | 150 | 1.5 | 1.50 | 1.00 | 0.25 |")


def test_a_text_replaces_what_stood_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    document, (begin, end) = tmp_path / "page.md", markers("one")
    document.write_text(f"before\n{begin}\nstale\n{end}\n{markers('two')[0]}\nkept\n")
    for text in ("first", table(["what", "figure"], [["a", "1"]])):
        replace_between(document, "one", text)
        assert document.read_text() == f"before\n{begin}\n\n{text}\n\n{end}\n{markers('two')[0]}\nkept\n"
    with pytest.raises(ValueError, match="has no <!-- three:begin -->"):
        replace_between(document, "three", "nowhere to go")


def test_what_was_disturbed_is_measured_again_and_the_least_disturbed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = iter([0.0, 0.9, 0.0, 0.4, 0.0, 0.7, 0.0, 0.5])  # quiet before each, not during any

    def leave(watch: quiet.Watch, *exception: object) -> None:
        watch.foreign_processors = next(disturbed)

    monkeypatch.setattr(quiet.Watch, "__exit__", leave)
    monkeypatch.setattr(quiet, "_LOOK_SECONDS", 0.0)
    figures, patience = iter("abcd"), quiet.Patience()

    async def measure() -> str:
        return next(figures)

    assert asyncio.run(patience.measure(measure)) == "b"
    assert patience.foreign_processors == [0.4]


def test_a_machine_that_is_never_quiet_is_measured_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(watch: quiet.Watch, *exception: object) -> None:
        watch.foreign_processors = 1.5

    monkeypatch.setattr(quiet.Watch, "__exit__", leave)

    async def measure() -> str:
        return "figure"

    assert asyncio.run(quiet.Patience(seconds=0.6).measure(measure)) == "figure"


def test_what_this_process_computes_is_no_disturbance_by_others() -> None:
    def busy_seconds() -> float:
        machine = psutil.cpu_times()
        return float(sum(machine) - machine.idle - getattr(machine, "iowait", 0.0))

    before, started = busy_seconds(), time.perf_counter()
    with quiet.Watch() as watch:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
    foreign_seconds = watch.foreign_processors * (time.perf_counter() - started)
    assert busy_seconds() - before - foreign_seconds > 0.4


def test_an_instance_that_ends_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        seen = psutil.Process(process.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [seen])
    assert quiet.functions_cpu_seconds() == 0.0


def test_the_page_has_a_place_for_every_section() -> None:
    text = program.DOCUMENT.read_text()
    assert all(marker in text for section in program.SECTIONS for marker in markers(f"functions-{section}"))


@pytest.mark.parametrize("more", [[], ["--print"]])
def test_what_is_measured_is_written_down_unless_it_is_only_to_be_printed(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(markers("functions-scaling")))
    monkeypatch.setattr(program, "DOCUMENT", page)
    monkeypatch.setattr(program, "measure", lambda section, patience: f"{section}, {patience.seconds:.0f} s")
    program.main(["scaling", "--patience", "7", *more])
    assert "scaling, 7 s" in capsys.readouterr().out
    assert ("scaling, 7 s" in page.read_text()) == (not more)


@pytest.mark.parametrize("patience", ["-1", "nan", "inf", "long"])
def test_a_patience_that_is_no_time_is_refused(patience: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["packing", f"--patience={patience}"])
    assert "--patience" in capsys.readouterr().err


def test_the_help_says_what_each_section_costs_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} ({time})" in said for name, time in program.SECTIONS.items())


def test_a_section_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["packing", "speed"])
    assert "there is no section speed" in capsys.readouterr().err
