"""Packing on a store in memory: what is packed, and what cannot be."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import Array, Packer, Schema
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY
from stoker._format.supersample import SuperSample
from stoker._maintenance.inspection import verify
from stoker._pack.packer import AsyncPacker, PackProgress
from stoker._pack.plan import PackConfig
from stoker._pack.record import record_key
from stoker.abc import Buffer, ObjectInfo, Store
from stoker.errors import ConfigError, DatasetExistsError, PackError, SchemaError, StoreError
from stoker.testing import WatchedStore
from support.cases import for_each
from support.packing import (
    SCHEMA,
    SlowStore,
    config,
    contents,
    failing_after,
    fresh_store,
    labels,
    numbered_samples,
    pack,
    puts,
    read_objects,
)
from support.supersamples import EVERY_KIND, samples_of

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

    asyncio.run(main())


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

    asyncio.run(main())


def test_the_same_samples_give_the_same_objects_whatever_the_concurrency() -> None:
    async def main() -> None:
        found = []
        for concurrency in (1, 2, 16):
            store = fresh_store()
            await pack(store, numbered_samples(50), concurrency=concurrency)
            found.append(await read_objects(store, "data/"))
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == 17

    asyncio.run(main())


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
        first = await pack(fresh_store(), numbered_samples(5))
        assert (await pack(fresh_store(), numbered_samples(5))).runs == first.runs
        assert (await pack(fresh_store(), numbered_samples(5), **changes)).runs[0].run != first.runs[0].run

    asyncio.run(main())


def test_the_manifest_is_written_behind_everything_that_it_names() -> None:
    async def main() -> None:
        store = WatchedStore(fresh_store())
        manifest = await pack(store, numbered_samples(50))
        written = [call.removeprefix("put ") for call in store.calls if call.startswith("put ")]
        first = written.index("manifests/00000001.safetensors")
        assert {manifest.key(row) for row in range(len(manifest))} <= set(written[:first])
        assert written[first + 1] == POINTER_KEY
        assert written[0] == record_key(manifest.runs[0].run)

    asyncio.run(main())


def test_at_most_the_configured_number_of_uploads_run_and_writes_wait_for_them() -> None:
    async def main() -> None:
        store = SlowStore(fresh_store())
        taken = 0

        async def feed() -> None:
            nonlocal taken
            async with AsyncPacker(store, config(concurrency=2)) as packer:
                for sample in numbered_samples(60):
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

    asyncio.run(main())


def test_progress_rises_to_the_whole() -> None:
    async def main() -> None:
        seen: list[PackProgress] = []
        async with AsyncPacker(fresh_store(), config(), on_progress=seen.append) as packer:
            for sample in numbered_samples(50):
                await packer.write(sample)
        manifest = packer.manifest
        assert manifest is not None
        assert seen[-1] == PackProgress(samples=50, size_bytes=manifest.size_bytes, objects=len(manifest))
        assert [p.samples for p in seen] == sorted(p.samples for p in seen)

    asyncio.run(main())


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
def test_a_sample_that_does_not_fit_is_named_and_the_pack_can_continue_without_it(
    sample: dict[str, object], message: str
) -> None:
    async def main() -> None:
        store = fresh_store()
        async with AsyncPacker(store, config()) as packer:
            for good in numbered_samples(4):
                await packer.write(good)
            with pytest.raises(SchemaError, match=message):
                await packer.write(sample, where="b.tar")
            await packer.write(numbered_samples(1, 4)[0])
        assert await labels(store) == list(range(5))

    asyncio.run(main())


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_sample_larger_than_the_target_has_a_super_sample_of_its_own(first: int) -> None:
    async def main() -> None:
        store = fresh_store()
        async with AsyncPacker(store, config()) as packer:
            for number in range(first):
                await packer.write({"data": bytes(10), "label": number})
            await packer.write({"data": bytes(5000), "label": first})
            for number in range(first + 1, first + 3):
                await packer.write({"data": bytes(10), "label": number})
        assert packer.manifest is not None
        assert packer.manifest.rows.samples.tolist() == [*([first] if first else []), 1, 2]
        assert await labels(store) == list(range(first + 3))
        assert await verify(store, packer.manifest, deep=True) == []

    asyncio.run(main())


def test_a_sample_larger_than_any_may_be_is_refused_with_the_sizes_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker._pack.run.MAX_SAMPLE_BYTES", 1000)

    async def main() -> None:
        store = fresh_store()
        async with AsyncPacker(store, config()) as packer:
            await packer.write(numbered_samples(1)[0])
            with pytest.raises(PackError, match=r"sample 1 has 1008 .*1000 .* 'data'.* 1000 .*divide it into several"):
                await packer.write({"data": bytes(1000), "label": 1})
            await packer.write({"data": bytes(992), "label": 1})
        assert await labels(store) == [0, 1]

    asyncio.run(main())


def test_an_empty_source_makes_no_data_set_and_leaves_nothing() -> None:
    async def main() -> None:
        store = fresh_store()
        with pytest.raises(PackError, match="nothing was packed"):
            await pack(store, [])
        assert await read_objects(store) == {}

    asyncio.run(main())


@for_each(
    "changes",
    [
        {"mode": "replace"},
        {"super_sample_bytes": 0},
        {"super_sample_bytes": (256 << 20) + 1},
        {"super_sample_bytes": (1 << 30) + 1, "memory_bytes": 1 << 40},
        {"memory_bytes": 3},
        {"memory_bytes": "1GB"},
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
            await packer.write(numbered_samples(1)[0])
        async with packer:
            await packer.write(numbered_samples(1)[0])
            assert await packer.commit() is await packer.commit()
            with pytest.raises(ConfigError, match="committed"):
                await packer.write(numbered_samples(1)[0])
        packer.manifest = None
        with pytest.raises(ConfigError, match="with"):
            await packer.write(numbered_samples(1)[0])

    asyncio.run(main())


def test_asking_whether_the_store_keeps_conditions_takes_one_small_request() -> None:
    async def main() -> None:
        writes = []
        for single_writer in (True, False):
            store = WatchedStore(fresh_store())
            await pack(store, numbered_samples(50), single_writer=single_writer)
            writes.append(puts(store, ""))
        without, asked = writes
        assert asked == [without[0], *without]

    asyncio.run(main())


class Forgetful(WatchedStore):
    """Ignores conditions on writes, as some servers do."""

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        return await super().put(key, data)


@pytest.mark.parametrize("mode", ["create", "append"])
def test_a_store_that_ignores_conditions_is_refused_and_nothing_is_left(mode: str) -> None:
    async def main() -> None:
        store = Forgetful(fresh_store())
        if mode == "append":
            await pack(store.store, numbered_samples(5))
        before = await read_objects(store)
        with pytest.raises(StoreError, match=r"ignores If-None-Match.*single_writer=True"):
            await pack(store, numbered_samples(9), mode=mode, source="more")
        assert await read_objects(store) == before
        await pack(store, numbered_samples(9), mode=mode, source="more", single_writer=True)

    asyncio.run(main())


def test_a_record_that_is_deleted_while_the_store_is_asked_is_no_sign_that_it_ignores_conditions() -> None:
    class Collected(WatchedStore):
        async def before(self, number: int, operation: str, key: str) -> None:
            if operation == "put" and sum(call == f"put {key}" for call in self.calls) == 2:
                await self.store.delete(key)

    async def main() -> None:
        store = Collected(fresh_store())
        assert (await pack(store, numbered_samples(2))).samples == 2

    asyncio.run(main())


# The face without an event loop


def test_the_packer_packs_from_ordinary_code(tmp_path: Any) -> None:
    with Packer(tmp_path / "set", schema={**SCHEMA}, super_sample_bytes=400) as packer:
        packer.write(numbered_samples(1)[0], where="a file")
        packer.extend(numbered_samples(19, 1))
    assert packer.manifest is not None
    assert packer.manifest.samples == 20
    data = (tmp_path / "set" / packer.manifest.key(0)).read_bytes()
    assert [int(n) for n in SuperSample(data).column("label")] == [0, 1, 2]


def test_an_exception_in_the_block_commits_nothing_and_the_next_packer_resumes(tmp_path: Any) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), Packer(tmp_path, schema=SCHEMA, super_sample_bytes=400) as packer:
            packer.extend(failing_after(numbered_samples(31)))
    assert not (tmp_path / POINTER_KEY).exists()
    with Packer(tmp_path, schema=SCHEMA, super_sample_bytes=400) as packer:
        assert packer.durable_samples == 30
        packer.skip(30)
        packer.extend(numbered_samples(5, 30))
        assert packer.commit().samples == 35
    with pytest.raises(DatasetExistsError), Packer(tmp_path, schema=SCHEMA):
        pass


def test_the_packer_works_inside_a_running_event_loop(tmp_path: Any) -> None:
    async def main() -> None:
        with Packer(tmp_path, schema=SCHEMA) as packer:
            packer.extend(numbered_samples(5))

    asyncio.run(main())


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Have the interpreter change threads after nearly every instruction, so that races show."""
    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_seconds)


@pytest.mark.parametrize("super_sample_bytes", [400, 3000])
@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_write_to_one_packer_lose_and_mix_no_sample(super_sample_bytes: int) -> None:
    store = fresh_store()
    threads = 8
    with Packer(store.url, schema=SCHEMA, super_sample_bytes=super_sample_bytes) as packer:
        groups = [numbered_samples(100, 100 * thread) for thread in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(packer.extend, groups))
    found = asyncio.run(contents(store))
    assert [sample["data"] for sample in found] == [
        numbered_samples(1, int(sample["label"]))[0]["data"] for sample in found
    ]
    assert sorted(int(sample["label"]) for sample in found) == list(range(100 * threads))
    manifest = packer.manifest
    assert manifest is not None
    assert asyncio.run(verify(store, manifest, deep=True)) == []


@pytest.mark.usefixtures("frequent_switches")
def test_what_a_thread_writes_while_another_commits_is_committed_or_refused() -> None:
    for _ in range(10):
        store = fresh_store()
        taken: list[int] = []
        with Packer(store.url, schema=SCHEMA, super_sample_bytes=400) as packer, ThreadPoolExecutor(4) as pool:
            packer.write(numbered_samples(1)[0])

            def write(thread: int, packer: Packer = packer, taken: list[int] = taken) -> None:
                for sample in numbered_samples(1000, 1000 * thread):
                    packer.write(sample)
                    taken.append(int(str(sample["label"])))

            writing = [pool.submit(write, thread) for thread in range(1, 4)]
            while len(taken) < 20:
                time.sleep(0.001)
            packer.commit()
            for thread in writing:
                with pytest.raises(ConfigError, match="committed"):
                    thread.result()
        assert sorted(asyncio.run(labels(store))) == sorted([0, *taken])


def test_tasks_that_write_and_commit_at_once_lose_nothing() -> None:
    async def main() -> None:
        store = SlowStore(fresh_store())
        async with AsyncPacker(store, config(concurrency=2)) as packer:
            writing = [asyncio.create_task(packer.write(sample)) for sample in numbered_samples(60)]
            await asyncio.sleep(0)
            committing = [asyncio.create_task(packer.commit()) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="is being committed"):
                await packer.write(numbered_samples(1)[0])
            store.gate.set()
            await asyncio.gather(*writing)
            first, second = await asyncio.gather(*committing)
            assert first is second
        assert await labels(store) == list(range(60))

    asyncio.run(main())


@pytest.mark.parametrize("numbers", [[0, 2], [0, 0], [1], [1, 0]])
def test_super_samples_that_are_not_numbered_without_gaps_or_repeats_are_not_committed(numbers: list[int]) -> None:
    async def submit_out_of_order(store: Store) -> None:
        async with AsyncPacker(store, config()) as packer:
            cuts = [cut for sample in numbered_samples(10) if (cut := packer.encode(sample))]
            for number in numbers:  # as if two threads had cut at the same time
                await packer.submit(cuts[number])

    async def main() -> None:
        store = fresh_store()
        with pytest.raises(PackError, match="nothing was committed"):
            await submit_out_of_order(store)
        assert await versions.find_newest_manifest(store) is None

    asyncio.run(main())


def test_a_config_is_checked_when_the_packer_is_made() -> None:
    with pytest.raises(SchemaError, match="__x"):
        Packer("memory://unused", schema={"__x": Array("int64")})
    with pytest.raises(ConfigError, match="super_sample_bytes"):
        Packer("memory://unused", schema=SCHEMA, super_sample_bytes=1 << 30)
    assert PackConfig(schema=SCHEMA).super_sample_bytes == 8 << 20
