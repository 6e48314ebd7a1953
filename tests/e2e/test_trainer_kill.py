"""Trainings that are killed or preempted, and resumed elsewhere: each epoch has every sample exactly once.

The ranks are processes joined by gloo. Their number changes at every start; the samples a step stay.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

import stoker
from support.processes import child_process, wait_for_end
from support.tally_training import Checkpoint, End, TallyTask, train

SAMPLES = 211
GLOBAL_BATCH = 12
EPOCHS = 2
STEPS = -(-SAMPLES // GLOBAL_BATCH) * EPOCHS
WORLD_SIZES = (2, 3, 1)
_serial = count()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tally") / "train"
    with stoker.Packer(folder, schema={"x": stoker.Array("int64")}, super_sample_bytes=128) as packer:
        packer.extend({"x": index} for index in range(SAMPLES))
    return str(folder)


def run_ranks(task: TallyTask, world_size: int) -> list[int]:
    """Run the training on a number of ranks; return their exit codes.

    Where the training has an end for one of them, the others are killed when that one is gone, as launchers do.
    """
    rendezvous = task.folder / f"rendezvous-{next(_serial)}"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(child_process(train, task, f"file://{rendezvous}", rank, world_size))
            for rank in range(world_size)
        ]
        if task.ends and task.ends[0].signal == signal.SIGKILL:
            return [wait_for_end(ranks[task.ends[0].rank])]
        return [wait_for_end(rank) for rank in ranks]


def check_so_far(checkpoint: Checkpoint) -> None:
    """Check that a checkpoint's model was trained on exactly the samples before its loader's state."""
    epoch, position = checkpoint.state["epoch"], checkpoint.state["position"]
    assert set(checkpoint.tally) <= {epoch, epoch + 1}
    assert sum(checkpoint.tally) == epoch * SAMPLES + position


def check_whole(checkpoint: Checkpoint | None) -> None:
    """See that a model was trained on every sample once an epoch."""
    assert checkpoint is not None
    assert checkpoint.tally == [EPOCHS] * SAMPLES
    assert (checkpoint.steps, checkpoint.state["epoch"]) == (STEPS, EPOCHS)


@pytest.fixture
def task(url: str, tmp_path: Path) -> TallyTask:
    """A whole training that nothing ends early."""
    return TallyTask(url=url, folder=tmp_path, global_batch=GLOBAL_BATCH, epochs=EPOCHS, checkpoint_steps=3)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_killed_at_random_moments_continue_from_the_checkpoint_on_another_world_size(
    task: TallyTask, seed: int
) -> None:
    random = Random(seed)
    for world_size in WORLD_SIZES * 2:
        end = End.drawn(random, world_size, signal.SIGKILL)
        assert run_ranks(replace(task, ends=(end,)), world_size) == [-signal.SIGKILL]
        if checkpoint := Checkpoint.load(task.folder):
            check_so_far(checkpoint)
    assert run_ranks(task, 2) == [0, 0]
    check_whole(Checkpoint.load(task.folder))


def test_when_one_rank_is_preempted_all_save_at_the_same_step_and_lose_none(task: TallyTask) -> None:
    random = Random(7)
    for world_size in WORLD_SIZES:
        end = End.drawn(random, world_size, signal.SIGTERM)
        assert run_ranks(replace(task, checkpoint_steps=STEPS, ends=(end,)), world_size) == [0] * world_size
        checkpoint = Checkpoint.load(task.folder)
        assert checkpoint is not None
        check_so_far(checkpoint)
    assert run_ranks(replace(task, checkpoint_steps=1), 3) == [0] * 3
    check_whole(Checkpoint.load(task.folder))
