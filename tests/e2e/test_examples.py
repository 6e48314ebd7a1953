"""The examples, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_train_digits_packs_a_folder_trains_from_it_and_recognises_digits(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "train_digits.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    found = re.search(r"([\d.]+)% of the test images", run.stdout)
    assert found is not None
    assert float(found[1]) >= 95
    assert {path.name for path in tmp_path.iterdir()} == {"train", "test"}


def test_cached_dataset_trains_in_three_ways_and_fetches_ahead() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "cached_dataset.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"waited [\d.]+ s in 2 epochs", run.stdout)) == 3
    found = re.search(r"(\d+) of 200 look-ups were misses", run.stdout)
    assert found is not None
    assert int(found[1]) < 200


def test_every_example_has_a_line_in_their_readme() -> None:
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    for script in EXAMPLES.glob("*.py"):
        assert any(script.name in line for line in lines)
