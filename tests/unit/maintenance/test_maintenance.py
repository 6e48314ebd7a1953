"""Verifying, rebuilding and collecting garbage, on data sets that lost or gained what they should not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stoker import catalog
from stoker.checksum import crc32c
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    ConfigError,
    DatasetExistsError,
    NotFoundError,
    PackError,
    PermissionDeniedError,
    StoreError,
)
from stoker.maintenance import BadObject, gc, rebuild_manifest, verify
from stoker.manifest import POINTER_KEY, PackRun, Rows, object_key, version_key
from stoker.pack.record import PackRecord, record_key
from stoker.schema import Array, Bytes, Schema
from stoker.store import open_store
from stoker.store.protocol import ObjectInfo, Store
from stoker.supersample import Origin, SuperSample
from stoker.tier import ObjectRef
from support.packing import SCHEMA, DyingStore, WatchedStore, fresh_store, labels, numbered, pack, stored
from support.supersamples import built


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


async def data_set() -> Store:
    """Two versions: samples 0 to 29 and 30 to 44, in 15 super-samples of three."""
    store = fresh_store()
    await pack(store, numbered(30))
    await pack(store, numbered(15, 30), mode="append")
    return store


async def leave_unfinished(store: Store, source: str, *, mode: str = "append") -> str:
    """Let a pack of 20 samples die in its commit; return its run."""
    before = set(await stored(store, "packs/"))
    rehearsal = fresh_store()
    if mode == "append":
        rehearsal = await _copied(store)
    watched = WatchedStore(rehearsal)
    await pack(watched, numbered(20, 100), source=source, mode=mode)
    death = next(i for i, call in enumerate(watched.calls) if call.startswith("put manifests/"))
    with pytest.raises(StoreError, match="dead"):
        await pack(DyingStore(store, death, late=False), numbered(20, 100), source=source, mode=mode)
    (key,) = set(await stored(store, "packs/")) - before
    assert PackRecord.from_bytes((await store.get(key))[0]).state == "complete"
    return key.removeprefix("packs/").removesuffix(".safetensors")


async def leave_half(store: Store, source: str) -> str:
    """Let an append break off after 30 of its samples; return its run."""

    def breaking() -> Any:
        yield from numbered(31, 200)
        raise ZeroDivisionError

    before = set(await stored(store, "packs/"))
    with pytest.raises(ZeroDivisionError):
        await pack(store, breaking(), source=source, mode="append")
    (key,) = set(await stored(store, "packs/")) - before
    return key.removeprefix("packs/").removesuffix(".safetensors")


async def _copied(store: Store) -> Store:
    other = fresh_store()
    for key, data in (await stored(store)).items():
        await other.put(key, data)
    return other


# verify


@pytest.mark.parametrize("deep", [False, True])
def test_an_intact_data_set_has_no_bad_object(deep: bool) -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await catalog.read_manifest(store)
        seen: list[tuple[ObjectRef, BadObject | None]] = []
        bad = await verify(store, manifest, deep=deep, on_object=lambda ref, bad: seen.append((ref, bad)))
        assert bad == []
        assert {ref.key for ref, _ in seen} == {manifest.key(row) for row in range(15)}
        assert all(problem is None for _, problem in seen)

    run(main())


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _other_samples(data: bytes) -> bytes:
    origin = SuperSample(data).head.origin
    return built(SCHEMA, [{"data": b"x", "label": 1}], origin)[0]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "flipped bit": (_flipped, "crc32c"),
    "flipped bit in the head": (lambda data: data[:40] + b"?" + data[41:], "crc32c|header|JSON|super-sample"),
    "truncated": (lambda data: data[:-5], "bytes, not"),
    "grown": (lambda data: data + b"x", "bytes, not"),
    "empty": (lambda data: b"", "0 bytes, not"),
    "other samples": (_other_samples, "bytes, not"),
    "zeros": (lambda data: bytes(len(data)), "header length 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_listed_with_its_problem(damage: str) -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await catalog.read_manifest(store)
        change, message = DAMAGE[damage]
        for row in (3, 12):
            data, _ = await store.get(manifest.key(row))
            await store.put(manifest.key(row), change(data))
        await store.delete(manifest.key(7))
        bad = await verify(store, manifest)
        assert [item.key for item in bad] == [manifest.key(row) for row in (3, 7, 12)]
        assert "does not exist" in bad[1].problem
        for item in (bad[0], bad[2]):
            assert any(part in item.problem for part in message.split("|")), item.problem

    run(main())


def _impostor(change: dict[str, Any], schema: Schema = SCHEMA) -> Callable[[Store], Coroutine[Any, Any, str]]:
    """Put a well-formed super-sample in a place where it does not belong, and a manifest that pins it there."""

    async def make(store: Store) -> str:
        manifest = await catalog.read_manifest(store)
        run_id = manifest.runs[-1].run
        origin: dict[str, Any] = {
            "dataset": manifest.dataset,
            "run": run_id,
            "ordinal": manifest.runs[-1].rows,
        } | change
        data, packed = built(schema, [{"data": b"x", "label": 1}], Origin(**(origin | change)))
        key = object_key(run_id, manifest.runs[-1].rows)
        await store.put(key, data)
        successor = manifest.extended(Rows.of([packed]), PackRun(run_id, manifest.runs[-1].rows, 1))
        await catalog.publish(store, successor)
        return key

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_impostor({"dataset": "other"}), "says that it is"),
        (_impostor({"run": "0" * 16}), "says that it is"),
        (_impostor({"ordinal": 0}), "says that it is"),
        (_impostor({}, Schema({"data": Bytes(), "label": Array("int64", classes=("a",))})), "another schema"),
    ],
)
def test_a_super_sample_that_belongs_elsewhere_is_bad(
    make: Callable[[Store], Coroutine[Any, Any, str]], message: str
) -> None:
    async def main() -> None:
        store = await data_set()
        key = await make(store)
        (bad,) = await verify(store, await catalog.read_manifest(store))
        assert bad.key == key
        assert message in bad.problem

    run(main())


def test_only_a_deep_verify_sees_a_value_whose_own_checksum_is_wrong() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered(3))
        data, _ = await store.get(manifest.key(0))
        head = SuperSample(data).head
        forged = bytearray(data)
        forged[head.starts["__crc32c__"]] ^= 1
        # A writer with a bug: every other checksum fits what it wrote.
        wrong = f"{crc32c(memoryview(forged)[head.header_bytes :]):08x}".encode()
        forged = forged.replace(f"{head.data_crc32c:08x}".encode(), wrong)
        rows = manifest.rows
        rows.crc32c.flags.writeable = True
        rows.crc32c[0] = crc32c(forged)
        await store.put(manifest.key(0), forged)
        assert await verify(store, manifest) == []
        (bad,) = await verify(store, manifest, deep=True)
        assert "column 'data' of row 0" in bad.problem

    run(main())


def test_an_object_that_was_damaged_on_its_way_only_is_not_bad() -> None:
    class OnceDamaging(WatchedStore):
        done = False

        async def get_range(
            self, key: str, start: int, end: int, *, into: memoryview, tag: str | None = None
        ) -> ObjectInfo:
            info = await self.store.get_range(key, start, end, into=into, tag=tag)
            if not self.done:
                self.done = True
                into[-1] ^= 1
            return info

    async def main() -> None:
        store = await data_set()
        assert await verify(OnceDamaging(store), await catalog.read_manifest(store)) == []

    run(main())


def test_a_store_that_cannot_be_read_is_an_error_and_no_list_of_bad_objects() -> None:
    class Refusing(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            raise PermissionDeniedError("no")

    async def main() -> None:
        store = await data_set()
        manifest = await catalog.read_manifest(store)
        with pytest.raises(PermissionDeniedError):
            await verify(Refusing(store), manifest)
        with pytest.raises(BucketNotFoundError):
            await verify(open_store("memory://no-such-bucket-at-all"), manifest)

    run(main())


def test_verify_reads_no_more_objects_at_once_than_it_was_told() -> None:
    class Counting(WatchedStore):
        now = most = 0

        async def get_range(
            self, key: str, start: int, end: int, *, into: memoryview, tag: str | None = None
        ) -> ObjectInfo:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await self.store.get_range(key, start, end, into=into, tag=tag)

    async def main() -> None:
        store = Counting(await data_set())
        await verify(store, await catalog.read_manifest(store), concurrency=3)
        assert store.most == 3

    run(main())


# rebuild


def test_rebuilding_a_whole_data_set_changes_nothing() -> None:
    async def main() -> None:
        store = await data_set()
        before = await stored(store)
        report = await rebuild_manifest(store)
        assert not report.is_new
        assert (report.manifest.version, report.lost, report.orphans) == (2, (), ())
        assert await stored(store) == before

    run(main())


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
        before = await catalog.read_manifest(store)
        for key in lost:
            if damaged:
                await store.put(key, _flipped((await store.get(key))[0]))
            else:
                await store.delete(key)
        report = await rebuild_manifest(store)
        after = await catalog.read_manifest(store)
        assert report.manifest.version == after.version
        assert (after.runs, after.dataset, after.schema) == (before.runs, before.dataset, before.schema)
        assert await labels(store) == list(range(45))
        assert await verify(store, after) == []
        await pack(store, numbered(3, 45), mode="append", source="later")
        assert await labels(store) == list(range(48))

    run(main())


def test_the_number_of_a_lost_version_is_not_given_again() -> None:
    async def main() -> None:
        store = await data_set()
        for key in (POINTER_KEY, version_key(1), version_key(2)):
            await store.delete(key)
        assert (await rebuild_manifest(store)).manifest.version == 3
        assert (await gc(store)).objects == ()

    run(main())


@pytest.mark.parametrize("records_too", [False, True])
def test_the_pointer_alone_is_enough_to_restore_its_version(records_too: bool) -> None:
    async def main() -> None:
        store = await data_set()
        before = await stored(store)
        for key in before:
            if key.startswith("manifests/") or (records_too and key.startswith("packs/")):
                await store.delete(key)
        report = await rebuild_manifest(store)
        assert (report.is_new, report.manifest.version, report.orphans) == (False, 2, ())
        assert (await store.get(version_key(2)))[0] == before[version_key(2)]

    run(main())


def test_a_rebuilt_manifest_is_without_objects_that_are_lost_and_names_them() -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await catalog.read_manifest(store)
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

    run(main())


def test_a_pack_that_had_come_to_its_end_is_taken_in_and_resuming_it_adds_nothing() -> None:
    async def main() -> None:
        store = await data_set()
        await leave_unfinished(store, "late")
        report = await rebuild_manifest(store)
        assert report.is_new
        assert await labels(store) == [*range(45), *range(100, 120)]
        await pack(store, numbered(20, 100), source="late", mode="append")
        assert len(await labels(store)) == 65
        await pack(store, numbered(20, 100), source="late", mode="append")
        assert len(await labels(store)) == 85

    run(main())


def test_a_first_pack_that_had_come_to_its_end_makes_the_data_set() -> None:
    async def main() -> None:
        store = fresh_store()
        await leave_unfinished(store, "only", mode="create")
        await rebuild_manifest(store)
        assert await labels(store) == list(range(100, 120))
        with pytest.raises(DatasetExistsError):
            await pack(store, numbered(5), source="other")

    run(main())


def test_a_create_that_was_refused_is_not_taken_in() -> None:
    async def main() -> None:
        store = fresh_store()
        refused = await leave_unfinished(store, "refused", mode="create")
        await pack(store, numbered(6), source="winner")
        for keys in ([], [POINTER_KEY, version_key(1)]):
            for key in keys:
                await store.delete(key)
            report = await rebuild_manifest(store)
            assert await labels(store) == list(range(6))
            assert {key.split("/")[1] for key in report.orphans} == {refused}

    run(main())


def test_of_two_creates_that_came_to_their_end_none_is_taken() -> None:
    async def main() -> None:
        store = fresh_store()
        await leave_unfinished(store, "a", mode="create")
        await leave_unfinished(store, "b", mode="create")
        with pytest.raises(NotFoundError, match="no super-sample"):
            await rebuild_manifest(store)

    run(main())


def test_orphans_are_listed_and_adopted_only_when_told() -> None:
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
            await pack(store, numbered(40, 200), source="half", mode="append")

    run(main())


def test_an_orphan_that_is_damaged_or_foreign_is_refused() -> None:
    async def main() -> None:
        store = await data_set()
        half = await leave_half(store, "half")
        manifest = await catalog.read_manifest(store)
        await store.put(object_key(half, 1), _flipped((await store.get(object_key(half, 1)))[0]))
        sample = [{"data": b"x", "label": 1}]
        foreign = Origin(dataset="other", run="1" * 16, ordinal=0)
        misplaced = Origin(dataset=manifest.dataset, run="2" * 16, ordinal=5)
        other = Schema({"label": Array("int64"), "data": Bytes()})
        reordered = Origin(dataset=manifest.dataset, run="3" * 16, ordinal=0)
        await store.put(object_key("1" * 16, 0), built(SCHEMA, sample, foreign)[0])
        await store.put(object_key("2" * 16, 0), built(SCHEMA, sample, misplaced)[0])
        await store.put(object_key("3" * 16, 0), built(other, sample, reordered)[0])
        await store.put(object_key("4" * 16, 0), b"not one")
        await store.put("data/notes.txt", b"of the user's")
        report = await rebuild_manifest(store, adopt=True)
        refused = {bad.key: bad.problem for bad in report.refused}
        assert "crc32c" in refused[object_key(half, 1)]
        assert "another data set" in refused[object_key("1" * 16, 0)]
        assert "says that it is" in refused[object_key("2" * 16, 0)]
        assert "another schema" in refused[object_key("3" * 16, 0)]
        assert len(refused) == 5
        assert set(report.orphans) == set(refused)
        assert await labels(store) == [*range(45), *(i for i in range(200, 230) if not 203 <= i < 206)]
        assert await verify(store, report.manifest) == []

    run(main())


def test_super_samples_alone_can_be_adopted_without_any_record() -> None:
    async def main() -> None:
        store = await data_set()
        for key in await stored(store):
            if not key.startswith("data/"):
                await store.delete(key)
        with pytest.raises(NotFoundError):
            await rebuild_manifest(store)
        await rebuild_manifest(store, adopt=True)
        assert sorted(await labels(store)) == list(range(45))

    run(main())


def test_there_is_nothing_to_rebuild_in_an_empty_place() -> None:
    for url in ("memory://nothing-was-ever-here", fresh_store().url):
        with pytest.raises(NotFoundError, match="no super-sample"):
            asyncio.run(rebuild_manifest(open_store(url), adopt=True))


def test_a_rebuild_that_another_writer_overtakes_says_so() -> None:
    class Overtaken(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put" and key == version_key(3):
                await pack(self.store, numbered(3, 60), source="winner", mode="append")

    async def main() -> None:
        store = await data_set()
        await leave_unfinished(store, "late")
        with pytest.raises(PackError, match="another writer"):
            await rebuild_manifest(Overtaken(store))
        assert await labels(store) == [*range(45), 60, 61, 62]

    run(main())


# gc


def test_nothing_of_a_finished_data_set_is_garbage() -> None:
    async def main() -> None:
        store = await data_set()
        before = await stored(store)
        report = await gc(store, delete=True)
        assert (report.objects, report.records, report.versions, report.unfinished) == ((), (), (), {})
        assert await stored(store) == before

    run(main())


def test_orphans_are_listed_first_and_deleted_when_told() -> None:
    async def main() -> None:
        store = await data_set()
        for number in range(3):
            await store.put(object_key("e" * 16, number), bytes(100))
        await store.put("data/notes.txt", b"of the user's")
        listed = await gc(store)
        assert [info.key for info in listed.objects] == [object_key("e" * 16, n) for n in range(3)]
        assert (listed.size_bytes, listed.is_deleted) == (300, False)
        assert len(await stored(store, "data/e")) == 3
        deleted = await gc(store, delete=True)
        assert (deleted.objects, deleted.is_deleted) == (listed.objects, True)
        assert not await stored(store, "data/e")
        assert "data/notes.txt" in await stored(store)
        assert await verify(store, await catalog.read_manifest(store)) == []

    run(main())


@pytest.mark.parametrize("leave", [leave_half, leave_unfinished])
def test_an_unfinished_pack_is_protected_until_it_is_called_abandoned(leave: Any) -> None:
    async def main() -> None:
        store = await data_set()
        run_id = await leave(store, "unfinished")
        before = await stored(store)
        report = await gc(store, delete=True)
        assert set(report.unfinished) == {run_id}
        assert report.unfinished[run_id] == len(await stored(store, f"data/{run_id}/")) > 0
        assert await stored(store) == before
        report = await gc(store, delete=True, abandoned=True)
        assert report.records == (record_key(run_id),)
        assert not await stored(store, f"data/{run_id}/")
        assert await labels(store) == list(range(45))
        assert await verify(store, await catalog.read_manifest(store)) == []

    run(main())


def test_the_run_of_a_damaged_record_is_protected_too() -> None:
    async def main() -> None:
        store = await data_set()
        run_id = await leave_half(store, "half")
        await store.put(record_key(run_id), b"damaged")
        report = await gc(store, delete=True)
        assert report.unfinished == {run_id: 10}
        assert len(await stored(store, f"data/{run_id}/")) == 10

    run(main())


def test_old_versions_go_when_told_with_what_only_they_cover() -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await catalog.read_manifest(store)
        await store.put(manifest.key(4), b"damaged")
        await rebuild_manifest(store)
        assert (await gc(store)).objects == ()
        report = await gc(store, keep_versions=1, delete=True)
        assert report.versions == (1, 2)
        assert [info.key for info in report.objects] == [manifest.key(4)]
        assert await catalog.list_versions(store) == [3]
        assert await verify(store, await catalog.read_manifest(store)) == []
        await pack(store, numbered(3, 45), mode="append", source="later")
        assert (await catalog.read_manifest(store)).version == 4
        with pytest.raises(ConfigError, match="at least 1"):
            await gc(store, keep_versions=0)

    run(main())


def test_a_pointer_that_stayed_behind_is_moved_before_versions_are_deleted() -> None:
    async def main() -> None:
        store = await data_set()
        await pack(store, numbered(3, 45), mode="append", source="third")
        await store.put(POINTER_KEY, (await store.get(version_key(1)))[0])
        await gc(store, keep_versions=1, delete=True)
        assert (await catalog.read_manifest(store)).version == 3
        await pack(store, numbered(3, 48), mode="append", source="fourth")
        assert await labels(store) == list(range(51))

    run(main())


def test_nothing_is_deleted_where_a_manifest_was_lost() -> None:
    async def main() -> None:
        store = await data_set()
        for key in (version_key(2), POINTER_KEY):
            await store.delete(key)
        before = await stored(store)
        for abandoned in (False, True):
            with pytest.raises(PackError, match="rebuild-manifest"):
                await gc(store, delete=True, abandoned=abandoned)
        assert await stored(store) == before

    run(main())


def test_without_a_data_set_only_what_is_abandoned_is_garbage() -> None:
    async def main() -> None:
        store = fresh_store()
        await leave_unfinished(store, "only", mode="create")
        with pytest.raises(NotFoundError, match="gc --abandoned --delete"):
            await gc(store, delete=True)
        await gc(store, delete=True, abandoned=True)
        assert await stored(store) == {}

    run(main())


def test_a_version_that_cannot_be_read_stops_the_collection() -> None:
    async def main() -> None:
        store = await data_set()
        await store.put(version_key(1), _flipped((await store.get(version_key(1)))[0]))
        before = await stored(store)
        with pytest.raises(ChecksumError, match="damaged"):
            await gc(store, delete=True)
        assert await stored(store) == before

    run(main())


def test_a_packer_that_starts_while_garbage_is_collected_loses_nothing() -> None:
    class Meanwhile(WatchedStore):
        """Packs and commits something between any two operations of the collector."""

        def __init__(self, store: Store, at: int) -> None:
            super().__init__(store)
            self.at = at

        async def before(self, number: int, operation: str, key: str) -> None:
            if number == self.at:
                await pack(self.store, numbered(6, 100), source="meanwhile", mode="append")

    async def main() -> None:
        rehearsal = WatchedStore(await data_set())
        await gc(rehearsal, delete=True)
        for at in range(len(rehearsal.calls)):
            store = await data_set()
            await gc(Meanwhile(store, at), delete=True)
            assert await labels(store) == [*range(45), *range(100, 106)]

    run(main())
