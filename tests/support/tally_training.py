"""One rank of a training whose model counts how often each sample was trained on, over all ranks and steps.

Checkpoints have the model and the loader's state, like those of any training. So after any kills and restarts, the
model shows whether every sample was trained on exactly once per epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import distributed

from stoker_torch import Loader, Preemption, save_on_sigterm

__all__ = ["Checkpoint", "End", "TallyTask", "train"]

_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A signal that ends a training early.

    Attributes:
        rank: rank that gets the signal.
        step: step of the process, from 1, during which it is sent.
        delay_seconds: time since the step's begin, in seconds; a later step may have begun by then.
        signal: number of the signal.
    """

    rank: int
    step: int
    delay_seconds: float = 0.0
    signal: int = signal.SIGKILL

    @classmethod
    def drawn(cls, random: Random, world_size: int, number: int) -> End:
        """Return one at a random moment of the first few steps of a random rank."""
        rank, step, delay = random.randrange(world_size), random.randint(1, 6), random.random() * 0.01
        return cls(rank=rank, step=step, delay_seconds=delay, signal=number)

    def begin(self) -> threading.Thread:
        """Send the signal to this process after the delay."""
        timer = threading.Timer(self.delay_seconds, os.kill, (os.getpid(), self.signal))
        timer.start()
        return timer


@dataclass(frozen=True, slots=True, kw_only=True)
class TallyTask:
    """Task of the ranks.

    Attributes:
        url: URL of the data set.
        folder: folder of the checkpoint, and of a file with a line for each process.
        global_batch: samples per step, over all ranks.
        epochs: number of epochs of the whole training.
        checkpoint_steps: number of steps between two checkpoints.
        ends: end of each attempt, in order; later attempts run to the end of the training.
    """

    url: str
    folder: Path
    global_batch: int
    epochs: int
    checkpoint_steps: int
    ends: tuple[End, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> TallyTask:
        """Return the task that :meth:`to_json` wrote."""
        fields = json.loads(text)
        ends = tuple(End(**end) for end in fields.pop("ends"))
        return cls(folder=Path(fields.pop("folder")), ends=ends, **fields)

    def to_json(self) -> str:
        """Return the task as text."""
        return json.dumps(asdict(self), default=str)


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Model and position of a training.

    Attributes:
        tally: number of times that each sample was trained on.
        steps: number of completed steps.
        state: state of the loader.
    """

    tally: list[int]
    steps: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Checkpoint | None:
        """Return the newest checkpoint, None before the first."""
        file = folder / "checkpoint.json"
        return cls(**json.loads(file.read_text())) if file.exists() else None

    def save(self, folder: Path) -> None:
        """Make this the newest checkpoint; a kill at any moment leaves it or the one before."""
        draft = folder / "draft.json"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / "checkpoint.json")


def train(task: TallyTask, init_method: str, rank: int, world_size: int, attempt: int = 0) -> None:
    """Resume from the newest checkpoint, to the end of the training or of this attempt."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    with (task.folder / "processes").open("a") as file:
        file.write(f"{os.getpid()}\n")
    distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        end = task.ends[attempt] if attempt < len(task.ends) and task.ends[attempt].rank == rank else None
        batch_size = task.global_batch // world_size
        with Loader(task.url, batch_size=batch_size, seed=3, window=2, memory="1MB", with_ids=True) as loader:
            _Training(task, end, loader).run()
    finally:
        distributed.destroy_process_group()


class _Training:
    """A running training in this process."""

    def __init__(self, task: TallyTask, end: End | None, loader: Loader) -> None:
        self._task, self._end, self._loader = task, end, loader
        self._ending: threading.Thread | None = None
        checkpoint = Checkpoint.load(task.folder) or Checkpoint(tally=[0] * loader.manifest.samples)
        self._tally, self._steps_before, self._steps = torch.tensor(checkpoint.tally), checkpoint.steps, 0
        if checkpoint.state:
            loader.load_state_dict(checkpoint.state)

    def run(self) -> None:
        # Ranks must stop at the same step. So the first rank with a signal informs the others in the step's all-reduce,
        # and the hook only delays the signal; if they do not get there, the last checkpoint is used.
        with save_on_sigterm(self._loader, lambda _state: None, grace_seconds=120.0, wait_seconds=60.0) as hook:
            while self._loader.state_dict()["epoch"] < self._task.epochs and self._train_epoch(hook):
                pass
            if self._ending is not None:
                self._ending.join()

    def _train_epoch(self, hook: Preemption) -> bool:
        """Train to the end of the epoch; return False if a rank is preempted before."""
        for batch in self._loader:
            self._steps += 1
            if self._end is not None and self._steps == self._end.step:
                self._ending = self._end.begin()
            is_leaving = self._train_step(batch["__id__"], is_leaving=hook.is_requested)
            if is_leaving or self._steps % self._task.checkpoint_steps == 0:
                self._checkpoint()
            if is_leaving:
                return False
        return True

    def _train_step(self, ids: torch.Tensor, *, is_leaving: bool) -> bool:
        """Count the samples of all ranks; return whether any of them is leaving."""
        samples = len(self._tally)
        trained = torch.zeros(samples + 1, dtype=torch.int64)
        trained.index_add_(0, ids, torch.ones_like(ids))
        trained[samples] = is_leaving
        distributed.all_reduce(trained)
        self._tally += trained[:samples]
        return bool(trained[samples])

    def _checkpoint(self) -> None:
        if distributed.get_rank() == 0:
            Checkpoint(
                tally=self._tally.tolist(), steps=self._steps_before + self._steps, state=self._loader.state_dict()
            ).save(self._task.folder)


if __name__ == "__main__":
    train(
        TallyTask.from_json(sys.argv[1]),
        "env://",
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    )
