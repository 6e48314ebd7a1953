"""Materialized epochs, written in this process as functions would write them."""

from __future__ import annotations

import math
from typing import Any

from stoker import open_store
from stoker._format.versions import read_manifest
from stoker._order.epoch_layout import EpochLayout
from stoker.abc import Store
from stoker_functions._shuffle_job.plan import EpochPlan
from stoker_functions._shuffle_job.work import ShuffleTask, Way, perform
from support.stores import run_check

__all__ = ["MEMORY_BYTES", "WAYS", "perform_tasks", "layout_of", "write_epoch", "materialize", "plan_tasks"]

MEMORY_BYTES = 64 << 20
WAYS: tuple[Way, ...] = ("ranged", "streamed", "scattered")


def plan_tasks(
    way: Way = "streamed",
    *,
    slices: int = 1,
    scatters: int = 2,
    object_bytes: int = 2000,
    epoch: int = 0,
    lanes: int = 1,
    seed: int = 7,
    version: int = 1,
    keep: int = 1,
    url: str = "memory://any",
) -> list[list[ShuffleTask]]:
    """Return the tasks of an epoch's plan."""
    plan = EpochPlan(
        way=way,
        slices=slices,
        scatters=scatters if way == "scattered" else 0,
        object_bytes=object_bytes,
        get_requests=0,
        put_requests=0,
        read_bytes=0,
        written_bytes=0,
        store_dollars=0.0,
        function_dollars=0.0,
        task_seconds=0.0,
        seconds=0.0,
    )
    return plan.phases(dataset=url, version=version, seed=seed, epoch=epoch, lanes=lanes, keep=keep)


async def perform_tasks(store: Store, tasks: list[list[ShuffleTask]], memory_bytes: int = MEMORY_BYTES) -> None:
    """Perform tasks, one after the other."""
    for phase in tasks:
        for task in phase:
            result = await perform(store, task, memory_bytes=memory_bytes, stop_at_seconds=math.inf)
            assert result["state"] == "complete"


async def write_epoch(store: Store, **settings: Any) -> None:
    """Write an epoch into a store."""
    await perform_tasks(store, plan_tasks(**settings))


def materialize(url: str, **settings: Any) -> None:
    """Materialize an epoch of the data set at a URL."""
    run_check(open_store(url), lambda store: write_epoch(store, **settings))


async def layout_of(store: Store, task: ShuffleTask) -> EpochLayout:
    """Return the layout of a task's epoch."""
    manifest = await read_manifest(store, task.version)
    return EpochLayout(manifest, seed=task.seed, lanes=task.lanes, epoch=task.epoch)
