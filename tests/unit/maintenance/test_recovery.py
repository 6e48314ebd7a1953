"""Rebuilding the manifest of a data set that lost or gained what it should not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stoker import Array, Bytes, RetryingStore, Schema, open_store
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, object_key, version_key
from stoker._format.supersample import PackOrigin
from stoker._maintenance.compaction import compact
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.catalog import BucketCatalog
from stoker._pack.record import PackRecord, record_key
from stoker.abc import Store
from stoker.errors import DatasetExistsError, NotFoundError, PackError
from stoker.testing import WatchedStore
from support.leftovers import data_set, flipped, leave_half, leave_unfinished
from support.packing import SCHEMA, fresh_store, labels, numbered_samples, pack, read_objects
from support.supersamples import built


def test_rebuilding_a_whole_data_set_changes_nothing() -> None:
    async def main() -> None:
        store = await data_set()
        before = await read_objects(store)
        report = await rebuild_manifest(store)
        assert not report.is_new
        assert (report.manifest.version, report.lost, report.orphans) == (2, (), ())
        assert await read_objects(store) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    "lost",
    [
        [POINTER_KEY],
        [POINTER_KEY, version_key(2)],
        [POINTER_KEY, version_key(1), version_key(2)],
    ],
)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_lost_or_damaged_manifest_is_rebuilt_as_it_was(lost: list[str], damaged: bool) -> None:
    async def main() -> None:
        store = await data_set()
        before = await versions.read_manifest(store)
        for key in lost:
            if damaged:
                await store.put(key, flipped((await store.get(key))[0]))
            else:
                await store.delete(key)
        report = await rebuild_manifest(store)
        after = await versions.read_manifest(store)
        assert report.manifest.version == after.version
        assert (after.runs, after.dataset, after.schema) == (before.runs, before.dataset, before.schema)
        assert await labels(store) == list(range(45))
        assert await verify(store, after) == []
        await pack(store, numbered_samples(3, 45), mode="append", source="later")
        assert await labels(store) == list(range(48))

    asyncio.run(main())


def test_the_number_of_a_lost_version_is_not_given_again() -> None:
    async def main() -> None:
        store = await data_set()
        for key in (POINTER_KEY, version_key(1), version_key(2)):
            await store.delete(key)
        assert (await rebuild_manifest(store)).manifest.version == 3
        assert (await collect_garbage(store)).objects == ()

    asyncio.run(main())


@pytest.mark.parametrize("records_too", [False, True])
def test_the_pointer_alone_is_enough_to_restore_its_version(records_too: bool) -> None:
    async def main() -> None:
        store = await data_set()
        before = await read_objects(store)
        for key in before:
            if key.startswith("manifests/") or (records_too and key.startswith("packs/")):
                await store.delete(key)
        report = await rebuild_manifest(store)
        assert (report.is_new, report.manifest.version, report.orphans) == (False, 2, ())
        assert (await store.get(version_key(2)))[0] == before[version_key(2)]

    asyncio.run(main())


def test_a_rebuilt_manifest_is_without_objects_that_are_lost_and_names_them() -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await versions.read_manifest(store)
        await store.delete(manifest.key(0))
        await store.put(manifest.key(4), b"short")
        data, _ = await store.get(manifest.key(12))
        await store.put(manifest.key(12), data[:50] + b"?" + data[51:])
        report = await rebuild_manifest(store)
        assert [bad.key for bad in report.lost] == [manifest.key(row) for row in (0, 4, 12)]
        assert "does not exist" in report.lost[0].problem
        gone = {0, 1, 2, 12, 13, 14, 36, 37, 38}
        assert await labels(store) == [i for i in range(45) if i not in gone]
        assert (report.is_new, report.manifest.version) == (True, 3)
        assert await verify(store, report.manifest) == []
        assert not (await rebuild_manifest(store)).is_new

    asyncio.run(main())


def test_a_pack_that_had_come_to_its_end_is_ingested_and_resuming_it_adds_nothing() -> None:
    async def main() -> None:
        store = await data_set()
        await leave_unfinished(store, "late")
        report = await rebuild_manifest(store)
        assert report.is_new
        assert await labels(store) == [*range(45), *range(100, 120)]
        await pack(store, numbered_samples(20, 100), source="late", mode="append")
        assert len(await labels(store)) == 65
        await pack(store, numbered_samples(20, 100), source="late", mode="append")
        assert len(await labels(store)) == 85

    asyncio.run(main())


def test_a_first_pack_that_had_come_to_its_end_makes_the_data_set() -> None:
    async def main() -> None:
        store = fresh_store()
        await leave_unfinished(store, "only", mode="create")
        await rebuild_manifest(store)
        assert await labels(store) == list(range(100, 120))
        with pytest.raises(DatasetExistsError):
            await pack(store, numbered_samples(5), source="other")

    asyncio.run(main())


def test_a_create_that_was_refused_is_not_ingested() -> None:
    async def main() -> None:
        store = fresh_store()
        refused = await leave_unfinished(store, "refused", mode="create")
        await pack(store, numbered_samples(6), source="winner")
        for keys in ([], [POINTER_KEY, version_key(1)]):
            for key in keys:
                await store.delete(key)
            report = await rebuild_manifest(store)
            assert await labels(store) == list(range(6))
            assert {key.split("/")[1] for key in report.orphans} == {refused}

    asyncio.run(main())


def test_of_two_creates_that_came_to_their_end_none_is_taken() -> None:
    async def main() -> None:
        store = fresh_store()
        await leave_unfinished(store, "a", mode="create")
        await leave_unfinished(store, "b", mode="create")
        with pytest.raises(NotFoundError, match="neither a manifest nor the record"):
            await rebuild_manifest(store)

    asyncio.run(main())


def test_orphans_are_listed_and_adopted_only_on_request() -> None:
    async def main() -> None:
        store = await data_set()
        half = await leave_half(store, "half")
        report = await rebuild_manifest(store)
        assert not report.is_new
        assert report.orphans == tuple(object_key(half, i) for i in range(10))
        report = await rebuild_manifest(store, adopt=True)
        assert report.adopted == tuple(object_key(half, i) for i in range(10))
        assert await labels(store) == [*range(45), *range(200, 230)]
        with pytest.raises(PackError, match="adopted"):
            await pack(store, numbered_samples(40, 200), source="half", mode="append")

    asyncio.run(main())


def test_an_orphan_that_is_damaged_or_foreign_is_refused() -> None:
    async def main() -> None:
        store = await data_set()
        half = await leave_half(store, "half")
        manifest = await versions.read_manifest(store)
        await store.put(object_key(half, 1), flipped((await store.get(object_key(half, 1)))[0]))
        sample = [{"data": b"x", "label": 1}]
        foreign = PackOrigin(dataset="other", run="1" * 16, ordinal=0)
        misplaced = PackOrigin(dataset=manifest.dataset, run="2" * 16, ordinal=5)
        other = Schema({"label": Array("int64"), "data": Bytes()})
        reordered = PackOrigin(dataset=manifest.dataset, run="3" * 16, ordinal=0)
        await store.put(object_key("1" * 16, 0), built(SCHEMA, sample, foreign)[0])
        await store.put(object_key("2" * 16, 0), built(SCHEMA, sample, misplaced)[0])
        await store.put(object_key("3" * 16, 0), built(other, sample, reordered)[0])
        await store.put(object_key("4" * 16, 0), b"not one")
        await store.put("data/notes.txt", b"of the user's")
        report = await rebuild_manifest(store, adopt=True)
        refused = {bad.key: bad.problem for bad in report.refused}
        assert "crc32c" in refused[object_key(half, 1)]
        assert "another data set" in refused[object_key("1" * 16, 0)]
        assert "has the origin" in refused[object_key("2" * 16, 0)]
        assert "another schema" in refused[object_key("3" * 16, 0)]
        assert len(refused) == 5
        assert set(report.orphans) == set(refused)
        assert await labels(store) == [*range(45), *(i for i in range(200, 230) if not 203 <= i < 206)]
        assert await verify(store, report.manifest) == []

    asyncio.run(main())


def test_super_samples_alone_can_be_adopted_without_any_record() -> None:
    async def main() -> None:
        store = await data_set()
        await leave_data_only(store)
        with pytest.raises(NotFoundError, match=f"15 super-samples of 2 runs.*--adopt {store.url}"):
            await rebuild_manifest(store)
        report = await rebuild_manifest(store, adopt=True)
        assert report.gaps == ()
        assert sorted(await labels(store)) == list(range(45))

    asyncio.run(main())


async def leave_data_only(store: Store) -> None:
    for key in await read_objects(store):
        if not key.startswith("data/"):
            await store.delete(key)


@pytest.mark.parametrize(
    ("lost", "gaps"),
    [
        ([0], ["00000000 does not exist"]),
        ([7], ["00000007 does not exist"]),
        ([2, 3, 4, 8], ["00000002 and the 2 after it do not exist", "00000008 does not exist"]),
        ([9], ["00000008 is not marked as the last"]),
        ([0, 9], ["00000000 does not exist", "00000008 is not marked as the last"]),
    ],
)
def test_missing_super_samples_of_adopted_runs_are_reported(lost: list[int], gaps: list[str]) -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(30))
        await leave_data_only(store)
        for row in lost:
            await store.delete(manifest.key(row))
        report = await rebuild_manifest(store, adopt=True)
        assert len(report.gaps) == len(gaps)
        for bad, gap in zip(report.gaps, gaps, strict=True):
            assert bad.problem.startswith(f"data/{manifest.runs[0].run}/{gap}")
        assert len(await labels(store)) == 30 - 3 * len(lost)

    asyncio.run(main())


def test_a_run_that_was_never_finished_has_no_end_to_lose() -> None:
    async def main() -> None:
        store = await data_set()
        half = await leave_half(store, "half")
        await store.delete(object_key(half, 4))
        report = await rebuild_manifest(store, adopt=True)
        assert [bad.key for bad in report.gaps] == [object_key(half, 4)]
        assert len(report.adopted) == 9

    asyncio.run(main())


def test_an_impossibly_large_number_is_one_gap() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(30))
        await leave_data_only(store)
        await store.put(object_key(manifest.runs[0].run, 9_999_999_999), b"of another writer")
        report = await rebuild_manifest(store, adopt=True)
        assert [bad.problem.partition(" ")[2][:25] for bad in report.gaps] == ["and the 9,999,999,988 aft"]
        assert len(report.refused) == 1

    asyncio.run(main())


def test_without_a_manifest_a_run_with_a_lost_record_is_reported() -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await versions.read_manifest(store)
        lacking = manifest.runs[1].run
        for key in (POINTER_KEY, version_key(1), version_key(2), record_key(lacking)):
            await store.delete(key)
        report = await rebuild_manifest(store)
        assert await labels(store) == list(range(30))
        assert [bad.key for bad in report.gaps] == [object_key(lacking, 0)]
        assert "run of 5 super-samples" in report.gaps[0].problem
        assert (await rebuild_manifest(store, adopt=True)).gaps == ()
        assert await labels(store) == list(range(45))

    asyncio.run(main())


def test_an_unrecorded_compaction_is_reported_on_adoption() -> None:
    async def main() -> None:
        store = await data_set()
        retrying = RetryingStore(store)
        await compact(retrying, BucketCatalog(retrying), now_seconds=0.0, super_sample_bytes=2000)
        await leave_data_only(store)
        report = await rebuild_manifest(store, adopt=True)
        assert len(await labels(store)) == 90
        assert len(report.repeats) == 1
        assert "a compaction of the other" in report.repeats[0].problem

    asyncio.run(main())


@pytest.mark.parametrize("records_too", [False, True])
def test_what_is_damaged_behind_its_head_is_left_out_when_all_of_it_is_read(records_too: bool) -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(30))
        damaged = manifest.key(6)
        await store.put(damaged, flipped((await store.get(damaged))[0]))
        if records_too:
            await leave_data_only(store)
        else:
            assert (await rebuild_manifest(store)).lost == ()
        report = await rebuild_manifest(store, adopt=records_too, verify=True)
        assert [bad.key for bad in (*report.lost, *report.refused)] == [damaged]
        assert await verify(store, report.manifest) == []
        assert sorted(await labels(store)) == [*range(18), *range(21, 30)]

    asyncio.run(main())


def test_there_is_nothing_to_rebuild_in_an_empty_place() -> None:
    for url in ("memory://nothing-was-ever-here", fresh_store().url):
        with pytest.raises(NotFoundError, match="no super-sample"):
            asyncio.run(rebuild_manifest(open_store(url), adopt=True))


@pytest.mark.parametrize("where", ["a version", "a pack record"])
def test_a_version_that_none_can_follow_is_not_followed(where: str) -> None:
    async def main() -> None:
        store = await data_set()
        if where == "a version":
            await store.put(version_key(999_999_999), b"of another writer")
        else:
            ((key, data), *_) = (await read_objects(store, "packs/")).items()
            await store.put(key, replace(PackRecord.from_bytes(data), version=999_999_999).to_bytes())
        await leave_unfinished(store, "late")
        before = await read_objects(store)
        with pytest.raises(PackError, match="version 999999999, the highest possible number"):
            await rebuild_manifest(store)
        assert await read_objects(store) == before

    asyncio.run(main())


def test_a_rebuild_overtaken_by_another_writer_fails() -> None:
    class Overtaken(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put" and key == version_key(3):
                await pack(self.store, numbered_samples(3, 60), source="winner", mode="append")

    async def main() -> None:
        store = await data_set()
        await leave_unfinished(store, "late")
        with pytest.raises(PackError, match="another writer"):
            await rebuild_manifest(Overtaken(store))
        assert await labels(store) == [*range(45), 60, 61, 62]

    asyncio.run(main())
