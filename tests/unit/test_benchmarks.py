from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from benchmarks import __main__ as program
from benchmarks import compare, plots, report, targets
from benchmarks.cells import LIMITS, LOADERS, Cell, Selection
from benchmarks.child import Outcome, _Tree, run_child
from benchmarks.compare import Comparison
from benchmarks.limits import pull_with_sockets
from benchmarks.ratios import ratios
from benchmarks.results import Mixing, Record, Results

from stoker_local import BucketConfig, BucketSpec, running_bucket

SAMPLES, PAYLOAD_BYTES = 1000, 3_080_000


def epoch(seconds: float, samples: int = SAMPLES, wait_seconds: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "samples": samples, "batches": 4, "wait_seconds": wait_seconds}


def record(loader: str, kind: str, *seconds: float, round: int = 0, profile: str = "none", **fields: Any) -> Record:  # noqa: A002
    """Return a record of an images cell with the given durations of its epochs."""
    cell = Cell(workload="images", mode="raw", profile=profile, loader=loader, kind=kind, samples=SAMPLES, round=round)
    result = {"first_batch_seconds": 0.5, "first_wait": 0.4, "epochs": [epoch(each) for each in seconds]}
    result |= {"budget_bytes": 0, "super_samples": 1} if loader == "ours" else {}
    result |= fields.pop("result", {})
    fields = {"counts": counts(gets=1, bytes_out=PAYLOAD_BYTES), **fields}
    return Record(cell=cell, result=result, payload_bytes=PAYLOAD_BYTES, **fields)


def counts(gets: int, bytes_out: int) -> dict[str, Any]:
    return {"requests": {"GetObject": gets, "ListObjectsV2": 9}, "bytes_out": bytes_out}


def mixed(distance: float) -> Mixing:
    return Mixing(missing=0, duplicated=0, rank_correlation=0.0, neighbours=1.0, distance=distance)


def verdicts(results: Results) -> dict[str, str]:
    """Return the last column of the table of targets, by its first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in targets.table(results).splitlines()[2:]]
    return {row[0]: row[-1] for row in rows}


def test_a_cold_epoch_counts_from_the_construction_of_the_loader() -> None:
    assert record("ours", "cold", 0.9).rate == pytest.approx(SAMPLES / (0.9 + 0.1))


def test_a_steady_rate_leaves_out_the_first_epoch_and_those_that_came_out_of_memory() -> None:
    budget = {"budget_bytes": 2 * PAYLOAD_BYTES}
    assert record("ours", "steady", 9.0, 2.0, 4.0, 0.1, 0.1, result=budget).rate == pytest.approx(2000 / 6.0)
    assert record("streaming", "steady", 9.0, 2.0, 4.0).rate == pytest.approx(2000 / 6.0)
    everything = {"budget_bytes": 99 * PAYLOAD_BYTES}
    assert record("ours", "steady", 9.0, 2.0, 0.1, result=everything).rate == pytest.approx(1000 / 2.0)


@pytest.mark.parametrize(
    ("sent", "disk_bytes", "epochs_of_samples"),
    [
        ([1.5, 2.5, 3.5], 0, 2.0),  # as much read ahead after the epochs as before them
        ([1.5, 2.2, 3.0], 0, 1.5),  # half an epoch was in memory before
        ([1.0, 2.5, 4.0], 0, 2.0),  # what is read for later epochs does not count either
        ([1.0, 1.0, 1.0], 9, 2.0),  # from the disk
        ([], 0, 2.0),  # of a bucket that does not count
    ],
)
def test_a_steady_rate_does_not_count_samples_that_were_read_before(
    sent: list[float], disk_bytes: int, epochs_of_samples: float
) -> None:
    result = {"bytes_sent": [each * PAYLOAD_BYTES for each in sent]}
    fields: dict[str, Any] = {"result": result, "stored_bytes": PAYLOAD_BYTES, "disk_bytes": disk_bytes}
    unshaped, found = (
        record("spdl", "steady", 9.0, 2.0, 2.0, profile=profile, **fields) for profile in ("none", "cloud")
    )
    assert unshaped.rate == pytest.approx(2.0 * SAMPLES / 4.0)  # there is no rate that it could not exceed
    assert found.rate == pytest.approx(epochs_of_samples * SAMPLES / 4.0)


def test_the_second_epoch_has_a_rate_of_its_own() -> None:
    assert record("ours", "steady", 9.0, 2.0, 1.0).second_epoch_rate == pytest.approx(SAMPLES / 2.0)
    result = {"bytes_sent": [PAYLOAD_BYTES * 1.25, PAYLOAD_BYTES * 2.0]}
    for profile, share in (("none", 1.0), ("cloud", 0.75)):
        found = record("ours", "steady", 9.0, 2.0, profile=profile, result=result, stored_bytes=PAYLOAD_BYTES)
        assert found.second_epoch_rate == pytest.approx(share * SAMPLES / 2.0)


def test_a_limit_counts_while_all_its_connections_are_in_use() -> None:
    epochs = [epoch(9.0), epoch(2.0, samples=4 * SAMPLES), epoch(9.0)]
    assert record("sockets", "limit", result={"epochs": epochs}).rate == pytest.approx(2 * SAMPLES)
    assert record("gather", "limit", 2.0).rate == pytest.approx(SAMPLES / 2.0)


def test_the_quality_of_a_shuffle_is_its_worst_measure() -> None:
    measures = {"missing": 0, "duplicated": 0}
    assert Mixing(rank_correlation=0.3, neighbours=1.0, distance=0.8, **measures).quality == pytest.approx(0.7)
    assert Mixing(rank_correlation=0.3, neighbours=4.0, distance=0.8, **measures).quality == pytest.approx(0.25)
    assert Mixing(rank_correlation=0.0, neighbours=0.9, distance=1.02, **measures).quality == 1.0


def test_stall_is_the_waiting_behind_the_first_batch() -> None:
    waiting = record("ours", "stall", result={"epochs": [epoch(10.4, wait_seconds=0.9)]})
    assert waiting.stall == pytest.approx(0.5 / 10.0)


def test_processor_time_is_by_sample_of_all_epochs_and_by_payload() -> None:
    found = record("ours", "steady", 1.0, 1.0, cpu_seconds=0.01)
    assert found.cpu_us_per_sample == pytest.approx(5.0)
    assert found.cpu_seconds_per_gb == pytest.approx(0.01 / (2 * PAYLOAD_BYTES) * 1e9)


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was ten times slower in the second round; the loader was at half the limit in each.
    results = Results(
        found
        for number, drift in enumerate((1.0, 10.0, 1.0))
        for found in (
            record("ours", "steady", 1.0, 2.0 * drift, round=number),
            record("aiohttp", "limit", 1.0 * drift, round=number),
        )
    )
    assert targets.of_limit(results, "aiohttp", "images", "none") == pytest.approx(0.5)
    assert results.median(lambda each: each.rate, loader="aiohttp") == pytest.approx(1000.0)


def test_a_cell_measured_in_the_first_round_only_is_compared_with_every_round() -> None:
    results = Results(
        [
            record("perobject", "cold", 9.9),
            *(record("ours", "cold", seconds, round=number) for number, seconds in enumerate((0.9, 4.9, 1.9))),
        ]
    )
    found = results.ratio(
        lambda each: each.rate, {"loader": "ours", "kind": "cold"}, {"loader": "perobject", "kind": "cold"}
    )
    assert found == pytest.approx(10.0 / 2.0)


def test_only_peers_that_really_shuffle_are_marks() -> None:
    results = Results(
        [
            record("ours", "cold", 0.9),
            record("ours", "steady", 0.9, 0.1),
            record("streaming", "steady", 9.9, 0.4),
            record("webdataset", "cold", 0.9, mixing=mixed(0.2)),
            record("streaming", "cold", 9.9, mixing=mixed(1.0)),
            record("perobject", "cold", 99.9, mixing=mixed(1.0)),
        ]
    )
    assert results.shuffling_peers("images") == ["streaming", "perobject"]
    cold = targets.over_peers(results, lambda each: each.rate, "images", "cold")
    assert cold == pytest.approx(1_000 / 100)  # the faster of the two
    second = targets.over_peers(results, lambda each: each.second_epoch_rate, "images", "steady")
    assert second == pytest.approx(10_000 / 2_500)


def test_what_an_epoch_adds_leaves_out_the_start_and_the_hedges() -> None:
    steady = record(
        "ours",
        "steady",
        *[0.5] * 31,
        counts=counts(gets=9 + 30 * 19 + 5, bytes_out=PAYLOAD_BYTES * 31 + 100),
        cpu_seconds=0.5 + 30 * 0.002,
        result={"hedges": 5, "super_samples": 19},
    )
    cold = record("ours", "cold", 0.5, counts=counts(gets=9, bytes_out=PAYLOAD_BYTES + 100), cpu_seconds=0.5)
    results = Results([steady, cold])
    assert targets.gets_per_super_sample(results, "images", "none") == pytest.approx(1.0)
    assert targets.amplification(results, "images", "none") == pytest.approx(1.0)
    assert targets.cpu_us(results, "images", "none") == pytest.approx(2.0)


def test_processor_time_of_workers_is_compared_in_steady_state() -> None:
    ours = [record("ours", "cold", 0.5, cpu_seconds=0.5), record("ours", "steady", *[0.5] * 3, cpu_seconds=0.504)]
    stream = [
        record("ours_stream", "cold", 0.5, cpu_seconds=3.0),
        record("ours_stream", "steady", *[0.5] * 4, cpu_seconds=3.0 + 3 * 0.005),
    ]
    assert targets.stream_cpu(Results([*ours, *stream]), "images") == pytest.approx(2.5)
    payload_gb = PAYLOAD_BYTES / 1e9
    for_jpegs = Results(replace(each, cell=replace(each.cell, workload="jpegs")) for each in ours)
    assert targets.cpu_seconds_per_gb(for_jpegs, "jpegs", "none") == pytest.approx(0.002 / payload_gb)


def test_the_starts_of_all_rounds_are_one_distribution() -> None:
    slow = [0.1] * 99 + [9.0]
    runs = [
        record("ours", "starts", round=number, profile="cloud-late", result={"starts": starts})
        for number, starts in enumerate(([0.1] * 100, slow))
    ]
    assert targets.started_within(Results(runs), "images") == pytest.approx(0.1)
    assert targets.started_within(Results([*runs[1:], replace(runs[0], result={"starts": slow})]), "images") == 0.1
    assert targets.started_within(Results([replace(runs[0], result={"starts": [0.1, 9.0]})]), "images") == 9.0
    assert "| images | 200 | 0.100 | 0.100 | 0.100 | 9.000 |" in report.starts_table(Results(runs))
    lost = next(each for each in targets.targets() if each.what == "samples lost or delivered twice")
    assert lost.measure(Results(runs)) is None  # a start delivers no epoch


def test_second_epochs_and_the_shuffle_stand_in_each_row() -> None:
    results = Results(
        [
            record("ours", "cold", 0.9, mixing=mixed(0.4)),
            record("ours", "steady", 0.9, 0.5, 0.25),
            record("spdl", "cold", 1.9, mixing=mixed(0.3)),
            record("spdl", "steady", 1.9, 1.0, 1.0),
        ]
    )
    rows = [
        [cell.strip() for cell in row.split("|")][1:-1]
        for row in report.speed_table(results, "images", "raw", "none").splitlines()
    ]
    assert [[row[0], *row[1:4], row[-1]] for row in rows[2:]] == [
        ["stoker", "1,000", "2,000", "2,667", "0.40"],
        ["SPDL, a pipeline", "500", "1,000", "1,000", "0.30"],
    ]
    assert targets.over(results, lambda each: each.second_epoch_rate, "spdl", "images", "none", "steady") == 2.0


def test_a_target_is_met_missed_or_not_measured() -> None:
    fast, slow = (
        Results([record("ours", "steady", 1.0, seconds), record("aiohttp", "limit", 1.0)]) for seconds in (0.9, 1.0)
    )
    what = "images: steady rate, of plain aiohttp's"
    assert verdicts(fast)[what] == "met"
    assert verdicts(slow)[what] == "**missed**"
    assert set(verdicts(Results()).values()) == {"not measured"}


def test_few_requests_say_nothing_about_the_tail() -> None:
    for gets, expected in ((499, None), (500, 0.5)):
        found = (
            record("ours", "steady", 1.0, seconds, profile=profile, counts=counts(gets, 0))
            for profile, seconds in (("cloud", 1.0), ("cloud-tail", 2.0))
        )
        results = Results(replace(each, cell=replace(each.cell, workload="jpegs")) for each in found)
        assert targets.tail_ratio(results) == expected


def test_lost_and_repeated_samples_are_found() -> None:
    found = Mixing.of(np.array([3, 0, 0, 1, 5]), samples=6, batch=2)
    assert (found.missing, found.duplicated) == (2, 1)


def test_mixing_tells_a_permutation_from_packed_order() -> None:
    shuffled = Mixing.of(np.random.default_rng(0).permutation(20_000), samples=20_000, batch=256)
    assert shuffled.distance == pytest.approx(1.0, abs=0.02)
    assert shuffled.neighbours == pytest.approx(1.0, abs=0.1)
    assert shuffled.rank_correlation < 0.03
    packed = Mixing.of(np.arange(20_000), samples=20_000, batch=256)
    assert packed.rank_correlation == pytest.approx(1.0)
    assert packed.distance < 0.001


def test_results_survive_a_file_that_was_cut_short(tmp_path: Path) -> None:
    records = [record("ours", "cold", 1.0, mixing=mixed(0.5)), record("aiohttp", "limit", 1.0)]
    lines = [json.dumps({"machine": {}}), *(json.dumps(asdict(each)) for each in records)]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(lines) + '\n{"cell": {"workl')
    results = Results.load(path)
    assert list(results) == records
    assert results.settings == {"machine": {}}


def test_an_interrupted_comparison_continues_where_it_was_if_it_is_the_same(tmp_path: Path) -> None:
    path, selection = tmp_path / "results.jsonl", Selection(workloads=("images",), profiles=("none",), rounds=2)
    cells = list(selection.cells())

    def left(selection: Selection, *, afresh: bool = False) -> list[Cell]:
        return Comparison(selection, 9.0, path, afresh=afresh).left

    Comparison(selection, 9.0, path, afresh=False).begin_file()
    with path.with_suffix(".unfinished").open("a") as file:
        file.write(json.dumps(asdict(Record(cell=cells[0]))) + "\n")
        file.write(json.dumps(asdict(Record(cell=cells[1])))[:-9])  # cut short
    assert left(selection) == cells[1:]
    Comparison(selection, 9.0, path, afresh=False).begin_file()
    assert left(selection) == cells[1:]
    assert left(selection, afresh=True) == cells
    other = replace(selection, scale=0.5)
    assert left(other) == list(other.cells())


def test_a_round_measures_every_loader_and_limit_before_the_next() -> None:
    cells = list(Selection(rounds=2, workloads=("images",), profiles=("none",)).cells())
    assert len(set(cells)) == len(cells)
    assert [cell.round for cell in cells] == sorted(cell.round for cell in cells)
    second = {cell.loader for cell in cells if cell.round == 1}
    assert second == {*LOADERS, *LIMITS} - {"perobject", "spdl_torch", "decode"}


def test_one_question_is_a_selection_of_loaders_networks_and_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Selection] = []
    path = tmp_path / "results.jsonl"

    def run(comparison: Comparison) -> None:
        asked.append(comparison._selection)
        path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in (record("ours", "cold", 0.9),)))

    monkeypatch.setattr(Comparison, "run", run)
    named = ["--only", "stoker,spdl", "--only", "aiohttp", "--shape", "none", "--kind", "cold,limit", "--rounds", "3"]
    compare.main([*named, "--workload", "images", "--output", str(path)])
    loaders = ("ours", "spdl", "aiohttp")
    wanted = Selection(workloads=("images",), profiles=("none",), loaders=loaders, kinds=("cold", "limit"), rounds=3)
    assert asked == [wanted]
    assert {(cell.loader, cell.kind) for cell in wanted.cells()} == {
        ("ours", "cold"),
        ("spdl", "cold"),
        ("aiohttp", "limit"),
    }
    assert "| stoker | 1,000 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main(["--only", "stoker,nonesuch"])
    assert "there is no nonesuch; there are ours," in capsys.readouterr().err


def test_the_ratios_are_stoker_s_to_each_loader_and_to_each_limit() -> None:
    results = Results(
        [
            record("ours", "cold", 0.9),
            record("ours", "steady", 0.9, 0.5),
            record("spdl", "cold", 1.9),
            record("aiohttp", "limit", 0.25),
            replace(record("litdata", "cold"), error="it hung", result={}),
        ]
    )
    rows = [[cell.strip() for cell in line.split("|")][1:4] for line in ratios(results).splitlines()]
    assert ["stoker", "1,000", ""] in rows
    assert ["SPDL, a pipeline", "500", "2.00"] in rows
    assert ["plain aiohttp, 8 connections", "4,000", "0.50"] in rows
    assert ["LitData (it hung)", "", ""] in rows


def test_the_tables_say_why_a_figure_is_missing() -> None:
    hung = replace(record("litdata", "cold"), error="no result within 150 s", result={})
    results = Results([record("ours", "cold", 0.9), hung])
    table = report.speed_table(results, "images", "raw", "none")
    assert "| stoker | 1,000 |" in table
    assert "| LitData | no result within 150 s |" in table


def test_plots_set_cold_epochs_beside_cold_ones_and_later_ones_beside_later_ones() -> None:
    results = Results(
        [
            record("ours", "cold", 0.9),
            record("ours", "steady", 0.9, 0.2, 0.2),
            record("litdata", "cold", 1.9),
            record("litdata", "steady", 1.9, 0.1, 0.1),
            record("sockets", "limit", 0.05),
        ]
    )
    cold, later = plots.throughput_cases(results, "none")
    assert cold[0].endswith("first epoch, cold")
    assert [label for label, _, _ in cold[1]] == ["stoker", "LitData"]
    assert later[0].endswith("second epoch")
    assert [label for label, _, _ in later[1]] == ["LitData", "stoker"]
    assert cold[2] == later[2] == {"sockets": pytest.approx(SAMPLES / 0.05)}


def test_a_document_keeps_what_is_around_its_tables(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{report.BEGIN}\nstale figures\n{report.END}\nafter\n")
    settings = {"machine": {"python": "3.11", "cores": 2}, "selection": {"rounds": 3, "scale": 1.0}}
    results = Results([record("ours", "cold", 0.9)], settings)
    for _ in range(2):
        report.write(results, document)
        text = document.read_text()
        assert text.startswith(f"before\n{report.BEGIN}\n\n")
        assert text.endswith(f"\n\n{report.END}\nafter\n")
        assert text.count("| stoker | 1,000 |") == 1
        assert "stale figures" not in text
    document.write_text("no markers")
    with pytest.raises(ValueError, match="compare:begin"):
        report.write(results, document)


def run_script(tmp_path: Path, script: str, timeout_seconds: float = 60.0) -> Outcome:
    return run_child(
        [sys.executable, "-c", script], environment={}, timeout_seconds=timeout_seconds, log=tmp_path / "child.log"
    )


BURN = "import os, time\nwhile time.process_time() < {seconds}: pass\n"
FORK = "import os\npid = os.fork()\n"
SEEN = "import os, time\nwhile not os.path.exists('{seen}'): time.sleep(0.01)\n"


def when_seen(monkeypatch: pytest.MonkeyPatch, mark: Path, holds: Callable[[_Tree], bool]) -> str:
    """Return a script that ends once a look at its memory has shown something; when one comes is up to the machine."""
    look = _Tree.sample

    def sample(tree: _Tree) -> None:
        look(tree)
        if holds(tree):
            mark.touch()

    monkeypatch.setattr(_Tree, "sample", sample)
    return SEEN.format(seen=mark)


def test_a_child_s_result_is_all_the_json_that_it_printed(tmp_path: Path) -> None:
    outcome = run_script(tmp_path, """print('{"a": 1, "b": 1}\\nnoise\\n{"b": 2}')""")
    assert outcome.error is None
    assert outcome.result == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "script",
    [
        BURN.format(seconds=0.3),
        f"{FORK}if pid: os.wait()\nelse:\n    {BURN.format(seconds=0.3)!r}\n    exec({BURN.format(seconds=0.3)!r})",
    ],
    ids=["itself", "a child that it waits for"],
)
def test_processor_time_is_that_of_the_whole_tree(tmp_path: Path, script: str) -> None:
    outcome = run_script(tmp_path, script)
    assert outcome.error is None
    assert outcome.cpu_seconds >= 0.3


def test_processor_time_is_also_that_of_a_child_that_outlives_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = when_seen(monkeypatch, tmp_path / "seen", lambda tree: len(tree._seen) == 2)
    burn = BURN.format(seconds=0.3) + f"open({str(tmp_path / 'burnt')!r}, 'w')\ntime.sleep(600)"
    burnt = SEEN.format(seen=tmp_path / "burnt")
    outcome = run_script(tmp_path, f"{FORK}exec({burn!r} if not pid else {seen + burnt!r})")
    assert outcome.error is None
    assert outcome.cpu_seconds >= 0.3


def test_a_child_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"{FORK}import time\n{str(tmp_path)!r}\ntime.sleep(600)"
    outcome = run_script(tmp_path, script, timeout_seconds=2.0)
    assert outcome.error == "no result within 2 s"
    assert not [each for each in psutil.process_iter(["cmdline"]) if script in (each.info["cmdline"] or [])]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import sys; sys.exit('the bucket is gone')", "exit code 1: the bucket is gone"),
        ("import os; os.abort()", "exit code -6: "),
        ("print('{')", "its result is not JSON"),
    ],
)
def test_a_child_that_fails_says_why(tmp_path: Path, script: str, error: str) -> None:
    outcome = run_script(tmp_path, script)
    assert outcome.result == {}
    assert (outcome.error or "").startswith(error)


def test_the_memory_of_a_child_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = when_seen(monkeypatch, tmp_path / "seen", lambda tree: tree.peak_bytes > 200 << 20)
    outcome = run_script(tmp_path, f"held = b'x' * (200 << 20)\n{seen}")
    assert outcome.error is None
    assert 200 << 20 < outcome.peak_bytes < 300 << 20


@pytest.mark.parametrize("connections", [1, 3, 16])
def test_plain_sockets_read_every_object_to_its_end(connections: int) -> None:
    with running_bucket(BucketConfig(buckets=(BucketSpec(name="stoker", anonymous=True),))) as bucket:
        sizes = [0, 1, 100, 1 << 20, (3 << 20) + 1]
        for size in sizes:
            bucket.put("stoker", f"of-{size}", bytes(size))
        ends = pull_with_sockets(bucket.url, [f"/stoker/of-{size}" for size in sizes], connections)
        assert len(ends) == len(sizes)
        assert ends == sorted(ends)
        assert bucket.counts.requests["GetObject"] == len(sizes)
        assert bucket.counts.bytes_out == sum(sizes)
        with pytest.raises(ConnectionError, match="404"):
            pull_with_sockets(bucket.url, ["/stoker/missing"], connections)


def test_every_benchmark_that_the_program_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["no-such"]) == 2
    named = capsys.readouterr().err
    for name in (*program.NAMES, *program.BY_NAME):
        assert name in named
        assert find_spec(f"benchmarks.{name}") is not None
