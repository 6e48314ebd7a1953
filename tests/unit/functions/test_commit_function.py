"""commit: finished runs become one version of the manifest, all at once, each raw object once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

from stoker import Bytes, RetryingStore, Schema, Text, open_store
from stoker._format import versions
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.merge import DedupIndex, merge
from stoker._pack.record import SOURCE_RETENTION_SECONDS, PackRecord, record_key
from stoker._sources.parts import SourcePart
from stoker.abc import ObjectInfo, Store
from stoker.errors import DatasetExistsError, EventError, PackError, StokerError
from stoker.testing import DyingStore, WatchedStore, run_virtual
from stoker_functions._commit import commit, compact
from stoker_functions._deployment import open_catalog
from stoker_functions._pack import pack
from support.deployments import DelayedStore, Place, plenty
from support.packing import read_objects

JOB = "a" * 16


async def packed(place: Place, raw: range | list[ObjectInfo], **changes: Any) -> SourcePart:
    """Pack raw objects, or those of these numbers, as a run of its own, and return what it was made of."""
    objects = await place.put(raw) if isinstance(raw, range) else raw
    part = place.part(objects, **{"is_remembered": True, **changes})
    assert (await pack(part.to_json(), place.deployment(), plenty()))["state"] == "complete"
    return part


async def commit_all(place: Place, **changes: Any) -> dict[str, Any]:
    return await commit({"dataset": place.dataset, **changes}, place.deployment(), plenty())


def job_event(place: Place, runs: Iterable[str], mode: str = "create") -> dict[str, Any]:
    return {"dataset": place.dataset, "job": JOB, "runs": list(runs), "mode": mode}


def test_with_nothing_that_waits_nothing_is_written() -> None:
    async def main() -> None:
        place = Place()
        unfinished = place.part(await place.put(range(3)))
        await (await place.deployment().catalog(place.dataset).journal(unfinished.run)).save(unfinished.record())
        nothing = await commit_all(place)
        assert (nothing["version"], nothing["samples"], nothing["runs"]) == (0, 0, 0)
        assert await place.keys() == [record_key(unfinished.run)]
        await packed(place, range(10))
        await commit_all(place)
        before = await read_objects(open_store(place.dataset))
        again = await commit_all(place)
        assert (again["version"], again["samples"], again["runs"], again["added_samples"]) == (1, 10, 0, 0)
        assert await read_objects(open_store(place.dataset)) == before

    asyncio.run(main())


def test_with_nothing_that_waits_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place = Place()
        await packed(place, range(10))
        await commit_all(place)

        class Unwanted(DedupIndex):
            def __init__(self, names: object) -> None:
                raise AssertionError("millions of names are sorted needlessly")

        monkeypatch.setattr("stoker._pack.merge.DedupIndex", Unwanted)
        assert (await commit_all(place))["samples"] == 10
        await packed(place, range(10, 20))
        with pytest.raises(AssertionError, match="needlessly"):
            await commit_all(place)

    asyncio.run(main())


def test_all_runs_that_wait_become_one_version() -> None:
    async def main() -> None:
        place = Place()
        for start in (0, 10, 20):
            await packed(place, range(start, start + 10))
        result = await commit_all(place)
        expected = {"version": 1, "samples": 30, "added_samples": 30, "repeated_samples": 0, "runs": 3, "refused": []}
        assert {name: result[name] for name in expected} == expected
        assert sorted(await place.numbers()) == list(range(30))

    asyncio.run(main())


def test_an_unfinished_run_waits_until_it_is_finished() -> None:
    async def main() -> None:
        place = Place()
        await packed(place, range(10))
        late = place.part(await place.put(range(10, 20)), is_remembered=True)
        await (await place.deployment().catalog(place.dataset).journal(late.run)).save(late.record())
        assert (await commit_all(place))["runs"] == 1
        await pack(late.to_json(), place.deployment(), plenty())
        assert (await commit_all(place))["version"] == 2
        assert await place.numbers() == list(range(20))

    asyncio.run(main())


def test_raw_objects_that_came_in_two_groups_are_there_once_and_counted() -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(15))
        await packed(place, raw[:10])
        await packed(place, raw[5:])
        result = await commit_all(place)
        assert (result["samples"], result["repeated_samples"]) == (15, 5)
        await packed(place, raw[3:12])
        result = await commit_all(place)
        assert (result["version"], result["samples"], result["repeated_samples"]) == (1, 15, 9)
        assert sorted(await place.numbers()) == list(range(15))

    asyncio.run(main())


def test_two_commits_at_the_same_time_make_one_version_of_each_run() -> None:
    async def main() -> None:
        place = Place()
        for start in range(0, 60, 10):
            await packed(place, range(start, start + 10))
        slow = [place.deployment(lambda store: DelayedStore(store, 0.01)) for _ in range(4)]
        results = await asyncio.gather(*(commit({"dataset": place.dataset}, one, plenty()) for one in slow))
        assert sum(result["runs"] for result in results) == 6
        assert sorted(await place.numbers()) == list(range(60))

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_a_commit_that_lost_a_race_counts_what_it_left_out_once(seed: int) -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(15))
        await packed(place, raw[:10])
        await commit_all(place)
        await packed(place, raw[5:], super_sample_bytes=2000 + seed)  # the runs come in another order each time
        other: list[str] = []

        class Overtaken(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                if operation == "put" and key == "manifests/00000002.safetensors" and not other:
                    other.append("")
                    other[:] = [(await packed(place, range(20, 25))).run]
                    await merge_now(place, keep=other)

        result = await commit({"dataset": place.dataset}, place.deployment(Overtaken), plenty())
        assert (result["version"], result["samples"], result["repeated_samples"]) == (3, 20, 5)
        assert sorted(await place.numbers()) == [*range(15), *range(20, 25)]

    run_virtual(main())


async def merge_now(place: Place, keep: list[str]) -> None:
    """Commit some runs alone, as if the others' records had come later."""
    store = RetryingStore(open_store(place.dataset))

    catalog = open_catalog(store, place.deployment().settings)
    every = catalog.records

    async def some() -> list[PackRecord]:
        return [record for record in await every() if record.is_committed or record.run in keep]

    with patch.object(catalog, "records", some):
        await merge(store, catalog, now_seconds=1e9)


def test_a_job_is_committed_whole_in_order_and_only_by_itself() -> None:
    async def main() -> None:
        place = Place()
        parts = [await packed(place, range(n, n + 10), job=JOB, is_remembered=False) for n in (20, 0, 10)]
        assert (await commit_all(place))["runs"] == 0
        result = await commit(job_event(place, [part.run for part in parts]), place.deployment(), plenty())
        assert (result["version"], result["runs"], result["samples"]) == (1, 3, 30)
        assert await place.numbers() == [*range(20, 30), *range(20)]

    asyncio.run(main())


@pytest.mark.parametrize("lacks", ["a record", "its end"])
def test_a_job_of_which_one_run_is_not_finished_commits_nothing(lacks: str) -> None:
    async def main() -> None:
        place = Place()
        done = await packed(place, range(10), job=JOB)
        late = place.part(await place.put(range(10, 20)), job=JOB)
        if lacks == "its end":
            await (await place.deployment().catalog(place.dataset).journal(late.run)).save(late.record())
        with pytest.raises(PackError, match=f"1 of 2 parts of job {JOB} are incomplete.*{late.run}"):
            await commit(job_event(place, [done.run, late.run]), place.deployment(), plenty())
        assert await place.manifest() is None

    asyncio.run(main())


def test_a_job_that_is_to_create_a_data_set_does_not_add_to_one_that_is_there() -> None:
    async def main() -> None:
        place = Place()
        await packed(place, range(10))
        await commit_all(place)
        part = await packed(place, range(10, 20), job=JOB)
        with pytest.raises(DatasetExistsError, match="--append"):
            await commit(job_event(place, [part.run]), place.deployment(), plenty())
        assert (await commit(job_event(place, [part.run], "append"), place.deployment(), plenty()))["samples"] == 20

    asyncio.run(main())


def test_a_job_that_is_committed_is_not_committed_again() -> None:
    async def main() -> None:
        place = Place()
        part = await packed(place, range(10), job=JOB)
        for _ in range(3):
            result = await commit(job_event(place, [part.run]), place.deployment(), plenty())
            assert (result["version"], result["samples"]) == (1, 10)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"job": JOB, "runs": []}, "'runs'"),
        ({"job": JOB, "runs": ["b" * 16, "b" * 16]}, "twice"),
        ({"runs": ["b" * 16]}, "'job'"),
        ({"mode": "create"}, "'job'"),
        ({"job": JOB, "runs": ["../../../secret"]}, "'run'"),
        ({"job": JOB, "runs": ["b" * 16], "mode": "replace"}, "'mode'"),
        ({"job": "x"}, "'job'"),
        ({"dataset": 3}, "'dataset'"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
    ],
)
def test_an_event_that_says_something_else_than_it_seems_to_is_refused(change: dict[str, Any], problem: str) -> None:
    async def main() -> None:
        with pytest.raises(EventError, match=problem):
            await commit_all(Place(), **change)

    asyncio.run(main())


def test_runs_of_another_data_set_or_with_other_columns_are_refused_and_do_not_stand_in_the_way() -> None:
    async def main() -> None:
        place = Place()
        await packed(place, range(10))
        await commit_all(place)
        foreign = await packed(place, range(10, 20), dataset_id="e" * 16)
        elsewhere = place.part(await place.put([90]), job=JOB, dataset_id="e" * 16)
        await pack(elsewhere.to_json(), place.deployment(), plenty())
        await packed(place, range(20, 30))
        result = await commit_all(place)
        assert (result["refused"], result["samples"]) == ([foreign.run], 20)
        unfinished = (await collect_garbage(open_store(place.dataset))).unfinished
        assert {each.run for each in unfinished.values() if each.is_refused} == {foreign.run, elsewhere.run}
        assert set((await collect_garbage(open_store(place.dataset), abandoned=[foreign.run])).unfinished) == {
            elsewhere.run
        }
        with pytest.raises(PackError, match="packed for another data set"):
            await commit(job_event(place, [elsewhere.run], "append"), place.deployment(), plenty())

    asyncio.run(main())


def test_a_data_set_begins_with_runs_of_one_kind() -> None:
    async def main() -> None:
        place = Place()
        other = Schema({"path": Text(), "data": Bytes()})
        await packed(place, range(10))
        await packed(place, range(10, 20), schema=other)
        result = await commit_all(place)
        assert (result["runs"], result["samples"], len(result["refused"])) == (1, 10, 1)

    asyncio.run(main())


def test_nothing_is_committed_on_top_of_a_manifest_that_is_lost() -> None:
    async def main() -> None:
        place = Place()
        await packed(place, range(10))
        await commit_all(place)
        store = open_store(place.dataset)
        for key in [*await place.keys("manifests/"), "manifest.safetensors"]:
            await store.delete(key)
        await packed(place, range(10, 20))
        with pytest.raises(PackError, match="rebuild-manifest"):
            await commit_all(place)
        await rebuild_manifest(store)
        assert await place.numbers() == list(range(10))
        assert (await commit_all(place))["samples"] == 20

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
def test_a_commit_that_dies_at_any_operation_is_completed_by_the_next(late: bool) -> None:
    async def main() -> None:
        whole = Place()
        raw = await whole.put(range(30))
        first, second, third = raw[:10], raw[5:15], raw[15:]
        deaths = 0
        for lives in range(200):
            place = Place()
            place.raw = whole.raw
            for objects in (first, second):
                await pack(remembered(place, objects), place.deployment(), plenty())
            dying: list[DyingStore] = []
            try:
                await commit({"dataset": place.dataset}, place.deployment(killed(dying, lives, late)), plenty())
            except StokerError:
                deaths += 1
            assert len(await place.numbers()) in (0, 15)
            await pack(remembered(place, third), place.deployment(), plenty())
            await commit_all(place)
            assert sorted(await place.numbers()) == list(range(30))
            if not any(store.is_dead for store in dying):
                break
        assert deaths > 15

    run_virtual(main())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
def test_a_job_whose_commit_dies_at_any_operation_is_there_whole_or_not_at_all(late: bool) -> None:
    async def main() -> None:
        whole = Place()
        groups = [await whole.put(range(start, start + 10)) for start in (0, 10, 20)]
        for lives in range(200):
            place = Place()
            place.raw = whole.raw
            parts = [place.part(objects, job=JOB) for objects in groups]
            for part in parts:
                await pack(part.to_json(), place.deployment(), plenty())
            event = job_event(place, [part.run for part in parts])
            dying: list[DyingStore] = []
            with suppress(StokerError):
                await commit(event, place.deployment(killed(dying, lives, late)), plenty())
            assert await place.numbers() in ([], list(range(30)))
            result = await commit(event, place.deployment(), plenty())
            assert (result["version"], result["samples"]) == (1, 30)
            if not any(store.is_dead for store in dying):
                break
        assert lives > 10

    run_virtual(main())


def test_what_came_twice_and_was_left_out_is_not_adopted() -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(20))
        await packed(place, raw[:15])
        twice = await packed(place, raw[5:15])
        await commit_all(place)
        report = await rebuild_manifest(open_store(place.dataset), adopt=True)
        assert report.adopted == ()
        assert {bad.key.split("/")[1] for bad in report.refused} == {twice.run}
        assert all("may be in it already" in bad.problem for bad in report.refused)
        assert await place.numbers() == list(range(15))

    asyncio.run(main())


def test_what_waits_for_its_commit_cannot_be_given_up_and_jobs_and_unfinished_runs_can() -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(40))
        await packed(place, raw[:10])
        await commit_all(place)
        waits = await packed(place, raw[10:20])
        job = await packed(place, raw[20:30], job=JOB, is_remembered=False)
        unfinished = place.part(raw[30:])
        await (await place.deployment().catalog(place.dataset).journal(unfinished.run)).save(unfinished.record())
        store = open_store(place.dataset)
        before = await read_objects(store)
        for named in ([waits.run], [JOB, waits.run]):
            with pytest.raises(PackError, match=f"the next commit to {place.dataset} adds 1 run .*: {waits.run}"):
                await collect_garbage(store, delete=True, abandoned=named)
        assert set((await collect_garbage(store, delete=True)).unfinished) == {waits.run, job.run, unfinished.run}
        assert await read_objects(store) == before
        report = await collect_garbage(store, delete=True, abandoned=[JOB, unfinished.run])
        assert set(report.unfinished) == {waits.run}
        assert sorted(report.records) == sorted([record_key(job.run), record_key(unfinished.run)])
        assert {info.key.split("/")[1] for info in report.objects} == {job.run}
        assert (await commit_all(place))["samples"] == 20
        assert await place.numbers() == list(range(20))

    asyncio.run(main())


def killed(stores: list[DyingStore], lives: int, late: bool) -> Callable[[Store], Store]:
    """Return what makes stores of an instance that dies, and notes them."""

    def wrap(store: Store) -> Store:
        stores.append(DyingStore(store, lives, late=late))
        return stores[-1]

    return wrap


def remembered(place: Place, objects: list[ObjectInfo]) -> dict[str, Any]:
    return place.part(objects, is_remembered=True).to_json()


def test_a_run_that_is_packed_again_when_it_was_compacted_away_is_not_added_again() -> None:
    async def main() -> None:
        for changes in ({"is_remembered": True}, {"is_remembered": False}, {"is_remembered": False, "job": JOB}):
            place = Place()
            part = await packed(place, range(10), **changes)
            event = job_event(place, [part.run]) if part.job else {"dataset": place.dataset}
            await commit(event, place.deployment(), plenty())
            done = await compact({"dataset": place.dataset, "super_sample_bytes": 9000}, place.deployment(), plenty())
            assert done["objects_after"] == 1
            await collect_garbage(open_store(place.dataset), delete=True, keep_versions=1)
            assert record_key(part.run) not in await place.keys("packs/")
            assert (await commit(event, place.deployment(), plenty()))["samples"] == 10
            await pack(part.to_json(), place.deployment(), plenty())
            if part.job:
                event["mode"] = "append"
            assert (await commit(event, place.deployment(), plenty()))["samples"] == 10
            assert await place.numbers() == list(range(10))

    asyncio.run(main())


def test_raw_objects_are_remembered_for_longer_than_a_queue_keeps_messages() -> None:
    async def main() -> None:
        place = Place()
        store = RetryingStore(open_store(place.dataset))
        catalog = open_catalog(store, place.deployment().settings)
        raw = await place.put(range(10))
        await packed(place, raw)
        await merge(store, catalog, now_seconds=1e9)
        for days, samples in ((14, 10), (15.1, 20)):
            part = await packed(place, raw, super_sample_bytes=2001 + int(days))
            merged = await merge(store, catalog, now_seconds=1e9 + days * 86_400)
            assert merged.manifest is not None
            assert merged.manifest.samples == samples
            assert (record_key(part.run) in await place.keys("packs/")) == (days > 15)
        assert SOURCE_RETENTION_SECONDS == 15 * 86_400

    asyncio.run(main())


def test_what_the_packer_appends_and_what_functions_take_in_are_both_there() -> None:
    async def main() -> None:
        from stoker._pack.packer import AsyncPacker
        from stoker._pack.plan import PackConfig
        from stoker._sources.folders import files_schema

        place = Place()
        await packed(place, range(10))
        await commit_all(place)
        config = PackConfig(schema=files_schema(), mode="append", super_sample_bytes=2000, source="laptop")
        async with AsyncPacker(open_store(place.dataset), config) as packer:
            for number in range(10, 20):
                info = (await place.put([number]))[0]
                data, _ = await open_store(place.raw).get(info.key)
                await packer.write({"data": data, "path": info.key})
                if number == 15:
                    await packed(place, range(20, 30))
                    await commit_all(place)
        await packed(place, range(30, 40))
        result = await commit_all(place)
        assert result["version"] == 4
        assert sorted(await place.numbers()) == list(range(40))
        newest = await versions.read_manifest(open_store(place.dataset))
        assert newest.version == 4

    asyncio.run(main())


def test_rebuilding_the_manifest_adopts_nothing_of_a_job_that_waits_for_its_commit() -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(30))
        await packed(place, raw[:10], is_remembered=False)
        await commit_all(place)
        parts = [await packed(place, raw[n : n + 10], is_remembered=False, job=JOB) for n in (10, 20)]
        report = await rebuild_manifest(open_store(place.dataset), adopt=True)
        assert (report.adopted, report.refused, report.orphans) == ((), (), ())
        event = job_event(place, [part.run for part in parts], "append")
        assert (await commit(event, place.deployment(), plenty()))["samples"] == 30
        assert await place.numbers() == list(range(30))

    asyncio.run(main())


@pytest.mark.parametrize("adopt", [False, True])
def test_rebuilding_the_manifest_leaves_what_waits_for_its_commit_to_that(adopt: bool) -> None:
    async def main() -> None:
        place = Place()
        raw = await place.put(range(40))
        await packed(place, raw[:10])
        await commit_all(place)
        await packed(place, raw[5:20])
        late = place.part(raw[20:], is_remembered=True)
        dying = place.deployment(lambda store: DyingStore(store, 9, late=False))
        with suppress(StokerError):
            await pack(late.to_json(), dying, plenty())
        assert f"data/{late.run}/00000000" in await place.keys("data/")
        await rebuild_manifest(open_store(place.dataset), adopt=adopt)
        assert await place.numbers() == list(range(10))
        assert (await commit_all(place))["samples"] == 20
        await pack(late.to_json(), place.deployment(), plenty())
        await commit_all(place)
        assert sorted(await place.numbers()) == list(range(40))

    run_virtual(main())
