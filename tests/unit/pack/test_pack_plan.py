"""Packing where there is something already: data sets, and packs that did not finish."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stoker import Schema
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY
from stoker._pack.packer import AsyncPacker
from stoker._pack.record import record_key
from stoker.errors import ConfigError, DatasetExistsError, NotFoundError, PackError, SchemaError, StoreError
from stoker.testing import DyingStore, WatchedStore
from support.packing import (
    SCHEMA,
    config,
    fresh_store,
    labels,
    numbered_samples,
    pack,
    pack_interrupted,
    puts,
    read_objects,
)

# Where there is something already


def test_create_refuses_a_data_set_that_is_there_also_the_very_same() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(5))
        before = await read_objects(store)
        for source in ("numbers", "other"):
            with pytest.raises(DatasetExistsError, match=r"5 samples.*append"):
                await pack(store, numbered_samples(5), source=source)
        assert await read_objects(store) == before

    asyncio.run(main())


def test_create_refuses_where_a_manifest_was_lost() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(5))
        for key in (POINTER_KEY, "manifests/00000001.safetensors"):
            await store.delete(key)
        with pytest.raises(DatasetExistsError, match="rebuild-manifest"):
            await pack(store, numbered_samples(5), source="other")

    asyncio.run(main())


def test_create_continues_beside_an_unfinished_pack_of_another_source_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(40), source="first")
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered_samples(7), source="second")
        assert "unfinished pack with another source, size or schema (first)" in caplog.text
        assert await labels(store) == list(range(7))

    asyncio.run(main())


def test_append_adds_a_version_and_leaves_the_old_one() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(5))
        manifest = await pack(store, numbered_samples(6, 5), mode="append")
        assert (manifest.version, manifest.samples, len(manifest.runs)) == (2, 11, 2)
        assert await labels(store) == list(range(11))
        assert (await versions.read_manifest(store, 1)).samples == 5

    asyncio.run(main())


def test_appending_the_same_source_again_appends_it_again() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(3))
        for _ in range(3):
            await pack(store, numbered_samples(2, 10), mode="append", source="more")
        assert await labels(store) == [0, 1, 2] + 3 * [10, 11]

    asyncio.run(main())


def test_append_needs_a_data_set_of_the_same_schema() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(NotFoundError, match="mode='create'"):
            await pack(store, numbered_samples(5), mode="append")
        await pack(store, numbered_samples(5))
        with pytest.raises(
            SchemaError,
            match="in the order label, data, not data, label; append samples with the data set's own columns",
        ):
            await pack(store, [], mode="append", schema=Schema({name: SCHEMA[name] for name in reversed(list(SCHEMA))}))

    asyncio.run(main())


# Resumed packs


@pytest.mark.parametrize("mode", ["create", "append"])
@pytest.mark.parametrize("samples", [0, 1, 26, 99, 100])
def test_a_pack_that_stopped_is_resumed_and_gives_the_undisturbed_data_set(mode: str, samples: int) -> None:
    async def main() -> None:
        undisturbed, store = fresh_store(), WatchedStore(fresh_store())
        for place in (undisturbed, store):
            if mode == "append":
                await pack(place, numbered_samples(5), source="base")
        await pack_interrupted(store, numbered_samples(samples), mode=mode)
        first = len(puts(store))
        await pack(undisturbed, numbered_samples(100), mode=mode)
        await pack(store, numbered_samples(100), mode=mode)
        assert await read_objects(store, "data/") == await read_objects(undisturbed, "data/")
        assert len(puts(store)) == len(set(puts(store))), "nothing durable was uploaded again"
        assert first >= samples // 3 - 1

    asyncio.run(main())


def test_an_unfinished_append_is_resumed_also_if_others_appended_meanwhile() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        await pack(store, numbered_samples(3), source="base")
        await pack_interrupted(store, numbered_samples(30, 100), mode="append")
        await pack(store, numbered_samples(3, 3), mode="append", source="others")
        first = set(puts(store))
        await pack(store, numbered_samples(40, 100), mode="append")
        assert await labels(store) == [*range(6), *range(100, 140)]
        assert len(puts(store)) == len(set(puts(store)))
        assert len(first) > 10

    asyncio.run(main())


def test_a_resumed_pack_that_stops_early_forgets_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(62))
        await pack_interrupted(store, numbered_samples(10))
        async with AsyncPacker(store, config()) as packer:
            assert packer.durable_samples == 60
            packer.skip(60)

    asyncio.run(main())


def test_what_is_durable_can_be_skipped_without_reading_it() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(50))
        async with AsyncPacker(store, config()) as packer:
            assert packer.durable_samples == 48
            with pytest.raises(ConfigError, match="exactly the 48"):
                packer.skip(3)
            packer.skip(48)
            with pytest.raises(ConfigError, match="before the first"):
                packer.skip(48)
            for sample in numbered_samples(10, 48):
                await packer.write(sample)
        assert await labels(store) == list(range(58))

    asyncio.run(main())


def test_a_finished_but_uncommitted_pack_can_be_skipped_whole() -> None:
    async def main() -> None:
        memory = fresh_store()
        alive = WatchedStore(memory)
        await pack(WatchedStore(fresh_store()), numbered_samples(20))
        await pack(alive, numbered_samples(20))
        commit = alive.calls.index("put manifests/00000001.safetensors")
        store = fresh_store()
        with pytest.raises(StoreError, match="dead"):
            await pack(DyingStore(store, commit, late=False), numbered_samples(20))
        async with AsyncPacker(store, config()) as packer:
            packer.skip(packer.durable_samples)
        assert await labels(store) == list(range(20))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([*numbered_samples(4), {"data": b"?", "label": 0}, *numbered_samples(95, 5)], "super-sample 1, .* differs"),
        (numbered_samples(30), "super-sample 9, before sample 30, differs"),
        (numbered_samples(48), "super-sample 15, before sample 48, differs"),
        ([], "ended after 0 samples, but 60"),
        ([{"data": bytes(90), "label": 0}, *numbered_samples(59, 1)], "super-sample 0, .* differs"),
    ],
)
def test_a_source_that_changed_is_refused_and_the_original_still_resumes(
    changed: list[dict[str, object]], message: str
) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(62))
        with pytest.raises(
            PackError, match=rf"differs from the one .*({message}).*source=.*gc --abandoned [0-9a-f]{{16}} --delete"
        ):
            await pack(store, changed)
        await pack(store, numbered_samples(70))
        assert await labels(store) == list(range(70))

    asyncio.run(main())


def test_a_source_that_grew_after_it_had_ended_is_refused() -> None:
    async def main() -> None:
        healthy = WatchedStore(fresh_store())
        await pack(healthy, numbered_samples(20))
        commit = healthy.calls.index("put manifests/00000001.safetensors")
        for more in (1, 2, 9):
            store = fresh_store()
            with pytest.raises(StoreError, match="dead"):
                await pack(DyingStore(store, commit, late=False), numbered_samples(21))
            with pytest.raises(PackError, match=r"differs|more than its 21 samples"):
                await pack(store, numbered_samples(21 + more))

    asyncio.run(main())


def test_objects_beyond_the_record_that_hold_other_samples_are_never_overwritten() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(12), source=None)
        before = await read_objects(store, "data/")
        record = next(iter(await read_objects(store, "packs/")))
        await store.delete(record)
        with pytest.raises(PackError, match="holds other samples"):
            await pack(store, numbered_samples(9, 1), source=None)
        assert await read_objects(store, "data/") == before
        await pack(store, numbered_samples(12), source=None)
        assert await labels(store) == list(range(12))

    asyncio.run(main())


def test_a_prefix_that_lost_an_object_is_packed_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(50))
        await store.delete(sorted(await read_objects(store, "data/"))[3])
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered_samples(60))
        assert "lost objects" in caplog.text
        assert await labels(store) == list(range(60))

    asyncio.run(main())


@pytest.mark.parametrize("damage", [b"", b"not a record", b"\xff" * 64])
def test_a_damaged_record_costs_only_its_uploads(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(50))
        await store.put(next(iter(await read_objects(store, "packs/"))), damage)
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered_samples(60))
        assert "ignoring the pack record" in caplog.text
        assert await labels(store) == list(range(60))

    asyncio.run(main())


def test_a_record_under_the_key_of_another_run_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(50), source="other")
        (data,) = (await read_objects(store, "packs/")).values()
        run_id = (await pack(fresh_store(), numbered_samples(3))).runs[0].run
        await store.put(record_key(run_id), data)
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered_samples(3))
        assert "it has the record of run" in caplog.text
        assert await labels(store) == [0, 1, 2]

    asyncio.run(main())
