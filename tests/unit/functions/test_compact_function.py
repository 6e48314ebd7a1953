"""compact: many small super-samples become few large ones, in order, under any concurrent operations."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stoker import RetryingStore, open_store
from stoker._format import versions
from stoker._format.manifest import PackRun
from stoker._maintenance.compaction import _MAX_REPLACED_RUNS, CompactionResult
from stoker._maintenance.compaction import compact as compact_dataset
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.inspection import verify
from stoker._maintenance.recovery import rebuild_manifest
from stoker._pack.catalog import BucketCatalog
from stoker._pack.merge import collect_source_names
from stoker._pack.record import PackRecord, record_key
from stoker.abc import ObjectInfo, Store
from stoker.errors import DeadlineError, EventError, NotFoundError, StokerError
from stoker.testing import DyingStore, WatchedStore, run_virtual
from stoker_functions._commit import commit, compact
from stoker_functions._deployment import InvocationDeadline
from stoker_functions._pack import pack
from support.deployments import DelayedStore, Place, plenty
from support.packing import contents, read_objects

TARGET_BYTES = 20_000


async def trickled(
    place: Place, groups: Sequence[int], *, raw: Sequence[ObjectInfo] = (), first: int = 0, value_bytes: int = 300
) -> list[ObjectInfo]:
    """Let raw objects come in groups, each a run of its own, committed at every tenth, and return them."""
    objects = list(raw) or await place.put(range(first, first + sum(groups)), value_bytes)
    begin = 0
    for number, size in enumerate(groups, 1):
        part = place.part(objects[begin : begin + size], is_remembered=True, super_sample_bytes=TARGET_BYTES)
        await pack(part.to_json(), place.deployment(), plenty())
        if number % 10 == 0 or number == len(groups):
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
        begin += size
    return objects


def event(place: Place, **changes: Any) -> dict[str, Any]:
    return {"dataset": place.dataset, "super_sample_bytes": TARGET_BYTES, **changes}


async def sizes(place: Place) -> list[int]:
    manifest = await place.manifest()
    assert manifest is not None
    return [int(size) for size in manifest.rows.size_bytes]


def test_small_super_samples_become_large_ones_with_the_same_samples_in_their_order() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 40)
        before = await contents(open_store(place.dataset))
        result = await compact(event(place), place.deployment(), plenty())
        assert (result["version"], result["objects_before"], result["state"]) == (5, 40, "complete")
        assert result["objects_after"] == len(await sizes(place)) < 5
        assert await contents(open_store(place.dataset)) == before
        assert await verify(open_store(place.dataset), await versions.read_manifest(open_store(place.dataset))) == []

    asyncio.run(main())


def test_a_compaction_without_a_deadline_merges_all_small_super_samples() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 10)
        result = await compact(event(place), place.deployment(), InvocationDeadline(math.inf, math.inf))
        assert (result["objects_before"], result["state"]) == (10, "complete")

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(6))
def test_after_one_compaction_the_median_size_is_at_least_half_of_the_target(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        place = Place()
        numbers: list[int] = []
        groups = [rng.randint(1, rng.choice([2, 10, 60])) for _ in range(rng.randint(3, 40))]
        for size in groups:
            value_bytes = rng.choice([8, 300, 2000, 9000])
            await trickled(place, [size], first=len(numbers), value_bytes=value_bytes)
            numbers += range(len(numbers), len(numbers) + size)
        await compact(event(place), place.deployment(), plenty())
        if len(found := await sizes(place)) > 2:
            assert np.median(found) >= TARGET_BYTES / 2
        assert sorted(await place.numbers()) == numbers
        assert (await compact(event(place), place.deployment(), plenty()))["objects_before"] == 0

    asyncio.run(main())


def test_where_there_is_nothing_to_gain_nothing_is_written() -> None:
    async def main() -> None:
        place = Place()
        for groups in ([5], [60]):
            await trickled(place, groups, first=60 * len(groups))
            before = await read_objects(open_store(place.dataset))
            result = await compact(event(place), place.deployment(), plenty())
            assert (result["objects_before"], result["objects_after"], result["state"]) == (0, 0, "complete")
            assert await read_objects(open_store(place.dataset)) == before

    asyncio.run(main())


def test_where_there_is_no_data_set_yet_there_is_nothing_to_do() -> None:
    async def main() -> None:
        place = Place()
        await open_store(place.dataset).put("notes.txt", b"the bucket is there")
        before = await read_objects(open_store(place.dataset))
        result = await compact(event(place), place.deployment(), plenty())
        assert result == {"version": 0, "objects_before": 0, "objects_after": 0, "state": "complete"}
        assert await read_objects(open_store(place.dataset)) == before
        await trickled(place, [3] * 40)
        assert (await compact(event(place), place.deployment(), plenty()))["objects_before"] == 40

    asyncio.run(main())


def test_what_a_data_set_lacks_is_an_error() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 40)
        manifest = await place.manifest()
        assert manifest is not None
        await open_store(place.dataset).delete(manifest.key(7))
        with pytest.raises(NotFoundError):
            await compact(event(place), place.deployment(), plenty())

    asyncio.run(main())


def test_what_the_time_does_not_allow_is_left_for_another_invocation() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 90)
        states: list[str] = []
        while not states or states[-1] == "packing":
            # 20 MB a second, of which there are far less than a second: room for two super-samples
            result = await compact(event(place), place.deployment(), InvocationDeadline.after(0.001))
            states.append(result["state"])
        assert len(states) > 2
        assert np.median(await sizes(place)) >= TARGET_BYTES / 2
        assert sorted(await place.numbers()) == list(range(270))

    run_virtual(main())


def test_a_compaction_that_is_too_slow_is_a_typed_error_and_changes_nothing_that_can_be_read() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 30)
        before = await place.manifest()
        with pytest.raises(DeadlineError, match="did not come to its end"):
            await compact(
                event(place), place.deployment(lambda store: DelayedStore(store, 3.0)), InvocationDeadline.after(10)
            )
        after = await place.manifest()
        assert before is not None
        assert after is not None
        assert after.to_bytes() == before.to_bytes()
        await compact(event(place), place.deployment(), plenty())
        assert sorted(await place.numbers()) == list(range(90))

    run_virtual(main())


def test_two_compactions_at_the_same_time_come_to_the_same() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 40)
        slow = [place.deployment(lambda store: DelayedStore(store, 0.01)) for _ in range(3)]
        asked = [event(place), event(place), event(place, super_sample_bytes=15_000)]
        results = await asyncio.gather(*(compact(each, one, plenty()) for each, one in zip(asked, slow, strict=True)))
        assert {result["version"] for result in results} == {5}
        assert sorted(await place.numbers()) == list(range(120))
        assert len(await sizes(place)) < 10

    run_virtual(main())


def test_commits_while_a_compaction_is_under_way_do_not_stop_it() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 40)
        committed = 0

        class Meanwhile(WatchedStore):
            async def before(self, number: int, operation: str, key: str) -> None:
                nonlocal committed
                if operation == "put" and key.startswith("data/") and committed < 3:
                    committed += 1
                    await trickled(place, [3], first=1000 * committed)

        result = await compact(event(place), place.deployment(Meanwhile), plenty())
        assert result["objects_before"] == 40
        assert committed >= 2
        assert len(await sizes(place)) == result["objects_after"] + committed
        added = [1000 * n + i for n in range(1, committed + 1) for i in range(3)]
        assert sorted(await place.numbers()) == sorted([*range(120), *added])

    run_virtual(main())


def test_two_compactions_that_share_a_third_one_out_do_not_lose_its_names() -> None:
    async def main() -> None:
        place = Place()
        raw = await trickled(place, [3] * 13)
        await compact(event(place, super_sample_bytes=5000), place.deployment(), plenty())
        raw += await trickled(place, [1] * 4, first=39)
        (first, second, last, *others) = await sizes(place)
        assert 4500 > last > max(others)
        assert min(first, second) > 4500

        async def compacted(target_bytes: int, limit_bytes: int) -> CompactionResult:
            store = RetryingStore(DelayedStore(open_store(place.dataset), 0.01))
            now_seconds = time.time()
            return await compact_dataset(
                store,
                BucketCatalog(store),
                now_seconds=now_seconds,
                super_sample_bytes=target_bytes,
                limit_bytes=limit_bytes,
            )

        both = await asyncio.gather(compacted(20_000, first + second), compacted(9000, 100_000))
        assert [done.objects_before for done in both] == [2, 5]
        await trickled(place, [3] * 14, raw=raw[:42])
        assert sorted(await place.numbers()) == list(range(43))
        await compact(event(place), place.deployment(), plenty())
        assert len(await sizes(place)) == 1
        await trickled(place, [3] * 14, raw=raw[:42])
        assert sorted(await place.numbers()) == list(range(43))

    run_virtual(main())


def test_a_compaction_that_does_not_have_the_samples_that_it_takes_the_place_of_is_not_believed() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 4)
        catalog = BucketCatalog(open_store(place.dataset))
        manifest = await place.manifest()
        assert manifest is not None
        part = place.part(await place.put([50]), super_sample_bytes=TARGET_BYTES)
        await pack(part.to_json(), place.deployment(), plenty())
        records = {record.run: record for record in await catalog.records()}
        forged = replace(
            records.pop(part.run), replaces=manifest.runs, sources=collect_source_names(records.values(), 0)
        )
        await open_store(place.dataset).put(record_key(forged.run), forged.to_bytes())
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert sorted(await place.numbers()) == list(range(12))

    asyncio.run(main())


def test_a_compaction_whose_rows_another_has_packed_again_is_forgotten() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 20)
        dying = place.deployment(lambda store: DyingStore(store, 30, late=False))
        with pytest.raises(StokerError):
            await compact(event(place, super_sample_bytes=15_000), dying, plenty())
        catalog = BucketCatalog(open_store(place.dataset))
        (left,) = [record for record in await catalog.records() if record.state == "packing"]
        await compact(event(place), place.deployment(), plenty())
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        assert left.run not in [record.run for record in await catalog.records()]

    run_virtual(main())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
def test_a_compaction_that_dies_at_any_operation_loses_nothing_and_the_next_one_completes_it(late: bool) -> None:
    async def main() -> None:
        whole = Place()
        raw = await whole.put(range(24))
        deaths = 0
        for lives in range(200):
            place = Place()
            place.raw = whole.raw
            await trickled(place, [4] * 6, raw=raw)
            dying: list[DyingStore] = []

            def wrap(store: Store, lives: int = lives, dying: list[DyingStore] = dying) -> DyingStore:
                dying.append(DyingStore(store, lives, late=late))
                return dying[-1]

            try:
                await compact(event(place), place.deployment(wrap), plenty())
            except StokerError:
                deaths += 1
            assert sorted(await place.numbers()) == list(range(24))
            await trickled(place, [4] * 2, raw=raw[:8])  # delivered again: the names outlast whatever died
            await compact(event(place), place.deployment(), plenty())
            assert sorted(await place.numbers()) == list(range(24))
            assert len(await sizes(place)) == 1
            if not any(store.is_dead for store in dying):
                break
        assert deaths > 20

    run_virtual(main())


def test_older_versions_can_be_read_until_the_garbage_is_collected() -> None:
    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 30)
        store = open_store(place.dataset)
        samples = await contents(store)
        await compact(event(place), place.deployment(), plenty())
        await collect_garbage(store, delete=True)
        assert await contents(store, await versions.read_manifest(store, 3)) == samples
        report = await collect_garbage(store, delete=True, keep_versions=1)
        assert len(report.objects) == 30
        assert await contents(store) == samples
        assert await verify(store, await versions.read_manifest(store)) == []

    asyncio.run(main())


def test_raw_objects_that_were_compacted_are_not_ingested_again() -> None:
    async def main() -> None:
        place = Place()
        raw = await trickled(place, [3] * 20)
        for _ in range(3):
            await compact(event(place), place.deployment(), plenty())
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
            await collect_garbage(open_store(place.dataset), delete=True, keep_versions=1)
            await trickled(place, [7] * 8, raw=raw[4:])
            assert sorted(await place.numbers()) == list(range(60))

    asyncio.run(main())


def test_a_compaction_does_not_hand_on_the_names_of_all_before_it() -> None:
    async def main() -> None:
        place = Place()
        catalog = BucketCatalog(open_store(place.dataset))
        most = 0
        for round_number in range(12):
            await trickled(place, [10] * 7, first=70 * round_number)  # of which a small super-sample is left
            await compact(event(place), place.deployment(), plenty())
            most = max(len(record.sources) for record in await catalog.records())
        assert most == 70
        known = {bytes(name) for record in await catalog.records() for name in record.sources}
        assert len(known) == 12 * 70

    asyncio.run(main())


def test_a_manifest_that_is_lost_is_rebuilt_without_what_was_packed_again() -> None:
    async def main() -> None:
        for lost in (["manifest.safetensors"], ["manifest.safetensors", "manifests/"]):
            for adopt in (False, True):
                place = Place()
                store = open_store(place.dataset)
                await trickled(place, [3] * 20)
                await compact(event(place), place.deployment(), plenty())
                await trickled(place, [3] * 2, first=60)
                for prefix in lost:
                    for key in await place.keys(prefix):
                        await store.delete(key)
                report = await rebuild_manifest(store, adopt=adopt)
                assert (report.orphans, report.refused, report.lost) == ((), (), ())
                assert sorted(await place.numbers()) == list(range(66))

    asyncio.run(main())


def test_runs_of_a_job_that_were_compacted_twice_are_not_rebuilt() -> None:
    async def main() -> None:
        place = Place()
        parts = [place.part(await place.put(range(n, n + 10)), job="a" * 16) for n in range(0, 60, 10)]
        for part in parts:
            await pack(part.to_json(), place.deployment(), plenty())
        job = {"job": "a" * 16, "runs": [part.run for part in parts], "mode": "create"}
        await commit({"dataset": place.dataset, **job}, place.deployment(), plenty())
        for target_bytes in (5000, 100_000):
            await compact(event(place, super_sample_bytes=target_bytes), place.deployment(), plenty())
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        await rebuild_manifest(open_store(place.dataset))
        assert await place.numbers() == list(range(60))

    asyncio.run(main())


@pytest.mark.parametrize("compactions", [1, 2, 3])
@pytest.mark.parametrize("job", ["", "a" * 16])
def test_what_was_compacted_several_times_is_rebuilt_once_without_any_manifest(compactions: int, job: str) -> None:
    async def main() -> None:
        place = Place()
        store = open_store(place.dataset)
        parts = [place.part(await place.put(range(n, n + 10)), job=job) for n in range(0, 60, 10)]
        for part in parts:
            await pack(part.to_json(), place.deployment(), plenty())
        asked = {"job": job, "runs": [part.run for part in parts], "mode": "create"} if job else {}
        await commit({"dataset": place.dataset, **asked}, place.deployment(), plenty())
        for target_bytes in (5000, 11_000, 100_000)[:compactions]:
            done = await compact(event(place, super_sample_bytes=target_bytes), place.deployment(), plenty())
            assert done["objects_before"]
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        for _ in range(2):
            for key in [*await place.keys("manifests/"), "manifest.safetensors"]:
                await store.delete(key)
            report = await rebuild_manifest(store)
            assert (report.lost, sorted(await place.numbers())) == ((), list(range(60)))
            await collect_garbage(store, delete=True, keep_versions=1)

    asyncio.run(main())


def test_of_very_many_runs_as_many_are_compacted_as_a_record_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker._maintenance.compaction._MAX_REPLACED_RUNS", 12)

    async def main() -> None:
        place = Place()
        await trickled(place, [3] * 30)
        deployment = place.deployment()
        before: list[int] = []
        while not before or before[-1]:
            before.append((await compact(event(place), deployment, plenty()))["objects_before"])
        assert before[:2] == [12, 12]
        assert len(await sizes(place)) < 4
        assert sorted(await place.numbers()) == list(range(90))

    asyncio.run(main())


def test_a_record_can_name_as_many_runs_as_a_compaction_takes_the_place_of() -> None:
    runs = tuple(PackRun(f"{n:016x}", (1 << 32) - 1, (1 << 32) - 1) for n in range(_MAX_REPLACED_RUNS))
    record = PackRecord(run="a" * 16, identity="0" * 64, source="x" * 10_000, mode="deferred", replaces=runs)
    assert PackRecord.from_bytes(record.to_bytes()).replaces == runs


def test_what_is_left_of_a_run_is_rebuilt_when_the_rest_was_compacted_twice_and_collected() -> None:
    async def main() -> None:
        place = Place()
        store = open_store(place.dataset)
        part = place.part(await place.put(range(16)))  # of four super-samples, of which the last is small
        await pack(part.to_json(), place.deployment(), plenty())
        await commit({"dataset": place.dataset}, place.deployment(), plenty())
        for number in (1, 2):
            await trickled(place, [2], first=20 * number)
            done = await compact(event(place, super_sample_bytes=4000), place.deployment(), plenty())
            assert (done["objects_before"], done["objects_after"]) == (2, 1)
            await commit({"dataset": place.dataset}, place.deployment(), plenty())
            await collect_garbage(store, delete=True, keep_versions=1)
        before = await place.numbers()
        assert sorted(before) == [*range(16), 20, 21, 40, 41]
        for key in [*await place.keys("manifests/"), "manifest.safetensors"]:
            await store.delete(key)
        report = await rebuild_manifest(store)
        assert (report.lost, await place.numbers()) == ((), before)

    asyncio.run(main())


@pytest.mark.parametrize("targets_bytes", [(100_000,), (5000,), (5000, 100_000), (4000, 11_000)])
def test_a_compaction_that_lost_an_object_is_rebuilt_of_what_it_had_replaced(targets_bytes: tuple[int, ...]) -> None:
    async def main() -> None:
        place = Place()
        store = open_store(place.dataset)
        await trickled(place, [5] * 12)
        for target_bytes in targets_bytes:
            await compact(event(place, super_sample_bytes=target_bytes), place.deployment(), plenty())
        manifest = await versions.read_manifest(store)
        for key in [*await place.keys("manifests/"), "manifest.safetensors", manifest.key(0)]:
            await store.delete(key)
        report = await rebuild_manifest(store)
        assert [bad.key for bad in report.lost] == [manifest.key(0)]
        assert sorted(await place.numbers()) == list(range(60))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"super_sample_bytes": 0}, "'super_sample_bytes' is 0"),
        ({"super_sample_bytes": "8MiB"}, "'super_sample_bytes' is '8MiB'"),
        ({"super_sample_bytes": 1 << 30}, "'super_sample_bytes'"),
        ({"dataset": "memory://elsewhere"}, "may not use"),
        ({"limit": 3}, "unknown field 'limit'"),
    ],
)
def test_a_malformed_event_names_its_field(change: dict[str, Any], problem: str) -> None:
    async def main() -> None:
        with pytest.raises(EventError, match=problem):
            await compact(event(Place(), **change), Place().deployment(), plenty())

    asyncio.run(main())
