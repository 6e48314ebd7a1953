"""A training under torchrun, one of whose ranks is killed: it is started again and ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import stoker
from support import tally_training
from support.tally_training import Checkpoint, End, TallyTask

SAMPLES = 211
EPOCHS = 2
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Makes torchrun give each attempt a store of its own. The agent's, which attempts share else, keeps the addresses of
ranks that are dead, and torch 2.13 no longer tells attempts apart in it: new ranks then try to connect to dead ones
(https://github.com/pytorch/pytorch/issues/135712)."""
_TIMEOUT_SECONDS = 300


@pytest.fixture
def task(tmp_path: Path) -> TallyTask:
    """A training one of whose ranks is killed in the first attempt, behind some checkpoints."""
    with stoker.Packer(tmp_path / "data", schema={"x": stoker.Array("int64")}, super_sample_bytes=128) as packer:
        packer.extend({"x": index} for index in range(SAMPLES))
    (tmp_path / "run").mkdir()
    return TallyTask(
        url=str(tmp_path / "data"),
        folder=tmp_path / "run",
        global_batch=12,
        epochs=EPOCHS,
        checkpoint_steps=3,
        ends=(End(rank=1, step=8),),
    )


def torchrun(task: TallyTask) -> None:
    """Train on two ranks, started and watched by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", "--max-restarts=3"]
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    with subprocess.Popen(
        [*command, str(tally_training.__file__), task.to_json()],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **FRESH_STORE},
    ) as process:
        try:
            _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        finally:
            process.terminate()  # of which it tells its ranks
    assert process.returncode == 0, errors
    assert f"exitcode: {-signal.SIGKILL}" in errors


def started_by(task: TallyTask) -> list[psutil.Process]:
    """Return the processes of a training; without one, the port has no listener either."""
    return [each for each in psutil.process_iter(["cmdline"]) if task.to_json() in (each.info["cmdline"] or [])]


def test_a_training_whose_ranks_are_killed_and_restarted_ends_exactly_once_and_leaves_nothing(task: TallyTask) -> None:
    torchrun(task)
    checkpoint = Checkpoint.load(task.folder)
    assert checkpoint is not None
    assert checkpoint.tally == [EPOCHS] * SAMPLES
    took_part = [int(line) for line in (task.folder / "processes").read_text().splitlines()]
    assert len(took_part) == 2 * (len(task.ends) + 1)
    assert not [pid for pid in took_part if psutil.pid_exists(pid)]
    assert not started_by(task)
