"""The commands, prices and the paper's table in docs/costs.md are right."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import stoker_sim
from stoker import cli
from stoker_sim import _experiments as experiments
from stoker_sim._experiments import ExperimentResult

PAGE = (Path(__file__).parents[2] / "docs" / "costs.md").read_text("utf-8")
PACKAGE = Path(stoker_sim.__file__).parent
COMMAND = re.compile(r"^\$ (?:STOKER_PRICES=(\S+) )?stoker (.*)\n((?:[^$`].*\n)*)", re.MULTILINE)
METHODS = {
    "disk": "disk",
    "bucket": "bucket",
    "full fetch 1024": "full fetch, 1024",
    "full fetch 2048": "full fetch, 2048",
    "50/50 1024": "50/50, 1024",
}
PARTS = ("api", "storage", "compute and loading", "total")


@pytest.fixture(scope="module")
def outcome() -> ExperimentResult:
    return experiments.load_experiment("deli-table-2").run(False)


def table_of(outcome: ExperimentResult) -> str:
    """Return the paper's table in Markdown, with ours in brackets where they differ by a cent or more."""
    cells = {}
    for workload, method, part, ours, published, _, is_met, *_ in outcome.tables[0].rows:
        cells[workload, method, part] = f"{published:.2f}" + ("" if is_met == "yes" else f" ({ours:.3f})")
    lines = [
        "| method | MNIST: requests | storage | nodes | total | CIFAR-10: requests | storage | nodes | total |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, name in METHODS.items():
        row = [cells.get((workload, method, part), "") for workload in ("mnist", "cifar10") for part in PARTS]
        lines.append(f"| {name} | {' | '.join(row)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def test_every_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STOKER_PRICES", raising=False)
    shutil.copy(PACKAGE / "published/deli_prices.toml", tmp_path)
    packing = re.search(r"```python\n(import numpy.*?)```", PAGE, re.DOTALL)
    assert packing
    exec(compile(packing[1], "costs.md", "exec"), {})  # noqa: S102 - our own page
    commands = COMMAND.findall(PAGE)
    assert len(commands) == PAGE.count("$ stoker ") + PAGE.count("$ STOKER_PRICES") >= 7
    for prices, command, shown in commands:
        with monkeypatch.context() as patch:
            if prices:
                patch.setenv("STOKER_PRICES", prices)
            assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == shown


def test_the_papers_table_is_the_experiments(outcome: ExperimentResult) -> None:
    assert table_of(outcome) in PAGE


def test_the_counts_of_cells_are_the_experiments(outcome: ExperimentResult) -> None:
    here, printed_price, listings, _ = (met for _, met, _ in outcome.tables[1].rows)
    assert f"{here} of its {len(outcome.tables[0].rows)} cells are met" in PAGE
    assert f"with which only {printed_price} cells are met" in PAGE
    assert f"meet {listings} cells" in PAGE.replace("\n  ", " ")


def test_what_keeps_a_cell_from_being_met_is_the_experiments(outcome: ExperimentResult) -> None:
    (remark,) = (each for each in outcome.remarks if each.startswith("Not met"))
    found = re.search(r"(\d+) s of the (\d+) s", remark)
    assert found
    assert f"if they were {found[1]} s shorter, of {found[2]}, ours would round" in PAGE


def test_a_row_by_hand_comes_to_the_experiments(outcome: ExperimentResult) -> None:
    row = {
        str(part): ours
        for workload, method, part, ours, *_ in outcome.tables[0].rows
        if (workload, method) == ("cifar10", "50/50 1024")
    }
    shown = COMMAND.findall(PAGE)[-1][2]
    dollars = {line.split("  ")[0]: float(line.rsplit("$", 1)[1]) for line in shown.splitlines()[:-1]}
    assert dollars["GET requests"] + dollars["LIST requests"] == pytest.approx(row["api"], abs=1e-4)
    assert dollars["disks"] == pytest.approx(row["storage"], abs=1e-4)
    assert dollars["computing"] + dollars["waiting for data"] == pytest.approx(row["compute and loading"], abs=1e-4)
    assert dollars["total"] == pytest.approx(row["total"], abs=2e-4)
