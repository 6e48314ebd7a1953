"""Packing on a store in memory: boundaries, errors, resumption, twins and appenders."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import catalog
from stoker.errors import (
    ChecksumError,
    ConfigError,
    DatasetExistsError,
    NotFoundError,
    PackError,
    SchemaError,
    StokerError,
    StoreError,
)
from stoker.maintenance import gc
from stoker.manifest import POINTER_KEY, Manifest
from stoker.pack.packer import AsyncPacker, Packer, PackProgress
from stoker.pack.plan import PackConfig
from stoker.pack.record import PackRecord, record_key
from stoker.schema import Array, Schema
from stoker.store.protocol import Store
from stoker.supersample import SuperSample
from support.packing import (
    SCHEMA,
    DyingStore,
    FlakyStore,
    SlowStore,
    WatchedStore,
    config,
    contents,
    fresh_store,
    labels,
    numbered,
    pack,
    stored,
)
from support.supersamples import EVERY_KIND, samples_of


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def breaking(samples: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the samples, then fail as a source would."""
    yield from samples
    raise ZeroDivisionError


async def interrupted(store: Store, samples: list[dict[str, object]], **changes: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        await pack(store, breaking(samples), **changes)


def puts(store: WatchedStore, prefix: str = "data/") -> list[str]:
    return [call for call in store.calls if call.startswith(f"put {prefix}")]


# What is packed


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(800, 5000))
def test_every_value_of_every_kind_of_column_comes_back_in_order(count: int, seed: int, limit: int) -> None:
    async def main() -> None:
        store, samples = fresh_store(), samples_of(EVERY_KIND, count, seed)
        await pack(store, samples, schema=EVERY_KIND, super_sample_bytes=limit)
        found = await contents(store)
        assert len(found) == count
        for wanted, sample in zip(samples, found, strict=True):
            assert EVERY_KIND.encode(sample) == EVERY_KIND.encode(wanted)

    run(main())


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(400, 1500))
def test_a_super_sample_ends_exactly_where_the_next_sample_would_exceed_it(sizes: list[int], limit: int) -> None:
    async def main() -> None:
        store = fresh_store()
        manifest = await pack(
            store, [{"data": bytes(n), "label": i} for i, n in enumerate(sizes)], super_sample_bytes=limit
        )
        # By the format: 8 bytes of offset, 8 of label and 8 of checksums a sample, and 8 for the last offset.
        expected, used = [0], 8
        for size in sizes:
            if used + size + 24 > limit:
                expected.append(0)
                used = 8
            expected[-1] += 1
            used += size + 24
        assert manifest.rows.samples.tolist() == expected

    run(main())


def test_the_same_samples_give_the_same_objects_whatever_the_concurrency() -> None:
    async def main() -> None:
        found = []
        for concurrency in (1, 2, 16):
            store = fresh_store()
            await pack(store, numbered(50), concurrency=concurrency)
            found.append(await stored(store, "data/"))
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == 17

    run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "other"},
        {"super_sample_bytes": 500},
        {"schema": Schema({"data": SCHEMA["data"], "label": Array("int64", classes=("a",))})},
    ],
)
def test_anything_else_that_is_packed_has_another_run(changes: dict[str, Any]) -> None:
    async def main() -> None:
        first = await pack(fresh_store(), numbered(5))
        assert (await pack(fresh_store(), numbered(5))).runs == first.runs
        assert (await pack(fresh_store(), numbered(5), **changes)).runs[0].run != first.runs[0].run

    run(main())


def test_the_manifest_is_written_behind_everything_that_it_names() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        manifest = await pack(store, numbered(50))
        written = [call.removeprefix("put ") for call in store.calls if call.startswith("put ")]
        first = written.index("manifests/00000001.safetensors")
        assert {manifest.key(row) for row in range(len(manifest))} <= set(written[:first])
        assert written[first + 1] == POINTER_KEY
        assert written[0] == record_key(manifest.runs[0].run)

    run(main())


def test_at_most_the_configured_number_of_uploads_run_and_writes_wait_for_them() -> None:
    async def main() -> None:
        store = SlowStore(fresh_store())
        taken = 0

        async def feed() -> None:
            nonlocal taken
            async with AsyncPacker(store, config(concurrency=2)) as packer:
                for sample in numbered(60):
                    await packer.write(sample)
                    taken += 1

        feeding = asyncio.create_task(feed())
        for _ in range(1000):
            await asyncio.sleep(0)
        # Two uploads run and a third super-sample waits: the sample that ended it is not yet acknowledged.
        assert (store.most_uploading, taken) == (2, 9)
        store.gate.set()
        await feeding
        assert store.most_uploading == 2
        assert await labels(store) == list(range(60))

    run(main())


def test_progress_rises_to_the_whole() -> None:
    async def main() -> None:
        seen: list[PackProgress] = []
        async with AsyncPacker(fresh_store(), config(), on_progress=seen.append) as packer:
            for sample in numbered(50):
                await packer.write(sample)
        manifest = packer.manifest
        assert manifest is not None
        assert seen[-1] == PackProgress(samples=50, size_bytes=manifest.size_bytes, objects=len(manifest))
        assert [p.samples for p in seen] == sorted(p.samples for p in seen)

    run(main())


# What cannot be packed


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"data": b"x"}, r"sample 4 \(b\.tar\) has no column 'label'"),
        ({"data": b"x", "label": 1, "extra": 2}, r"sample 4 \(b\.tar\) has unknown column 'extra'"),
        ({"data": "text", "label": 1}, r"sample 4 \(b\.tar\), column 'data'"),
        ({"data": b"x", "label": np.float32(1)}, r"sample 4 \(b\.tar\), column 'label'.*astype"),
        ({"data": b"x", "label": [1, 2]}, r"sample 4 \(b\.tar\), column 'label'.*shape"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_and_the_pack_can_go_on_without_it(
    sample: dict[str, object], message: str
) -> None:
    async def main() -> None:
        store = fresh_store()
        async with AsyncPacker(store, config()) as packer:
            for good in numbered(4):
                await packer.write(good)
            with pytest.raises(SchemaError, match=message):
                await packer.write(sample, where="b.tar")
            await packer.write(numbered(1, 4)[0])
        assert await labels(store) == list(range(5))

    run(main())


def test_a_sample_larger_than_a_super_sample_is_refused_with_the_sizes_and_the_remedy() -> None:
    async def main() -> None:
        async with AsyncPacker(fresh_store(), config()) as packer:
            await packer.write(numbered(1)[0])
            with pytest.raises(PackError, match=r"sample 1 needs 532 .*500 .* 'data'.* 400; raise super_sample"):
                await packer.write({"data": bytes(500), "label": 1})
            with pytest.raises(PackError, match="sample 1 needs"):
                await packer.write({"data": bytes(369), "label": 1})
            await packer.write({"data": bytes(368), "label": 1})

    run(main())


def test_an_empty_source_makes_no_data_set_and_leaves_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(PackError, match="nothing was packed"):
            await pack(store, [])
        assert await stored(store) == {}

    run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "replace"},
        {"super_sample_bytes": 0},
        {"super_sample_bytes": (32 << 20) + 1},
        {"super_sample_bytes": 1e6},
        {"super_sample_bytes": "8MiB"},
        {"concurrency": 0},
        {"concurrency": True},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(changes.values())))):
        config(**changes)


def test_a_packer_outside_its_with_block_or_after_its_commit_takes_no_sample() -> None:
    async def main() -> None:
        packer = AsyncPacker(fresh_store(), config())
        with pytest.raises(ConfigError, match="with"):
            await packer.write(numbered(1)[0])
        async with packer:
            await packer.write(numbered(1)[0])
            assert await packer.commit() is await packer.commit()
            with pytest.raises(ConfigError, match="committed"):
                await packer.write(numbered(1)[0])
        packer.manifest = None
        with pytest.raises(ConfigError, match="with"):
            await packer.write(numbered(1)[0])

    run(main())


# Where there is something already


def test_create_refuses_a_data_set_that_is_there_also_the_very_same() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(5))
        before = await stored(store)
        for source in ("numbers", "other"):
            with pytest.raises(DatasetExistsError, match=r"5 samples.*append"):
                await pack(store, numbered(5), source=source)
        assert await stored(store) == before

    run(main())


def test_create_refuses_where_a_manifest_was_lost() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(5))
        for key in (POINTER_KEY, "manifests/00000001.safetensors"):
            await store.delete(key)
        with pytest.raises(DatasetExistsError, match="rebuild-manifest"):
            await pack(store, numbered(5), source="other")

    run(main())


def test_create_goes_on_beside_an_unfinished_pack_of_another_source_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(40), source="first")
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered(7), source="second")
        assert "unfinished pack of another source, or of another size or schema (first)" in caplog.text
        assert await labels(store) == list(range(7))

    run(main())


def test_append_adds_a_version_and_leaves_the_old_one() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(5))
        manifest = await pack(store, numbered(6, 5), mode="append")
        assert (manifest.version, manifest.samples, len(manifest.runs)) == (2, 11, 2)
        assert await labels(store) == list(range(11))
        assert (await catalog.read_manifest(store, 1)).samples == 5

    run(main())


def test_appending_the_same_source_again_appends_it_again() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(3))
        for _ in range(3):
            await pack(store, numbered(2, 10), mode="append", source="more")
        assert await labels(store) == [0, 1, 2] + 3 * [10, 11]

    run(main())


def test_append_needs_a_data_set_of_the_same_schema() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(NotFoundError, match="mode='create'"):
            await pack(store, numbered(5), mode="append")
        await pack(store, numbered(5))
        with pytest.raises(
            SchemaError,
            match="in the order label, data, not data, label; append samples with the data set's own columns",
        ):
            await pack(store, [], mode="append", schema=Schema({name: SCHEMA[name] for name in reversed(list(SCHEMA))}))

    run(main())


# Resumed packs


@pytest.mark.parametrize("mode", ["create", "append"])
@pytest.mark.parametrize("samples", [0, 1, 26, 99, 100])
def test_a_pack_that_stopped_is_resumed_and_gives_the_undisturbed_data_set(mode: str, samples: int) -> None:
    async def main() -> None:
        undisturbed, store = fresh_store(), WatchedStore(fresh_store())
        for place in (undisturbed, store):
            if mode == "append":
                await pack(place, numbered(5), source="base")
        await interrupted(store, numbered(samples), mode=mode)
        first = len(puts(store))
        await pack(undisturbed, numbered(100), mode=mode)
        await pack(store, numbered(100), mode=mode)
        assert await stored(store, "data/") == await stored(undisturbed, "data/")
        assert len(puts(store)) == len(set(puts(store))), "nothing durable was uploaded again"
        assert first >= samples // 3 - 1

    run(main())


def test_an_unfinished_append_is_resumed_also_if_others_appended_meanwhile() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        await pack(store, numbered(3), source="base")
        await interrupted(store, numbered(30, 100), mode="append")
        await pack(store, numbered(3, 3), mode="append", source="others")
        first = set(puts(store))
        await pack(store, numbered(40, 100), mode="append")
        assert await labels(store) == [*range(6), *range(100, 140)]
        assert len(puts(store)) == len(set(puts(store)))
        assert len(first) > 10

    run(main())


def test_a_resumed_pack_that_stops_early_forgets_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(62))
        await interrupted(store, numbered(10))
        async with AsyncPacker(store, config()) as packer:
            assert packer.durable_samples == 60
            packer.skip(60)

    run(main())


def test_what_is_durable_can_be_skipped_without_reading_it() -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(50))
        async with AsyncPacker(store, config()) as packer:
            assert packer.durable_samples == 48
            with pytest.raises(ConfigError, match="only the 48"):
                packer.skip(3)
            packer.skip(48)
            with pytest.raises(ConfigError, match="before the first"):
                packer.skip(48)
            for sample in numbered(10, 48):
                await packer.write(sample)
        assert await labels(store) == list(range(58))

    run(main())


def test_a_finished_but_uncommitted_pack_can_be_skipped_whole() -> None:
    async def main() -> None:
        memory = fresh_store()
        alive = WatchedStore(memory)
        await pack(WatchedStore(fresh_store()), numbered(20))
        await pack(alive, numbered(20))
        commit = alive.calls.index("put manifests/00000001.safetensors")
        store = fresh_store()
        with pytest.raises(StoreError, match="dead"):
            await pack(DyingStore(store, commit, late=False), numbered(20))
        async with AsyncPacker(store, config()) as packer:
            packer.skip(packer.durable_samples)
        assert await labels(store) == list(range(20))

    run(main())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([*numbered(4), {"data": b"?", "label": 0}, *numbered(95, 5)], "super-sample 1, .* differs"),
        (numbered(30), "super-sample 10, .* differs|ended after"),
        (numbered(48), "ended after 48 samples, but 60"),
        ([{"data": bytes(90), "label": 0}, *numbered(59, 1)], "super-sample 0, .* differs"),
    ],
)
def test_a_source_that_changed_is_refused_and_the_original_still_resumes(
    changed: list[dict[str, object]], message: str
) -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(62))
        with pytest.raises(PackError, match=rf"not the one .*({message}).*source=.*gc --abandoned --delete"):
            await pack(store, changed)
        await pack(store, numbered(70))
        assert await labels(store) == list(range(70))

    run(main())


def test_a_source_that_grew_after_it_had_ended_is_refused() -> None:
    async def main() -> None:
        healthy = WatchedStore(fresh_store())
        await pack(healthy, numbered(20))
        commit = healthy.calls.index("put manifests/00000001.safetensors")
        for more in (1, 2, 9):
            store = fresh_store()
            with pytest.raises(StoreError, match="dead"):
                await pack(DyingStore(store, commit, late=False), numbered(21))
            with pytest.raises(PackError, match=r"differs|more than its 21 samples"):
                await pack(store, numbered(21 + more))

    run(main())


def test_objects_beyond_the_record_that_hold_other_samples_are_never_overwritten() -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(12), source=None)
        before = await stored(store, "data/")
        record = next(iter(await stored(store, "packs/")))
        await store.delete(record)
        with pytest.raises(PackError, match="holds other samples"):
            await pack(store, numbered(9, 1), source=None)
        assert await stored(store, "data/") == before
        await pack(store, numbered(12), source=None)
        assert await labels(store) == list(range(12))

    run(main())


def test_a_prefix_that_lost_an_object_is_packed_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(50))
        await store.delete(sorted(await stored(store, "data/"))[3])
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered(60))
        assert "lost objects" in caplog.text
        assert await labels(store) == list(range(60))

    run(main())


@pytest.mark.parametrize("damage", [b"", b"not a record", b"\xff" * 64])
def test_a_damaged_record_costs_only_its_uploads(damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(50))
        await store.put(next(iter(await stored(store, "packs/"))), damage)
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered(60))
        assert "ignoring the pack record" in caplog.text
        assert await labels(store) == list(range(60))

    run(main())


def test_a_record_under_the_key_of_another_run_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        store = fresh_store()
        await interrupted(store, numbered(50), source="other")
        (data,) = (await stored(store, "packs/")).values()
        run_id = (await pack(fresh_store(), numbered(3))).runs[0].run
        await store.put(record_key(run_id), data)
        with caplog.at_level(logging.WARNING):
            await pack(store, numbered(3))
        assert "it is the record of run" in caplog.text
        assert await labels(store) == [0, 1, 2]

    run(main())


# Deaths and lost answers


async def _operations(samples: int, mode: str) -> int:
    store = WatchedStore(await _prepared(mode))
    await pack(store, numbered(samples), mode=mode)
    return len(store.calls)


async def _prepared(mode: str) -> Store:
    store = fresh_store()
    if mode == "append":
        await pack(store, numbered(4), source="base")
    return store


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize("mode", ["create", "append"])
def test_after_a_death_at_any_operation_packing_again_gives_every_sample_exactly_once(mode: str, late: bool) -> None:
    async def main() -> None:
        samples, ended = numbered(40), 0
        whole = await _prepared(mode)
        await pack(whole, samples, mode=mode)
        expected = await stored(whole, "data/")
        for lives in range(await _operations(40, mode)):
            store = await _prepared(mode)
            dying = DyingStore(store, lives, late=late)
            with pytest.raises(StoreError, match="dead"):
                await pack(dying, samples, mode=mode)
            finished = any(call.startswith("put packs/") for call in dying.calls[lives:]) and (
                b'"state":"committed"' in b"".join((await stored(store, f"packs/{_run_of(dying)}")).values())
            )
            if finished:  # its very last write had its effect: nobody can tell it from one that ended
                ended += 1
            else:
                await pack(store, samples, mode=mode)
            assert await stored(store, "data/") == expected
            newest = await catalog.read_manifest(store)
            assert newest.version == (2 if mode == "append" else 1)
            assert newest.runs == (await catalog.read_manifest(whole)).runs
        assert ended <= 1

    run(main())


def _run_of(store: WatchedStore) -> str:
    record = next((call for call in store.calls if call.startswith("put packs/")), "put packs/-")
    return record.removeprefix("put packs/")


@pytest.mark.parametrize("late", [False, True], ids=["failed", "answer lost"])
def test_any_operation_may_fail_once_and_the_pack_succeeds_all_the_same(late: bool) -> None:
    async def main() -> None:
        for at in range(await _operations(20, "create")):
            store = FlakyStore(fresh_store(), at, late=late)
            manifest = await pack(store, numbered(20))
            assert (manifest.version, await labels(store.store)) == (1, list(range(20)))

    run(main())


def test_a_store_that_stays_broken_ends_the_pack_with_its_error_and_no_manifest() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(StoreError, match="dead"):
            await pack(DyingStore(store, 9, late=False), numbered(100))
        with pytest.raises(NotFoundError, match="stoker pack"):
            await catalog.read_manifest(store)

    run(main())


def test_a_cancelled_pack_leaves_no_task_and_can_be_resumed() -> None:
    async def main() -> None:
        memory = fresh_store()
        packing = asyncio.create_task(pack(SlowStore(memory), numbered(60)))
        for _ in range(200):
            await asyncio.sleep(0)
        packing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await packing
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await pack(memory, numbered(60))
        assert await labels(memory) == list(range(60))

    run(main())


def test_a_write_that_is_cancelled_has_taken_its_sample() -> None:
    async def main() -> None:
        store = SlowStore(fresh_store())
        async with AsyncPacker(store, config(concurrency=1)) as packer:
            for sample in numbered(6):
                await packer.write(sample)
            waiting = asyncio.create_task(packer.write(numbered(1, 6)[0]))
            for _ in range(50):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            store.gate.set()
            for sample in numbered(20, 7):
                await packer.write(sample)
        assert await labels(store) == list(range(27))

    run(main())


# Several packers at once


class _Shuffled(WatchedStore):
    """Lets other tasks run a random number of times before and after each operation."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(store)
        self.random = random.Random(seed)

    async def before(self, number: int, operation: str, key: str) -> None:
        for _ in range(self.random.randrange(9)):
            await asyncio.sleep(0)

    after = before


async def _race(store: Store, seed: int, packs: list[tuple[list[dict[str, object]], dict[str, Any]]]) -> list[Any]:
    tasks = (pack(_Shuffled(store, seed + i), samples, **changes) for i, (samples, changes) in enumerate(packs))
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_create_the_same_one_wins_and_the_data_set_is_whole(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        outcomes = await _race(store, seed, [(numbered(40), {}), (numbered(40), {})])
        assert {type(outcome) for outcome in outcomes} == {Manifest, DatasetExistsError}
        assert await labels(store) == list(range(40))
        assert (await catalog.read_manifest(store)).version == 1

    run(main())


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_create_different_data_sets_one_wins_whole(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        outcomes = await _race(store, seed, [(numbered(40), {"source": "a"}), (numbered(40, 100), {"source": "b"})])
        assert {type(outcome) for outcome in outcomes} == {Manifest, DatasetExistsError}
        first = 0 if isinstance(outcomes[0], Manifest) else 100
        assert await labels(store) == list(range(first, first + 40))

    run(main())


@pytest.mark.parametrize("seed", range(15))
def test_appenders_of_different_sources_all_succeed(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(4))
        outcomes = await _race(
            store,
            seed,
            [(numbered(10, 100 * i), {"source": f"{i}", "mode": "append"}) for i in range(1, 5)],
        )
        assert {type(outcome) for outcome in outcomes} == {Manifest}
        assert sorted(await labels(store)) == list(range(4)) + [100 * i + j for i in range(1, 5) for j in range(10)]
        assert (await catalog.read_manifest(store)).version == 5
        assert (await labels(store))[:4] == [0, 1, 2, 3]

    run(main())


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("second", [0, 100], ids=["same samples", "other samples"])
def test_appenders_that_name_no_source_both_succeed(seed: int, second: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(4))
        changes = {"source": None, "mode": "append"}
        outcomes = await _race(store, seed, [(numbered(10, 50), changes), (numbered(10, 50 + second), changes)])
        assert {type(outcome) for outcome in outcomes} == {Manifest}
        assert sorted(await labels(store)) == sorted([0, 1, 2, 3, *range(50, 60), *range(50 + second, 60 + second)])

    run(main())


@pytest.mark.parametrize("seed", range(15))
def test_of_two_that_append_the_same_source_at_once_one_is_refused(seed: int) -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(4), source="base")
        changes = {"mode": "append"}
        outcomes = await _race(store, seed, [(numbered(10, 50), changes), (numbered(10, 50), changes)])
        assert {type(outcome) for outcome in outcomes} == {Manifest, PackError}
        assert await labels(store) == [0, 1, 2, 3, *range(50, 60)]

    run(main())


def test_a_twin_that_is_far_ahead_is_neither_set_back_nor_doubled() -> None:
    async def main() -> None:
        store, before = fresh_store(), dict[str, bytes]()

        async def packing() -> None:
            async with AsyncPacker(store, config()) as slow:
                await slow.write(numbered(1)[0])
                await pack(store, numbered(60))
                before.update(await stored(store))
                for sample in numbered(59, 1):
                    await slow.write(sample)

        with pytest.raises(DatasetExistsError, match="at the same time"):
            await packing()
        assert await stored(store) == before

    run(main())


def test_an_append_to_a_data_set_that_was_replaced_meanwhile_is_refused() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(3), source="first")

        async def packing() -> None:
            async with AsyncPacker(store, config(mode="append")) as packer:
                await packer.write(numbered(1)[0])
                for key in await stored(store):
                    if not key.startswith("packs/") or "first" in str((await store.get(key))[0]):
                        await store.delete(key)
                await pack(store, numbered(6), source="second")

        with pytest.raises(PackError, match="was deleted while"):
            await packing()
        assert await labels(store) == list(range(6))

    run(main())


def test_a_pack_whose_record_is_collected_as_abandoned_stops_before_it_commits() -> None:
    async def main() -> None:
        store = fresh_store()
        await pack(store, numbered(3), source="first")

        async def packing() -> None:
            async with AsyncPacker(store, config(mode="append")) as packer:
                for sample in numbered(60):
                    await packer.write(sample)
                await gc(store, delete=True, abandoned=True)

        with pytest.raises(PackError, match="was deleted while the pack was running"):
            await packing()
        assert await labels(store) == [0, 1, 2]

    run(main())


# The record


def _record() -> PackRecord:
    async def main() -> bytes:
        store = fresh_store()
        await interrupted(store, numbered(50))
        (data,) = (await stored(store, "packs/")).values()
        return data

    return PackRecord.from_bytes(asyncio.run(main()))


def test_a_record_comes_back_from_its_bytes() -> None:
    record = _record()
    again = PackRecord.from_bytes(record.to_bytes())
    assert (again.to_bytes(), len(again), again.samples, again.state) == (record.to_bytes(), 16, 48, "packing")
    assert PackRecord.from_bytes(replace(record, prefix=None).to_bytes()).samples == 0


def test_a_record_that_is_damaged_anywhere_is_refused() -> None:
    data = _record().to_bytes()
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises((ChecksumError, StokerError)):
            PackRecord.from_bytes(damaged)
    for end in range(0, len(data), 7):
        with pytest.raises(StokerError):
            PackRecord.from_bytes(data[:end])


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "0" * 16},
        {"run": "../../../../etc/"},
        {"identity": "x"},
        {"mode": "replace"},
        {"state": "done"},
        {"state": "committed"},
        {"version": 3},
        {"state": "complete", "prefix": None},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StokerError, match="pack record"):
        PackRecord.from_bytes(replace(_record(), **changes).to_bytes())


def test_the_records_bytes_stay_proportional_to_the_manifest() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        await pack(store, [{"data": bytes(300), "label": i} for i in range(1000)])
        assert len(puts(store)) == 1000
        assert len(puts(store, "packs/")) < 100

    run(main())


# The face without an event loop


def test_the_packer_packs_from_ordinary_code(tmp_path: Any) -> None:
    with Packer(tmp_path / "set", schema={**SCHEMA}, super_sample_bytes=400) as packer:
        packer.write(numbered(1)[0], where="a file")
        packer.extend(numbered(19, 1))
    assert packer.manifest is not None
    assert packer.manifest.samples == 20
    data = (tmp_path / "set" / packer.manifest.key(0)).read_bytes()
    assert [int(n) for n in SuperSample(data).column("label")] == [0, 1, 2]


def test_an_exception_in_the_block_commits_nothing_and_the_next_packer_resumes(tmp_path: Any) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), Packer(tmp_path, schema=SCHEMA, super_sample_bytes=400) as packer:
            packer.extend(breaking(numbered(31)))
    assert not (tmp_path / POINTER_KEY).exists()
    with Packer(tmp_path, schema=SCHEMA, super_sample_bytes=400) as packer:
        assert packer.durable_samples == 30
        packer.skip(30)
        packer.extend(numbered(5, 30))
        assert packer.commit().samples == 35
    with pytest.raises(DatasetExistsError), Packer(tmp_path, schema=SCHEMA):
        pass


def test_the_packer_works_inside_a_running_event_loop(tmp_path: Any) -> None:
    async def main() -> None:
        with Packer(tmp_path, schema=SCHEMA) as packer:
            packer.extend(numbered(5))

    run(main())


def test_a_config_is_checked_when_the_packer_is_made() -> None:
    with pytest.raises(SchemaError, match="__x"):
        Packer("memory://unused", schema={"__x": Array("int64")})
    with pytest.raises(ConfigError, match="super_sample_bytes"):
        Packer("memory://unused", schema=SCHEMA, super_sample_bytes=1 << 30)
    assert PackConfig(schema=SCHEMA).super_sample_bytes == 8 << 20
