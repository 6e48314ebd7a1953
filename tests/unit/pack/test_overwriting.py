"""Overwriting a data set: the newest version has only the new samples, and readers of earlier ones continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import stoker
from stoker import Array, RetryingStore, Schema
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, version_key
from stoker._maintenance.compaction import compact
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.catalog import BucketCatalog
from stoker._pack.packer import AsyncPacker
from stoker.abc import Store
from stoker.errors import DatasetExistsError, PackError
from stoker_torch import Loader
from support.packing import config, contents, failing_after, fresh_store, labels, numbered_samples, pack

OTHER = Schema({"number": Array("int64")})


def run(check: Callable[[Store], Awaitable[None]]) -> None:
    asyncio.run(check(fresh_store()))  # type: ignore[arg-type]  # every check is a coroutine function


async def overwrite(store: Store, count: int, start: int = 0) -> None:
    await pack(store, numbered_samples(count, start), mode="overwrite", source=None)


def test_a_cell_that_is_run_twice_makes_the_same_data_set(tmp_path: Path) -> None:
    url = str(tmp_path / "cell")
    for _ in range(3):
        with stoker.Packer(url, schema={"x": stoker.Array("int64")}, mode="overwrite") as packer:
            packer.extend({"x": number} for number in range(10))
        with stoker.open(url) as dataset:
            assert [int(sample["x"]) for sample in dataset] == list(range(10))


def test_the_new_version_has_the_new_samples_alone_and_the_old_one_stays() -> None:
    async def check(store: Store) -> None:
        first = await pack(store, numbered_samples(20))
        await pack(store, numbered_samples(5, 20), mode="append")
        await overwrite(store, 7, 100)
        assert await labels(store) == list(range(100, 107))
        newest = await versions.read_manifest(store)
        assert (newest.version, newest.dataset) == (3, first.dataset)
        assert [row["label"] for row in await contents(store, await versions.read_manifest(store, 2))] == list(
            range(25)
        )
        assert await verify(store, newest, deep=True) == []
        await pack(store, numbered_samples(2, 107), mode="append")
        assert await labels(store) == list(range(100, 109))

    run(check)


def test_the_columns_may_be_others() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await pack(store, [{"number": 1}], mode="overwrite", schema=OTHER)
        assert await contents(store) == [{"number": 1}]

    run(check)


def test_a_pack_that_fails_leaves_what_is_there_and_the_next_one_does_not_resume_it() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        for start in (100, 200):
            with pytest.raises(ZeroDivisionError):
                await pack(store, failing_after(numbered_samples(10, start)), mode="overwrite", source=None)
            assert await labels(store) == list(range(20))
        with pytest.raises(PackError, match="nothing was packed"):
            await overwrite(store, 0)
        assert await labels(store) == list(range(20))
        await overwrite(store, 3)
        assert await labels(store) == [0, 1, 2]

    run(check)


def test_a_named_source_is_resumed() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        with pytest.raises(ZeroDivisionError):
            await pack(store, failing_after(numbered_samples(30, 100)), mode="overwrite")
        async with AsyncPacker(store, config(mode="overwrite")) as packer:
            durable = packer.durable_samples
            assert durable
            packer.skip(durable)
            for sample in numbered_samples(30 - durable, 100 + durable):
                await packer.write(sample)
        assert await labels(store) == list(range(100, 130))
        await pack(store, numbered_samples(30, 100), mode="overwrite")
        assert (await versions.read_manifest(store)).version == 3

    run(check)


def test_of_two_at_once_the_later_commit_is_what_stays() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        async with AsyncPacker(store, config(mode="overwrite", source=None)) as outer:
            await outer.write(numbered_samples(1, 50)[0])
            await overwrite(store, 3)
            await pack(store, numbered_samples(2, 3), mode="append")
        assert await labels(store) == [50]
        assert (await versions.read_manifest(store)).version == 4

    run(check)


def test_concurrent_appends_are_added_or_fail_for_other_columns() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        async with AsyncPacker(store, config(mode="append", source=None)) as appending:
            await appending.write(numbered_samples(1, 50)[0])
            await overwrite(store, 2)
        assert await labels(store) == [0, 1, 50]

        async def append_meanwhile() -> None:
            async with AsyncPacker(store, config(mode="append", source=None)) as appending:
                await appending.write(numbered_samples(1, 51)[0])
                await pack(store, [{"number": 1}], mode="overwrite", schema=OTHER)

        with pytest.raises(PackError, match="overwritten with other columns"):
            await append_meanwhile()
        assert await contents(store) == [{"number": 1}]

    run(check)


def test_garbage_of_the_earlier_version_is_found(caplog: pytest.LogCaptureFixture) -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        with caplog.at_level(logging.WARNING, logger="stoker"):
            await overwrite(store, 5)
        assert f"stoker gc --keep-versions 1 --delete {store.url}" in caplog.text
        assert (await collect_garbage(store, delete=True)).objects == ()
        assert len((await collect_garbage(store, delete=True, keep_versions=1)).objects) == 7
        assert await labels(store) == list(range(5))
        assert (await collect_garbage(store)).unfinished == {}

    run(check)


@pytest.mark.parametrize("lost", [(1, 2, 3), (2, 3), (3,), (1,)])
@pytest.mark.parametrize("other", [False, True])
def test_a_rebuilt_manifest_has_nothing_that_was_overwritten(lost: tuple[int, ...], *, other: bool) -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        schema = {"schema": OTHER} if other else {}

        def samples(count: int, start: int = 0) -> list[dict[str, object]]:
            return [{"number": n} for n in range(start, start + count)] if other else numbered_samples(count, start)

        await pack(store, samples(4), mode="overwrite", source=None, **schema)
        await pack(store, samples(2, 4), mode="append", source=None, **schema)
        wanted = await contents(store)
        for key in (POINTER_KEY, *map(version_key, lost)):
            await store.delete(key)
        report = await rebuild_manifest(store, adopt=False)
        assert (report.lost, report.orphans, report.gaps) == ((), (), ())
        assert await contents(store) == wanted

    run(check)


def test_what_was_overwritten_is_not_adopted() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await overwrite(store, 4, 100)
        await store.delete(version_key(1))
        report = await rebuild_manifest(store, adopt=True)
        assert (report.adopted, report.is_new) == ((), False)
        assert await labels(store) == list(range(100, 104))

    run(check)


def test_a_data_set_that_lost_its_manifest_is_not_overwritten() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await store.delete(POINTER_KEY)
        await store.delete(version_key(1))
        with pytest.raises(DatasetExistsError, match="rebuild-manifest"):
            await overwrite(store, 3)

    run(check)


def test_an_overwritten_data_set_is_compacted() -> None:
    async def check(store: Store) -> None:
        await pack(store, numbered_samples(20))
        await overwrite(store, 12, 100)
        done = await compact(RetryingStore(store), BucketCatalog(store), now_seconds=1.0)
        assert done.objects_before == 4
        assert await labels(store) == list(range(100, 112))

    run(check)


def test_a_loader_continues_with_the_version_that_it_reads_and_resumes_it() -> None:
    url = fresh_store().url
    schema = {"x": stoker.Array("int64")}
    with stoker.Packer(url, schema=schema, super_sample_bytes=100) as packer:
        packer.extend({"x": number} for number in range(60))
    with Loader(url, batch_size=10, memory="1MB") as loader:
        batches = iter(loader)
        read = next(batches)["x"].tolist()
        with stoker.Packer(url, schema=schema, mode="overwrite") as packer:
            packer.write({"x": -1})
        read += next(batches)["x"].tolist()
        state = loader.state_dict()
    with Loader(url, batch_size=10) as resumed:
        resumed.load_state_dict(state)
        read += [number for batch in resumed for number in batch["x"].tolist()]
    assert sorted(read) == list(range(60))
    with Loader(url, batch_size=10, epochs=1) as fresh:
        assert [batch["x"].tolist() for batch in fresh] == [[-1]]
