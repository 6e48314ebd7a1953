"""Every experiment runs, writes what it should, and says of itself what is true."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.errors import ConfigError
from stoker_sim import _experiments as experiments

PLOTLY_BYTES = 1 << 20
ELSEWHERE = {"silod-estimator"}
"""What takes ten seconds even when it is quick; ``test_plan_silod`` runs a part of it."""


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


def test_what_is_said_of_caches_holds() -> None:
    found = experiments.load("ddp").run(True)
    (table,) = found.tables
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    hits = {str(row["policy"]): float(str(row["hit rate"])) for row in rows}
    differences = [abs(float(str(row["difference"]))) for row in rows]
    assert max(differences) < 0.02
    assert f"at most {max(differences):.3f}" in " ".join(found.remarks)
    for row in rows:
        assert row["policy alone"] == pytest.approx(hits[str(row["policy"])], abs=0.005)
    assert sorted(hits, key=hits.__getitem__) == ["fifo", "uniform", "next-use"]
    assert all(row["miss rate of the loop"] == 0.0 for row in rows), "nothing is missed after the first epoch"


def test_our_schedules_wait_less_by_what_is_asked_for() -> None:
    (table,) = experiments.load("ours").run(True).tables
    rows = {(row[0], row[1], row[2]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    for workload in ("mnist", "cifar10"):
        later = rows[workload, "ours, super-samples", 2]
        assert float(str(later["less than directly"])) > 0.97
        assert later["miss rate"] == 0.0
    assert float(str(rows["cifar10", "ours, by sample", 2]["less than directly"])) > 0.97
    assert float(str(rows["mnist", "ours, by sample", 2]["epoch / bound"])) < 1.1


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


def test_a_scenario_with_prices_of_nobody_is_refused_before_it_is_run(tmp_path: Path) -> None:
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
        experiments.load("x")
