"""The training of the trainer image, on a bucket: told to go, it goes on elsewhere with every sample exactly once."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker_local.bucket import LocalBucket, environment_of
from support.places import with_store

SCRIPT = Path(__file__).parents[2] / "examples" / "train_job.py"
SAMPLES, EPOCHS = 60, 100
DATA, RUN = "s3://stoker/train-job/data", "s3://stoker/train-job/run"
_TIMEOUT_SECONDS = 120


@pytest.fixture
def environment(local_bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a machine that reaches the bucket, where a packed data set has a class of its own for every sample."""
    for name, value in (leading := environment_of(local_bucket.config, local_bucket.url)).items():
        monkeypatch.setenv(name, value)
    schema = {"image": stoker.Array("uint8", (4, 4)), "label": stoker.Array("int64")}
    with stoker.Packer(DATA, schema=schema, super_sample_bytes=160) as packer:
        packer.extend({"image": [[label] * 4] * 4, "label": label} for label in range(SAMPLES))
    return {**os.environ, **leading, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@contextmanager
def training(environment: dict[str, str], processes: int, checkpoint_steps: int = 7) -> Iterator[subprocess.Popen[str]]:
    """Run the job with so many ranks; what is left of it at the end is killed."""
    options = {"data": DATA, "checkpoint": RUN, "classes": SAMPLES, "epochs": EPOCHS, "batch-size": 12}
    options |= {"memory": "4MB", "checkpoint-steps": checkpoint_steps, "processes": processes, "grace-seconds": 60}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            end_all_of(process)


def end_all_of(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a program and of those that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def checkpoint() -> dict[str, Any]:
    data: bytes = with_store(RUN, lambda store: store.get("checkpoint.pt"))[0]
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def position(state: dict[str, Any]) -> int:
    """Return how many samples the loader has given out since the very first start."""
    place: dict[str, int] = state["loader"]
    return place["epoch"] * SAMPLES + place["position"]


def test_told_to_go_it_goes_on_another_world_size_with_every_sample_exactly_once(environment: dict[str, str]) -> None:
    reached = 0
    for processes in (1, 2):
        with training(environment, processes) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("saved at")  # it is under way
            process.terminate()
            process.communicate(timeout=_TIMEOUT_SECONDS)
            assert process.returncode != 0  # so that the platform starts another attempt
        state = checkpoint()
        assert set(state["seen"].tolist()) <= {state["loader"]["epoch"], state["loader"]["epoch"] + 1}
        assert state["seen"].sum() == position(state) > reached
        reached = position(state)
    assert reached < SAMPLES * EPOCHS
    with training(environment, 1, checkpoint_steps=10_000) as process:
        process.communicate(timeout=_TIMEOUT_SECONDS)
        assert process.returncode == 0
    assert checkpoint()["seen"].tolist() == [EPOCHS] * SAMPLES
