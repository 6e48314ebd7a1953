"""Collecting garbage, and nothing that is still needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, object_key, version_key
from stoker._maintenance.garbage import UnfinishedRun, collect_garbage
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.record import record_key
from stoker.abc import Store
from stoker.errors import ChecksumError, ConfigError, NotFoundError, PackError
from stoker.testing import WatchedStore
from support.leftovers import data_set, flipped, leave_half, leave_unfinished
from support.packing import fresh_store, labels, numbered_samples, pack, read_objects


def test_nothing_of_a_finished_data_set_is_garbage() -> None:
    async def main() -> None:
        store = await data_set()
        before = await read_objects(store)
        report = await collect_garbage(store, delete=True)
        assert (report.objects, report.records, report.versions, report.unfinished) == ((), (), (), {})
        assert await read_objects(store) == before

    asyncio.run(main())


def test_orphans_are_listed_first_and_deleted_on_request() -> None:
    async def main() -> None:
        store = await data_set()
        for number in range(3):
            await store.put(object_key("e" * 16, number), bytes(100))
        await store.put("data/notes.txt", b"of the user's")
        listed = await collect_garbage(store)
        assert [info.key for info in listed.objects] == [object_key("e" * 16, n) for n in range(3)]
        assert (listed.size_bytes, listed.is_deleted) == (300, False)
        assert len(await read_objects(store, "data/e")) == 3
        deleted = await collect_garbage(store, delete=True)
        assert (deleted.objects, deleted.is_deleted) == (listed.objects, True)
        assert not await read_objects(store, "data/e")
        assert "data/notes.txt" in await read_objects(store)
        assert await verify(store, await versions.read_manifest(store)) == []

    asyncio.run(main())


@pytest.mark.parametrize("leave", [leave_half, leave_unfinished])
def test_an_unfinished_pack_is_protected_until_it_is_given_up_by_its_name(leave: Any) -> None:
    async def main() -> None:
        store = await data_set()
        run_id = await leave(store, "unfinished")
        before = await read_objects(store)
        report = await collect_garbage(store, delete=True)
        assert set(report.unfinished) == {run_id}
        assert report.unfinished[run_id].objects == len(await read_objects(store, f"data/{run_id}/")) > 0
        assert await read_objects(store) == before
        report = await collect_garbage(store, delete=True, abandoned=[run_id])
        assert report.records == (record_key(run_id),)
        assert not await read_objects(store, f"data/{run_id}/")
        assert await labels(store) == list(range(45))
        assert await verify(store, await versions.read_manifest(store)) == []

    asyncio.run(main())


def test_the_run_of_a_damaged_record_is_protected_too() -> None:
    async def main() -> None:
        store = await data_set()
        run_id = await leave_half(store, "half")
        await store.put(record_key(run_id), b"damaged")
        report = await collect_garbage(store, delete=True)
        assert report.unfinished == {run_id: UnfinishedRun(run=run_id, objects=10, record=None)}
        assert len(await read_objects(store, f"data/{run_id}/")) == 10
        await collect_garbage(store, delete=True, abandoned=[run_id])
        assert not await read_objects(store, f"data/{run_id}/")

    asyncio.run(main())


def test_old_versions_are_deleted_on_request_with_their_own_objects() -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await versions.read_manifest(store)
        await store.put(manifest.key(4), b"damaged")
        await rebuild_manifest(store)
        assert (await collect_garbage(store)).objects == ()
        report = await collect_garbage(store, keep_versions=1, delete=True)
        assert report.versions == (1, 2)
        assert [info.key for info in report.objects] == [manifest.key(4)]
        assert await versions.list_versions(store) == [3]
        assert await verify(store, await versions.read_manifest(store)) == []
        await pack(store, numbered_samples(3, 45), mode="append", source="later")
        assert (await versions.read_manifest(store)).version == 4
        with pytest.raises(ConfigError, match="at least 1"):
            await collect_garbage(store, keep_versions=0)

    asyncio.run(main())


def test_a_pointer_that_stayed_behind_is_moved_before_versions_are_deleted() -> None:
    async def main() -> None:
        store = await data_set()
        await pack(store, numbered_samples(3, 45), mode="append", source="third")
        await store.put(POINTER_KEY, (await store.get(version_key(1)))[0])
        await collect_garbage(store, keep_versions=1, delete=True)
        assert (await versions.read_manifest(store)).version == 3
        await pack(store, numbered_samples(3, 48), mode="append", source="fourth")
        assert await labels(store) == list(range(51))

    asyncio.run(main())


def test_nothing_is_deleted_where_a_manifest_was_lost() -> None:
    async def main() -> None:
        store = await data_set()
        first = [run.run for run in (await versions.read_manifest(store, 1)).runs]
        for key in (version_key(2), POINTER_KEY):
            await store.delete(key)
        before = await read_objects(store)
        (second,) = [
            run for run in {key.split("/")[1] for key in before if key.startswith("data/")} if run not in first
        ]
        for abandoned in ([], [second]):
            with pytest.raises(PackError, match="rebuild-manifest"):
                await collect_garbage(store, delete=True, abandoned=abandoned)
        assert await read_objects(store) == before

    asyncio.run(main())


def test_without_a_data_set_only_what_is_given_up_is_garbage() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(NotFoundError, match="no data set"):
            await collect_garbage(store, delete=True)
        run_id = await leave_unfinished(store, "only", mode="create")
        orphan = "e" * 16
        await store.put(object_key(orphan, 0), b"of a pack whose record is lost")
        before = await read_objects(store)
        report = await collect_garbage(store, delete=True)
        assert (report.objects, report.records, set(report.unfinished)) == ((), (), {run_id})
        assert await read_objects(store) == before
        await collect_garbage(store, delete=True, abandoned=[orphan, run_id])
        assert await read_objects(store) == {}

    asyncio.run(main())


@pytest.mark.parametrize("what", ["a run of the data set", "nothing"])
def test_only_what_is_unfinished_can_be_given_up(what: str) -> None:
    async def main() -> None:
        store = await data_set()
        before = await read_objects(store)
        run_id = (await versions.read_manifest(store)).runs[0].run if what != "nothing" else "no run"
        with pytest.raises(ConfigError, match=f"has the id '{run_id}'; list them with: stoker gc memory"):
            await collect_garbage(store, delete=True, abandoned=[run_id])
        assert await read_objects(store) == before

    asyncio.run(main())


def test_a_version_that_cannot_be_read_stops_the_collection() -> None:
    async def main() -> None:
        store = await data_set()
        await store.put(version_key(1), flipped((await store.get(version_key(1)))[0]))
        before = await read_objects(store)
        with pytest.raises(ChecksumError, match="damaged"):
            await collect_garbage(store, delete=True)
        assert await read_objects(store) == before

    asyncio.run(main())


def test_a_packer_that_starts_while_garbage_is_collected_loses_nothing() -> None:
    class Meanwhile(WatchedStore):
        """Packs and commits something between any two operations of the collector."""

        def __init__(self, store: Store, at: int) -> None:
            super().__init__(store)
            self.at = at

        async def before(self, number: int, operation: str, key: str) -> None:
            if number == self.at:
                await pack(self.store, numbered_samples(6, 100), source="meanwhile", mode="append")

    async def main() -> None:
        rehearsal = WatchedStore(await data_set())
        await collect_garbage(rehearsal, delete=True)
        for at in range(len(rehearsal.calls)):
            store = await data_set()
            await collect_garbage(Meanwhile(store, at), delete=True)
            assert await labels(store) == [*range(45), *range(100, 106)]

    asyncio.run(main())
