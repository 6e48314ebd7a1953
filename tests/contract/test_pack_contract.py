"""A pack that breaks off, is resumed, appended to, verified and rebuilt: the same on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from stoker import RetryingStore, open_store
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._maintenance.compaction import compact
from stoker._maintenance.garbage import collect_garbage, plan_removal, remove_dataset
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack import shuffle
from stoker._pack.catalog import BucketCatalog
from stoker.abc import Store
from stoker.errors import BucketNotFoundError, DatasetExistsError, NotFoundError, StoreError
from stoker_local import BucketConfig, BucketSpec, running_bucket
from support.local_bucket import s3_options
from support.packing import labels, numbered_samples, pack, read_objects
from support.stores import Deviation, Place


def breaking(count: int) -> Iterator[dict[str, Any]]:
    yield from numbered_samples(count)
    raise ZeroDivisionError


def packed_at(place: Place) -> Callable[..., Awaitable[Manifest]]:
    """Return what packs at a place: alone, where that ignores conditions."""
    return partial(pack, single_writer=place.needs_single_writer)


def test_a_data_set_lives_on_every_store(place: Place) -> None:
    pack = packed_at(place)

    async def main(store: Store) -> None:
        with pytest.raises(ZeroDivisionError):
            await pack(store, breaking(40))
        first = await pack(store, numbered_samples(45))
        assert (first.version, first.samples) == (1, 45)
        second = await pack(store, numbered_samples(5, 45), mode="append")
        assert await labels(store) == list(range(50))
        tags = {info.key: info.tag async for info in store.list("data/")}
        assert tags == {second.key(row): second.rows.tag(row) for row in range(len(second))}
        assert await verify(store, second, deep=True) == []
        with pytest.raises(DatasetExistsError):
            await pack(store, numbered_samples(3))
        before = await read_objects(store)
        for key in (POINTER_KEY, version_key(1), version_key(2)):
            await store.delete(key)
        report = await rebuild_manifest(store)
        assert (report.manifest.samples, report.lost, report.orphans) == (50, (), ())
        assert await labels(store) == list(range(50))
        assert (await collect_garbage(store, delete=True)).objects == ()
        assert await read_objects(store, "data/") == {
            key: data for key, data in before.items() if key.startswith("data/")
        }
        assert (await versions.read_manifest(store)).runs == second.runs

    place.run(main)


def test_samples_are_permuted_on_every_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "_count_parts", lambda *_: 3)
    pack = packed_at(place)

    async def main(store: Store) -> None:
        with pytest.raises(ZeroDivisionError):
            await pack(store, breaking(40), shuffle=7)
        manifest = await pack(store, numbered_samples(45), shuffle=7)
        permuted = await labels(store)
        assert sorted(permuted) == list(range(45)) != permuted
        assert [each.seed for each in manifest.shuffles.values()] == [7]
        assert await verify(store, manifest, deep=True) == []
        report = await collect_garbage(store)
        assert (report.objects, report.unfinished) == ((), {})
        assert not [key for key in await read_objects(store, "packs/") if key.count("/") > 1]

    place.run(main)


def test_a_data_set_is_overwritten_on_every_store(place: Place) -> None:
    pack = packed_at(place)

    async def main(store: Store) -> None:
        for count in (20, 5):
            manifest = await pack(store, numbered_samples(count), mode="overwrite", source=None)
            assert await labels(store) == list(range(count))
        assert manifest.version == 2
        assert await verify(store, await versions.read_manifest(store, 1)) == []
        assert len((await collect_garbage(store, delete=True, keep_versions=1)).objects) == 7
        assert await verify(store, manifest) == []

    place.run(main)


def test_a_data_set_is_removed_from_every_store(place: Place) -> None:
    pack = packed_at(place)

    async def main(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await store.put("data/mine", b"mine")
        await remove_dataset(store, await plan_removal(store))
        assert list(await read_objects(store)) == ["data/mine"]
        with pytest.raises(NotFoundError, match="no data set"):
            await plan_removal(store)

    place.run(main)


def test_maintenance_tells_a_missing_bucket_from_a_missing_data_set(place: Place) -> None:
    async def commands(store: Store) -> list[Exception]:
        compaction = compact(RetryingStore(store), BucketCatalog(store), now_seconds=0.0)
        found = await asyncio.gather(
            compaction, collect_garbage(store), rebuild_manifest(store), plan_removal(store), return_exceptions=True
        )
        return [error for error in found if isinstance(error, NotFoundError)]

    async def missing(store: Store) -> None:
        assert [type(error) for error in await commands(store)] == [BucketNotFoundError] * 4

    async def empty(store: Store) -> None:
        await store.put("something", b"else")
        assert [type(error) for error in await commands(store)] == [NotFoundError] * 4

    place.run_without_bucket(missing)
    place.run(empty)


def test_a_store_that_ignores_conditions_is_reported_before_packing(place: Place) -> None:
    ignores = place.needs_single_writer

    async def main(store: Store) -> None:
        if ignores:
            with pytest.raises(StoreError, match=f"{store.url} ignores If-None-Match.*single_writer=True"):
                await pack(store, numbered_samples(4), single_writer=False)
            assert await read_objects(store) == {}
        manifest = await pack(store, numbered_samples(4), single_writer=ignores)
        assert manifest.samples == 4

    place.run(main)


def test_an_s3_server_that_ignores_conditions_is_reported_by_name() -> None:
    async def main() -> None:
        spec = BucketSpec(name="stoker", ignores_conditions=True)
        with running_bucket(BucketConfig(buckets=(spec,))) as bucket:
            options = s3_options(bucket)
            store = open_store("s3://stoker/set", options=options)
            with pytest.raises(StoreError, match="s3://stoker/set ignores If-None-Match"):
                await pack(store, numbered_samples(4))
            await pack(store, numbered_samples(4), single_writer=True)
            assert await labels(store) == [0, 1, 2, 3]
            await store.close()

    asyncio.run(main())


def test_objects_that_are_there_are_recognised_and_not_written_again(place: Place) -> None:
    if Deviation.IGNORES_PRECONDITIONS in place.deviations:
        pytest.skip(f"{place.name} ignores preconditions")

    async def main(store: Store) -> None:
        with pytest.raises(ZeroDivisionError):
            await pack(store, breaking(30))
        before = {info.key: info.tag async for info in store.list("data/")}
        for key in await read_objects(store, "packs/"):
            await store.delete(key)
        manifest = await pack(store, numbered_samples(45))
        tags = {manifest.key(row): manifest.rows.tag(row) for row in range(len(manifest))}
        assert tags.items() >= before.items()
        assert await verify(store, manifest) == []

    place.run(main)
