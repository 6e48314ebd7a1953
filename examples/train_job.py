"""Train in a container that may be taken away at any moment: Cloud Run GPU jobs, AWS Batch, torchrun, one machine.

    python train_job.py --data s3://bucket/train --checkpoint s3://bucket/runs/7 --epochs 10 --classes 10

If it is killed or gets SIGTERM, a checkpoint of model and loader is in the bucket; started again, on any number of GPUs
and machines, it resumes there, and the epoch still has every sample exactly once.

The environment variables of the platform determine the kind of the process:

- ``RANK`` of ``WORLD_SIZE``, set by torchrun: a rank of one training, whose gradients are averaged (DDP).
- ``AWS_BATCH_JOB_NODE_INDEX`` of ``AWS_BATCH_JOB_NUM_NODES`` (AWS Batch, multi-node parallel job): nodes that run
  together and reach each other. torchrun is started on each, and all GPUs are ranks of one training.
- ``CLOUD_RUN_TASK_INDEX`` of ``CLOUD_RUN_TASK_COUNT`` (Cloud Run job) and ``AWS_BATCH_JOB_ARRAY_INDEX`` of
  ``AWS_BATCH_JOB_ARRAY_SIZE`` (AWS Batch, array job): tasks that cannot reach each other, need not run at the same
  time, and are retried one by one. They are no ranks: models that each see a part of the data and never exchange
  gradients are not one training. So each task is a whole training, on all of the data, with its own seed and
  checkpoint: a member of an ensemble, or a point of a sweep.
- none of them: one machine. If it has several GPUs (or with ``--processes``), torchrun is started on it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from stoker import Array, NotFoundError, RetryingStore, open_store
from stoker.images import ImageDecoder
from stoker_torch import Loader, Preemption, save_on_sigterm

TAKEN_AWAY = 128 + signal.SIGTERM
"""Exit code of an unfinished training: platforms count it as a failure, and start the next attempt. It differs from
torchrun's own exit code 1, so that it can be told from an error."""

_INDEPENDENT = (
    ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Position of this process in the job.

    Attributes:
        member: number of the independent training that this process is part of; None if there is only one.
        node: number of this machine; the others connect to 0.
        nodes: number of machines that train together.
        main_address: address of node 0.
        is_rank: whether torchrun has started this process.
    """

    member: int | None = None
    node: int = 0
    nodes: int = 1
    main_address: str = "127.0.0.1"
    is_rank: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Placement:
        """Return the placement in the platform's environment variables."""
        member = None
        for index, size in _INDEPENDENT:
            if int(environ.get(size, "1")) > 1:
                member = int(environ[index])
        nodes = int(environ.get("AWS_BATCH_JOB_NUM_NODES", "1"))
        index = int(environ.get("AWS_BATCH_JOB_NODE_INDEX", "0"))
        main = int(environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        return cls(
            member=member,
            node=(index - main) % nodes,
            nodes=nodes,
            # The main node does not get its own address and does not need it: it listens on all addresses.
            main_address=environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "127.0.0.1"),
            is_rank="RANK" in environ,
        )

    def torchrun(self, processes: int, port: int) -> list[str]:
        """Return torchrun's arguments to start this node's ranks; the platform restarts them."""
        words = [f"--nproc-per-node={processes}", "--max-restarts=0"]
        if self.nodes == 1:
            return [*words, "--standalone", "--local-addr=127.0.0.1"]
        where = [f"--node-rank={self.node}", f"--master-addr={self.main_address}", f"--master-port={port}"]
        return [*words, f"--nnodes={self.nodes}", *where]


class Checkpoint:
    """The newest state of one training, an object in a bucket.

    Objects are replaced atomically. A machine that was replaced and still runs cannot overwrite its successor's object:
    each write requires that the object is the one that this process read or wrote last.
    """

    def __init__(self, url: str, member: int | None) -> None:
        self._url = url
        self._key = "checkpoint.pt" if member is None else f"member-{member}/checkpoint.pt"
        self._tag: str | None = None

    def load(self) -> dict[str, Any] | None:
        """Return the newest state, None before the first."""
        try:
            data, self._tag = asyncio.run(self._get())
        except NotFoundError:
            return None
        state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        data = io.BytesIO()
        torch.save(state, data)
        self._tag = asyncio.run(self._put(data.getbuffer()))

    async def _get(self) -> tuple[bytes, str]:
        store = RetryingStore(open_store(self._url))
        try:
            data, info = await store.get(self._key)
        finally:
            await store.close()
        return data, info.tag

    async def _put(self, data: memoryview) -> str:
        store = RetryingStore(open_store(self._url))
        try:
            info = await store.put(self._key, data, if_absent=self._tag is None, if_tag=self._tag)
        finally:
            await store.close()
        return info.tag


def device() -> torch.device:
    """Return the device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def image_shape(job: argparse.Namespace, loader: Loader) -> tuple[int, ...]:
    """Return the shape of the model's input images."""
    if job.image_size:
        return (job.image_size, job.image_size, 3)
    column = loader.manifest.schema["image"]
    if not isinstance(column, Array):
        raise SystemExit(f"the images of {job.data} are encoded: say with --image-size how large to make them")
    return column.shape


def build_model(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model for images of a shape; put yours here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, classes))


class Training:
    """One rank of a training.

    Attributes:
        seen: number of samples of each class that all ranks were trained on since the first start.
    """

    def __init__(self, job: argparse.Namespace, loader: Loader, checkpoint: Checkpoint) -> None:
        self._job, self._loader, self._checkpoint = job, loader, checkpoint
        self._is_distributed = loader.world_size > 1
        self._device = device()
        self._steps = 0
        self._module = build_model(image_shape(job, loader), job.classes).to(self._device)
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=job.learning_rate)
        self.seen = torch.zeros(job.classes, dtype=torch.int64, device=self._device)
        if state := checkpoint.load():
            self._module.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.seen += state["seen"].to(self._device)
            loader.load_state_dict(state["loader"])
        self._model = DistributedDataParallel(self._module) if self._is_distributed else self._module

    def run(self) -> bool:
        """Train to the end; return False if a rank's machine is preempted before."""
        # Ranks must leave at the same step, or the others would wait for ever for the one that left. So the hook only
        # delays the signal, and each step informs all ranks of it.
        grace = self._job.grace_seconds
        with save_on_sigterm(self._loader, lambda _state: None, grace_seconds=grace, wait_seconds=grace / 2) as hook:
            while self._loader.state_dict()["epoch"] < self._job.epochs:
                if not self._train_epoch(hook):
                    return False
        self._save()
        return True

    def _train_epoch(self, hook: Preemption) -> bool:
        for batch in self._loader:
            is_leaving = self._train_step(batch, is_leaving=hook.is_requested)
            self._steps += 1
            if is_leaving or self._steps % self._job.checkpoint_steps == 0:
                self._save()
            if is_leaving:
                return False
        return True

    def _train_step(self, batch: dict[str, Any], *, is_leaving: bool) -> bool:
        """Train on a batch; return whether any rank is leaving."""
        images, labels = (batch[name].to(self._device, non_blocking=True) for name in ("image", "label"))
        loss = nn.functional.cross_entropy(self._model(images.float() / 255), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        counts = torch.bincount(labels, minlength=len(self.seen) + 1)
        counts[-1] = is_leaving
        if self._is_distributed:
            distributed.all_reduce(counts)
        self.seen += counts[:-1]
        return bool(counts[-1])

    def _save(self) -> None:
        if self._loader.rank != 0:
            return
        state = {
            "model": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "seen": self.seen.cpu(),
            "loader": self._loader.state_dict(),
        }
        self._checkpoint.save(state)
        print(f"saved at {self._loader!r}", flush=True)


def train(job: argparse.Namespace, placement: Placement) -> bool:
    """Train as one rank, from the newest checkpoint on."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if placement.is_rank:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if job.batch_size % ranks:
            raise SystemExit(f"--batch-size {job.batch_size} cannot be divided among {ranks} ranks")
        seed = job.seed + (placement.member or 0)
        torch.manual_seed(seed)
        with Loader(
            job.data,
            batch_size=job.batch_size // ranks,
            seed=seed,
            memory=job.memory,
            epochs=job.epochs,
            columns=("image", "label"),
            pin_memory=True,
            decode={"image": ImageDecoder(job.image_size, job.image_size)} if job.image_size else {},
        ) as loader:
            return Training(job, loader, Checkpoint(job.checkpoint, placement.member)).run()
    finally:
        if placement.is_rank:
            distributed.destroy_process_group()


def start_ranks(words: Sequence[str]) -> bool:
    """Run torchrun to its end; return False if the ranks left early because a machine was preempted."""
    try:
        torchrun(words)
    except SignalException:
        return False
    except ChildFailedError as error:
        if all(failure.exitcode != TAKEN_AWAY for failure in error.failures.values()):
            raise
        return False
    return True


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description="Train a classifier from a packed data set of images and labels.")
    parser.add_argument("--data", required=True, help="URL of the data set, with columns image and label")
    parser.add_argument("--checkpoint", required=True, help="URL below which checkpoints are kept, one run each")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--image-size", type=int, help="pixels a side, where images are encoded (JPEG, PNG …)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="samples a step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="node:4GB", help="of the loader, divided among a machine's ranks")
    parser.add_argument("--checkpoint-steps", type=int, default=500)
    parser.add_argument("--grace-seconds", type=float, default=10.0, help="between SIGTERM and SIGKILL")
    parser.add_argument("--processes", type=int, help="ranks on this machine; one a GPU unless given")
    parser.add_argument("--port", type=int, default=29500, help="of the main node, where several train together")
    return parser.parse_args(words)


def main() -> None:
    """Train, or start the ranks that do."""
    job, placement = arguments(), Placement.of(os.environ)
    processes = job.processes or max(1, torch.cuda.device_count())
    if not placement.is_rank and processes * placement.nodes > 1:
        is_over = start_ranks([*placement.torchrun(processes, job.port), *sys.argv])
    else:
        is_over = train(job, placement)
    if not is_over:
        raise SystemExit(TAKEN_AWAY)


if __name__ == "__main__":
    main()
