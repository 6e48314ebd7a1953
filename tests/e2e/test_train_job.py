"""The training of the trainer image: after a preemption it resumes elsewhere, with every sample exactly once."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker_local import LocalBucket
from stoker_local._bucket import client_environment
from support.places import with_store
from support.ports import reserved_port

SCRIPT = Path(__file__).parents[2] / "examples" / "train_job.py"
SAMPLES, EPOCHS = 60, 100
DATA, RUN = "s3://stoker/train-job/data", "s3://stoker/train-job/run"
TAKEN_AWAY = 128 + signal.SIGTERM
_TIMEOUT_SECONDS = 300


@pytest.fixture
def environment(local_bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a machine that reaches the bucket, where a packed data set has a class of its own for every sample."""
    for name, value in (leading := client_environment(local_bucket.config, local_bucket.url)).items():
        monkeypatch.setenv(name, value)
    schema = {"image": stoker.Array("uint8", (4, 4)), "label": stoker.Array("int64")}
    with stoker.Packer(DATA, schema=schema, super_sample_bytes=160) as packer:
        packer.extend({"image": [[label] * 4] * 4, "label": label} for label in range(SAMPLES))
    return {**os.environ, **leading, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@contextmanager
def training(
    environment: dict[str, str], *, checkpoint_steps: int = 7, port: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Run the job on one machine; what is left of it at the end is killed."""
    options = {"data": DATA, "checkpoint": RUN, "classes": SAMPLES, "epochs": EPOCHS, "batch-size": 12, "port": port}
    options |= {"memory": "4MB", "checkpoint-steps": checkpoint_steps, "processes": 1, "grace-seconds": 60}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            end_all_of(process)


def node_of_two(environment: dict[str, str], index: int) -> dict[str, str]:
    """Return AWS Batch's variables for a node of a multi-node parallel job."""
    told = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": str(index)}
    if index != 0:
        told["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
    return {**environment, **told, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}


def wait_until_under_way(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().startswith("saved at")


def end_of(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=_TIMEOUT_SECONDS)
    return process.returncode


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


def check_so_far() -> int:
    """Check that a model was trained on exactly the samples before its loader's state; return their number."""
    state = checkpoint()
    epoch = state["loader"]["epoch"]
    assert set(state["seen"].tolist()) <= {epoch, epoch + 1}
    assert state["seen"].sum() == position(state) < SAMPLES * EPOCHS
    return position(state)


def test_a_preempted_training_resumes_with_another_world_size_and_every_sample_exactly_once(
    environment: dict[str, str],
) -> None:
    port = reserved_port()
    with ExitStack() as stack:
        nodes = [stack.enter_context(training(node_of_two(environment, index), port=port)) for index in range(2)]
        wait_until_under_way(nodes[0])
        nodes[1].terminate()  # the other node learns it only from this one
        assert [end_of(node) for node in nodes] == [TAKEN_AWAY] * 2  # so that the platform starts another attempt
    reached = check_so_far()
    with training(environment) as process:
        wait_until_under_way(process)
        process.terminate()
        assert end_of(process) == TAKEN_AWAY
    assert check_so_far() > reached
    with training(environment, checkpoint_steps=10_000) as process:
        assert end_of(process) == 0
    assert checkpoint()["seen"].tolist() == [EPOCHS] * SAMPLES
