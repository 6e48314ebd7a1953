"""The page on frameworks: its programs run, and what it takes from the examples stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

import stoker

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
SAMPLES = 1000
START = """
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from stoker_torch import Loader, StreamDataset, merge_states

class Stop(Exception):
    pass

def train(batch):
    seen.extend(batch["x"].tolist())
    if len(seen) == stop:
        raise Stop

url, folder = "train", Path()
checkpoint, epochs = Path("checkpoint.pt"), 2
seen, stop = [], None
"""


def blocks(section: str) -> list[str]:
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def dense(program: str) -> str:
    """Return a program without its empty lines."""
    return re.sub(r"\n\n+", "\n", program)


def run(folder: Path, program: str) -> None:
    """Run a program beside a data set."""
    with stoker.Packer(folder / "train", schema={"x": stoker.Array("int64")}, super_sample_bytes=512) as packer:
        packer.extend({"x": number} for number in range(SAMPLES))
    done = subprocess.run(
        [sys.executable, "-c", START + program], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(("section", "example"), [
    ("Lightning", "train_lightning"), ("Accelerate", "train_accelerate"), ("Hugging Face Trainer", "train_hf_trainer"),
])  # fmt: skip
def test_what_is_shown_of_a_framework_stands_in_its_example(section: str, example: str) -> None:
    program = dense((ROOT / "examples" / f"{example}.py").read_text("utf-8"))
    found = blocks(section)
    assert found
    for block in found:
        assert any(indent(dense(block), " " * depth) in program for depth in (0, 4, 8)), block


def test_the_loop_of_plain_torch_trains_on_every_sample_and_continues(tmp_path: Path) -> None:
    (block,) = blocks("torch.distributed, torchrun")
    check = f"\nassert sorted(seen) == sorted([*range({SAMPLES})] * epochs)\nepochs = 3\n{block}\n"
    run(tmp_path, f"{block}{check}assert len(seen) == 3 * {SAMPLES}\n")


def test_the_stateful_loop_continues_as_it_is_and_with_other_workers(tmp_path: Path) -> None:
    first, other = blocks("StatefulDataLoader")
    stopped = "try:\n" + indent(first, "    ") + "except Stop:\n    pass\n"
    program = f"stop = 3 * 64\n{stopped}del loader\nkept, stop = seen[:128], None\n"  # the third was not saved
    ends = [f"seen = list(kept)\n{block}\nassert sorted(seen) == list(range({SAMPLES}))\n" for block in (other, first)]
    run(tmp_path, program + "".join(ends))
