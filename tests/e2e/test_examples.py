"""The examples, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from support.forked_programs import ForkedPrograms, forked_programs

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train_digits_packs_a_folder_trains_from_it_and_recognises_digits(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "train_digits.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    found = re.search(r"([\d.]+)% of the test images", run.stdout)
    assert found is not None
    assert float(found[1]) >= 95
    assert {path.name for path in tmp_path.iterdir()} == {"train", "test"}


def test_cached_dataset_trains_in_three_ways_and_fetches_ahead() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "cached_dataset.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"waited [\d.]+ s in 2 epochs", run.stdout)) == 3
    found = re.search(r"(\d+) of 200 look-ups were misses", run.stdout)
    assert found is not None
    assert int(found[1]) < 200


TWICE = f"""
import runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
script, folder, *steps = sys.argv[1:]
for each in steps:
    sys.argv = [script, folder, each]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedPrograms]:
    """What forks programs that need not import all that optimizers import, which takes seconds."""
    with forked_programs(imports=["sklearn.datasets", "stoker_torch", "torch._dynamo"]) as forked:
        yield forked


@pytest.mark.parametrize(
    ("name", "steps", "printed"),
    [
        (
            "accelerate",
            ("100", "50"),
            [r"epoch 4, position 256>", r"([\d.]+)%", r"epoch 6, position 384>", r"([\d.]+)%"],
        ),
        ("hf_trainer", ("100", "240"), [r"step 100: ([\d.]+)%", r"step 240: ([\d.]+)%"]),
        ("lightning", ("100", "240"), [r"accuracy\D+0.(\d\d)"] * 2 + ["Restored all states"]),
    ],
)
def test_a_framework_trains_and_run_again_continues(
    forked: ForkedPrograms, tmp_path: Path, name: str, steps: tuple[str, str], printed: list[str]
) -> None:
    program, folder = tmp_path / "twice.py", tmp_path / "current"
    program.write_text(TWICE)
    folder.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "COLUMNS": "120",
    }
    with chdir(folder):
        script = EXAMPLES / f"train_{name}.py"
        run = forked.start(program, script, folder / "run", *steps, environment=environment)
    output, errors = run.communicate(600)
    assert run.returncode == 0, errors
    found = re.search(".*?".join(printed), output + errors, re.DOTALL)
    assert found is not None, output
    assert all(float(percent) >= 90 for percent in found.groups())
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_every_example_has_a_line_in_their_readme() -> None:
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    for script in EXAMPLES.glob("*.py"):
        assert any(script.name in line for line in lines)
