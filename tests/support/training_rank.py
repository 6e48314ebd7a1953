"""Ranks of a distributed training, each in a process of its own."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import stoker
from stoker.errors import RankMismatchError
from stoker_torch import Loader
from stoker_torch._config import LoaderShuffle
from support.preloaded import preloaded_forkserver

__all__ = ["RankReport", "RankTask", "ids_of", "keeping_ranks", "pack_sums", "run_ranks", "run_training"]

_TIMEOUT_SECONDS = 300
_MAX_RANKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Task of a rank: train for some whole epochs and some steps of the next."""

    url: str
    rank: int
    world_size: int
    rendezvous: str
    batch_size: int
    seed: int = 0
    shuffle: LoaderShuffle = "window"
    epochs: int = 0
    steps: int = 0
    state: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class RankReport:
    """Report of a rank: ids of each epoch's batches in order, the final state and the weights."""

    epochs: list[list[list[int]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)
    mismatch: str = ""


def pack_sums(folder: Path, samples: int) -> None:
    """Pack the training data: ``x`` of four numbers, and ``y``, their sum; a few samples per super-sample."""
    schema = {"x": stoker.Array("float32", (4,)), "y": stoker.Array("float32")}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=256) as packer:
        for x in np.random.default_rng(0).normal(size=(samples, 4)).astype(np.float32):
            packer.write({"x": x, "y": x.sum()})


def ids_of(reports: Iterable[RankReport], epoch: int) -> list[int]:
    """Return the ids of all samples of the ranks in their ``epoch``-th epoch."""
    return [number for report in reports for batch in report.epochs[epoch] for number in batch]


def run_ranks(tasks: Sequence[RankTask]) -> list[RankReport]:
    """Run each task in a process of its own, all at the same time, and return their reports in order.

    Raises:
        TimeoutError: a rank hangs; no rank outlives the call then.
    """
    assert len(tasks) <= _MAX_RANKS
    pool = _pool()
    running = [pool.submit(_run, task) for task in tasks]
    try:
        return [each.result(_TIMEOUT_SECONDS) for each in running]
    except TimeoutError:
        for process in pool._processes.values():
            process.kill()
        raise


@contextmanager
def keeping_ranks() -> Iterator[None]:
    """Keep the processes of ranks from one training to the next, and fork them with what they need imported."""
    with preloaded_forkserver("stoker_torch", "torch._dynamo"):  # the latter is what an optimizer imports
        try:
            yield
        finally:
            _pool().shutdown()
            _pool.cache_clear()


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(_MAX_RANKS, mp_context=get_context("forkserver"), initializer=_prepare)


def _prepare() -> None:
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"


def run_training(urls: Sequence[str], rendezvous: Path, **settings: Any) -> list[RankReport]:
    """Run a rank for each URL, all with the same settings of a :class:`RankTask`, and return their reports in order."""
    alike = {"world_size": len(urls), "rendezvous": str(rendezvous), **settings}
    return run_ranks([RankTask(url=url, rank=rank, **alike) for rank, url in enumerate(urls)])


def _run(task: RankTask) -> RankReport:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS / 2),
    )
    try:
        report = RankReport()
        with Loader(
            task.url, batch_size=task.batch_size, shuffle=task.shuffle, seed=task.seed, memory="8MB", with_ids=True
        ) as loader:
            if task.state is not None:
                loader.load_state_dict(task.state)
            try:
                _train(loader, task, report)
            except RankMismatchError as error:
                report.mismatch = str(error)
        return report
    finally:
        distributed.destroy_process_group()


def _train(loader: Loader, task: RankTask, report: RankReport) -> None:
    torch.manual_seed(task.rank)  # DDP must make the weights equal
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for steps in [None] * task.epochs + [task.steps] * bool(task.steps):
        report.epochs.append([])
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report.losses.append(loss.item())
            report.epochs[-1].append(batch["__id__"].tolist())
            if len(report.epochs[-1]) == steps:
                break
    report.state = loader.state_dict()
    report.weights = [weight for parameter in model.parameters() for weight in parameter.flatten().tolist()]
