"""The guides of the documentation: every Python block and every command on them runs, in their order, as printed."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

from stoker.files import DatasetFileSystem
from stoker_local import BucketConfig, BucketProcess, BucketSpec, bucket_process

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = (
    "buckets",
    "files",
    "first-training",
    "images",
    "install",
    "loader",
    "operate",
    "resume",
    "splits",
    "tables",
    "text",
)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OF_OTHERS = ("gcloud", "pip")
"""Programs whose commands a guide shows, and that change more than the data sets of this test."""


@pytest.fixture(autouse=True)
def file_system() -> Iterator[None]:
    """Register the file system, as the entry point of an installed distribution does."""
    fsspec.register_implementation("stoker", DatasetFileSystem, clobber=True)
    yield
    gc.collect()  # ends the threads of data sets that open files refer to in circles


@pytest.fixture(scope="module")
def bucket() -> Iterator[BucketProcess]:
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="bucket"),))) as process:
        yield process


def prepare(folder: Path, *, has_splits: bool) -> None:
    """Make what the guides read: photos in class folders, below those of splits or not, tables, and an array."""
    for number in range(16):
        out = io.BytesIO()
        Image.fromarray(np.full((80, 90, 3), 15 * number, np.uint8)).save(out, "JPEG")
        for place in ("photos/train", "photos/val") if has_splits else ("photos",):
            file = folder / place / ("cat", "dog")[number % 2] / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(out.getvalue())
    (folder / "flowers.csv").write_text("length,width,species\n5.1,3.5,0\n4.9,3.0,0\n6.3,2.8,2\n")
    rows = [{"text": "well made", "stars": 5}, {"text": "never came", "stars": 1}]
    (folder / "reviews.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    np.save(folder / "flowers.npy", np.ones((10, 4), np.float32))


def blocks_of(name: str) -> list[tuple[str, str]]:
    """Return the blocks of a page, each with its language."""
    return BLOCK.findall((DOCS / f"{name}.md").read_text("utf-8"))


def run_command(command: str, folder: Path) -> None:
    if command.split()[0] in OF_OTHERS:
        return
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_as_printed(
    name: str, tmp_path: Path, bucket: BucketProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in bucket.environment().items():
        monkeypatch.setenv(variable, value)
    prepare(tmp_path, has_splits=name == "splits")
    blocks = blocks_of(name)
    if name == "operate":  # which asks about the data set of the first training
        blocks[:0] = blocks_of("first-training")[:1]
    names: dict[str, Any] = {"__name__": name}
    assert blocks
    for language, text in blocks:
        if language == "python":
            exec(compile(text, f"{name}.md", "exec"), names)  # noqa: S102 - our own pages
        else:
            for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", text, re.MULTILINE):
                run_command(line, tmp_path)


def test_every_page_that_a_reader_begins_with_is_run() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text("utf-8")
    begin, end = navigation.index("Get started:"), navigation.index("Functions:\n")
    pages = set(re.findall(r"(\S+)\.md", navigation[begin:end]))
    assert pages - {"comparison", "data-loader", "frameworks", "gpu", "local-bucket"} == set(GUIDES) - {"operate"}
