"""Tasks of an epoch, carried out in any way, any number of times, by anybody: always the same epoch."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Order, OrderConfig, Prices, Schema, open_store
from stoker._base.meter import FolderStore
from stoker._fetch.materialized_pipeline import read_epoch
from stoker._format.manifest import POINTER_KEY, Manifest, ManifestRows, PackRun, version_key
from stoker._format.supersample import SuperSample, SuperSampleRecord
from stoker._format.versions import read_manifest
from stoker.abc import ObjectInfo, Store
from stoker.errors import DeadlineError, MemoryBudgetError, NotFoundError, PackError, StoreError
from stoker.testing import DyingStore, FlakyStore, WatchedStore, run_virtual
from stoker_functions._shuffle_job.epochs import delete_epochs
from stoker_functions._shuffle_job.plan import PlanConfig, plan_ways
from stoker_functions._shuffle_job.work import ShuffleTask, Way, perform
from support.materialized import MEMORY_BYTES, WAYS, layout_of, perform_tasks, plan_tasks, write_epoch
from support.memory import ROUNDS, Memory
from support.packing import fresh_store, pack, read_objects
from support.same import same
from support.supersamples import EVERY_KIND, samples_of

SAMPLES = 150


async def packed(schema: Schema = EVERY_KIND, samples: int = SAMPLES) -> Store:
    """Return a store with a data set of columns of every kind, in many super-samples."""
    store = fresh_store()
    await pack(store, samples_of(schema, samples), schema=schema, super_sample_bytes=3000)
    return store


async def contents(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row in range(len(manifest)):
        data, info = await store.get(manifest.key(row))
        ref = manifest.ref(row)
        assert (info.tag, info.size_bytes) == (ref.tag, ref.size_bytes)
        sample = SuperSample(data)
        sample.verify()
        found += [sample[each] for each in range(len(sample))]
    return found


async def epoch_of(store: Store, task: ShuffleTask) -> Manifest:
    manifest = await read_epoch(store, await layout_of(store, task))
    assert manifest is not None
    return manifest


async def check_epoch(store: Store, task: ShuffleTask) -> None:
    """Check that an epoch has at every position what ``full`` has there."""
    source = await read_manifest(store, task.version)
    samples = await contents(store, source)
    epoch = await epoch_of(store, task)
    rows = await contents(FolderStore(store, (await layout_of(store, task)).folder), epoch)
    none = Order(epoch.rows.samples, OrderConfig(shuffle="none", lanes=task.lanes), task.epoch)
    full = Order(source.rows.samples, OrderConfig(shuffle="full", seed=task.seed), task.epoch)
    for row, number in zip(none.at(0, len(rows)).tolist(), full.at(0, len(samples)).tolist(), strict=True):
        assert same(rows[row], samples[number])


async def epoch_objects(store: Store) -> dict[str, bytes]:
    return {
        key: data
        for key, data in (await read_objects(store, "epochs/")).items()
        if "/data/" in key and "scattered" not in key
    }


CUTS = [(1, 1), (1, 3), (4, 1), (4, 2), (4, 4), (4, 8), (3, 3), (5, 15)]


# What is written.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("lanes", "slices"), CUTS)
def test_an_epoch_has_at_every_position_what_full_has(way: Way, lanes: int, slices: int) -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(way, lanes=lanes, slices=slices, scatters=3, epoch=2)
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


def test_more_scatters_than_super_samples_leave_some_without_work() -> None:
    async def main() -> None:
        store = await packed(samples=20)
        tasks = plan_tasks("scattered", slices=3, scatters=40)
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_of_small_columns_only_is_made_too(way: Way) -> None:
    async def main() -> None:
        store = await packed(Schema({"x": Array("int64"), "y": Array("float32", (2,))}))
        tasks = plan_tasks(way, lanes=2, slices=4)
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_more_lanes_than_samples_make_an_epoch_of_lanes_with_one_sample_or_none(way: Way) -> None:
    async def main() -> None:
        store = await packed(samples=5)
        tasks = plan_tasks(way, lanes=8, slices=8, scatters=1)
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


def test_every_way_writes_the_same_objects() -> None:
    async def main() -> list[dict[str, bytes]]:
        store = await packed()
        found = []
        for way in WAYS:
            await write_epoch(store, way=way, lanes=2, slices=4)
            found.append(await epoch_objects(store))
            for key in await read_objects(store, "epochs/"):
                await store.delete(key)
        return found

    ranged, streamed, scattered = asyncio.run(main())
    assert ranged == streamed == scattered
    assert len(ranged) > 8


def test_no_super_sample_of_an_epoch_is_shared_by_two_lanes_or_larger_than_requested() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(lanes=4, slices=2, object_bytes=1500)
        await perform_tasks(store, tasks)
        layout = await layout_of(store, tasks[0][0])
        epoch = await epoch_of(store, tasks[0][0])
        borders = np.cumsum([0, *epoch.rows.samples.tolist()])
        assert set(layout.lane_starts.tolist()) <= set(borders.tolist())
        bodies = epoch.rows.size_bytes.astype(int)
        largest = max(epoch.rows.samples.tolist())
        assert largest > 1
        assert bodies.max() < 1500 + 4096

    asyncio.run(main())


def test_what_was_scattered_is_gone_when_the_epoch_is_there() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks("scattered", slices=3, scatters=2)
        await perform_tasks(store, tasks[:-1])
        assert any("/scattered/" in key for key in await read_objects(store, "epochs/"))
        await perform_tasks(store, tasks[-1:])
        assert not any("/scattered/" in key for key in await read_objects(store, "epochs/"))
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


# Again, at the same time, killed.


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tasks_again_write_nothing(way: Way) -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(way, lanes=2, slices=4)
        await perform_tasks(store, tasks[:-1])
        watched = WatchedStore(store)
        await perform_tasks(watched, tasks[:-1])
        await perform_tasks(watched, tasks[-1:])
        writes = [call for call in watched.calls if call.startswith("put")]
        assert [call.rpartition("/")[2] for call in writes] == ["00000001.safetensors", "manifest.safetensors"]
        watched.calls.clear()
        await perform_tasks(watched, tasks)
        assert not [call for call in watched.calls if call.startswith(("put", "delete"))]

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tasks_at_the_same_time_make_one_epoch(way: Way) -> None:
    async def main() -> None:
        store = await packed()
        for phase in plan_tasks(way, lanes=2, slices=4):
            twins = [task for task in phase for _ in range(3)]
            results = await asyncio.gather(*(perform(store, task, memory_bytes=MEMORY_BYTES) for task in twins))
            assert all(result["state"] == "complete" for result in results)
        await check_epoch(store, plan_tasks(way, lanes=2, slices=4)[0][0])

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_task_that_is_killed_anywhere_is_gone_on_with(way: Way, late: bool) -> None:
    """At every fifth of its requests; each time by another process, which finds only what is in the store."""

    async def main() -> None:
        store = await packed(samples=60)
        tasks = [task for phase in plan_tasks(way, lanes=2, slices=2, object_bytes=900) for task in phase]
        for lives in itertools.count(0, 5):
            dying = DyingStore(store, lives, late=late)
            try:
                for task in tasks:
                    await perform(dying, task, memory_bytes=MEMORY_BYTES)
            except StoreError:
                assert dying.is_dead
            else:
                break
        assert lives > 20
        await check_epoch(store, tasks[0])

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_fails_once_changes_nothing(late: bool) -> None:
    async def main() -> None:
        task = plan_tasks("scattered", slices=2)[0][0]
        for number in range(0, 120, 7):
            store = await packed(samples=40)
            await perform_tasks(FlakyStore(store, number, late=late), plan_tasks("scattered", slices=2))
            await check_epoch(store, task)

    run_virtual(main())


class SlowWrites(WatchedStore):
    """Takes a second to write a super-sample."""

    async def before(self, number: int, operation: str, key: str) -> None:
        if operation == "put" and "/data/" in key:
            await asyncio.sleep(1.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_task_that_runs_out_of_time_says_how_far_it_is_and_continues(way: Way) -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(way, scatters=1, object_bytes=900)
        for task in [task for phase in tasks[:-1] for task in phase]:
            counts = [0]
            for _ in range(40):
                stop = asyncio.get_running_loop().time() + 0.5
                slow = SlowWrites(store)
                result = await perform(slow, task, memory_bytes=MEMORY_BYTES, stop_at_seconds=stop)
                counts.append(result["samples" if task.step == "slice" else "scattered_samples"])
                assert asyncio.get_running_loop().time() < stop + 3
                if result["state"] == "complete":
                    break
            assert counts == sorted(set(counts)), "each comes farther"
            assert (len(counts) > 4, counts[-1]) == (True, SAMPLES)
            assert not [key for key in await read_objects(store, "epochs/") if "/manifest" in key]
        await perform_tasks(store, tasks[-1:])
        await check_epoch(store, tasks[0][0])

    run_virtual(main())


def test_too_little_time_to_read_all_objects_is_reported() -> None:
    async def main() -> None:
        store = await packed()
        with pytest.raises(DeadlineError, match=r"0 of [0-9]+ super-samples"):
            await perform(store, plan_tasks("streamed")[0][0], memory_bytes=MEMORY_BYTES, stop_at_seconds=-math.inf)

    asyncio.run(main())


def test_cancelling_leaves_nothing_that_the_next_one_cannot_use() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks("ranged", lanes=2, slices=2, object_bytes=900)
        for turns in range(1, 400, 40):
            task = asyncio.create_task(perform(store, tasks[0][0], memory_bytes=MEMORY_BYTES))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert asyncio.all_tasks() == {asyncio.current_task()}
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


class Meanwhile(WatchedStore):
    """Runs another operation before the second write of a record."""

    def __init__(self, store: Store, act: Callable[[Store], Awaitable[object]]) -> None:
        super().__init__(store)
        self._act = act

    async def before(self, number: int, operation: str, key: str) -> None:
        records = [call for call in self.calls if call.startswith("put") and "/parts/" in call]
        if operation == "put" and "/parts/" in key and len(records) == 2:
            await self._act(self.store)


def test_a_part_that_the_commit_of_a_later_epoch_deletes_is_an_error_and_leaves_no_record_of_what_is_gone() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks("streamed", object_bytes=600)
        later = await layout_of(store, plan_tasks(epoch=9)[0][0])
        with pytest.raises(PackError, match="was deleted while it was written"):
            await perform_tasks(Meanwhile(store, lambda store: delete_epochs(store, later, keep=0)), tasks)
        assert not [key for key in await read_objects(store, "epochs/") if "/parts/" in key]
        await perform_tasks(store, tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


def test_a_scatter_of_an_epoch_committed_by_another_process_is_complete() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks("scattered", scatters=1, slices=2, object_bytes=600)

        async def commit(store: Store) -> None:
            await perform_tasks(store, tasks)
            assert not [key for key in await read_objects(store, "epochs/") if "/scattered/" in key]

        await perform_tasks(Meanwhile(store, commit), tasks)
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())


def test_slices_of_another_cut_than_the_one_that_was_committed_meanwhile_are_complete() -> None:
    async def main() -> None:
        store = await packed()
        four, two = (plan_tasks("scattered", slices=slices) for slices in (4, 2))
        await perform_tasks(store, four[:1])
        await perform_tasks(store, two)
        before = await read_objects(store)
        await perform_tasks(store, four[1:])
        assert await read_objects(store) == before

    asyncio.run(main())


# What is refused.


def refused(
    error: type[Exception],
    match: str,
    spoil: Callable[[Store, list[list[ShuffleTask]]], Awaitable[None]],
    way: Way,
    **cut: Any,
) -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(way, **{"slices": 2, **cut})

        async def spoil_and_carry_out() -> None:
            await spoil(store, tasks)
            await perform_tasks(store, tasks)

        with pytest.raises(error, match=match):
            await spoil_and_carry_out()
        assert await read_epoch(store, await layout_of(store, tasks[0][0])) is None

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::stoker.errors.CopiedBucketWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_is_spoilt_in_the_data_set_is_an_error_that_names_the_object(way: Way) -> None:
    async def spoil(store: Store, _: Any) -> None:
        key = (await read_manifest(store)).key(1)
        data, _info = await store.get(key)
        await store.put(key, data[:-1] + bytes([data[-1] ^ 1]))

    refused(StoreError, "data/", spoil, way)


def test_what_was_spoilt_between_scattering_and_writing_is_an_error() -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        await perform_tasks(store, tasks[:1])
        key = next(key for key in await read_objects(store, "epochs/") if "/scattered/data/" in key)
        data, info = await store.get(key)
        await store.put(key, data[:-1] + bytes([data[-1] ^ 1]), if_tag=info.tag)

    refused(StoreError, "scattered", spoil, "scattered")


def test_a_slice_before_its_scatters_is_an_error() -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        await perform_tasks(store, [[tasks[0][0]], tasks[1]])

    refused(PackError, "scatter 1 of 2 has not written all samples", spoil, "scattered")


def test_a_commit_before_its_slices_commits_nothing() -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        await perform_tasks(store, [[tasks[0][0]], tasks[1]])

    refused(PackError, "in 1 of 2 slices", spoil, "streamed")


def test_something_else_where_a_super_sample_belongs_is_left_alone() -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        layout = await layout_of(store, tasks[0][0])
        starts = layout.slice_starts(2).tolist()
        run = layout.run_id("slice", starts[0], starts[1], 2000)
        await store.put(f"{layout.folder}data/{run}/00000000", b"mine")

    refused(PackError, "has other contents", spoil, "streamed")


@pytest.mark.parametrize("bytes_", [b"", b"x" * 100, b"\xff" * 5000])
def test_a_record_that_is_none_is_an_error_that_names_it(bytes_: bytes) -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        layout = await layout_of(store, tasks[0][0])
        starts = layout.slice_starts(2).tolist()
        run = layout.run_id("slice", starts[0], starts[1], 2000)
        await store.put(f"{layout.folder}parts/{run}.safetensors", bytes_)

    refused(PackError, "parts/.* is damaged", spoil, "streamed")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda manifest, run: replace(manifest, dataset="0" * 16), "is of another data set"),
        (lambda manifest, run: replace(manifest, runs=(PackRun("0" * 16, 0, 3),)), "record of another part"),
        (lambda manifest, run: replace(manifest, runs=(PackRun(run, 1, 3),)), "record of another part"),
        (lambda manifest, run: with_samples(manifest, 1000), "record of another part"),
        (lambda manifest, run: with_samples(manifest, 70), "record of another part"),
    ],
    ids=["data set", "run", "numbers", "more than there are", "over the border of a lane"],
)
def test_a_record_of_something_else_is_an_error(change: Callable[[Manifest, str], Manifest], match: str) -> None:
    async def spoil(store: Store, tasks: list[list[ShuffleTask]]) -> None:
        layout = await layout_of(store, tasks[0][0])
        run = layout.run_id("slice", 0, SAMPLES, 2000)
        packed = [
            SuperSampleRecord(ordinal=number, size_bytes=90_000, samples=20, head_bytes=80_000, head_crc32c=1, crc32c=1)
            for number in range(3)
        ]
        schema = layout.manifest.schema
        rows = ManifestRows.of(packed)
        manifest = Manifest(dataset=layout.dataset, version=1, schema=schema, rows=rows, runs=(PackRun(run, 0, 3),))
        await store.put(f"{layout.folder}parts/{run}.safetensors", change(manifest, run).to_bytes())

    refused(PackError, match, spoil, "streamed", slices=1, lanes=2)


def with_samples(manifest: Manifest, samples: int) -> Manifest:
    """Return a manifest whose second super-sample has the given number of samples."""
    packed = [manifest.rows.record(row, row) for row in range(len(manifest))]
    packed[1] = replace(packed[1], samples=samples)
    return replace(manifest, rows=ManifestRows.of(packed))


def test_a_version_that_does_not_exist_is_named() -> None:
    async def main() -> None:
        with pytest.raises(NotFoundError, match="no version 3"):
            await write_epoch(await packed(), version=3)

    asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_is_too_small_is_an_error_that_names_a_figure(way: Way) -> None:
    async def main() -> None:
        store = await packed()
        with pytest.raises(MemoryBudgetError, match=r"MiB|KiB"):
            await perform_tasks(store, plan_tasks(way), memory_bytes=100_000)

    asyncio.run(main())


LARGE = Schema({"x": Array("int64"), "image": Array("uint8", (100, 100)), "sound": Bytes()})
LARGE_BYTES = 3 << 20
BUDGET_BYTES = 1280 << 10


async def large(store: Store) -> Store:
    """Put samples into a store that take more than twice the budget."""
    samples = samples_of(LARGE, LARGE_BYTES // 10_000)
    await pack(store, samples, schema=LARGE, super_sample_bytes=44_000)
    return store


@pytest.mark.parametrize("way", WAYS)
def test_no_task_takes_more_than_its_memory(way: Way, tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        store = await large(open_store(tmp_path))  # not in memory, where it would count, too
        manifest = await read_manifest(store)
        config = PlanConfig(lanes=2, memory_bytes=BUDGET_BYTES, store=Prices.load().store("s3"))
        plan = next(plan for plan in plan_ways(manifest, config) if plan.way == way)
        assert not plan.problem
        memory = Memory()
        for epoch in range(ROUNDS):
            tasks = plan.phases(dataset="any", version=1, seed=7, epoch=epoch, lanes=2, keep=1)
            with memory.round():
                await perform_tasks(store, tasks[:-1], BUDGET_BYTES)
            await perform_tasks(store, tasks[-1:], BUDGET_BYTES)
            await check_epoch(store, tasks[0][0])
            if memory.peak_bytes < BUDGET_BYTES:
                break
        return memory.peak_bytes, manifest.size_bytes

    peak_bytes, size_bytes = asyncio.run(main())
    assert size_bytes > 2 * BUDGET_BYTES
    assert peak_bytes < BUDGET_BYTES


@pytest.mark.parametrize("way", ["streamed", "scattered"])
def test_what_does_not_fit_in_memory_says_how_many_more_parts_there_have_to_be(way: Way) -> None:
    async def main() -> None:
        store = await large(fresh_store())
        with pytest.raises(MemoryBudgetError, match=r"[2-9]\.[0-9] times as many parts"):
            await perform_tasks(store, plan_tasks(way, scatters=1, object_bytes=22_000), BUDGET_BYTES)

    asyncio.run(main())


# What is visible, and what is deleted.


def test_nothing_is_visible_before_the_commit() -> None:
    async def main() -> None:
        store = await packed()
        tasks = plan_tasks(slices=3)
        layout = await layout_of(store, tasks[0][0])
        for phase in tasks:
            for task in phase:
                assert await read_epoch(store, layout) is None
                await perform_tasks(store, [[task]])
        assert await read_epoch(store, layout) is not None

    asyncio.run(main())


def test_the_first_of_two_cuts_of_an_epoch_is_committed_and_the_other_one_left_alone() -> None:
    async def main() -> None:
        store = await packed()
        two, three = plan_tasks(slices=2), plan_tasks(slices=3)
        await perform_tasks(store, two[:-1])
        await perform_tasks(store, three)
        epoch = await epoch_of(store, three[0][0])
        await perform_tasks(store, two[-1:])
        assert (await epoch_of(store, two[0][0])).to_bytes() == epoch.to_bytes()
        await check_epoch(store, two[0][0])

    asyncio.run(main())


def test_a_commit_deletes_the_epochs_of_its_run_that_are_older_than_is_kept_and_nothing_else() -> None:
    async def main() -> None:
        store = await packed(samples=30)
        for epoch in range(4):
            await write_epoch(store, epoch=epoch, keep=99)
        await write_epoch(store, epoch=0, seed=8, keep=99)
        await write_epoch(store, epoch=0, lanes=2, keep=99)
        before = await read_objects(store)
        await write_epoch(store, epoch=4, keep=1)
        layouts = [await layout_of(store, plan_tasks(epoch=epoch)[0][0]) for epoch in range(5)]
        there = [await read_epoch(store, layout) is not None for layout in layouts]
        assert there == [False, False, False, True, True]
        after = await read_objects(store)
        gone = set(before) - set(after)
        assert gone == {key for key in before if key.startswith(tuple(each.folder for each in layouts[:3]))}

    asyncio.run(main())


def test_what_is_old_goes_in_the_order_in_which_nothing_names_what_is_not_there() -> None:
    async def main() -> None:
        store = await packed(samples=30)
        await write_epoch(store, epoch=0, slices=2)
        watched = WatchedStore(store)
        await write_epoch(watched, epoch=5, keep=0)
        deleted = [call.split("/")[3] for call in watched.calls if call.startswith("delete")]
        assert deleted == sorted(deleted, key=lambda name: (not name.startswith("manifest"), name != "parts"))
        assert set(deleted) == {"manifests", "manifest.safetensors", "parts", "data"}

    asyncio.run(main())


def test_an_epoch_of_which_only_the_copy_of_its_manifest_is_left_is_made_again() -> None:
    """As where one process deletes it while another one commits it."""

    async def main() -> None:
        store = await packed(samples=30)
        await write_epoch(store)
        task = plan_tasks()[0][0]
        folder = (await layout_of(store, task)).folder
        for key in await read_objects(store, folder):
            if key != f"{folder}{POINTER_KEY}":
                await store.delete(key)
        await write_epoch(store)
        await check_epoch(store, task)

    asyncio.run(main())


def test_deleting_that_runs_out_of_time_is_gone_on_with() -> None:
    async def main() -> None:
        store = await packed(samples=30)
        await write_epoch(store, epoch=0, slices=2)
        layout = await layout_of(store, plan_tasks(epoch=5)[0][0])
        assert await delete_epochs(store, layout, keep=0, stop_at_seconds=-math.inf) == (0, (), False)
        deleted = await delete_epochs(store, layout, keep=0)
        assert (deleted.objects > 3, deleted.epochs, deleted.is_all) == (True, (0,), True)
        assert await read_objects(store, "epochs/") == {}
        assert await delete_epochs(store, layout, keep=0) == (0, (), True)

    asyncio.run(main())


# Finding an epoch.


@pytest.mark.parametrize("data", [b"", b"junk" * 100, "another", "cut"])
def test_a_manifest_of_another_epoch_counts_as_missing_and_is_reported(
    data: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        store = await packed(samples=30)
        task = plan_tasks()[0][0]
        await write_epoch(store)
        layout = await layout_of(store, task)
        key = layout.folder + version_key(1)
        there, _ = await store.get(key)
        content = {"another": (await read_manifest(store)).to_bytes(), "cut": there[:-1]}.get(str(data), data)
        assert isinstance(content, bytes)
        await store.put(key, content)
        assert await read_epoch(store, layout) is None
        with pytest.raises(Exception, match="epochs/"):
            await perform_tasks(store, plan_tasks())

    asyncio.run(main())
    assert "cannot be used" in caplog.text


def test_finding_an_epoch_takes_one_request() -> None:
    async def main() -> None:
        store = await packed(samples=30)
        layout = await layout_of(store, plan_tasks()[0][0])
        watched = WatchedStore(store)
        assert await read_epoch(watched, layout) is None
        await write_epoch(store)
        assert await read_epoch(watched, layout) is not None
        assert watched.calls == [f"get {layout.folder}{version_key(1)}"] * 2

    asyncio.run(main())


def test_a_manifest_or_record_that_is_damaged_on_its_way_is_read_again() -> None:
    class Damaging(WatchedStore):
        async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
            is_first = f"get {key}" not in self.calls
            data, info = await super().get(key)
            return (data[:-1] + bytes([data[-1] ^ 1]) if is_first and key.startswith("epochs/") else data), info

    async def main() -> None:
        store = await packed(samples=30)
        tasks = plan_tasks()
        await perform_tasks(store, tasks[:1])
        await perform_tasks(Damaging(store), tasks)
        assert await read_epoch(Damaging(store), await layout_of(store, tasks[0][0])) is not None
        await check_epoch(store, tasks[0][0])

    asyncio.run(main())
