"""The function that makes materialized epochs: what it takes, what it refuses, and when it stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stoker import open_store
from stoker.abc import Store
from stoker.errors import ConfigError, DeadlineError, EventError, MemoryBudgetError, NotFoundError
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions._shuffle_job.work import ShuffleTask, shuffle
from stoker_torch import Loader
from support.datasets import numbers, pack_numbers
from support.materialized import WAYS, plan_tasks
from support.packing import read_objects
from support.stores import run_check

SAMPLES = 60
MEMORY_BYTES = 512 << 20


def invoked(
    url: str, event: Any, *, seconds: float = 60.0, stop_seconds: float = 50.0, **settings: Any
) -> dict[str, Any]:
    """Return the result of a new instance for an event, with a stop and a kill after the given times."""

    async def invoke() -> dict[str, Any]:
        allowed = {"datasets": {"train": url}, "memory_bytes": MEMORY_BYTES, **settings}
        deployment = Deployment(DeploymentSettings(**allowed))
        try:
            now = asyncio.get_running_loop().time()
            return await shuffle(event, deployment, InvocationDeadline(now + seconds, now + stop_seconds))
        finally:
            await deployment.close()

    return asyncio.run(invoke())


def events(url: str, **settings: Any) -> list[dict[str, Any]]:
    return [task.to_event() for phase in plan_tasks(url=url, **settings) for task in phase]


@pytest.mark.parametrize("way", WAYS)
def test_every_event_delivered_twice_makes_an_epoch_that_a_loader_reads(way: Any) -> None:
    url = pack_numbers(SAMPLES)
    for event in events(url, way=way, lanes=2, slices=2):
        first, second = invoked(url, event), invoked(url, event)
        assert first["state"] == second["state"] == "complete"
        varies = {"deleted": 0, "deleted_epochs": [], "requests": {}}
        assert {**first, **varies} == {**second, **varies}
    with Loader(url, batch_size=8, shuffle="materialized", seed=7, lanes=2) as loader:
        assert sorted(numbers(loader)) == list(range(SAMPLES))
        assert loader._resources.pipeline.is_materialized


@pytest.mark.parametrize(
    "elsewhere",
    [
        "memory://elsewhere/ds",
        "memory://numbers",
        "s3://bucket/ds",
        "file:///etc",
        "/etc",
        "",
        "ftp://x",
        "memory://a/../b",
    ],
)
def test_a_data_set_that_is_none_of_the_deployments_is_refused(elsewhere: str) -> None:
    url = pack_numbers(SAMPLES)
    with pytest.raises(EventError):
        invoked(url, events(url)[0] | {"dataset": elsewhere})


@pytest.mark.parametrize("event", [None, [], "x", {}, {"dataset": 3}, {"Records": []}])
def test_what_is_no_shuffle_event_is_refused(event: Any) -> None:
    with pytest.raises(EventError):
        invoked(pack_numbers(SAMPLES), event)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 99}, NotFoundError),
        ({"slices": 3, "lanes": 2}, ConfigError),
        ({"epoch": 10**9}, EventError),
        ({"part": 1}, ConfigError),
    ],
    ids=str,
)
def test_an_event_that_can_never_succeed_is_an_error_that_will_not_be_tried_again(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    url = pack_numbers(SAMPLES)
    with pytest.raises(error):
        invoked(url, events(url)[0] | changes)

    async def look(store: Store) -> None:
        assert await read_objects(store, "epochs/") == {}

    run_check(open_store(url), look)


def test_an_instance_with_too_little_memory_says_how_much_it_takes() -> None:
    url = pack_numbers(SAMPLES)
    with pytest.raises(MemoryBudgetError, match=r"16[0-9] MiB or more in total"):
        invoked(url, events(url)[0], memory_bytes=128 << 20)


def test_an_invocation_without_time_is_an_error_that_may_be_tried_again() -> None:
    url = pack_numbers(SAMPLES)
    with pytest.raises(DeadlineError, match="more time"):
        invoked(url, events(url)[0], stop_seconds=0.0)
    with pytest.raises(DeadlineError, match="slice 0 of epoch 0 could not stop in time"):
        invoked(url, events(url)[0], seconds=0.0)


def test_a_slice_by_ranges_without_time_writes_something_and_says_that_there_is_more(tmp_path: Path) -> None:
    url = pack_numbers(SAMPLES)
    event = events(url, way="ranged", object_bytes=700)[0]
    reached = 0
    for _ in range(60):
        result = invoked(url, event, stop_seconds=0.0)
        assert result["samples"] > reached, "each one comes farther"
        reached = result["samples"]
        if result["state"] == "complete":
            break
    assert reached == SAMPLES


def test_nothing_is_written_outside_the_epochs(tmp_path: Path) -> None:
    url = pack_numbers(SAMPLES)
    found: list[dict[str, bytes]] = []

    async def look(store: Store) -> None:
        found.append({key: data for key, data in (await read_objects(store)).items() if not key.startswith("epochs/")})

    run_check(open_store(url), look)
    for event in events(url, way="scattered", slices=2, keep=0):
        invoked(url, event)
    run_check(open_store(url), look)
    assert found[0] == found[1]
    assert ShuffleTask.from_event(events(url)[0]).dataset == url
