"""A training of many epochs in a process of its own, whose memory, objects, files and threads stay what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def flat_memory(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.flat_memory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def test_memory_objects_files_and_threads_stay_flat_over_60_epochs() -> None:
    done = flat_memory("--batches", "512")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("flat\n")


def test_a_batch_leaked_every_epoch_is_found() -> None:
    done = flat_memory("--batches", "256", "--leak")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "memory_bytes grows" in done.stdout
    assert "objects grows" in done.stdout
