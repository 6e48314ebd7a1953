"""A pack that permutes its samples: uniform, exactly once, the same whatever the memory, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from stoker import MemoryBudgetError, Packer, RetryingStore
from stoker._format import versions
from stoker._format.manifest import Manifest
from stoker._format.pack_shuffle import PackShuffle
from stoker._maintenance.compaction import compact
from stoker._maintenance.garbage import collect_garbage, plan_removal
from stoker._maintenance.recovery import rebuild_manifest
from stoker._order.epoch_layout import EpochLayout
from stoker._order.random_words import FeistelPermutation, Purpose, words
from stoker._pack import shuffle as permuting
from stoker._pack.catalog import BucketCatalog
from stoker._pack.packer import AsyncPacker
from stoker._pack.record import list_records
from stoker.abc import Store
from stoker.errors import ChecksumError, ConfigError, PackError, StoreError
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

SEED = 7
_SMALL_MEMORY_BYTES = 1_300_000  # little more than the minimum: two parts of 4,000 samples


def expected_order(samples: int, seed: int = SEED) -> list[int]:
    """Return the numbers of the source's samples in packed order, computed as docs/order.md defines it."""
    keys = words(FeistelPermutation.ROUNDS, seed=seed, purpose=Purpose.PACK, epoch=0)
    order: list[int] = FeistelPermutation(samples, keys)(np.arange(samples)).tolist()
    return order


async def work_keys(store: Store) -> list[str]:
    """Return the keys of temporary objects."""
    return [key for key in await read_objects(store, "packs/") if permuting.WORK_KEY_PATTERN.fullmatch(key)]


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permute in three parts, so that few samples go through scatters and cells."""
    monkeypatch.setattr(permuting, "_count_parts", lambda *_: 3)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of parts in which packs permute, as they are tried."""
    tried: list[int] = []
    write_rest = permuting._write_rest

    async def watch(*arguments: Any) -> None:
        tried.append(arguments[-1])
        await write_rest(*arguments)

    monkeypatch.setattr(permuting, "_write_rest", watch)
    return tried


def test_samples_are_in_the_documented_order_each_exactly_once_and_no_temporary_object_stays() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(100), shuffle=SEED)
        assert await labels(store) == expected_order(100)
        assert sorted(expected_order(100)) == list(range(100))
        (run,) = manifest.runs
        assert manifest.shuffles == {run.run: PackShuffle(SEED, run.run)}
        assert await work_keys(store) == []
        report = await collect_garbage(store)
        assert (report.objects, report.records, report.unfinished) == ((), (), {})

    asyncio.run(main())


def test_the_permutations_of_four_samples_are_uniform_over_seeds() -> None:
    async def main() -> None:
        manifest = await pack(fresh_store(), numbered_samples(4))
        rows, seeds = np.arange(4), 4800
        layouts = (EpochLayout(manifest, seed=seed, lanes=1, epoch=0, purpose=Purpose.PACK) for seed in range(seeds))
        counts = Counter(tuple(layout.samples_of(rows).tolist()) for layout in layouts)
        expected = seeds / 24
        chi_square = sum((counts[each] - expected) ** 2 / expected for each in permutations(range(4)))
        assert chi_square < 55.5  # 0.9998 quantile, 23 degrees of freedom

    asyncio.run(main())


def test_where_each_sample_lands_is_uniform_over_seeds() -> None:
    samples, cells, seeds = 1000, 10, 400
    table = np.zeros((cells, cells))
    for seed in range(seeds):
        order = np.array(expected_order(samples, seed))
        np.add.at(table, (np.arange(samples) * cells // samples, order * cells // samples), 1)
    expected = samples * seeds / cells**2
    chi_square = float(((table - expected) ** 2 / expected).sum())
    assert chi_square < 133  # 0.9998 quantile, 81 degrees of freedom


def test_the_seed_differs_from_that_of_an_epoch() -> None:
    async def main() -> None:
        manifest = await pack(fresh_store(), numbered_samples(100))
        full = EpochLayout(manifest, seed=SEED, lanes=1, epoch=0).samples_of(np.arange(100)).tolist()
        assert full != expected_order(100) != expected_order(100, SEED + 1)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
def test_neither_the_memory_nor_the_number_of_uploads_changes_a_byte(mode: str) -> None:
    async def main() -> None:
        packed = []
        for changes in ({}, {"memory_bytes": _SMALL_MEMORY_BYTES}, {"concurrency": 1}):
            settings = {"super_sample_bytes": 8000, **changes}
            store = fresh_store()
            if mode == "append":
                await pack(store, numbered_samples(4), source="base")
            watched = WatchedStore(store)
            manifest = await pack(watched, numbered_samples(4000), mode=mode, shuffle=SEED, **settings)
            assert any("/cells/" in call for call in watched.calls) == ("memory_bytes" in settings)
            packed.append((await read_objects(store, "data/"), manifest.runs))
        assert packed[0] == packed[1] == packed[2]
        assert (await labels(store))[-4000:] == expected_order(4000)

    asyncio.run(main())


def test_samples_of_very_uneven_sizes_are_permuted_in_more_parts(attempts: list[int]) -> None:
    async def main() -> None:
        store = fresh_store()
        samples = [{"data": b"x" * (90_000 if i % 10 == 0 else 10), "label": i} for i in range(500)]
        manifest = await pack(store, samples, shuffle=SEED, super_sample_bytes=100_000, memory_bytes=2_700_000)
        assert manifest.samples == 500
        assert await labels(store) == expected_order(500)
        assert len(attempts) == 2
        assert attempts[1] == 2 * attempts[0]

    asyncio.run(main())


def test_appended_samples_are_permuted_among_themselves(three_parts: None) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(20))
        manifest = await pack(store, numbered_samples(30, start=20), source="more", mode="append", shuffle=SEED)
        assert await labels(store) == [*range(20), *(20 + each for each in expected_order(30))]
        assert [manifest.shuffles.get(run.run) is not None for run in manifest.runs] == [False, True]

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_after_a_death_at_any_operation_packing_again_gives_the_same_data_set(
    mode: str, late: bool, three_parts: None
) -> None:
    async def begun() -> Store:
        store = fresh_store()
        if mode == "append":
            await pack(store, numbered_samples(4), source="base")
        return store

    async def main() -> None:
        samples = numbered_samples(6)
        whole = WatchedStore(await begun())
        expected = await pack(whole, samples, mode=mode, shuffle=SEED)
        objects = await read_objects(whole, "data/")
        for lives in range(len(whole.calls) - len(objects)):
            store = await begun()
            try:
                await pack(DyingStore(store, lives, late=late), samples, mode=mode, shuffle=SEED)
            except StoreError:
                records = [item.record for item in await list_records(store)]
                if not all(record is None or record.is_committed for record in records) or len(records) < len(
                    await list_records(whole)
                ):
                    await pack(store, samples, mode=mode, shuffle=SEED)
            assert await read_objects(store, "data/") == objects
            newest = await versions.read_manifest(store)
            assert (newest.version, newest.runs, newest.shuffles) == (
                expected.version,
                expected.runs,
                expected.shuffles,
            )
            await collect_garbage(store, delete=True)
            assert await work_keys(store) == []

    asyncio.run(main())


def test_a_resumed_pack_writes_only_the_rest(three_parts: None) -> None:
    async def main() -> None:
        store, samples = fresh_store(), numbered_samples(60)
        await pack_interrupted(store, samples[:40], shuffle=SEED)
        staged = [key for key in await work_keys(store) if "/data/" in key]
        again = WatchedStore(store)
        async with AsyncPacker(again, config(shuffle=SEED)) as packer:
            assert packer.durable_samples == len(staged) * 3
            packer.skip(packer.durable_samples)
            for sample in samples[packer.durable_samples :]:
                await packer.write(sample)
        assert not [call for call in again.calls if call.removeprefix("put ") in staged]
        assert await labels(store) == expected_order(60)

    asyncio.run(main())


def test_a_pack_with_another_seed_is_another_pack() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(30), shuffle=SEED)
        await pack(store, numbered_samples(30), shuffle=SEED + 1)
        assert await labels(store) == expected_order(30, SEED + 1)
        ((run, left),) = (await collect_garbage(store)).unfinished.items()
        assert left.objects > 0
        await collect_garbage(store, delete=True)
        assert await work_keys(store), "an unfinished pack is protected"
        await collect_garbage(store, delete=True, abandoned=[run])
        assert await work_keys(store) == []
        assert await labels(store) == expected_order(30, SEED + 1)

    asyncio.run(main())


def test_a_source_that_changed_before_the_resume_is_found() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack_interrupted(store, numbered_samples(30), shuffle=SEED)
        with pytest.raises(PackError, match="the source differs"):
            await pack(store, numbered_samples(30, start=1), shuffle=SEED)

    asyncio.run(main())


def test_a_source_without_samples_leaves_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(PackError, match="nothing was packed"):
            await pack(store, [], shuffle=SEED)
        assert await read_objects(store) == {}

    asyncio.run(main())


def test_a_staged_object_that_is_damaged_is_never_packed(three_parts: None) -> None:
    class Damaging(WatchedStore):
        async def put(self, key: str, data: Any, **conditions: Any) -> Any:
            if "/data/" in key and key.startswith("packs/"):
                data = bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 1])
            return await WatchedStore.put(self, key, data, **conditions)

    async def main() -> None:
        store = fresh_store()
        with pytest.raises((ChecksumError, StoreError)):
            await pack(Damaging(store), numbered_samples(30), shuffle=SEED)
        assert await versions.find_newest_manifest(store) is None
        assert not await read_objects(store, "data/")

    asyncio.run(main())


def test_if_temporary_objects_cannot_be_deleted_the_pack_is_committed_and_garbage_collection_deletes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Undeletable(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "delete":
                raise StoreError("no right to delete")

    async def main() -> None:
        store = fresh_store()
        with caplog.at_level(logging.WARNING, "stoker"):
            await pack(Undeletable(store), numbered_samples(30), shuffle=SEED)
        assert "stoker gc --delete" in caplog.text
        report = await collect_garbage(store, delete=True)
        assert report.objects
        assert not report.unfinished
        assert await work_keys(store) == []
        assert await labels(store) == expected_order(30)

    asyncio.run(main())


def test_removal_of_a_data_set_takes_the_temporary_objects_along() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered_samples(6), source="base")
        await pack_interrupted(store, numbered_samples(30), mode="append", source="more", shuffle=SEED)
        removal = await plan_removal(store)
        assert removal.others == ()
        assert {info.key for info in removal.objects} == (await read_objects(store)).keys()

    asyncio.run(main())


def test_the_manifest_keeps_the_seed_through_rewriting_rebuilding_and_compaction() -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(store, numbered_samples(30), shuffle=SEED)
        assert Manifest.from_bytes(manifest.to_bytes()).shuffles == manifest.shuffles
        assert manifest.file_bytes == len(manifest.to_bytes())
        rebuilt = await rebuild_manifest(store)
        assert not rebuilt.is_new
        for key in await read_objects(store, "manifest"):
            await store.delete(key)
        rebuilt = await rebuild_manifest(store)
        assert rebuilt.is_new
        assert rebuilt.manifest.shuffles == manifest.shuffles
        done = await compact(RetryingStore(store), BucketCatalog(store), now_seconds=1e9, super_sample_bytes=4000)
        assert done.objects_before
        assert done.manifest.shuffles == {}, "the new run has the samples of many, in whatever order"

    asyncio.run(main())


def test_settings_out_of_range_are_refused_with_a_remedy() -> None:
    for seed in (-1, 1 << 64, True, 1.5):
        with pytest.raises(ConfigError, match="shuffle must be a seed"):
            config(shuffle=seed)
    with pytest.raises(MemoryBudgetError, match="MiB or more in total, or "):
        config(shuffle=1, memory_bytes=1000)
    with pytest.raises(ConfigError, match=r"from 1 to 25 .*; raise memory to allow more"):
        replace(config(), memory_bytes=100)


def test_the_packer_permutes_within_the_memory_it_is_given() -> None:
    with Packer("memory://permuted/packer", schema=SCHEMA, shuffle=SEED, memory="512MiB") as packer:
        packer.extend(numbered_samples(50))
        assert packer.durable_samples == 0
    assert packer.manifest is not None
    assert [shuffle.seed for shuffle in packer.manifest.shuffles.values()] == [SEED]


def test_staged_samples_are_uploaded_while_samples_are_written() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        async with AsyncPacker(store, config(shuffle=SEED)) as packer:
            for sample in numbered_samples(60):
                await packer.write(sample)
            assert not puts(store)
            assert any("/data/" in call for call in store.calls)
            await packer.complete_source()
            with pytest.raises(ConfigError, match="committed"):
                await packer.write(numbered_samples(1)[0])

    asyncio.run(main())
