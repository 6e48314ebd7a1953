"""What the variables of a platform make of a process of the trainer image."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import stoker
from stoker.errors import PreconditionFailedError
from support.places import with_store

SCRIPT = Path(__file__).parents[3] / "examples" / "train_job.py"


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_job", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_job"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_job"]


def placement(job: ModuleType, environ: dict[str, str]) -> Any:
    return job.Placement.of(environ)


def test_without_variables_it_is_alone(job: ModuleType) -> None:
    alone = placement(job, {})
    assert (alone.member, alone.node, alone.nodes, alone.is_rank) == (None, 0, 1, False)


@pytest.mark.parametrize(
    ("index", "size"),
    [
        ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
        ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    ],
)
def test_independent_tasks_are_members_and_no_ranks(job: ModuleType, index: str, size: str) -> None:
    task = placement(job, {index: "2", size: "5"})
    assert (task.member, task.nodes, task.is_rank) == (2, 1, False)


def test_the_only_task_of_a_job_is_no_member(job: ModuleType) -> None:
    assert placement(job, {"CLOUD_RUN_TASK_INDEX": "0", "CLOUD_RUN_TASK_COUNT": "1"}).member is None


def test_nodes_that_run_together_start_torchrun_with_the_main_node_first(job: ModuleType) -> None:
    def of(index: int, **more: str) -> Any:
        batch = {"AWS_BATCH_JOB_NUM_NODES": "4", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
        return placement(job, {**batch, "AWS_BATCH_JOB_NODE_INDEX": str(index), **more})

    assert [of(index).node for index in range(4)] == [3, 0, 1, 2]
    command = of(3, AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS="10.0.0.7").torchrun(8, 29500)
    assert {"--nnodes=4", "--node-rank=2", "--master-addr=10.0.0.7", "--nproc-per-node=8"} < set(command)
    assert "--master-addr=127.0.0.1" in of(1).torchrun(8, 29500)


def test_one_machine_with_several_gpus_starts_torchrun_for_itself(job: ModuleType) -> None:
    command = placement(job, {}).torchrun(2, 29500)
    assert {"--standalone", "--nproc-per-node=2", "--max-restarts=0"} < set(command)


@pytest.mark.parametrize("exit_codes", [(143, -15), (-15, 143)])
def test_ranks_that_were_taken_away_are_no_mistake(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch, exit_codes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(job, "torchrun", failing(exit_codes))
    assert job.start_ranks([]) is False


def test_a_mistake_of_a_rank_is_one(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "torchrun", failing((1, -15)))
    with pytest.raises(ChildFailedError):
        job.start_ranks([])


def failing(exit_codes: tuple[int, ...]) -> Callable[[Sequence[str]], None]:
    """Return a torchrun whose ranks end with these codes."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(exit_codes)
    }

    def torchrun(words: Sequence[str]) -> None:
        raise ChildFailedError("train_job.py", failures)

    return torchrun


def test_what_torchrun_started_is_a_rank(job: ModuleType) -> None:
    assert placement(job, {"RANK": "0", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"}).is_rank


def test_a_batch_that_cannot_be_divided_among_the_ranks_is_refused(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    options = job.arguments(["--data=memory://x", "--checkpoint=memory://y", "--classes=2", "--batch-size=12"])
    with pytest.raises(SystemExit, match="12 cannot be divided among 5 ranks"):
        job.train(options, job.Placement())


def test_a_machine_that_was_given_up_cannot_replace_its_successors_checkpoint(job: ModuleType) -> None:
    url = "memory://train-job-checkpoints/run"
    first, second = job.Checkpoint(url, None), job.Checkpoint(url, None)
    assert first.load() is None
    first.save({"step": 1})
    assert second.load() == {"step": 1}
    second.save({"step": 2})
    with pytest.raises(PreconditionFailedError):
        first.save({"step": 1})
    assert job.Checkpoint(url, None).load() == {"step": 2}


@pytest.mark.parametrize("is_encoded", [True, False])
def test_images_are_trained_on_as_arrays_and_as_files(job: ModuleType, is_encoded: bool, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (8, 6, 6, 3), np.uint8)
    image = stoker.Bytes() if is_encoded else stoker.Array("uint8", (6, 6, 3))
    with stoker.Packer(tmp_path / "data", schema={"image": image, "label": stoker.Array("int64")}) as packer:
        packer.extend(
            {"image": png(array) if is_encoded else array, "label": label} for label, array in enumerate(pixels)
        )
    words = [f"--data={tmp_path / 'data'}", f"--checkpoint={tmp_path / 'run'}", "--classes=8", "--memory=16MB"]
    options = job.arguments([*words, "--epochs=3", "--batch-size=4", *(["--image-size=5"] if is_encoded else [])])
    assert job.train(options, job.Placement())
    assert job.Checkpoint(str(tmp_path / "run"), None).load()["seen"].tolist() == [3] * 8
    if is_encoded:
        with pytest.raises(SystemExit, match="--image-size"):
            job.train(job.arguments(words), job.Placement())


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def test_members_of_an_ensemble_keep_checkpoints_of_their_own(job: ModuleType) -> None:
    url = "memory://train-job-members/run"
    for member in (0, 1):
        job.Checkpoint(url, member).save({"member": member})

    async def keys(store: Any) -> list[str]:
        return [info.key async for info in store.list()]

    assert with_store(url, keys) == ["member-0/checkpoint.pt", "member-1/checkpoint.pt"]
    assert job.Checkpoint(url, 1).load() == {"member": 1}
