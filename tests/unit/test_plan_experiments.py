"""Every experiment runs, writes what it should, and says of itself what is true."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.errors import ConfigError
from stoker_sim import _experiments as experiments
from stoker_sim._experiments import Cell, Experiment, ExperimentResult, Table, load_experiment, load_paper

PLOTLY_BYTES = 1 << 20
ELSEWHERE = {"silod-estimator"}
"""What takes ten seconds even when it is quick; ``test_plan_silod`` runs a part of it."""


@cache
def outcome(name: str) -> ExperimentResult:
    """Return what an experiment finds when it is quick; each is run once, whatever looks at it."""
    return load_experiment(name).run(True)


@pytest.fixture(autouse=True)
def _each_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(name: str) -> Experiment:
        return replace(
            load_experiment(name), run=lambda is_quick: outcome(name) if is_quick else load_experiment(name).run(False)
        )

    monkeypatch.setattr(experiments, "load_experiment", run_once)


@pytest.mark.parametrize("name", [name for name in experiments.NAMES if name not in ELSEWHERE])
def test_an_experiment_writes_its_tables_and_its_figure(name: str, tmp_path: Path) -> None:
    assert main(["simulate", name, "--quick", "--out", str(tmp_path)]) == 0
    files = {path.name: path for path in tmp_path.iterdir()}
    assert {f"{name}.csv", f"{name}.png", f"{name}.html"} <= files.keys()
    assert files[f"{name}.png"].read_bytes().startswith(b"\x89PNG")
    page = files[f"{name}.html"].read_text("utf-8")
    assert len(page) > PLOTLY_BYTES, "the page brings its own script"
    assert not re.search(r"<script[^>]+src=", page)
    for path in files.values():
        if path.suffix == ".csv":
            columns, *rows = csv.reader(path.read_text("utf-8").splitlines())
            assert rows
            assert {len(row) for row in rows} == {len(columns)}


def test_the_page_shows_each_experiment_and_no_other() -> None:
    docs = Path(__file__).parents[2] / "docs"
    shown = re.findall(r"!\[.*\]\(images/experiments/(.*)\.png\)", (docs / "experiments.md").read_text("utf-8"))
    assert sorted(shown) == sorted(experiments.NAMES)
    assert sorted(path.stem for path in (docs / "images/experiments").iterdir()) == sorted(experiments.NAMES)


def test_json_has_what_the_files_have(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "caching", "deli-figure-5", "--quick", "--json", "--out", str(tmp_path / "none")]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("caching", "deli-figure-5")
    assert all(len(row) == len(first["tables"][0]["columns"]) for row in first["tables"][0]["rows"])
    assert not (tmp_path / "none").exists()


def test_documented_claims_about_caches_hold() -> None:
    found = outcome("ddp")
    (table,) = found.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    hits = {str(row["policy"]): float(str(row["hit rate"])) for row in rows}
    differences = [abs(float(str(row["difference"]))) for row in rows]
    assert max(differences) < 0.02
    assert f"at most {max(differences):.3f}" in " ".join(found.remarks)
    for row in rows:
        assert row["policy alone"] == pytest.approx(hits[str(row["policy"])], abs=0.005)
    assert sorted(hits, key=hits.__getitem__) == ["fifo", "no-evict", "next-use"]
    assert all(row["miss rate of the loop"] == 0.0 for row in rows), "nothing is missed after the first epoch"


def test_our_schedules_wait_less_by_the_required_factor() -> None:
    (table,) = outcome("ours").tables
    rows = {(row[0], row[1], row[2]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    for workload in ("mnist", "cifar10"):
        later = rows[workload, "ours, super-samples", 2]
        assert float(str(later["less than directly"])) > 0.97
        assert later["miss rate"] == 0.0
    assert float(str(rows["cifar10", "ours, by sample", 2]["less than directly"])) > 0.97
    assert float(str(rows["mnist", "ours, by sample", 2]["epoch / bound"])) < 1.1


def test_ipdls_published_trends_hold() -> None:
    loaders, trends = outcome("ipdl").tables
    assert len(trends.rows) == 9
    assert [row for row in trends.rows if row[3] != "yes"] == []
    by_depth = {row[2]: row[3] for row in loaders.rows if row[0] == "a bucket"}
    assert by_depth[4] == pytest.approx(1.5, rel=0.05)  # what ten steps take: what is late is not felt any more
    assert by_depth[1] > 1.3 * 1.5  # type: ignore[operator]


def cells(table: Table, *columns: str) -> list[tuple[Cell, ...]]:
    places = [table.columns.index(column) for column in columns]
    return [tuple(row[place] for place in places) for row in table.rows]


def number(cell: Cell) -> float:
    assert isinstance(cell, (int, float))
    return float(cell)


def test_by_chunk_is_faster_by_more_than_was_published() -> None:
    reads, units = outcome("diesel-reads").tables
    known = [
        (number(times), least) for times, least in cells(reads, "times", "published, more than") if least is not None
    ]
    assert {least for _, least in known} == {each["more_than_times"] for each in load_paper("diesel")["reads"]}
    assert all(times > number(least) for times, least in known)
    speeds = {(place, size): times for place, size, times in cells(units, "store", "unit bytes", "times 4 KiB")}
    assert 20 < number(speeds["file system", 131_072]) < 30


def test_a_snapshot_scales_with_workers_lists_by_files_and_servers_by_servers() -> None:
    (table,) = outcome("diesel-start-up").tables
    found = {
        (way, files, workers): number(seconds) for way, files, workers, seconds in cells(table, *table.columns[:4])
    }
    assert found["snapshot", 128_000, 64] == pytest.approx(found["snapshot", 128_000, 1], rel=0.25)
    assert found["1 server", 128_000, 64] == pytest.approx(64 * 128_000 / 70_000)
    assert found["4 servers", 128_000, 16] == pytest.approx(found["1 server", 128_000, 16] / 4)
    assert found["lists", 100_000, 16] == pytest.approx(10 * found["lists", 10_000, 16], rel=0.01)
    assert found["snapshot", 128_000, 16] < 0.1 * min(found["4 servers", 128_000, 16], found["lists", 128_000, 16])


def test_all_ways_of_dividing_stand_beside_equal_parts_and_no_cache() -> None:
    found = outcome("silod")
    rows = {(row[1], row[0]): row for row in found.tables[0].rows}
    assert len(rows) == len(found.tables[0].rows) == 16
    mean = {case: float(row[2] or 0) for case, row in rows.items()}
    for (way, at), row in rows.items():
        assert row[5] == pytest.approx(mean["equal, own data", at] / mean[way, at])
        assert row[6] == pytest.approx(mean["no cache", at] / mean[way, at])
    assert mean["greedy, own data", 2.0] < 0.8 * mean["equal, own data", 2.0]
    assert mean["greedy, shared data", 2.0] < 0.5 * mean["greedy, own data", 2.0]
    assert all(hours < mean["no cache", at] for (way, at), hours in mean.items() if way != "no cache")
    factor = mean["equal, own data", 2.0] / mean["greedy, own data", 2.0]
    assert f"to {factor:.1f} times faster on average" in found.remarks[2]


def rows_of(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_our_tier_exceeds_infinicache_s_availability_at_lower_cost_as_documented() -> None:
    cases, cheapest, by_objects = map(rows_of, outcome("warm-tier").tables)
    assert {row["mean life min"] for row in cases} == {30, 60, 444}
    above = {
        (row["mean life min"], row["read every min"])
        for row in cheapest
        if row["above InfiniCache's for less"] == "yes"
    }
    assert (444, 60) in above
    assert all(minutes == 444 for minutes, _ in above)
    for row in cases:
        assert row["object-hours kept"] <= row["reads served"] <= 1.0
    for code in ("10+2", "4+4"):
        rates = {
            (row["mean life min"], row["read every min"]): row["reads served"] for row in cases if row["code"] == code
        }
        assert all(rates[life, 10] > rates[life, 60] for life in (30, 60, 444))
        assert rates[30, 10] < rates[60, 10] < rates[444, 10]
    assert all(row["upkeep $"] < row["all $"] for row in by_objects)


def test_an_experiment_that_there_is_not_is_refused_before_any_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ours", "deli-figure-99"]) == 2
    captured = capsys.readouterr()
    assert "deli-figure-99" in captured.err
    assert not captured.out


def test_a_scenario_is_written_as_an_experiment_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples/scenarios/next-batch.toml"
    assert main(["simulate", str(example), "--out", str(tmp_path), "--no-html"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"next-batch.csv", "next-batch.png"}
    assert "requests" in capsys.readouterr().out


def test_a_scenario_with_unknown_prices_is_refused_before_it_is_run(tmp_path: Path) -> None:
    text = "bucket.prices_of = 'ftp://x'\ndataset = { super_samples = 1, samples = 1, super_sample_bytes = 1 }\n"
    text += "node.batch_size = 1\n"
    (tmp_path / "dear.toml").write_text(text)
    assert main(["simulate", str(tmp_path / "dear.toml"), "--out", str(tmp_path)]) == 2


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in experiments.NAMES)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["simulate", "deli-figure-5", "--quick", "--no-html", "--out", str(tmp_path / "file")]) == 2
    assert "name another folder with --out" in capsys.readouterr().err


def test_there_is_no_experiment_of_another_name() -> None:
    with pytest.raises(ConfigError, match="there is no experiment 'x'"):
        experiments.load_experiment("x")
