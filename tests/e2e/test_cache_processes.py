"""Caches on disk and the processes that have them: killed, forked, several at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch.utils.data import DataLoader

import stoker
from stoker_torch import Loader, StreamDataset
from support.cached_run import SETTINGS, leave_a_child, read_epoch, read_until_killed
from support.datasets import SCHEMA, numbers, sample_of
from support.processes import child_process, exit_code, wait_for_end

SAMPLES = 2000
UNCLOSED = """
import sys
from stoker_torch import Loader
loader = Loader(sys.argv[1], batch_size=16, memory="300KB", cache=sys.argv[2])
for number, _ in enumerate(loader):
    if number == 20:
        break
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bucket") / "train"
    with stoker.Packer(folder, schema=SCHEMA, super_sample_bytes=6000) as packer:
        packer.extend(sample_of(number) for number in range(SAMPLES))
    return str(folder)


def epoch_of(url: str, cache: str, folder: Path) -> dict[str, Any]:
    """Read an epoch in a process of its own and return its report."""
    report = folder / "report.json"
    assert exit_code(read_epoch, url, cache, str(report)) == 0
    told: dict[str, Any] = json.loads(report.read_text())
    return told


def plain_epoch(url: str) -> list[int]:
    with Loader(url, **SETTINGS, epochs=1) as loader:
        return numbers(loader)


def test_a_run_after_one_that_was_killed_reads_its_first_epoch_mostly_from_disk(url: str, tmp_path: Path) -> None:
    cache = f"disk:{tmp_path / 'cache'}?limit=1GB"
    batches = SAMPLES // 16
    assert exit_code(read_until_killed, url, cache, batches * 9 // 10) == -signal.SIGKILL
    told = epoch_of(url, cache, tmp_path)
    assert told["numbers"] == plain_epoch(url)
    assert told["hits"] > 0.7 * told["lookups"]
    assert told["requests"] == told["lookups"] - told["hits"] + 1  # and the manifest
    assert epoch_of(url, cache, tmp_path)["requests"] == 1


def test_kills_at_any_moment_leave_nothing_that_is_wrong_and_never_more_than_the_limit(
    url: str, tmp_path: Path
) -> None:
    folder, rng = tmp_path / "cache", Random(3)
    cache = f"disk:{folder}?limit=150KB"
    for _ in range(4):
        assert exit_code(read_until_killed, url, cache, rng.randrange(40)) == -signal.SIGKILL
    told = epoch_of(url, cache, tmp_path)
    assert told["numbers"] == plain_epoch(url)
    assert told["damaged"] == 0
    kept = [each for each in folder.rglob("*") if each.is_file()]
    assert kept
    assert all(not each.name.startswith(".") for each in kept)
    assert sum(each.stat().st_blocks * 512 for each in kept) <= told["limit_bytes"]


def test_two_processes_at_once_share_a_folder_and_both_have_every_sample(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cache, reports = f"disk:{tmp_path / 'cache'}?limit=1GB", [tmp_path / "first", tmp_path / "second"]
    with (
        child_process(read_epoch, url, cache, str(reports[0])) as first,
        child_process(read_epoch, url, cache, str(reports[1])) as second,
    ):
        assert (wait_for_end(first), wait_for_end(second)) == (0, 0)
    told = [json.loads(report.read_text()) for report in reports]
    assert told[0]["numbers"] == told[1]["numbers"] == plain_epoch(url)
    kept = {each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()}
    assert len(kept) == told[0]["lookups"]


def test_a_forked_child_that_lives_on_does_not_keep_its_killed_parents_part(url: str, tmp_path: Path) -> None:
    cache, pid_file = f"disk:{tmp_path / 'cache'}?limit=1GB", tmp_path / "pid"
    assert exit_code(leave_a_child, url, cache, str(pid_file)) == -signal.SIGKILL
    child = int(pid_file.read_text())
    try:
        told = epoch_of(url, cache, tmp_path)
        kept = [each for each in (tmp_path / "cache").rglob("*") if each.is_file()]
        assert len(kept) == told["lookups"]  # the next process had the part to write to
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_script_that_does_not_close_its_loader_ends_quietly_and_keeps_what_it_had(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", UNCLOSED, url, f"disk:{tmp_path / 'cache'}?limit=1GB"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    names = [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()]
    assert names
    assert ".writing" not in names


def test_worker_processes_of_many_epochs_take_over_from_one_another(url: str, tmp_path: Path) -> None:
    def read(cache: str | None) -> list[list[int]]:
        data = StreamDataset(url, batch_size=16, seed=5, window=2, memory="600KB", lanes=2, cache=cache)
        loader: DataLoader[Any] = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
        found = [numbers(loader) for _ in range(3)]
        data.close()
        return found

    cache = f"disk:{tmp_path / 'cache'}?limit=1GB"
    assert read(cache) == read(None)
    kept = [each.name for each in (tmp_path / "cache").rglob("*") if each.is_file()]
    with Loader(url, **SETTINGS) as loader:
        assert len(set(kept)) == len(loader.manifest)
    assert len(kept) <= len(set(kept)) + 2  # but for what a border between lanes cuts
