"""The page on data loaders: the program that trains on images runs, and resumes after a stop."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import stoker

PAGE = Path(__file__).parents[2] / "docs" / "data-loader.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pack(folder: Path, samples: int) -> None:
    """Pack grey JPEGs of many sizes, the brighter the higher their class."""
    schema = {"image": stoker.Bytes(), "label": stoker.Array("int64")}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=1 << 14) as packer:
        for number in range(samples):
            out = io.BytesIO()
            pixels = np.full((60 + number, 100 - number // 2, 3), 25 * (number % 10), np.uint8)
            Image.fromarray(pixels).save(out, "JPEG")
            packer.write({"image": out.getvalue(), "label": number % 10})


def test_the_program_that_trains_on_images_runs_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(tmp_path / "train", 20)
    pack(tmp_path / "test", 10)
    monkeypatch.chdir(tmp_path)
    (program,) = (block for block in BLOCK.findall(PAGE.read_text("utf-8")) if "ImageDecoder" in block)
    printed = []
    for epochs in (3, 4):
        names: dict[str, Any] = {}
        changed = program.replace("EPOCHS, CHECKPOINT = 3", f"EPOCHS, CHECKPOINT = {epochs}")
        exec(compile(changed, PAGE.name, "exec"), names)  # noqa: S102 - our own page
        printed.append(re.findall(r"^epoch (\d): \d+ of 10 test images$", capsys.readouterr().out, re.MULTILINE))
        assert names["loss"].isfinite()
    assert printed == [["0", "1", "2"], ["3"]]
