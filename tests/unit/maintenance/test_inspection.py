"""Verifying data sets that are intact, and damaged in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stoker import Array, Bytes, Schema, open_store
from stoker._base.checksum import crc32c
from stoker._format import versions
from stoker._format.manifest import ManifestRows, PackRun, object_key
from stoker._format.supersample import PackOrigin, SuperSample
from stoker._maintenance.inspection import BadObject, verify
from stoker.abc import ObjectInfo, ObjectRef, Store
from stoker.errors import BucketNotFoundError, PermissionDeniedError
from stoker.testing import WatchedStore
from support.identities import identity, remove_identities
from support.leftovers import data_set, flipped
from support.packing import SCHEMA, fresh_store, numbered_samples, pack
from support.supersamples import built


@pytest.mark.parametrize("deep", [False, True])
def test_an_intact_data_set_has_no_bad_object(deep: bool) -> None:
    async def main() -> None:
        store = await data_set()
        manifest = await versions.read_manifest(store)
        seen: list[tuple[ObjectRef, BadObject | None]] = []
        bad = await verify(store, manifest, deep=deep, on_object=lambda ref, bad: seen.append((ref, bad)))
        assert bad == []
        assert {ref.key for ref, _ in seen} == {manifest.key(row) for row in range(15)}
        assert all(problem is None for _, problem in seen)

    asyncio.run(main())


def _other_samples(data: bytes) -> bytes:
    origin = SuperSample(data).head.origin
    return built(SCHEMA, [{"data": b"x", "label": 1}], origin)[0]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "flipped bit": (flipped, "crc32c"),
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
        manifest = await versions.read_manifest(store)
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

    asyncio.run(main())


def _impostor(change: dict[str, Any], schema: Schema = SCHEMA) -> Callable[[Store], Coroutine[Any, Any, str]]:
    """Put a well-formed super-sample in a place where it does not belong, and a manifest that pins it there."""

    async def make(store: Store) -> str:
        manifest = await versions.read_manifest(store)
        run_id = manifest.runs[-1].run
        origin: dict[str, Any] = {
            "dataset": manifest.dataset,
            "run": run_id,
            "ordinal": manifest.runs[-1].rows,
        } | change
        data, packed = built(schema, [{"data": b"x", "label": 1}], PackOrigin(**(origin | change)))
        key = object_key(run_id, manifest.runs[-1].rows)
        await store.put(key, data)
        successor = manifest.append_runs(ManifestRows.of([packed]), PackRun(run_id, manifest.runs[-1].rows, 1))
        await versions.publish(store, successor)
        return key

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_impostor({"dataset": "other"}), "has the origin"),
        (_impostor({"run": "0" * 16}), "has the origin"),
        (_impostor({"ordinal": 0}), "has the origin"),
        (_impostor({}, Schema({"data": Bytes(), "label": Array("int64", classes=("a",))})), "another schema"),
    ],
)
def test_a_super_sample_that_belongs_elsewhere_is_bad(
    make: Callable[[Store], Coroutine[Any, Any, str]], message: str
) -> None:
    async def main() -> None:
        store = await data_set()
        key = await make(store)
        (bad,) = await verify(store, await versions.read_manifest(store))
        assert bad.key == key
        assert message in bad.problem

    asyncio.run(main())


def test_only_a_deep_verify_sees_a_value_whose_own_checksum_is_wrong() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(3))
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
        manifest = replace(manifest, rows=replace(rows, sha256_128=np.frombuffer(identity(forged), np.uint8)[None]))
        await store.put(manifest.key(0), forged)
        assert await verify(store, manifest) == []
        (bad,) = await verify(store, manifest, deep=True)
        assert "column 'data' of row 0" in bad.problem

    asyncio.run(main())


def test_bytes_with_the_checksum_of_others_are_bad_where_the_manifest_has_their_hash() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(3))
        forged = replace(manifest, rows=replace(manifest.rows, sha256_128=np.full((1, 16), 7, np.uint8)))
        (bad,) = await verify(store, forged)
        assert bad.problem == f"{manifest.key(0)} has the right CRC-32C, but another SHA-256: it was changed on purpose"
        assert await verify(store, remove_identities(forged)) == []

    asyncio.run(main())


def test_an_object_that_was_damaged_on_its_way_only_is_not_bad() -> None:
    class OnceDamaging(WatchedStore):
        done = False

        async def get_range(self, *which: Any, into: memoryview, **options: Any) -> ObjectInfo:
            info = await super().get_range(*which, into=into, **options)
            if not self.done:
                self.done = True
                into[-1] ^= 1
            return info

    async def main() -> None:
        store = await data_set()
        assert await verify(OnceDamaging(store), await versions.read_manifest(store)) == []

    asyncio.run(main())


def test_a_store_that_cannot_be_read_is_an_error_and_no_list_of_bad_objects() -> None:
    class Refusing(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            raise PermissionDeniedError("no")

    async def main() -> None:
        store = await data_set()
        manifest = await versions.read_manifest(store)
        with pytest.raises(PermissionDeniedError):
            await verify(Refusing(store), manifest)
        with pytest.raises(BucketNotFoundError):
            await verify(open_store("memory://no-such-bucket-at-all"), manifest)

    asyncio.run(main())


def test_verify_limits_its_concurrent_reads() -> None:
    class Counting(WatchedStore):
        now = most = 0

        async def before(self, number: int, operation: str, key: str) -> None:
            self.now += operation == "get"
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)

        async def after(self, number: int, operation: str, key: str) -> None:
            self.now -= operation == "get"

    async def main() -> None:
        store = Counting(await data_set())
        await verify(store, await versions.read_manifest(store), concurrency=3)
        assert store.most == 3

    asyncio.run(main())
