"""pack as part of a permutation: staged parts become slices of one uniform order, however often each event arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from stoker import RetryingStore, open_store
from stoker._fanout.job import JobConfig, PackJob, plan_job, plan_permutation
from stoker._format.manifest import Manifest
from stoker._format.pack_shuffle import PackShuffle
from stoker._maintenance.garbage import collect_garbage
from stoker._pack.shuffle import delete_work_folder, publish_staged, read_staged, work_url
from stoker._sources import open_source
from stoker.abc import Store
from stoker.errors import EventError, MemoryBudgetError, NotFoundError, PackError
from stoker.fanout import Task
from stoker.testing import WatchedStore, run_virtual
from stoker_functions._commit import commit
from stoker_functions._deployment import InvocationDeadline
from stoker_functions._pack import pack
from support.deployments import DelayedStore, Place, plenty
from support.function_rights import RIGHTS, GuardedStore
from support.packing import read_objects
from unit.pack.test_permuted_pack import expected_order

SAMPLES, SEED = 60, 7
_Wrap = Callable[[Store], Store]


def same(store: Store) -> Store:
    return store


class Permuting:
    """A job that permutes the raw objects of a place."""

    def __init__(self, place: Place, *, append: bool = False, part_bytes: int = 4000) -> None:
        self.place, self.store = place, open_store(place.dataset)
        self.config = JobConfig(
            dataset=place.dataset, append=append, super_sample_bytes=2000, part_bytes=part_bytes, shuffle=SEED
        )

    async def plan(self) -> PackJob:
        source = await open_source(self.place.raw, "files")
        return await plan_job(source, self.store, self.config)

    async def run(self, tasks: tuple[Task, ...], wrap: _Wrap = same, times: int = 1) -> list[dict[str, Any]]:
        """Send the events of tasks in an awkward order, each several times, and return the last results."""
        results = []
        for task in reversed(tasks):
            for _ in range(times):
                handler = {"pack": pack, "commit": commit}[task.function]
                result = await handler(task.event, self.place.deployment(wrap), plenty())
            results.append(result)
        return results

    async def stage(self) -> tuple[PackJob, Manifest]:
        job = await self.plan()
        await self.run(job.tasks)
        return job, await publish_staged(self.store, job.id, job.runs)

    async def perform(self, wrap: dict[str, _Wrap] | None = None, times: int = 1) -> PackJob:
        wraps = wrap or {"pack": same, "commit": same}
        job = await self.plan()
        await self.run(job.tasks, wraps["pack"], times)
        staged = await publish_staged(self.store, job.id, job.runs)
        for tasks in plan_permutation(job, staged, self.config).values():
            await self.run(tasks, wraps[tasks[0].function] if tasks else same, times)
        await delete_work_folder(RetryingStore(self.store), job.id)
        return job


def guard(name: str) -> _Wrap:
    return lambda store: GuardedStore(store, RIGHTS[name], "functions-raw" in store.url)


@pytest.mark.parametrize("part_bytes", [4000, 1 << 20], ids=["in slices", "in one slice"])
def test_the_samples_have_the_order_of_a_permuting_pack_in_one_process(part_bytes: int) -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(SAMPLES))
        permuting = Permuting(place, part_bytes=part_bytes)
        rights = {"pack": guard("pack"), "commit": guard("commit")}  # those that the deployment files give
        job = await permuting.perform(rights, times=2)
        assert await place.numbers() == expected_order(SAMPLES, SEED)
        manifest = await place.manifest()
        assert manifest is not None
        assert set(manifest.shuffles.values()) == {PackShuffle(SEED, job.id)}
        assert manifest.shuffles.keys() == {run.run for run in manifest.runs}
        report = await collect_garbage(permuting.store)
        assert (report.objects, report.records, report.unfinished) == ((), (), {})

    asyncio.run(main())


def test_a_repeated_append_finds_itself_committed() -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(20))
        await Permuting(place).perform()
        again = Permuting(place, append=True)
        await again.perform()
        job = await again.plan()
        assert job.is_committed
        (result,) = await again.run((job.commit,))
        assert (result["version"], result["samples"], result["added_samples"]) == (2, 40, 0)
        appended = (await place.numbers())[20:]
        assert appended == expected_order(20, SEED)

    asyncio.run(main())


def test_a_task_stops_before_the_deadline_and_the_same_event_continues_to_the_same_objects() -> None:
    async def main() -> None:
        whole, place = Place(), Place()
        place.raw = whole.raw
        await whole.put(range(1000))
        await Permuting(whole, part_bytes=165_000).perform()
        permuting = Permuting(place, part_bytes=165_000)
        job, staged = await permuting.stage()
        states = []
        for tasks in list(plan_permutation(job, staged, permuting.config).values())[:2]:
            for task in tasks:
                state = "packing"
                while state == "packing":
                    slow = place.deployment(lambda store: DelayedStore(store, 0.5))
                    state = (await pack(task.event, slow, InvocationDeadline.after(8.0)))["state"]
                    states.append(state)
        assert states.count("packing") > 1
        assert await read_objects(permuting.store, "data/") == await read_objects(open_store(whole.dataset), "data/")

    run_virtual(main())


def test_nothing_of_an_unfinished_job_is_visible_and_it_is_garbage_once_it_is_given_up() -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(SAMPLES))
        permuting = Permuting(place)
        job, staged = await permuting.stage()
        assert await place.manifest() is None
        with pytest.raises(NotFoundError, match="no data set"):
            await read_manifest_at(work_url(place.dataset, job.id))
        assert list((await collect_garbage(permuting.store)).unfinished) == [job.id]
        phases = plan_permutation(job, staged, permuting.config)
        await permuting.run(phases["scattering"])
        await permuting.run(phases["permuting"][:2])
        kept = await collect_garbage(permuting.store, delete=True)
        assert not kept.objects
        assert await read_objects(permuting.store, "packs/")
        given_up = await collect_garbage(permuting.store, delete=True, abandoned=[job.id])
        assert given_up.objects
        assert await read_objects(permuting.store) == {}

    async def read_manifest_at(url: str) -> None:
        from stoker._format.versions import read_manifest

        await read_manifest(open_store(url))

    asyncio.run(main())


def test_parts_that_are_incomplete_are_not_permuted() -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(SAMPLES))
        permuting = Permuting(place)
        job = await permuting.plan()
        await permuting.run(job.tasks[1:])
        with pytest.raises(PackError, match=r"1 of \d+ parts of job .* are incomplete"):
            await publish_staged(permuting.store, job.id, job.runs)
        with pytest.raises(NotFoundError):
            await read_staged(permuting.store, job.id)

    asyncio.run(main())


def test_slices_before_their_scatters_fail_and_write_nothing() -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(SAMPLES))
        permuting = Permuting(place)
        job, staged = await permuting.stage()
        slices = plan_permutation(job, staged, permuting.config)["permuting"]
        with pytest.raises(PackError, match="complete the scatters first"):
            await permuting.run(slices)
        assert not await read_objects(permuting.store, "data/")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": 9, "parts": 9}, "part"),
        ({"step": "commit"}, "step"),
        ({"seed": -1}, "seed"),
        ({"more": 1}, "more"),
    ],
)
def test_an_event_that_is_no_task_is_refused(changes: dict[str, Any], message: str) -> None:
    event = {
        "dataset": "memory://anything",
        "dataset_id": "0" * 16,
        "job": "0" * 16,
        "super_sample_bytes": 2000,
        "shuffle": {"seed": 1, "parts": 2, "step": "slice", "part": 0, **changes},
    }

    async def main() -> None:
        with pytest.raises(EventError, match=message):
            await pack(event, Place().deployment(), plenty())

    asyncio.run(main())


def test_a_function_with_too_little_memory_says_how_much_it_needs() -> None:
    async def main() -> None:
        place = Place()
        await place.put(range(SAMPLES))
        permuting = Permuting(place)
        job, staged = await permuting.stage()
        (task, *_) = plan_permutation(job, staged, permuting.config)["scattering"]
        watched: list[WatchedStore] = []

        def watch(store: Store) -> Store:
            watched.append(WatchedStore(store))
            return watched[-1]

        with pytest.raises(MemoryBudgetError, match="MiB or more in total"):
            await pack(task.event, place.deployment(watch, memory_bytes=160 << 20), plenty())
        assert not [call for store in watched for call in store.calls if call.startswith("put")]

    asyncio.run(main())
